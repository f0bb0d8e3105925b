"""docs/study-eagle31.md and the README say what docs/results holds: tables whose numbers are kept, row by row."""

import json
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGE = (DOCS / "study-eagle31.md").read_text(encoding="utf-8")
README = (DOCS.parent / "README.md").read_text(encoding="utf-8")
DEPTHS = [str(depth) for depth in range(1, 9)]
UNROLLED = ("unroll-3", "unroll-7")
FORMS = {  # as the page calls what the comparison calls otherwise
    "heldout": "as trained",
    "heldout · no_template": "no template",
    "heldout · template_llama3": "Llama 3's template",
    "heldout · template_vicuna": "Vicuna's template",
    "heldout · system_absent": "no system turn",
    "heldout · system_adversarial": "an adversarial system message",
    "heldout · temperature_1": "temperature 1",
}


def workloads(name):
    return json.loads((DOCS / "results" / f"study-{name}.json").read_text())["workloads"]


def length(found, drafter, depth):
    return found["drafters"][drafter]["by_depth"][depth]["acceptance_length"]


def bracketed(value, form="{:.3f}"):
    middle, low, high = (form.format(number).replace("-", "−") for number in value)
    return f"{middle} [{low}, {high}]"


def gain(found, drafter, depth):
    """By how many per cent a drafter is ahead of the first, with its interval."""
    value, low, high = (100 * (ratio - 1) for ratio in found["differences"][drafter][depth]["ratio"])
    return f"{value:+.1f} %".replace("-", "−"), f"[{low:.1f}, {high:.1f}]".replace("-", "−")


def row(*cells):
    return f"| {' | '.join(cells)} |"


def told(expected):
    """Whether the page has a line, however it stresses what stands in it."""
    return expected in PAGE.replace("**", "").split("\n")


@pytest.mark.parametrize("depth", DEPTHS)
def test_by_how_much_it_wins(depth):
    (found,) = workloads("comparison")
    first, last = (bracketed(length(found, name, depth)) for name in ("3.0", "3.1"))
    single = [f"{length(found, name, depth)[0]:.3f}" for name in ("norm_output", "fc_norm")]
    assert told(row(depth, first, *single, last, " ".join(gain(found, "3.1", depth))))


def test_a_second_training():
    (found,) = workloads("seed1")
    for name in ("3.0", "3.1"):
        assert told(row(f"{name}, seed 1", *(f"{length(found, name, depth)[0]:.3f}" for depth in DEPTHS)))
    gains = [gain(found, "3.1", depth) for depth in DEPTHS]
    assert told(row("3.1 over 3.0, seed 1", *(value for value, _ in gains)))
    assert told(f"| | {' | '.join(interval for _, interval in gains)} |")


@pytest.mark.parametrize("depth", DEPTHS)
def test_two_passes(depth):
    (both,), (new,), (old,) = workloads("passes2"), workloads("more"), workloads("more-3.0")
    assert length(both, "3.0", depth) == length(old, "two-passes", depth)
    assert length(both, "3.1", depth) == length(new, "two-passes", depth)
    lengths = (bracketed(length(both, name, depth)) for name in ("3.0", "3.1"))
    gains = [" ".join(gain(*one, depth)) for one in ((both, "3.1"), (old, "two-passes"), (new, "two-passes"))]
    assert told(row(depth, *lengths, *gains))


def test_the_readme():
    (one,), (two,), (other,) = workloads("comparison"), workloads("passes2"), workloads("seed1")
    for line in (
        row("EAGLE 3.1, two passes: the recipe", "", bracketed(length(two, "3.1", "3"))),
        row("EAGLE 3, two passes", "", bracketed(length(two, "3.0", "3"))),
        row("EAGLE 3.1, one pass", *(bracketed(length(found, "3.1", "3")) for found in (one, other))),
        row("EAGLE 3, one pass", *(bracketed(length(found, "3.0", "3")) for found in (one, other))),
    ):
        assert line.replace("|  |", "| |") in README.replace("**", "").split("\n")
    gains = [gain(two, "3.1", depth)[0].removeprefix("+") for depth in ("3", "8")]
    assert f"what they gain, {gains[0]} at 3 draft tokens and {gains[1]} at 8" in README.replace("\n", " ")


@pytest.mark.parametrize("depth", DEPTHS)
def test_unrolls(depth):
    (found,) = workloads("more")
    others = [(f"{length(found, name, depth)[0]:.3f}", " ".join(gain(found, name, depth))) for name in UNROLLED]
    assert told(row(depth, bracketed(length(found, "one-pass", depth)), *(cell for one in others for cell in one)))


@pytest.mark.parametrize("name", ["3.0", "norm_output", "fc_norm", "3.1"])
def test_what_drifts(name):
    (found,) = workloads("comparison")
    told_of, first = found["drafters"][name]["drift"], name == "3.0"
    drift = {measure: [value for value, *_ in told_of[measure]] for measure in ("rms", "entropy", "own")}
    large = [f"{value:.1f}" if value >= 20 else f"{value:.2f}" for value in drift["rms"]]
    assert told(row(f"RMS of the state read: {name}" if first else name, *large))
    assert told(row(f"entropy in nats: {name}" if first else name, *(f"{value:.2f}" for value in drift["entropy"])))
    shares = ["0 %", *(f"{100 * value:.1f} %" for value in drift["own"][1:])]
    assert told(row(f"attention on own drafts: {name}" if first else name, *shares))


def test_other_forms_again():
    found = workloads("forms-seed1")
    assert {one["name"] for one in found} == set(FORMS)
    for one in found:
        lengths = [f"{length(one, name, '3')[0]:.3f}" for name in ("3.0", "3.1")]
        start = row(FORMS[one["name"]], *lengths, " ".join(gain(one, "3.1", "3")))[:-1]
        assert any(line.startswith(start) for line in PAGE.replace("**", "").split("\n")), start


def test_contexts_of_4096_tokens():
    plain, long = workloads("contexts-seed1")
    lengths = [f"{length(long, name, '3')[0]:.3f}" for name in ("3.0", "3.1")]
    ahead = " ".join(gain(long, "3.1", "3"))
    assert f"| 4,096 tokens: seed 1, 10 prompts | {lengths[0]} | | | {lengths[1]} | {ahead} |" in PAGE
    kept = {name: length(long, name, "3")[0] / length(plain, name, "3")[0] for name in ("3.0", "3.1")}
    assert f"{1 - kept['3.0']:.0%} (3.0) and {1 - kept['3.1']:.0%} (3.1)".replace("%", " %") in PAGE


@pytest.mark.parametrize("name", ["seed1", "passes2"])
def test_served(name):
    serving = json.loads((DOCS / "results" / f"study-serving-{name}.json").read_text())
    for one in serving["rows"]:
        speed = bracketed(one["per_user"], "{:.1f}"), f"{one['total']:.1f}"
        times = f"{1e3 * one['ttft']['mean']:,.0f}", f"{1e3 * one['tpot']['mean']:.1f}"
        ahead = bracketed(one["speedup"], "{:.2f}") if one["speedup"] else ""
        drafted = one["draft_tokens"] or "none"
        tail = f"| {drafted} | {' | '.join([*times, *speed, ahead])}".rstrip() + " |"
        assert any(tail in line for line in PAGE.replace("**", "").split("\n")), tail
