"""Acceptance by depth, position and source, paired differences and verdicts, against servers played by hand."""

import json
import random
from dataclasses import replace

import pytest

from eagle31_train.measure import acceptance
from eagle31_train.measure.acceptance import Sheet, definitions, describe, report, tell
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


def test_counts_of_trainings_are_sums_and_acceptance_is_of_all_their_drafts(pair):
    both = only(tell([sheet(a=pair["one"] + pair["two"])], DEPTHS, 3))["drafters"]["a"]
    alone = [only(tell([sheet(a=pair[name])], DEPTHS, 3))["drafters"]["a"] for name in ("one", "two")]
    assert both["generated_tokens"] == sum(one["generated_tokens"] for one in alone)
    drafts = [one["by_depth"]["3"]["drafts"] for one in alone]
    accepted = [sum(one["by_depth"]["3"]["accepted_per_position"]) for one in alone]
    assert both["by_depth"]["3"]["drafts"] == sum(drafts)
    assert both["by_depth"]["3"]["acceptance_length"][0] == pytest.approx(1 + sum(accepted) / sum(drafts))


def test_one_lucky_training_of_three_does_not_win(pair):
    """Pooled, it is far ahead of the other drafter, on any prompts; two of its trainings are behind."""
    usual, lucky = answers(0.6, seed=1), answers(0.95, seed=5)
    unlucky = [answers(0.55, seed=seed) for seed in (3, 4)]
    found = only(tell([sheet(usual=usual, lucky=[*lucky, *unlucky[0], *unlucky[1]])], DEPTHS, 3))
    assert found["differences"]["lucky"]["8"]["difference"][1] > 0
    assert set(found["verdict"]["lucky"]["better"].values()) == {None}
    text = found["verdict"]["lucky"]["text"]
    assert "(lucky ahead in 1 of 3 pairs of trainings); trainings: 3 of lucky, one of usual" in text
    same = only(tell([sheet(usual=usual, lucky=lucky * 3)], DEPTHS, 3))["verdict"]["lucky"]
    assert set(same["better"].values()) == {"lucky"}


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


def halved(measured):
    return [replace(each, accepted=[n // 2 for n in each.accepted]) for each in measured]


def test_who_keeps_more_of_its_plain_form_is_told_on_the_same_draws(pair):
    """The second loses nothing on six prompts, the first half; prompts that have no second form count for nobody."""
    one, two = pair["one"], pair["two"]
    plain, both = sheet(one=one, two=two), slice(0, 6)
    result = tell([plain, sheet("heldout · x", "x", one=halved(one[both]), two=two[both][::-1])], DEPTHS, 3)
    workload = result["workloads"][1]
    for depth in map(str, DEPTHS):
        value, low, high = workload["differences"]["two"][depth]["kept_ratio"]
        first, second = (workload["drafters"][name]["kept"][depth][0] for name in ("one", "two"))
        assert (value, second) == (pytest.approx(second / first), pytest.approx(1))
        assert 1 < low < value < high
    value, low, high = (100 * (part - 1) for part in workload["differences"]["two"]["3"]["kept_ratio"])
    phrase = f"two keeps {value:.1f} % more of its plain form [{low:.1f}, {high:.1f}] at 3"
    assert phrase in workload["verdict"]["two"]["text"]
    assert phrase in " ".join(table(result).split())
    assert "kept_ratio" not in result["workloads"][0]["differences"]["two"]["3"]
    assert "keeps" not in result["workloads"][0]["verdict"]["two"]["text"]
    # Both lose the same: paired draws leave no width at all.
    same = tell([sheet(one=one, two=one), sheet("heldout · x", "x", one=halved(one), two=halved(one))], DEPTHS, 3)
    found = same["workloads"][1]
    assert found["differences"]["two"]["3"]["kept_ratio"] == [1.0, 1.0, 1.0]
    assert "two keeps 0.0 % more of its plain form [0.0, 0.0] at 3" in found["verdict"]["two"]["text"]


def test_forms_of_other_prompts_have_nothing_in_common(pair):
    rows = [replace(each, id=f"other {each.id}") for each in pair["one"]]
    result = tell([sheet(**pair), sheet("heldout · x", "x", one=rows, two=rows)], DEPTHS, 3)
    assert "kept_ratio" not in result["workloads"][1]["differences"]["two"]["3"]


def test_prompts_are_verified_that_every_drafter_decoded(pair):
    """Of every training, too: what one of them did not decode was not shown."""
    seen = {
        name: [replace(m, seen={3: m.rounds(3)} if i < 5 else {}) for i, m in enumerate(pair[name])] for name in pair
    }
    fewer = [replace(m, seen={3: m.rounds(3)} if i < 4 else {}) for i, m in enumerate(pair["two"])]
    for rows, count, words in (
        (seen, 5, "5 of them"),
        ({**seen, "two": seen["two"] + fewer}, 4, "4 of them"),
        ({**seen, "two": pair["two"]}, 0, "none"),
        ({"one": seen["one"][:5]}, 5, "all"),
    ):
        result = tell([sheet(**rows)], DEPTHS, 3)
        assert only(result)["verified"] == count
        assert f"prompts, greedy, {words} decoded by real speculation" in table(result)


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
    assert " ".join(" ".join(text.split()).split()).endswith(" ".join(definitions(8).split()))
    numbers = only(compared)["drafters"]["two"]["by_depth"]
    line = next(line for line in text.splitlines() if line.startswith("  two: acceptance length"))
    assert line.split()[3:] == [f"{numbers[str(depth)]['acceptance_length'][0]:.3f}" for depth in DEPTHS]
    assert only(compared)["verdict"]["two"]["text"] in text
    assert "heldout: 12 prompts, greedy, none decoded by real speculation" in text
    assert "of drafts of 8: share" in definitions(8)
    positions = next(line for line in text.splitlines() if line.startswith("    position, of drafts of 8 "))
    assert positions.split()[-8:] == list("12345678")
    assert max(map(len, text.splitlines())) <= 120


def test_speeds_and_notes_are_told(pair):
    one = replace(sheet(one=pair["one"]), speeds={"plain": (100, 10.0), "one": (100, 8.0)}, notes=["first turns only"])
    text = table(tell([one], DEPTHS, 3))
    assert "tokens per second, at 3: 10.0 without a drafter, 12.5 with one (1.25x)" in text
    assert "  first turns only" in text
