"""Pictures of a result, which `acceptance.py` describes: acceptance and drift by depth, all workloads, and serving.

Names and order of the pictures are part of what makes a model card new: they stay as they are.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np

from eagle31_train.evaluation.intervals import Interval
from eagle31_train.reporting import figures
from eagle31_train.reporting.figures import HEIGHT, ROW, Picture, percent
from eagle31_train.reporting.tables import ALL, SERVING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Result = dict[str, Any]
KINDS = {"sink": "first tokens", "prompt": "prompt", "verified": "verified", "own": "own drafts"}
TOKENS, STEP = "draft tokens", "draft step"
BAND = "95 % intervals shaded"
LEAST = 10.0  # per cent; smaller differences are drawn pale
NOTHING: Interval = [None, None, None]


def pictures(result: Result) -> Iterator[Picture]:
    """Every picture that there are numbers for: first those of all workloads, then those of each."""
    names: set[str] = set()
    for picture in _pictures(result):
        # Names that differ in case or in signs alone would write the same file.
        same = (name for n in count(1) if (name := f"{picture.name}-{n}" if n > 1 else picture.name) not in names)
        names.add(name := next(same))
        yield replace(picture, name=name)


def _pictures(result: Result) -> Iterator[Picture]:
    names, workloads = result.get("drafters", []), result.get("workloads", [])
    if len(workloads) > 1:
        yield from _overview(result)
    for workload in workloads:
        yield from _acceptance(workload, names)
        if workload is workloads[0]:  # tables have the drift of all
            yield from _drift(workload, names)
    if result.get("serving"):
        yield from _serving(result["serving"])


def slug(name: str) -> str:
    """A name as part of a file's name."""
    return re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-")


# ---------------------------------------------------------------- one workload


def _curves(
    axes: "Axes", across: str, curves: dict[str, list[Interval]], names: list[str], share: bool, shift: float = 0.0
) -> None:
    """A curve for each drafter, over 1, 2, 3, …; a share of one as a percentage."""
    for name, intervals in curves.items():
        last = next((value + shift for value, *_ in reversed(intervals) if value is not None), None)
        form = "{:+.1%}" if shift else "{:.0%}" if share else "{:.2f}"
        label = name if last is None else f"{name}  {form.format(last)}"
        figures.banded(axes, intervals, label, names.index(name), shift)
    if share:
        figures.shares(axes)
    figures.whole_numbers(axes, across)


def _acceptance(workload: Result, names: list[str]) -> Iterator[Picture]:
    section, drafters, differences = workload["name"], workload["drafters"], workload["differences"]
    first = next(iter(drafters))
    depths = list(drafters[first]["by_depth"])
    remark = f"{section} · {BAND}"
    lengths = {name: [of["by_depth"][k]["acceptance_length"] for k in depths] for name, of in drafters.items()}
    yield Picture(
        f"{slug(section)}-acceptance",
        section,
        "Acceptance length",
        "Tokens per verification, the target's own included, by the number of tokens that are drafted.",
        partial(_curves, across=TOKENS, curves=lengths, names=names, share=False),
        remark,
    )
    if differences:
        title = f"{' and '.join(differences) if len(differences) < 3 else 'Others'} against {first}"
        yield Picture(
            f"{slug(section)}-gain",
            section,
            title,
            "Change of the acceptance length on the same prompts. Bands are over prompts, not over trainings.",
            partial(_gain, first, {name: [of[k]["ratio"] for k in depths] for name, of in differences.items()}, names),
            f"acceptance length · {remark}",
        )
    if workload["perturbation"] is None:
        yield Picture(
            f"{slug(section)}-conditional",
            section,
            "Accepted, if reached",
            "Share of drafts whose token at this position is accepted, of those whose tokens before it are; "
            f"{depths[-1]} tokens are drafted.",
            partial(
                _curves,
                across="position",
                curves={name: numbers["conditional"] for name, numbers in drafters.items()},
                names=names,
                share=True,
            ),
            remark,
        )


def _gain(first: str, ratios: dict[str, list[Interval]], names: list[str], axes: "Axes") -> None:
    """Every other drafter against the first."""
    axes.axhline(0, linestyle="--", color="gray", label=first)
    _curves(axes, TOKENS, ratios, names, share=True, shift=-1.0)


def _drift(workload: Result, names: list[str]) -> Iterator[Picture]:
    section = workload["name"]
    drift = {name: numbers["drift"] for name, numbers in workload["drafters"].items() if numbers["drift"]}
    for name, measures in drift.items():
        yield Picture(
            f"{slug(section)}-attention-{slug(name)}",
            section,
            f"Where {name} looks",
            "Share of the attention on the first tokens of the sequence, the rest of the prompt, what the target has "
            "verified, and what the drafter itself has drafted.",
            partial(_attention, measures),
            f"{section} · share of the attention, by draft step",
        )
    for measure, title, caption in (
        ("own", "Attention on its own drafts", "Share of the attention on tokens that are not verified."),
        (
            "rms",
            "RMS of the state that a step reads",
            "Step 1 reads the target's states, later steps the one fed back.",
        ),
        ("entropy", "Entropy of the draft distribution, nats", "How undecided the drafter is, step by step."),
    ):
        if drift:
            curves = {name: measures[measure] for name, measures in drift.items()}
            draw = partial(_curves, across=STEP, curves=curves, names=names, share=measure == "own")
            yield Picture(f"{slug(section)}-{measure}", section, title, caption, draw, f"{section} · {BAND}")


