"""The result as plain data, against servers played by hand: acceptance by depth, position and source, differences."""

import json
import random
from dataclasses import replace

import pytest
import torch
from conftest import make_document, make_objective, make_shape
from measured import measured

from eagle31_train.errors import UserError
from eagle31_train.evaluation.measurement import Counts, Drift
from eagle31_train.evaluation.results import headline, per_prompt, summarise, verdict
from eagle31_train.evaluation.unrolled import Trajectory, unroll
from eagle31_train.reporting.tables import as_text as table

DEPTHS = range(1, 9)
HEADLINE = 3


def answers(rate, prompts=12, seed=0, drift=False):
    """A drafter that is right with probability `rate` at every step, more or less by prompt."""
    generator = random.Random(seed)
    rows = []
    for number in range(prompts):
        slots, hard = random.Random(number).randint(20, 60), random.Random(-number).uniform(-0.15, 0.15)
        reach = [next((n for n in range(8) if generator.random() > rate + hard), 8) for _ in range(slots)]
        own = Drift([0.5] * 8, [0.25] * 8, [0.25] * 8, [0.0] * 8, [float(slots)] * 8, [1.0] * 8) if drift else None
        rows.append(Counts(f"p{number}", "ab"[number % 2], slots + 1, reach, own))
    return rows


def served(rows, draft_tokens):
    """What a server counts that drafts so many tokens: drafts, accepted at each position."""
    drafts, counts = 0, [0] * draft_tokens
    for row in rows:
        at = 0
        while at < len(row.accepted):
            drafts += 1
            got = min(row.accepted[at], draft_tokens)
            for position in range(got):
                counts[position] += 1
            at += got + 1
    return drafts, counts


def only(**by_name):
    """The one workload of a result."""
    (workload,) = summarise([measured("heldout", by_name)], DEPTHS, HEADLINE)["workloads"]
    return workload


def numbers_of(rows):
    return only(a=rows)["drafters"]["a"]


@pytest.fixture(scope="module")
def pair():
    """Two drafters on one workload, with drift."""
    return {"one": answers(0.6, seed=1, drift=True), "two": answers(0.7, seed=2, drift=True)}


@pytest.fixture(scope="module")
def compared(pair):
    return summarise([measured("heldout", pair)], DEPTHS, HEADLINE)


# ---------------------------------------------------------------- one drafter


@pytest.mark.core
def test_every_depth_is_that_of_a_server_which_drafts_so_many(pair, compared):
    (workload,) = compared["workloads"]
    numbers = workload["drafters"]["one"]
    for depth in DEPTHS:
        drafts, counts = served(pair["one"], depth)
        found = numbers["by_depth"][str(depth)]
        assert (found["drafts"], found["accepted_per_position"]) == (drafts, counts)
        value, low, high = found["acceptance_length"]
        assert value == pytest.approx(1 + sum(counts) / drafts)
        assert 1 < low < value < high < depth + 1
        whole = headline(numbers, depth)
        assert whole["acceptance_at_depth"] == [count / drafts for count in counts]
        assert whole["conditional_acceptance"] == [
            count / reached for reached, count in zip([drafts, *counts], counts, strict=False)
        ]
    assert [value for value, _, _ in numbers["cumulative"]] == pytest.approx(whole["acceptance_at_depth"])
    assert [value for value, _, _ in numbers["conditional"]] == pytest.approx(whole["conditional_acceptance"])
    for source, found in numbers["by_source"].items():
        alone = numbers_of([row for row in pair["one"] if row.source == source])
        assert found == {name: alone[name] for name in found}
        assert found["prompts"] == 6


