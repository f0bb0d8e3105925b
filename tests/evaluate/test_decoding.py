"""Speculative decoding: the outputs of plain decoding, and vLLM's counts; of one prompt, and of several together."""

import pytest
import torch

from eagle31_train.measure.decoding import Limits, decode_plain, first_difference, logit_gap, speculate
from eagle31_train.measure.sampling import agreeing

PROMPT = [7, 3, 41, 20, 11, 5]


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
        self.read = 0
        self.wrong_at = wrong_at  # for each round, the first wrong proposal; all right where it is not told

    def extend(self, aux, next_tokens):
        assert len(aux) == len(next_tokens)
        assert next_tokens.tolist() == self.sequence[self.read + 1 : self.read + 1 + len(next_tokens)]
        self.read += len(next_tokens)
        self.rounds = getattr(self, "rounds", 0) + 1

    def draft(self, count):
        proposed = self.sequence[self.read + 1 : self.read + 1 + count]
        if self.rounds <= len(self.wrong_at):
            wrong = self.wrong_at[self.rounds - 1]
            proposed[wrong] = (proposed[wrong] + 1) % 50
        return proposed


class Recorder:
    """A drafter whose inputs are kept."""

    def __init__(self, inner):
        self.inner, self.aux, self.tokens = inner, [], []

    def extend(self, aux, next_tokens):
        self.aux.append(aux)
        self.tokens += next_tokens.tolist()
        self.inner.extend(aux, next_tokens)

    def draft(self, count):
        return self.inner.draft(count)


class Constant:
    """A drafter that always proposes the same token."""

    def __init__(self, token):
        self.token = token

    def extend(self, aux, next_tokens):
        pass

    def draft(self, count):
        return [self.token] * count


def limits(count, *end_ids):
    return Limits(count, frozenset(end_ids))


def plain(target, limits):
    return decode_plain(target, [PROMPT], limits)[0]


def speculative(target, drafter, draft_tokens, limits):
    """The one prompt, with a drafter of one sequence."""
    return speculate(target, Each(drafter), torch.arange(50), [PROMPT], draft_tokens, limits)[0]


@pytest.fixture
def continuation(target):
    tokens = plain(target, limits(60)).tokens
    assert len(set(tokens)) > 10  # an output that stands still would hide mistakes
    return tokens


def test_plain_decoding_is_transformers_own(target, continuation):
    ids = torch.tensor([PROMPT])
    theirs = target.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=60, do_sample=False)
    assert continuation == theirs[0, len(PROMPT) :].tolist()


@pytest.mark.parametrize("draft_tokens", [1, 2, 5])
def test_a_random_drafter_changes_no_output(target, make_decoder, continuation, draft_tokens):
    found = speculative(target, make_decoder(), draft_tokens, limits(60))
    assert found.tokens == continuation
    assert found.proposed == draft_tokens * len(found.accepted)
    assert len(found.tokens) <= 1 + len(found.accepted) + sum(found.accepted)


def test_the_drafter_gets_the_states_of_the_target_at_the_right_rows(target, make_decoder, continuation):
    scripted = Scripted(PROMPT, continuation + [0] * 9, wrong_at=[0, 2, 1, 3, 0, 1])
    recorder = Recorder(scripted)
    speculative(target, recorder, 4, limits(30))
    sequence = torch.tensor([PROMPT + continuation])
    whole = target.states(sequence, torch.ones_like(sequence)).aux[0]
    seen = torch.cat(recorder.aux)
    assert recorder.tokens == (PROMPT + continuation)[1 : len(seen) + 1]
    torch.testing.assert_close(seen, whole[: len(seen)], rtol=1e-4, atol=1e-4)


def test_a_target_that_keeps_rejected_tokens_is_seen(target, continuation, monkeypatch):
    monkeypatch.setattr(target, "forget", lambda counts: None)
    found = speculative(target, Constant(0), 3, limits(40))
    assert first_difference(continuation[:40], found.tokens) is not None


def test_an_oracle_is_accepted_whole(target, continuation):
    found = speculative(target, Scripted(PROMPT, continuation), 3, limits(41))
    assert found.tokens == continuation[:41]
    assert found.accepted == [3] * 10  # 1 token of the prompt's pass, then 10 times 3 + 1
    assert found.accepted_per_position(3) == [10, 10, 10]


def test_counts_say_how_far_each_draft_was_right(target, continuation):
    found = speculative(target, Scripted(PROMPT, continuation, [0, 2, 1, 1]), 3, limits(15))
    assert found.accepted == [0, 2, 1, 1, 3, 3]
    assert found.proposed == 18
    assert found.accepted_per_position(3) == [5, 3, 2]
    assert found.tokens == continuation[:15]


@pytest.mark.parametrize("count", range(1, 11))
def test_a_limit_inside_a_draft_cuts_the_output_and_not_the_counts(target, continuation, count):
    found = speculative(target, Scripted(PROMPT, continuation), 3, limits(count))
    assert found.tokens == continuation[:count]
    # Tokens 2..5 come with the first draft, 6..9 with the second, 10..13 with the third.
    assert found.accepted == [3] * ((count - 1 + 3) // 4)


@pytest.mark.parametrize("index", range(9))
def test_an_end_token_inside_a_draft_ends_the_output_and_is_kept(target, continuation, index):
    first = continuation.index(continuation[index])
    found = speculative(target, Scripted(PROMPT, continuation), 3, limits(50, continuation[index]))
    assert found.tokens == continuation[: first + 1]
    assert found.accepted == [3] * ((first + 3) // 4)
    assert plain(target, limits(50, continuation[index])).tokens == found.tokens


def test_nothing_is_drafted_after_an_answer_of_one_token(target, continuation):
    for end in (limits(1), limits(9, continuation[0])):
        found = speculative(target, Scripted(PROMPT, continuation), 3, end)
        assert (found.tokens, found.accepted, found.proposed) == (continuation[:1], [], 0)


@pytest.mark.parametrize(
    ("plain", "speculative", "where"),
    [([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1], [1, 2], 1), ([1, 2], [1], 1), ([4], [5], 0)],
)
def test_the_first_difference(plain, speculative, where):
    assert first_difference(plain, speculative) == where


def test_a_later_agreement_does_not_count():
    assert agreeing([1, 9, 3], [1, 2, 3, 4]) == 1
    assert agreeing([1, 2, 3], [1, 2, 3, 4]) == 3
    assert agreeing([9, 2], [1, 2, 3]) == 0


def test_the_gap_is_by_how_much_the_target_prefers_its_own_token(target, continuation):
    logits = target.own_logits(torch.tensor([PROMPT]), torch.ones(1, len(PROMPT), dtype=torch.long))[0, -1]
    other = (continuation[0] + 1) % 50
    gap = logit_gap(target, PROMPT, continuation[0], other)
    assert gap > 0
    assert gap == pytest.approx(float(logits[continuation[0]] - logits[other]), abs=1e-4)
