"""Speculative decoding: the outputs of plain decoding, and vLLM's counts; of one prompt, and of several together."""

import pytest
import torch
from planting import replaced

from eagle31_train.evaluation import decoding
from eagle31_train.evaluation.decoding import Limits, decode_plain, decode_speculative
from eagle31_train.targets.cached import CachedTarget

PROMPT = [7, 3, 41, 20, 11, 5]
PROMPTS = [PROMPT, [12], [4, 4, 30, 2, 19, 8, 44, 6, 17, 25, 3], [9, 40]]
WRONG_AT = [[], [0] * 30, [2, 0, 1] * 9, [1, 2] * 9]  # in each of their rounds


class Each:
    """Drafters of one sequence each, drafting together."""

    def __init__(self, *drafters):
        self.drafters = list(drafters)

    def extend(self, aux, next_tokens, counts):
        for drafter, rows, tokens in zip(self.drafters, aux.split(counts), next_tokens.split(counts), strict=True):
            drafter.extend(rows, tokens)

    def propose(self, count, choose):
        return torch.tensor([drafter.draft(count) for drafter in self.drafters])

    def select(self, sequences):
        self.drafters = [self.drafters[row] for row in sequences]


class Scripted:
    """A drafter that knows the target's continuation and errs where it is told to."""

    def __init__(self, prompt, continuation, wrong_at=()):
        self.sequence = prompt + continuation
        self.read, self.rounds = 0, 0
        self.wrong_at = wrong_at  # for each round, the first wrong proposal; all right where it is not told

    def extend(self, aux, next_tokens):
        assert len(aux) == len(next_tokens)
        assert next_tokens.tolist() == self.sequence[self.read + 1 : self.read + 1 + len(next_tokens)]
        self.read += len(next_tokens)
        self.rounds += 1

    def draft(self, count):
        proposed = self.sequence[self.read + 1 : self.read + 1 + count]
        if self.rounds <= len(self.wrong_at):
            wrong = self.wrong_at[self.rounds - 1]
            proposed[wrong] = (proposed[wrong] + 1) % 50
        return proposed


def limits(count, *end_ids):
    return Limits(count, frozenset(end_ids))


def speculate(target, drafters, prompts, draft_tokens, limits):
    """With a scripted drafter for each prompt."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoding, "DraftDecoder", lambda *_: Each(*drafters))
        return decode_speculative(target, None, torch.arange(50), prompts, draft_tokens, limits)


@pytest.fixture(scope="module")
def alone(model):
    """Every prompt's own continuation."""
    target = CachedTarget(model, [1, 2, 4])
    return [decode_plain(target, [prompt], limits(60))[0].tokens for prompt in PROMPTS]


@pytest.fixture(scope="module")
def continuation(alone):
    assert len(set(alone[0])) > 10  # an output that stands still would hide mistakes
    return alone[0]


@pytest.fixture(scope="module")
def ends(alone):
    """Limits at which the outputs have four lengths, one of them 1."""
    cut = limits(35, alone[0][0], alone[1][9], alone[2][20])
    lengths = [len(ended(tokens, cut)) for tokens in alone]
    assert (len(set(lengths)), min(lengths)) == (4, 1)
    return cut


def ended(tokens, limits):
    output = []
    limits.append(output, tokens)
    return output


def scripts(alone):
    """A drafter for each prompt."""
    return [Scripted(*told) for told in zip(PROMPTS, alone, WRONG_AT, strict=True)]


def test_plain_decoding_is_transformers_own(target, continuation):
    ids = torch.tensor([PROMPT])
    theirs = target.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=60, do_sample=False)
    assert continuation == theirs[0, len(PROMPT) :].tolist()


@pytest.mark.parametrize("by", ["limit", "end token"])
@pytest.mark.parametrize("count", [1, 2, 5, 6, 9])
def test_an_end_inside_a_draft_cuts_the_output_and_not_the_counts(target, continuation, count, by):
    cut = limits(count)
    if by == "end token":
        cut = limits(50, continuation[count - 1])
        count = continuation.index(continuation[count - 1]) + 1
    [found] = speculate(target, [Scripted(PROMPT, continuation)], [PROMPT], 3, cut)
    assert found.tokens == continuation[:count]
    # Tokens 2..5 come with the first draft, 6..9 with the second, 10..13 with the third.
    assert found.accepted == [3] * ((count - 1 + 3) // 4)


def test_rows_that_go_on_at_different_speeds(target, alone, ends):
    """Drafts right in one row and wrong in another, so that rows move over what they forget, and end apart."""
    for cut in (ends, limits(28)):
        found = speculate(target, scripts(alone), PROMPTS, 3, cut)
        assert [one.tokens for one in found] == [ended(tokens, cut) for tokens in alone]
        for one, prompt, drafter in zip(found, PROMPTS, scripts(alone), strict=True):
            assert one.accepted == speculate(target, [drafter], [prompt], 3, cut)[0].accepted
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


MISTAKES = {  # in a method of the target's, or of the drafters'
    "another row's draft": ("drafters", "select", lambda right, self, sequences: None),
    "rows forget alike": ("target", "forget", lambda right, counts: right([min(counts)] * len(counts))),
    "nothing is forgotten": ("target", "forget", lambda right, counts: None),
    "rows stay": ("target", "select", lambda right, rows: right(list(range(len(rows))))),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_planted_in_a_batch_is_seen(target, alone, ends, mistake, monkeypatch):
    of, name, wrong = MISTAKES[mistake]
    replaced(monkeypatch, Each if of == "drafters" else target, name)(wrong)
    try:
        found = speculate(target, scripts(alone), PROMPTS, 3, ends)
    except (AssertionError, RuntimeError, ValueError, IndexError):
        return
    assert [one.tokens for one in found] != [ended(tokens, ends) for tokens in alone]


def test_what_lies_beyond_an_output_takes_none_of_its_time(target, monkeypatch):
    passes, right = [], target.read_plain
    monkeypatch.setattr(target, "read_plain", lambda rows: passes.append(rows) or right(rows))
    monkeypatch.setattr(decoding, "_now", lambda _: float(len(passes)))
    for count in (1, 2):
        passes.clear()
        found = decode_plain(target, PROMPTS[:count], limits(6), beyond=5)
        assert [one.seconds for one in found] == [6 / count] * count
        assert len(passes) == 11