def test_positions_that_no_server_would_draft_at_do_not_count(monkeypatch):
    """After [2, 0, 0] a server that drafts two tokens goes on behind them; one that drafts one does not."""
    rows = [Counts("p", "s", 4, [2, 0, 0])]
    found = numbers_of(rows)["by_depth"]
    assert found["1"] == {"acceptance_length": [1.5, None, None], "drafts": 2, "accepted_per_position": [1]}
    assert found["2"] == {"acceptance_length": [3.0, None, None], "drafts": 1, "accepted_per_position": [1, 1]}
    monkeypatch.setattr(Counts, "rounds", lambda row, depth: [min(n, depth) for n in row.accepted])  # the mistake
    assert numbers_of(rows)["by_depth"]["2"]["drafts"] == 3


def test_sampled_drafts_count_as_decoded():
    """They are decoded for real at every depth; there is no run from every position."""
    found = numbers_of([Counts("p", "s", 6, [], seen={1: [1, 0, 1], 2: [2, 0, 1]})])["by_depth"]
    assert found["1"]["accepted_per_position"] == [2]
    assert found["2"]["accepted_per_position"] == [2, 1]
    assert found["3"]["acceptance_length"] == [None, None, None]  # and not 1.0


def test_a_share_of_none_or_all_has_no_interval():
    numbers = numbers_of([Counts(f"p{n}", "s", 4, [n % 2, 0, 1]) for n in range(12)])
    assert numbers["conditional"][1] == [0.0, None, None]
    assert None not in numbers["conditional"][0]


def test_drift_is_a_mean_over_slots(pair, compared):
    drift = compared["workloads"][0]["drafters"]["one"]["drift"]
    slots = [len(row.accepted) for row in pair["one"]]
    value, low, high = drift["rms"][0]
    assert value == pytest.approx(sum(slot * slot for slot in slots) / sum(slots))
    assert low < value < high
    assert drift["sink"] == [[pytest.approx(0.5)] * 3] * 8
    assert numbers_of(answers(0.5))["drift"] is None
    without = [*pair["one"], Counts("short", "a", 1, [])]  # an answer of one token has no slot
    assert numbers_of(without)["drift"]["rms"][0][0] == value


def test_an_output_cut_in_two_drifts_as_the_whole():
    """The second half's prompt is longer, so only what does not depend on the boundary can be compared."""
    objective = make_objective(make_shape())
    document = make_document(make_shape(), 30, torch.Generator().manual_seed(0))
    tokens = document.tokens.tolist()

    def part(begin, end):
        """Slots at begin-1 .. end-2 of the same sequence."""
        trajectory = Trajectory(tokens[:begin], tokens[begin : end + 1], tokens[end + 1 :], document.aux)
        accepted, drift = unroll(objective.drafter, objective.teacher.target_ids, trajectory, 3, drift=True)
        return Counts("p", "made", len(trajectory.output), accepted, drift)

    halves, whole = (numbers_of(rows)["drift"] for rows in ([part(6, 9), part(9, 25)], [part(6, 25)]))
    for name in ("sink", "own", "rms", "entropy"):
        assert [v for v, *_ in halves[name]] == pytest.approx([v for v, *_ in whole[name]], rel=1e-12), name
    halves, whole = (
        [p + v for (p, *_), (v, *_) in zip(d["prompt"], d["verified"], strict=True)] for d in (halves, whole)
    )
    assert halves == pytest.approx(whole, rel=1e-12)


def test_every_prompt_of_the_manifest_has_its_drafts():
    workload, drafters = measured("heldout", {"a": [Counts("p", "s", 5, [2, 0, 1, 0])]})
    prompt = type("Prompt", (), {"id": "p", "source": "s", "ids": [1, 2]})
    (measurement,) = drafters["a"]
    rows = per_prompt(replace(workload, prompts=[prompt]), replace(measurement, outputs=[[5, 6, 7, 8, 9]]), 2)
    assert rows == [
        {
            "id": "p",
            "source": "s",
            "drafts": 2,
            "accepted_per_position": [1, 1],
            "accepted": [2, 0],
            "prompt_ids": [1, 2],
            "output_ids": [5, 6, 7, 8, 9],
            "reach": [2, 0, 1, 0],
        }
    ]


