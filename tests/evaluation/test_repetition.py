"""Acceptance in repeating text and elsewhere, beside counts made by hand."""

import pytest

from eagle31_train.evaluation import results
from eagle31_train.evaluation.measurement import Counts, Measurement
from eagle31_train.evaluation.prompts import Prompt
from eagle31_train.evaluation.results import by_repetition, repeats

PROMPT = [1, 2, 3, 4, 5]
OUTPUT = [9, 1, 2, 3, 4, 5, 7, 2, 3, 4, 5]


def test_what_stood_before_in_prompt_or_answer_repeats():
    """From 1 2 3 4 on, which the prompt has; 7 is new, and the four tokens that end in each after it; 2 3 4 5 again."""
    assert repeats(PROMPT, OUTPUT).tolist() == [False] * 4 + [True, True] + [False] * 4 + [True]
    assert repeats([], [1, 1, 1, 1, 1]).tolist() == [False] * 4 + [True]


def counted(accepted, output=OUTPUT):
    return Measurement([output], [Counts("p", "s", len(output), accepted)])


def test_each_verification_counts_where_it_begins():
    prompts = [Prompt("p", "s", PROMPT)]
    # With three draft tokens they begin at 0, 1, 4, 8 and 9, with one at 0, 1, 3, 5, 6, 7 and 9; 4 and 5 repeat.
    one = counted([0, 2, 9, 1, 3, 0, 0, 1, 0, 9])
    found = by_repetition(prompts, [one], [1, 3])
    lengths = {
        kind: {depth: (one["acceptance_length"][0], one["drafts"]) for depth, one in of.items()}
        for kind, of in found.items()
    }
    assert lengths["repeating"] == {"1": (1.0, 1), "3": (4.0, 1)}
    assert lengths["new"] == {"1": (pytest.approx((1 + 2 + 2 + 1 + 2 + 2) / 6), 6), "3": ((1 + 3 + 1 + 4) / 4, 4)}
    twice = by_repetition(prompts, [one, one], [3])
    assert [twice[kind]["3"]["drafts"] for kind in twice] == [2 * found[kind]["3"]["drafts"] for kind in found]


def test_answers_of_one_token_say_nothing_and_sampled_drafts_have_no_such_numbers():
    prompts = [Prompt("p", "s", PROMPT)]
    found = by_repetition(prompts, [counted([], [7])], [3])
    assert [of["3"] for of in found.values()] == [{"acceptance_length": [None, None, None], "drafts": 0}] * 2
    assert by_repetition(prompts, [counted([])], [3]) == {}


@pytest.mark.parametrize("tokens", [3, 5])
def test_the_check_sees_another_length(monkeypatch, tokens):
    monkeypatch.setattr(results, "TOKENS", tokens)
    with pytest.raises(AssertionError):
        test_what_stood_before_in_prompt_or_answer_repeats()