def _attention(measures: dict[str, list[Interval]], axes: "Axes") -> None:
    parts = [figures.columns(measures[kind])[0] for kind in KINDS]
    labels = [f"{label}  {percent(part[-1])}" for label, part in zip(KINDS.values(), parts, strict=True)]
    axes.stackplot(np.arange(1.0, len(parts[0]) + 1), parts, labels=labels, edgecolor=axes.get_facecolor())
    axes.set_ylim(0, 1)
    axes.margins(x=0)
    figures.shares(axes)
    figures.whole_numbers(axes, STEP)


# ---------------------------------------------------------------- all workloads


def _overview(result: Result) -> Iterator[Picture]:
    workloads, names, depth = result["workloads"], result["drafters"], str(result["draft_tokens"])
    of_all = {workload["name"]: workload["drafters"] for workload in workloads}
    lengths = {
        row: {name: of["by_depth"][depth]["acceptance_length"] for name, of in drafters.items()}
        for row, drafters in of_all.items()
    }
    yield _forest(
        "acceptance",
        f"Acceptance length at {depth} draft tokens",
        "Tokens per verification, the target's own included.",
        lengths,
        names,
        "tokens per verification",
    )
    kept = {
        row: {name: of["kept"][depth] for name, of in drafters.items() if of.get("kept")}
        for row, drafters in of_all.items()
    }
    perturbed = [workload["name"] for workload in workloads if workload["perturbation"] is not None]
    if kept := {row: found for row, found in kept.items() if found and row in perturbed}:
        yield _forest(
            "kept",
            "What a perturbation leaves",
            f"Acceptance length at {depth} draft tokens, as a share of that on the plain form of the same prompts.",
            kept,
            names,
            "of the plain form's",
        )
    if all(of["drift"] for drafters in of_all.values() for of in drafters.values()):
        yield _forest(
            "own",
            "Attention on its own drafts, at the last step",
            "Share of the attention that the last draft step spends on tokens that are not verified.",
            {row: {name: of["drift"]["own"][-1] for name, of in drafters.items()} for row, drafters in of_all.items()},
            names,
            "of the attention",
        )
    for name in names[1:]:
        if compared := [workload for workload in workloads if name in workload["differences"]]:
            yield Picture(
                f"workloads-gain-{slug(name)}",
                ALL,
                f"{name} against {names[0]}",
                "Change of the acceptance length, in per cent; bold where one of them wins. "
                f"Positive: {name} is better.",
                partial(_cells, name, compared),
                "acceptance length, change in per cent · bold: one of them wins",
                1.0 + ROW * max(len(compared), 2),
            )


def _forest(
    name: str,
    title: str,
    caption: str,
    found: dict[str, dict[str, Interval]],
    names: list[str],
    across: str,
) -> Picture:
    """A row for each workload, with an interval for each drafter."""

    def draw(axes: "Axes") -> None:
        figures.rows(axes, list(found))
        for index, drafter in enumerate(names):
            figures.whiskers(axes, [row.get(drafter, NOTHING) for row in found.values()], drafter, index, len(names))
        axes.set_xlabel(across)
        if name != "acceptance":
            figures.shares(axes, "x")
        if name == "kept":
            axes.axvline(1, linestyle="--", color="gray")

    height = 1.1 + ROW * max(len(found) * (1 + len(names)) / 2, 2)
    return Picture(f"workloads-{name}", ALL, title, caption, draw, "95 % intervals", height)


def _cells(name: str, workloads: Sequence[Result], axes: "Axes") -> None:
    depths = list(workloads[0]["differences"][name])
    ratios = figures.columns([w["differences"][name][depth]["ratio"] for w in workloads for depth in depths])[0]
    wins = np.array([[w["verdict"][name]["better"][depth] is not None for depth in depths] for w in workloads])
    figures.cells(axes, 100 * (ratios.reshape(wins.shape) - 1), wins, depths, LEAST)
    figures.rows(axes, [workload["name"] for workload in workloads])
    axes.grid(visible=False)
    axes.set_xlabel(TOKENS)


# ---------------------------------------------------------------- serving


def _serving(serving: Result) -> Iterator[Picture]:
    rows = serving["rows"]
    for name in dict.fromkeys(row["drafter"] for row in rows if row["drafter"]):
        yield Picture(
            f"serving-{slug(name)}",
            SERVING,
            f"{name} in vLLM",
            "Output tokens per second and user, by requests under way at once; none: without a drafter.",
            partial(_speeds, [row for row in rows if row["drafter"] in (None, name)]),
            f"tokens/s/user, by number of draft tokens · {BAND}",
            HEIGHT,
        )


def _speeds(rows: list[Result], axes: "Axes") -> None:
    users = sorted({row["concurrency"] for row in rows})
    for index, tokens in enumerate(sorted({row["draft_tokens"] for row in rows})):
        speeds = {row["concurrency"]: row["per_user"] for row in rows if row["draft_tokens"] == tokens}
        label = f"{tokens or 'none'}  {speeds[max(speeds)][0]:.1f}"
        figures.banded(axes, [speeds.get(count, NOTHING) for count in users], label, index)
    axes.set_ylim(bottom=0)
    axes.set_xticks(range(1, len(users) + 1), [str(count) for count in users])
    axes.set_xlabel("concurrency")