def test_speeds_are_of_a_drafter_that_was_measured_alone(pair):
    """Of several, each decoded a batch or two, at times of their own: that is noise."""
    timed = measured("heldout", {"one": pair["one"]}, notes=["first turns only"], seconds=(9.0, 7.2))
    result = summarise([timed], DEPTHS, HEADLINE)
    assert result["workloads"][0]["tokens_per_second"] == {"plain": 10.0, "one": 12.5}
    assert "  first turns only" in table(result)
    for several in (pair, {"one": [pair["one"], pair["two"]]}):
        assert "tokens_per_second" not in summarise([measured("s", several, seconds=(9, 7))], [3], 3)["workloads"][0]


def test_measurements_of_another_machine_are_noted(pair):
    workload, drafters = measured("heldout", {"a": pair["one"], "b": [pair["one"], pair["two"]]})
    drafters["b"][1] = replace(drafters["b"][1], machine="an older machine")
    (found,) = summarise([(workload, drafters)], DEPTHS, HEADLINE)["workloads"]
    assert found["notes"] == ["b, training 2 was measured on an older machine"]


# ---------------------------------------------------------------- several trainings of one


def test_several_trainings_are_one_drafter(pair):
    once, other = answers(0.6, seed=1, drift=True), answers(0.7, seed=2)
    single, twice, both = (numbers_of(rows) for rows in (once, [once, once], [once, other]))
    # As many prompts, and so as wide an interval: the same answers a second time say nothing new.
    assert twice["prompts"] == single["prompts"] == 12
    assert (twice["conditional"], twice["drift"]) == (single["conditional"], single["drift"])
    for depth in map(str, DEPTHS):
        assert twice["by_depth"][depth]["acceptance_length"] == single["by_depth"][depth]["acceptance_length"]
    assert "by_training" not in single
    alone = numbers_of(other)
    lengths = [numbers["by_depth"]["3"]["acceptance_length"][0] for numbers in (single, alone)]
    assert [training["3"] for training in both["by_training"]] == lengths
    # Counts are sums, and acceptance is of all their drafts.
    assert both["generated_tokens"] == single["generated_tokens"] + alone["generated_tokens"]
    drafts = [numbers["by_depth"]["3"]["drafts"] for numbers in (single, alone)]
    accepted = [sum(numbers["by_depth"]["3"]["accepted_per_position"]) for numbers in (single, alone)]
    assert both["by_depth"]["3"]["drafts"] == sum(drafts)
    assert both["by_depth"]["3"]["acceptance_length"][0] == pytest.approx(1 + sum(accepted) / sum(drafts))


def test_one_lucky_training_of_three_is_not_better():
    """Pooled, it is far ahead of the other drafter, on any prompts; two of its trainings are behind."""
    usual, lucky = answers(0.6, seed=1), answers(0.95, seed=5)
    unlucky = [answers(0.55, seed=seed) for seed in (3, 4)]
    found = only(usual=usual, lucky=[lucky, *unlucky])
    assert found["differences"]["lucky"]["8"]["difference"][1] > 0
    assert set(found["verdict"]["lucky"]["better"].values()) == {None}
    assert set(only(usual=usual, lucky=[lucky] * 3)["verdict"]["lucky"]["better"].values()) == {"lucky"}


# ---------------------------------------------------------------- two drafters


def test_differences_are_of_the_same_prompts_in_whatever_order(pair, compared):
    shuffled = random.Random(3).sample(pair["two"], len(pair["two"]))
    (workload,) = compared["workloads"]
    differences = workload["differences"]["two"]
    assert only(one=pair["one"], two=shuffled)["differences"]["two"] == differences
    for depth in map(str, DEPTHS):
        one, two = (workload["drafters"][name]["by_depth"][depth]["acceptance_length"][0] for name in ("one", "two"))
        assert differences[depth]["difference"][0] == pytest.approx(two - one)
        assert differences[depth]["ratio"][0] == pytest.approx(two / one)
    same = only(one=pair["one"], same=pair["one"])
    assert set(same["verdict"]["same"]["better"].values()) == {None}
    assert same["differences"]["same"]["8"]["difference"] == [0.0, 0.0, 0.0]


