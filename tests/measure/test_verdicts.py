"""Verdicts on two drafters: who wins and where, and of how many prompts and trainings that is."""

import pytest

from eagle31_train.measure.verdicts import verdict


def told(*bounds):
    """Differences by depth with these intervals, and ratios of a tenth of them."""
    return {
        str(depth): {
            "difference": [(low + high) / 2, low, high],
            "ratio": [1 + (low + high) / 20, 1 + low / 10, 1 + high / 10],
        }
        for depth, (low, high) in enumerate(bounds, 1)
    }


def said(differences, prompts=20, first=None, other=None):
    """The verdict on A and B, of trainings of these acceptance lengths at whatever number of draft tokens.

    Single trainings are on the side that the intervals are on.
    """

    def side(lengths, sign):
        own = {depth: sign * found["difference"][0] for depth, found in differences.items()}
        return [dict.fromkeys(differences, length) for length in lengths] if lengths else [own]

    trainings = {"A": side(first, -1), "B": side(other, 1)}
    return verdict("A", "B", differences, prompts, trainings, 1)


UP, DOWN, NONE = (0.2, 0.6), (-0.6, -0.2), (-0.2, 0.4)


@pytest.mark.parametrize(
    ("bounds", "text"),
    [
        ([NONE, NONE, UP, UP], "B wins from 3 draft tokens on, +4.0 % [2.0, 6.0] at 3"),
        ([UP, UP], "B wins at every number of draft tokens, +4.0 % [2.0, 6.0] at 1"),
        ([NONE, UP], "B wins at 2 draft tokens, +4.0 % [2.0, 6.0]"),
        ([UP, NONE, UP, NONE], "B wins at 1 and 3 draft tokens, +4.0 % [2.0, 6.0] at 1"),
        ([UP, NONE], "B wins at 1 draft token, +4.0 % [2.0, 6.0]"),
        ([DOWN, DOWN], "A wins at every number of draft tokens, +4.2 % [2.0, 6.4] at 1"),
        (
            [DOWN, NONE, UP, UP],
            "B wins from 3 draft tokens on, +4.0 % [2.0, 6.0] at 3; A wins at 1 draft token, +4.2 % [2.0, 6.4]",
        ),
        ([NONE, NONE], "no difference shown at any number of draft tokens, +1.0 % [-2.0, 4.0] at 2"),
    ],
)
def test_a_verdict_says_who_wins_and_where(bounds, text):
    assert said(told(*bounds))["text"] == f"{text}; one training each"


AHEAD = "B wins at every number of draft tokens, +4.0 % [2.0, 6.0] at 1"
LOST = "no difference shown at any number of draft tokens, +4.0 % [2.0, 6.0] at 2"


@pytest.mark.parametrize(
    ("first", "other", "text"),
    [
        ([1.0, 1.1], [1.2, 1.3], f"{AHEAD}; 2 trainings each"),
        ([1.0], [1.2, 1.3, 1.1], f"{AHEAD}; trainings: 3 of B, one of A"),
        ([1.0, 1.1], [1.2], f"{AHEAD}; trainings: one of B, 2 of A"),
        ([1.0, 1.1], [1.05, 1.8], f"{LOST} (B ahead in 3 of 4 pairs of trainings); 2 trainings each"),
        ([1.0], [1.0, 1.8], f"{LOST} (B ahead in 1 of 2 pairs of trainings); trainings: 2 of B, one of A"),
        ([1.0], [None, 1.8], f"{LOST} (B ahead in 1 of 2 pairs of trainings); trainings: 2 of B, one of A"),
    ],
)
def test_who_wins_does_so_with_every_training(first, other, text):
    """The intervals are the same: they are over prompts, and know nothing of trainings."""
    found = said(told(UP, UP), first=first, other=other)
    assert found["text"] == text
    assert found["better"] == dict.fromkeys("12", "B" if "wins" in text else None)
    # Either way round.
    back = said(told(DOWN, DOWN), first=other, other=first)
    assert back["better"] == dict.fromkeys("12", "A" if "wins" in text else None)
    assert ("A wins at every number of draft tokens" in back["text"]) == ("wins" in text)


def test_trainings_are_held_against_each_other_at_every_number_of_draft_tokens():
    trainings = {"A": [{"1": 1.5, "2": 1.5}], "B": [{"1": 1.6, "2": 1.4}, {"1": 1.7, "2": 2.9}]}
    found = verdict("A", "B", told(UP, UP), 20, trainings, 1)
    assert found["better"] == {"1": "B", "2": None}
    assert found["text"] == "B wins at 1 draft token, +4.0 % [2.0, 6.0]; trainings: 2 of B, one of A"


@pytest.mark.parametrize(
    ("ratio", "words"),
    [
        ([1.031, 1.004, 1.059], "B keeps 3.1 % more of its plain form [0.4, 5.9] at 1; "),
        ([0.988, 0.97, 1.006], "B keeps 1.2 % less of its plain form [-0.6, 3.0] at 1; "),
        ([1.25, None, None], "B keeps 25.0 % more of its plain form at 1; "),
        ([0.75, None, None], "B keeps 25.0 % less of its plain form at 1; "),
        ([None, None, None], ""),
    ],
)
def test_what_is_kept_of_the_plain_form_stands_in_the_verdict(ratio, words):
    differences = told(UP, UP)
    differences["1"]["kept_ratio"] = ratio
    assert said(differences)["text"] == f"{AHEAD}; {words}one training each"


def test_a_verdict_of_few_prompts_says_so():
    assert said(told(UP, UP), prompts=9)["text"].endswith("; only 9 prompts, which is too few to rely on")
    one = {"1": {"difference": [0.5, None, None], "ratio": [1.25, None, None]}}
    found = said(one, prompts=1)
    assert found == {
        "text": "no difference shown at any number of draft tokens, +25.0 % at 1; "
        "one training each; only 1 prompt, which is too few to rely on",
        "better": {"1": None},
    }
