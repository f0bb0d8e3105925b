"""Speculative decoding: the outputs of plain decoding, and vLLM's counts; of one prompt, and of several together."""

from types import SimpleNamespace

import pytest
import torch

from eagle31_train.evaluation import decoding
from eagle31_train.evaluation.decoding import Limits, decode_plain, decode_speculative
from eagle31_train.targets.cached import CachedTarget

PROMPT = [7, 3, 41, 20, 11, 5]
PROMPTS = [PROMPT, [12], [4, 4, 30, 2, 19, 8, 44, 6, 17, 25, 3], [9, 40]]
WRONG_AT = [[], [0] * 30, [2, 0, 1] * 9, [1, 2] * 9]  # in each of their rounds


class Scripted:
    """Drafters that know the target's continuations and err where they are told to.

    Args:
        told: of each sequence its prompt, the continuation, and for each round the first wrong proposal; all are right
            where nothing is told.
    """

    def __init__(self, told):
        self.rows = [
            SimpleNamespace(sequence=prompt + continuation, read=0, wrong_at=iter(wrong_at))
            for prompt, continuation, wrong_at in told
        ]

    def extend(self, aux, next_tokens, counts):
        for row, states, tokens in zip(self.rows, aux.split(counts), next_tokens.split(counts), strict=True):
            assert len(states) == len(tokens)
            assert tokens.tolist() == row.sequence[row.read + 1 : row.read + 1 + len(tokens)]
            row.read += len(tokens)

    def propose(self, count, choose):
        drafts = []
        for row in self.rows:
            draft = row.sequence[row.read + 1 : row.read + 1 + count]
            if (wrong := next(row.wrong_at, None)) is not None:
                draft[wrong] = (draft[wrong] + 1) % 50
            drafts.append(draft)
        return torch.tensor(drafts)

    def select(self, sequences):
        self.rows = [self.rows[row] for row in sequences]


def speculate(target, told, draft_tokens, limits):
    """With drafters that are scripted so."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoding, "DraftDecoder", lambda *_: Scripted(told))
        return decode_speculative(target, None, torch.arange(50), [prompt for prompt, *_ in told], draft_tokens, limits)


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


def test_plain_decoding_is_transformers_own(target, alone):
    ids = torch.tensor([PROMPT])
    theirs = target.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=60, do_sample=False)
    assert alone[0] == theirs[0, len(PROMPT) :].tolist()


@pytest.mark.parametrize("by", ["limit", "end token"])
@pytest.mark.parametrize("count", [1, 2, 5, 6, 9])
def test_an_end_inside_a_draft_cuts_the_output_and_not_the_counts(target, alone, count, by):
    cut, continuation = Limits(count, ()), alone[0]
    if by == "end token":
        cut = Limits(50, {continuation[count - 1]})
        count = continuation.index(continuation[count - 1]) + 1
    [found] = speculate(target, [(PROMPT, continuation, [])], 3, cut)
    assert found.tokens == continuation[:count]
    # Tokens 2..5 come with the first draft, 6..9 with the second, 10..13 with the third.
    assert found.accepted == [3] * ((count - 1 + 3) // 4)


def test_rows_that_go_on_at_different_speeds(target, alone, ends):
    """Drafts right in one row and wrong in another, so that rows move over what they forget, and end apart."""
    told = list(zip(PROMPTS, alone, WRONG_AT, strict=True))
    for cut in (ends, Limits(28, ())):
        found = speculate(target, told, 3, cut)
        assert [one.tokens for one in found] == [ended(tokens, cut) for tokens in alone]
        assert [one.accepted for one in found] == [speculate(target, [one], 3, cut)[0].accepted for one in told]
    assert len({len(one.accepted) for one in found}) == 4


def test_states_and_what_lies_beyond_the_end(target, alone, ends):
    found = decode_plain(target, PROMPTS, ends, beyond=5, states=True)
    for one, prompt, tokens in zip(found, PROMPTS, alone, strict=True):
        assert one.tokens == ended(tokens, ends)
        assert one.tokens + one.beyond == tokens[: len(one.tokens) + 5]
        sequence = torch.tensor([prompt + one.tokens])[:, :-2]
        assert one.aux.shape == (len(prompt) + len(one.tokens) - 2, 3, 32)
        whole = target.states(sequence, None)[0][0] if sequence.numel() else one.aux
        torch.testing.assert_close(one.aux, whole, rtol=1e-4, atol=1e-4)


def test_what_lies_beyond_an_output_takes_none_of_its_time(target, monkeypatch):
    passes, right = [], target.read_plain
    monkeypatch.setattr(target, "read_plain", lambda rows: passes.append(rows) or right(rows))
    monkeypatch.setattr(decoding, "_now", lambda _: float(len(passes)))
    for count in (1, 2):
        passes.clear()
        found = decode_plain(target, PROMPTS[:count], Limits(6, ()), beyond=5)
        assert [one.seconds for one in found] == [6 / count] * count
        assert len(passes) == 11