def test_nothing_drafted_is_refused():
    with pytest.raises(UserError, match="heldout: every answer ended with its first token"):
        only(a=[Counts("p", "s", 1, [])])


def test_what_is_kept_under_a_perturbation_is_compared_on_the_same_resamples(pair):
    """The second loses nothing on six prompts, the first half; prompts that have no second form count for nobody."""

    def halved(rows):
        return [replace(row, accepted=[n // 2 for n in row.accepted]) for row in rows]

    one, two = pair["one"], pair["two"]
    forms = [measured("heldout", pair), measured("heldout · x", {"one": halved(one[:6]), "two": two[:6][::-1]})]
    plain, perturbed = summarise(forms, DEPTHS, HEADLINE)["workloads"]
    lengths = []
    for rows in (halved(one[:6]), one[:6]):
        drafts, counts = served(rows, 3)
        lengths.append(1 + sum(counts) / drafts)
    value, low, high = perturbed["drafters"]["one"]["kept"]["3"]
    assert value == pytest.approx(lengths[0] / lengths[1])
    assert low < value < high < 1
    for depth in map(str, DEPTHS):
        value, low, high = perturbed["differences"]["two"][depth]["kept_ratio"]
        first, second = (perturbed["drafters"][name]["kept"][depth][0] for name in ("one", "two"))
        assert (value, second) == (pytest.approx(second / first), pytest.approx(1))
        assert 1 < low < value < high
    assert "kept" not in plain["drafters"]["one"]
    assert "kept_ratio" not in plain["differences"]["two"]["3"]
    # Both lose the same: paired resamples leave no width at all.
    forms = [
        measured("heldout", {"one": one, "two": one}),
        measured("heldout · x", dict.fromkeys(("one", "two"), halved(one))),
    ]
    assert summarise(forms, [3], 3)["workloads"][1]["differences"]["two"]["3"]["kept_ratio"] == [1.0, 1.0, 1.0]
    others = [replace(row, id=f"other {row.id}") for row in one]
    forms[1] = measured("heldout · x", {"one": others, "two": others})
    assert "kept_ratio" not in summarise(forms, [3], 3)["workloads"][1]["differences"]["two"]["3"]


def test_prompts_are_verified_that_every_training_of_every_drafter_decoded(pair):
    def seen(rows, count):
        return [replace(row, seen={3: row.rounds(3)} if i < count else {}) for i, row in enumerate(rows)]

    one, two = pair["one"], pair["two"]
    for drafters, count, text in (
        ({"one": seen(one, 5), "two": seen(two, 5)}, 5, "5 of them"),
        ({"one": seen(one, 5), "two": [seen(two, 5), seen(two, 4)]}, 4, "4 of them"),
        ({"one": seen(one, 5), "two": two}, 0, "none"),
        ({"one": seen(one, 5)[:5]}, 5, "all"),
    ):
        result = summarise([measured("heldout", drafters)], DEPTHS, HEADLINE)
        assert result["workloads"][0]["verified"] == count
        assert f"prompts, greedy, {text} decoded by real speculation" in table(result)


def test_of_many_comparisons_without_a_difference_few_find_one():
    """What the definitions promise: about one of 20, here of 100 with at most 2.6 standard errors more."""
    wins = 0
    for seed in range(100):
        drafters = {"a": answers(0.6, 20, 2 * seed), "b": answers(0.6, 20, 2 * seed + 1)}
        (workload,) = summarise([measured("heldout", drafters)], [3], 3)["workloads"]
        wins += workload["verdict"]["b"]["better"]["3"] is not None
    assert wins <= 11


# ---------------------------------------------------------------- which is better

UP, DOWN, NONE = (0.2, 0.6), (-0.6, -0.2), (-0.2, 0.4)


@pytest.mark.parametrize(
    ("bounds", "better", "text"),
    [
        ([NONE, NONE, UP, UP], "--BB", "B better at 3-4 draft tokens: +4.0 % [2.0, 6.0] at 3"),
        ([UP, NONE, UP, NONE], "B-B-", "B better at 1, 3 draft tokens: +4.0 % [2.0, 6.0] at 3"),
        ([UP, NONE], "B-", "B better at 1 draft token: +4.0 % [2.0, 6.0]"),
        ([DOWN, DOWN], "AA", "A better at 1-2 draft tokens: +4.2 % [2.0, 6.4] at 1"),
        (
            [NONE, DOWN, UP],
            "-AB",
            "B better at 3 draft tokens: +4.0 % [2.0, 6.0]; A better at 2 draft tokens: +4.2 % [",
        ),
        ([NONE, NONE], "--", "no difference shown: +1.0 % [-2.0, 4.0] at 1"),
    ],
)
def test_which_is_better_and_where(bounds, better, text):
    differences = {
        str(depth): {
            "difference": [(low + high) / 2, low, high],
            "ratio": [1 + (low + high) / 20, 1 + low / 10, 1 + high / 10],
        }
        for depth, (low, high) in enumerate(bounds, 1)
    }
    lengths = {depth: each["difference"][0] for depth, each in differences.items()}
    found = verdict(
        ("A", [dict.fromkeys(differences, 0.0)]), ("B", [lengths]), differences, 20, 3 if len(bounds) > 2 else 1
    )
    assert "".join(name or "-" for name in found["better"].values()) == better
    assert found["text"].startswith(text)
    few = verdict(("A", [dict.fromkeys(differences, 0.0)]), ("B", [lengths]), differences, 9, 1)
    assert few["text"].endswith("; only 9 prompts")


@pytest.mark.parametrize(
    ("first", "other", "ahead"),
    [
        ([1.0, 1.1], [1.2, 1.3], True),
        ([1.0], [1.2, 1.3, 1.1], True),
        ([1.0, 1.1], [1.05, 1.8], False),
        ([1.0], [1.0, 1.8], False),
        ([1.0], [None, 1.8], False),
    ],
)
def test_the_better_one_is_so_with_every_training(first, other, ahead):
    """The intervals are the same: they are over prompts, and know nothing of trainings."""
    for (low, high), names in ((UP, "AB"), (DOWN, "BA")):  # either way round
        differences = {"1": {"difference": [(low + high) / 2, low, high], "ratio": [1.1, 1.0, 1.2]}}
        sides = {"A": [{"1": length} for length in first], "B": [{"1": length} for length in other]}
        found = verdict((names[0], sides[names[0]]), (names[1], sides[names[1]]), differences, 20, 1)
        assert found["better"] == {"1": "B" if ahead else None}


# ---------------------------------------------------------------- as JSON and as text


def test_a_result_is_plain_json_and_its_table_has_the_numbers(pair, compared):
    text = json.dumps(compared, allow_nan=False)
    assert json.loads(text) == compared
    assert json.dumps(summarise([measured("heldout", pair)], DEPTHS, HEADLINE)) == text
    shown = table(compared)
    numbers = compared["workloads"][0]["drafters"]["two"]["by_depth"]
    begin = shown.index("draft tokens", shown.index("  acceptance length"))
    rows = [line.split() for line in shown[begin:].splitlines()[1 : 1 + len(DEPTHS)]]
    lengths = [f"{numbers[str(depth)]['acceptance_length'][0]:.3f}" for depth in DEPTHS]
    assert [(row[0], row[4]) for row in rows] == list(zip(map(str, DEPTHS), lengths, strict=True))
    assert compared["workloads"][0]["verdict"]["two"]["text"] in " ".join(shown.split())
    assert "heldout: 12 prompts, greedy, none decoded by real speculation" in shown
