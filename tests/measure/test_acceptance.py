"""Acceptance by depth, position and source, paired differences and verdicts, against servers played by hand."""

import json
import random
from dataclasses import replace

import pytest

from eagle31_train.measure import acceptance
from eagle31_train.measure.acceptance import DEFINITIONS, Sheet, describe, report, tell, verdict
from eagle31_train.measure.prompts import Prompt
from eagle31_train.measure.results import Drift, Measured
from eagle31_train.measure.tables import table
from eagle31_train.schema import UserError

DEPTHS = range(1, 9)


def answers(rate, prompts=12, seed=0, drift=False):
    """A drafter that is right with probability `rate` at every step, more or less by prompt."""
    generator = random.Random(seed)
    found = []
    for number in range(prompts):
        slots, hard = random.Random(number).randint(20, 60), random.Random(-number).uniform(-0.15, 0.15)
        reach = [next((n for n in range(8) if generator.random() > rate + hard), 8) for _ in range(slots)]
        told = Drift([0.5] * 8, [0.25] * 8, [0.25] * 8, [0.0] * 8, [float(slots)] * 8, [1.0] * 8) if drift else None
        found.append(Measured(f"p{number}", "ab"[number % 2], slots + 1, reach, told))
    return found


def served(reach, draft_tokens):
    """What a server counts that drafts so many tokens: (drafts, accepted at each position)."""
    at, drafts, counts = 0, 0, [0] * draft_tokens
    while at < len(reach):
        drafts += 1
        got = min(reach[at], draft_tokens)
        for position in range(got):
            counts[position] += 1
        at += got + 1
    return drafts, counts


def sheet(name="heldout", perturbation=None, **measured):
    return Sheet(name, name.split(" · ")[0], perturbation, 0.0, 1.0, measured)


def only(result):
    (workload,) = result["workloads"]
    return workload


@pytest.fixture(scope="module")
def pair():
    """Two drafters on one workload, with drift."""
    return {"one": answers(0.6, seed=1, drift=True), "two": answers(0.7, seed=2, drift=True)}


@pytest.fixture(scope="module")
def compared(pair):
    return tell([sheet(**pair)], DEPTHS, 3)


# ---------------------------------------------------------------- one drafter


def test_every_depth_is_that_of_a_server_which_drafts_so_many(pair, compared):
    numbers = only(compared)["drafters"]["one"]
    for depth in DEPTHS:
        servers = [served(measured.accepted, depth) for measured in pair["one"]]
        drafts, counts = (
            sum(s[0] for s in servers),
            [sum(column) for column in zip(*(s[1] for s in servers), strict=True)],
        )
        found = numbers["by_depth"][str(depth)]
        assert (found["drafts"], found["accepted_per_position"]) == (drafts, counts)
        value, low, high = found["acceptance_length"]
        assert value == pytest.approx(1 + sum(counts) / drafts)
        assert 1 < low < value < high < depth + 1
    assert [value for value, _, _ in numbers["cumulative"]] == pytest.approx([count / drafts for count in counts])
    before = [drafts, *counts]
    assert [value for value, _, _ in numbers["conditional"]] == pytest.approx(
        [count / reached for reached, count in zip(before, counts, strict=False)]
    )


def test_places_that_no_server_would_draft_at_do_not_count(monkeypatch):
    """After [2, 0, 0] a server that drafts two tokens goes on behind them; one that drafts one does not."""
    measured = [Measured("p", "s", 4, [2, 0, 0])]
    found = only(tell([sheet(a=measured)], [1, 2], 1))["drafters"]["a"]["by_depth"]
    assert found["1"] == {"acceptance_length": [1.5, None, None], "drafts": 2, "accepted_per_position": [1]}
    assert found["2"] == {"acceptance_length": [3.0, None, None], "drafts": 1, "accepted_per_position": [1, 1]}
    monkeypatch.setattr(acceptance, "rounds", lambda one, depth: [min(n, depth) for n in one.accepted])  # the mistake
    found = only(tell([sheet(a=measured)], [1, 2], 1))["drafters"]["a"]["by_depth"]
    assert found["2"]["drafts"] == 3


def test_what_was_only_seen_counts_as_seen():
    """Drafts that are sampled are decoded for real at every depth; there is no run from every place."""
    measured = [Measured("p", "s", 6, [], seen={1: [1, 0, 1], 2: [2, 0, 1]})]
    found = only(tell([sheet(a=measured)], [1, 2, 3], 1))["drafters"]["a"]["by_depth"]
    assert found["1"]["accepted_per_position"] == [2]
    assert found["2"]["accepted_per_position"] == [2, 1]
    assert found["3"]["acceptance_length"] == [None, None, None]  # and not 1.0


