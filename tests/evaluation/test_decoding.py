"""Plain decoding, of one prompt and of several together, and what lies beyond an output. That it says what the model
does: test_trajectories.py. Speculation gives these outputs, and counts as the drafts from every place do:
test_measurer.py."""

import pytest
import torch

from eagle31_train.evaluation import decoding
from eagle31_train.evaluation.decoding import Limits, decode_plain
from eagle31_train.targets.cached import CachedTarget

PROMPTS = [[7, 3, 41, 20, 11, 5], [12], [4, 4, 30, 2, 19, 8, 44, 6, 17, 25, 3], [9, 40]]


@pytest.fixture(scope="module")
def alone(model):
    """Every prompt's own continuation."""
    target = CachedTarget(model, [1, 2, 4])
    found = [decode_plain(target, [prompt], Limits(60, ()))[0].tokens for prompt in PROMPTS]
    assert len(set(found[0])) > 10  # an output that stands still would hide mistakes
    return found


@pytest.fixture(scope="module")
def ends(alone):
    """Limits at which the outputs have four lengths, one of them 1."""
    cut = Limits(35, {alone[0][0], alone[1][9], alone[2][20]})
    lengths = [len(ended(tokens, cut)) for tokens in alone]
    assert (len(set(lengths)), min(lengths)) == (4, 1)
    return cut


def ended(tokens, limits):
    output = []
    limits.append(output, tokens)
    return output


def test_states_and_what_lies_beyond_the_end(target, alone, ends):
    found = decode_plain(target, PROMPTS, ends, beyond=5, states=True)
    for one, prompt, tokens in zip(found, PROMPTS, alone, strict=True):
        assert one.tokens == ended(tokens, ends)
        assert one.tokens + one.beyond == tokens[: len(one.tokens) + 5]
        sequence = torch.tensor([prompt + one.tokens])[:, :-2]
        assert one.aux.shape == (len(prompt) + len(one.tokens) - 2, 3, 32)
        whole = target.states(sequence, None)[0][0] if sequence.numel() else one.aux
        assert (one.aux - whole).norm() <= 1e-5 * whole.norm(), "rounding"


def test_what_lies_beyond_an_output_takes_none_of_its_time(target, monkeypatch):
    passes, right = [], target.read_plain
    monkeypatch.setattr(target, "read_plain", lambda rows: passes.append(rows) or right(rows))
    monkeypatch.setattr(decoding, "_now", lambda _: float(len(passes)))
    for count in (1, 2):
        passes.clear()
        found = decode_plain(target, PROMPTS[:count], Limits(6, ()), beyond=5)
        assert [one.seconds for one in found] == [6 / count] * count
        assert len(passes) == 11
