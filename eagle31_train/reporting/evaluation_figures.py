"""Pictures of a result, which `results.py` describes: acceptance and drift by depth, all workloads, and serving.

Names and order of the pictures are part of what makes a model card new: they stay as they are.
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np

from eagle31_train.evaluation.intervals import Interval
from eagle31_train.reporting import figures
from eagle31_train.reporting.figures import ROW, Picture
from eagle31_train.reporting.tables import ALL, SERVING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Result = dict[str, Any]
Curves = dict[str, list[Interval]]  # by drafter
KINDS = ("sink", "prompt", "verified", "own")
BAND = "95 % intervals shaded"
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


def _curves(across: str, curves: Curves, names: list[str], share: bool, axes: "Axes") -> None:
    """A curve for each drafter, over 1, 2, 3, …; a share of one as a percentage."""
    for name, intervals in curves.items():
        last = [value for value, *_ in intervals if value is not None][-1:]
        figures.banded(axes, intervals, " ".join([name, *map("{:.3g}".format, last)]), names.index(name))
    if share:
        figures.shares(axes)
    figures.whole_numbers(axes, across)


def _acceptance(workload: Result, names: list[str]) -> Iterator[Picture]:
    section, drafters, differences = workload["name"], workload["drafters"], workload["differences"]
    first = next(iter(drafters))
    depths = list(drafters[first]["by_depth"])

    def picture(name: str, title: str, across: str, curves: Curves, share: bool = False) -> Picture:
        draw = partial(_curves, across, curves, names, share)
        return Picture(f"{slug(section)}-{name}", section, title, draw, f"{section} · {BAND}")

    lengths = {name: [of["by_depth"][k]["acceptance_length"] for k in depths] for name, of in drafters.items()}
    yield picture("acceptance", "Acceptance length", "draft tokens", lengths)
    if differences:
        ratios = {name: [of[k]["ratio"] for k in depths] for name, of in differences.items()}
        yield picture("gain", f"Acceptance length, times that of {first}", "draft tokens", ratios)
    if workload["perturbation"] is None:
        shares = {name: numbers["conditional"] for name, numbers in drafters.items()}
        yield picture("conditional", "Accepted, if all before it is", "position", shares, share=True)


def _drift(workload: Result, names: list[str]) -> Iterator[Picture]:
    section = workload["name"]
    drift = {name: numbers["drift"] for name, numbers in workload["drafters"].items() if numbers["drift"]}
    for name, measures in drift.items():
        title, remark = f"Where {name} looks", f"{section} · share of the attention"
        yield Picture(f"{slug(section)}-attention-{slug(name)}", section, title, partial(_attention, measures), remark)
    titles = {
        "own": "Attention on its own drafts",
        "rms": "RMS of the state that a step reads",
        "entropy": "Entropy of the draft distribution, nats",
    }
    for measure, title in titles.items() if drift else ():
        curves = {name: measures[measure] for name, measures in drift.items()}
        draw = partial(_curves, "draft step", curves, names, measure == "own")
        yield Picture(f"{slug(section)}-{measure}", section, title, draw, f"{section} · {BAND}")


def _attention(measures: Curves, axes: "Axes") -> None:
    parts = [figures.columns(measures[kind])[0] for kind in KINDS]
    labels = [f"{kind} {part[-1]:.0%}" for kind, part in zip(KINDS, parts, strict=True)]
    axes.stackplot(np.arange(1.0, len(parts[0]) + 1), parts, labels=labels)
    axes.margins(0)
    figures.shares(axes)
    figures.whole_numbers(axes, "draft step")


# ---------------------------------------------------------------- all workloads


def _overview(result: Result) -> Iterator[Picture]:
    """A row for each workload, with an interval for each drafter."""
    names, depth = result["drafters"], str(result["draft_tokens"])
    of_all = {workload["name"]: workload for workload in result["workloads"]}

    def forest(name: str, title: str, found: dict[str, dict[str, Interval]], share: bool = False) -> Picture:
        rows = {row: intervals for row, intervals in found.items() if intervals}
        height = 1.1 + ROW * max(len(rows) * (1 + len(names)) / 2, 2)
        return Picture(f"workloads-{name}", ALL, title, partial(_forest, rows, names, share), "95 % intervals", height)

    lengths = {
        row: {name: of["by_depth"][depth]["acceptance_length"] for name, of in workload["drafters"].items()}
        for row, workload in of_all.items()
    }
    yield forest("acceptance", f"Acceptance length at {depth} draft tokens", lengths)
    kept = {
        row: {name: of["kept"][depth] for name, of in workload["drafters"].items() if of.get("kept")}
        for row, workload in of_all.items()
    }
    if any(kept.values()):
        yield forest("kept", f"Kept of the plain form's acceptance length, at {depth} draft tokens", kept, True)
    if all(of["drift"] for workload in of_all.values() for of in workload["drafters"].values()):
        own = {
            row: {name: of["drift"]["own"][-1] for name, of in workload["drafters"].items()}
            for row, workload in of_all.items()
        }
        yield forest("own", "Attention on its own drafts, at the last step", own, True)
    for name in names[1:]:
        ratios = {
            row: {name: workload["differences"][name][depth]["ratio"]}
            for row, workload in of_all.items()
            if name in workload["differences"]
        }
        if ratios:
            title = f"Acceptance length of {name}, times that of {names[0]}, at {depth} draft tokens"
            yield forest(f"gain-{slug(name)}", title, ratios)


def _forest(rows: dict[str, dict[str, Interval]], names: list[str], share: bool, axes: "Axes") -> None:
    for index, drafter in enumerate(names):
        if any(drafter in row for row in rows.values()):
            figures.whiskers(axes, [row.get(drafter, NOTHING) for row in rows.values()], drafter, index, len(names))
    axes.set_yticks(range(len(rows)), list(rows))
    axes.set_ylim(len(rows) - 0.5, -0.5)
    if share:
        figures.shares(axes, "x")


# ---------------------------------------------------------------- serving


def _serving(serving: Result) -> Iterator[Picture]:
    rows = serving["rows"]
    for name in dict.fromkeys(row["drafter"] for row in rows if row["drafter"]):
        draw = partial(_speeds, [row for row in rows if row["drafter"] in (None, name)])
        yield Picture(
            f"serving-{slug(name)}",
            SERVING,
            f"{name} in vLLM: tokens/s/user",
            draw,
            f"by number of draft tokens · {BAND}",
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