def test_a_share_of_none_or_all_has_no_interval():
    rows = [Measured(f"p{n}", "s", 4, [n % 2, 0, 1]) for n in range(12)]
    numbers = only(tell([sheet(a=rows)], [1, 2], 1))["drafters"]["a"]
    assert numbers["conditional"][1] == [0.0, None, None]
    assert None not in numbers["conditional"][0]


def test_sources_are_measured_by_themselves(pair, compared):
    by_source = only(compared)["drafters"]["one"]["by_source"]
    assert list(by_source) == ["a", "b"]
    for source, found in by_source.items():
        alone = tell([sheet(one=[m for m in pair["one"] if m.source == source])], DEPTHS, 3)
        numbers = only(alone)["drafters"]["one"]
        assert found == {name: numbers[name] for name in found}
        assert found["prompts"] == 6


def test_drift_is_a_mean_over_slots(pair, compared):
    drift = only(compared)["drafters"]["one"]["drift"]
    slots = [len(measured.accepted) for measured in pair["one"]]
    value, low, high = drift["rms"][0]
    assert value == pytest.approx(sum(slot * slot for slot in slots) / sum(slots))
    assert low < value < high
    assert drift["sink"] == [[pytest.approx(0.5)] * 3] * 8
    assert only(tell([sheet(a=answers(0.5))], DEPTHS, 3))["drafters"]["a"]["drift"] is None


def test_the_report_of_the_manifest_has_counts_shares_and_every_depth(pair, compared):
    numbers = only(compared)["drafters"]["one"]
    found = report(numbers, 3)
    servers = [served(measured.accepted, 3) for measured in pair["one"]]
    drafts, (one, two, three) = sum(s[0] for s in servers), (sum(s[1][i] for s in servers) for i in range(3))
    assert found["drafts"] == drafts
    assert found["accepted"] == one + two + three
    assert found["acceptance_length"] == 1 + (one + two + three) / drafts
    assert found["acceptance_at_depth"] == [one / drafts, two / drafts, three / drafts]
    assert found["conditional_acceptance"] == [one / drafts, two / one, three / two]
    assert found["generated_tokens"] == sum(measured.tokens for measured in pair["one"])
    assert found["by_depth"] == numbers["by_depth"]
    assert found["by_source"]["a"]["acceptance_length"] == pytest.approx(
        numbers["by_source"]["a"]["by_depth"]["3"]["acceptance_length"][0]
    )


def test_a_prompt_is_described_by_every_draft():
    measured = Measured("p", "s", 5, [2, 0, 1, 0])
    assert describe(Prompt("p", "s", [1, 2]), [5, 6, 7, 8, 9], measured, 2) == {
        "id": "p",
        "source": "s",
        "drafts": 2,
        "accepted_per_position": [1, 1],
        "accepted": [2, 0],
        "prompt_ids": [1, 2],
        "output_ids": [5, 6, 7, 8, 9],
    }


# ---------------------------------------------------------------- several trainings of one


def test_trainings_of_one_drafter_are_drawn_again_together():
    rows = answers(0.6, seed=1, drift=True)
    once, twice = (only(tell([sheet(a=of)], DEPTHS, 3))["drafters"]["a"] for of in (rows, rows + rows))
    # As many prompts, and so as wide an interval: the same answers a second time say nothing new.
    assert twice["prompts"] == once["prompts"] == 12
    assert twice["conditional"] == once["conditional"]
    assert twice["drift"] == once["drift"]
    for depth in map(str, DEPTHS):
        assert twice["by_depth"][depth]["acceptance_length"] == once["by_depth"][depth]["acceptance_length"]
    assert "by_training" not in once
    other = answers(0.7, seed=2)
    both = only(tell([sheet(a=rows + other)], DEPTHS, 3))["drafters"]["a"]
    alone = only(tell([sheet(a=other)], DEPTHS, 3))["drafters"]["a"]
    assert [training["3"] for training in both["by_training"]] == [
        numbers["by_depth"]["3"]["acceptance_length"][0] for numbers in (once, alone)
    ]


# ---------------------------------------------------------------- two drafters


def test_differences_are_of_the_same_prompts_in_whatever_order(pair, compared):
    shuffled = random.Random(3).sample(pair["two"], len(pair["two"]))
    again = only(tell([sheet(one=pair["one"], two=shuffled)], DEPTHS, 3))["differences"]["two"]
    found = only(compared)["differences"]["two"]
    assert found == again
    for depth in map(str, DEPTHS):
        one, two = (
            only(compared)["drafters"][name]["by_depth"][depth]["acceptance_length"][0] for name in ("one", "two")
        )
        assert found[depth]["difference"][0] == pytest.approx(two - one)
        assert found[depth]["ratio"][0] == pytest.approx(two / one)


def test_a_drafter_is_no_better_than_itself(pair):
    found = only(tell([sheet(one=pair["one"], same=pair["one"])], DEPTHS, 3))
    assert set(found["verdict"]["same"]["better"].values()) == {None}
    assert found["differences"]["same"]["8"]["difference"] == [0.0, 0.0, 0.0]
    assert "no difference shown at any number of draft tokens, +0.0 %" in found["verdict"]["same"]["text"]


def test_other_prompts_are_refused(pair):
    with pytest.raises(UserError, match="two and one were measured on different prompts of heldout"):
        tell([sheet(one=pair["one"], two=pair["two"][1:])], DEPTHS, 3)


def test_nothing_drafted_is_refused():
    with pytest.raises(UserError, match="heldout: every answer ended with its first token"):
        tell([sheet(a=[Measured("p", "s", 1, [])])], DEPTHS, 3)


def test_what_a_perturbation_leaves_is_of_the_prompts_that_have_both_forms(pair):
    plain = sheet(one=pair["one"])
    # Half as good on half of the prompts; the others no longer fit.
    worse = [replace(measured, accepted=[n // 2 for n in measured.accepted]) for measured in pair["one"][:6]]
    result = tell([plain, sheet("heldout · system_long", "system_long", one=worse)], DEPTHS, 3)
    value, low, high = result["workloads"][1]["drafters"]["one"]["kept"]["3"]
    lengths = [
        1 + sum(sum(served(m.accepted, 3)[1]) for m in of) / sum(served(m.accepted, 3)[0] for m in of)
        for of in (worse, pair["one"][:6])
    ]
    assert value == pytest.approx(lengths[0] / lengths[1])
    assert low < value < high < 1
    assert "kept" not in result["workloads"][0]["drafters"]["one"]


# ---------------------------------------------------------------- verdicts


def told(*bounds):
    """Differences by depth with these intervals, and ratios of a tenth of them."""
    return {
        str(depth): {
            "difference": [(low + high) / 2, low, high],
            "ratio": [1 + (low + high) / 20, 1 + low / 10, 1 + high / 10],
        }
        for depth, (low, high) in enumerate(bounds, 1)
    }


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
    assert verdict("A", "B", told(*bounds), 20)["text"] == text


def test_a_verdict_of_few_prompts_says_so():
    assert verdict("A", "B", told(UP, UP), 9)["text"].endswith("; only 9 prompts, which is too few to rely on")
    one = {"1": {"difference": [0.5, None, None], "ratio": [1.25, None, None]}}
    found = verdict("A", "B", one, 1)
    assert found == {
        "text": "no difference shown at any number of draft tokens, +25.0 % at 1; "
        "only 1 prompt, which is too few to rely on",
        "better": {"1": None},
    }


def test_of_many_comparisons_without_a_difference_few_find_one():
    """What the definitions promise: about one of 20, here of 100 with at most 2.6 standard errors more."""
    wins = 0
    for seed in range(100):
        result = tell([sheet(a=answers(0.6, 20, 2 * seed), b=answers(0.6, 20, 2 * seed + 1))], [3], 3)
        wins += only(result)["verdict"]["b"]["better"]["3"] is not None
    assert wins <= 11


# ---------------------------------------------------------------- as JSON and as text


def test_a_result_is_plain_json_and_the_same_again(pair, compared):
    text = json.dumps(compared, allow_nan=False)
    assert json.loads(text) == compared
    assert json.dumps(tell([sheet(**pair)], DEPTHS, 3)) == text


def test_the_table_says_what_its_numbers_mean(compared):
    text = table(compared)
    assert " ".join(" ".join(text.split()).split()).endswith(" ".join(DEFINITIONS.split()))
    numbers = only(compared)["drafters"]["two"]["by_depth"]
    line = next(line for line in text.splitlines() if line.startswith("  two: acceptance length"))
    assert line.split()[3:] == [f"{numbers[str(depth)]['acceptance_length'][0]:.3f}" for depth in DEPTHS]
    assert only(compared)["verdict"]["two"]["text"] in text
    assert "heldout: 12 prompts, greedy" in text
    assert max(map(len, text.splitlines())) <= 120


def test_speeds_and_notes_are_told(pair):
    one = replace(sheet(one=pair["one"]), speeds={"plain": (100, 10.0), "one": (100, 8.0)}, notes=["first turns only"])
    text = table(tell([one], DEPTHS, 3))
    assert "tokens per second, at 3: 10.0 without a drafter, 12.5 with one (1.25x)" in text
    assert "  first turns only" in text
