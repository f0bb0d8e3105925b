"""Pictures of a result, which `results.py` describes: acceptance and drift by depth, all workloads, and serving.

Names and order of the pictures are part of what makes a model card new: they stay as they are.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np

from eagle31_train.evaluation.intervals import NOTHING, Interval
from eagle31_train.reporting import figures, tables
from eagle31_train.reporting.figures import ROW, Picture
from eagle31_train.reporting.tables import ALL, SERVING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Result = dict[str, Any]
Curves = dict[str, list[Interval]]  # by drafter
Rows = dict[str, dict[str, Interval]]  # by row and drafter
KINDS = ("sink", "prompt", "verified", "own")
BAND = "95 % intervals shaded"
NUMBER, RATIO, SHARE = "{:.2f}", "{:.2f}×", "{:.1%}"  # how a legend tells numbers of a kind


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


def _curves(across: str, curves: Curves, names: list[str], kind: str, axes: "Axes") -> None:
    """A curve for each drafter, over 1, 2, 3, …"""
    for name, intervals in curves.items():
        last = [value for value, *_ in intervals if value is not None][-1:]
        figures.banded(axes, intervals, "  ".join([name, *map(kind.format, last)]), names.index(name))
    if kind == SHARE:
        figures.shares(axes)
    if kind == RATIO:
        axes.axhline(1, color="gray", linestyle="--", linewidth=0.8)
    figures.whole_numbers(axes, across)


def _acceptance(workload: Result, names: list[str]) -> Iterator[Picture]:
    section, drafters, differences = workload["name"], workload["drafters"], workload["differences"]
    first = next(iter(drafters))
    depths = list(drafters[first]["by_depth"])

    def picture(name: str, title: str, across: str, curves: Curves, kind: str) -> Picture:
        draw = partial(_curves, across, curves, names, kind)
        return Picture(f"{slug(section)}-{name}", section, title, draw, f"{section} · {BAND}")

    lengths = {name: [of["by_depth"][k]["acceptance_length"] for k in depths] for name, of in drafters.items()}
    yield picture("acceptance", "Acceptance length", "draft tokens", lengths, NUMBER)
    if differences:
        ratios = {name: [of[k]["ratio"] for k in depths] for name, of in differences.items()}
        yield picture("gain", f"Acceptance length, times that of {first}", "draft tokens", ratios, RATIO)
    if workload["perturbation"] is None:
        shares = {name: numbers["conditional"] for name, numbers in drafters.items()}
        yield picture("conditional", "Accepted, if all before it is", "position", shares, SHARE)


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
        draw = partial(_curves, "draft step", curves, names, SHARE if measure == "own" else NUMBER)
        yield Picture(f"{slug(section)}-{measure}", section, title, draw, f"{section} · {BAND}")


def _attention(measures: Curves, axes: "Axes") -> None:
    parts = [figures.columns(measures[kind])[0] for kind in KINDS]
    labels = [f"{kind} {part[-1]:.0%}" for kind, part in zip(KINDS, parts, strict=True)]
    axes.stackplot(np.arange(1.0, len(parts[0]) + 1), parts, labels=labels)
    axes.margins(0)
    axes.set_ylim(0, 1)
    figures.shares(axes)
    figures.whole_numbers(axes, "draft step")


# ---------------------------------------------------------------- all workloads


def _overview(result: Result) -> Iterator[Picture]:
    """A row for each workload, with an interval for each drafter."""
    names, depth = result["drafters"], str(result["draft_tokens"])

    def forest(name: str, title: str, kind: str, of: Callable[[Result, str], Interval | None]) -> Iterator[Picture]:
        rows: Rows = {}
        for workload in result["workloads"]:
            if intervals := {one: interval for one in names if (interval := of(workload, one))}:
                rows[workload["name"]] = intervals
        if rows:
            draw = partial(_forest, rows, names, kind)
            yield Picture(f"workloads-{name}", ALL, title, draw, "95 % intervals", _height(rows))

    def ratio(workload: Result, drafter: str, only: str) -> Interval | None:
        differences = workload["differences"].get(drafter)
        return differences[depth]["ratio"] if differences and drafter == only else None

    at, drafters = f"at {depth} draft tokens", "drafters"
    title = f"Acceptance length {at}"
    yield from forest("acceptance", title, NUMBER, lambda w, n: w[drafters][n]["by_depth"][depth]["acceptance_length"])
    title = f"Kept of the plain form's acceptance length, {at}"
    yield from forest("kept", title, SHARE, lambda w, n: w[drafters][n].get("kept", {}).get(depth))
    title = "Attention on its own drafts, at the last step"
    yield from forest("own", title, SHARE, lambda w, n: (w[drafters][n]["drift"] or {"own": [None]})["own"][-1])
    for name in names[1:]:
        title = f"Acceptance length of {name}, times that of {names[0]}, {at}"
        yield from forest(f"gain-{slug(name)}", title, RATIO, partial(ratio, only=name))


def _forest(rows: Rows, names: list[str], kind: str, axes: "Axes") -> None:
    shown = [name for name in names if any(name in row for row in rows.values())]
    for at, name in enumerate(shown):
        intervals = [row.get(name, NOTHING) for row in rows.values()]
        figures.whiskers(axes, intervals, name, names.index(name), at, len(shown))
    axes.set_yticks(range(len(rows)), list(rows))
    axes.set_ylim(len(rows) - 0.5, -0.5)
    if kind == SHARE:
        figures.shares(axes, "x")
    if kind == RATIO:
        axes.axvline(1, color="gray", linestyle="--", linewidth=0.8)


def _height(rows: Rows) -> float:
    """Inches of a chart with a row for each of these, and a point for each name in it."""
    names = {name for row in rows.values() for name in row}
    return 1.1 + ROW * max(len(rows) * (1 + len(names)) / 2, 2)


# ---------------------------------------------------------------- serving


def _serving(serving: Result) -> Iterator[Picture]:
    rows = sorted(serving["rows"], key=lambda row: (row["concurrency"], row["draft_tokens"]))
    for name in dict.fromkeys(row["drafter"] for row in serving["rows"] if row["drafter"]):
        speeds: Rows = {}
        for row in rows:
            if row["drafter"] in (None, name):
                label = tables.count(row["draft_tokens"], "draft token") if row["drafter"] else "no drafter"
                speeds.setdefault(tables.count(row["concurrency"], "user"), {})[label] = row["per_user"]
        labels = list(dict.fromkeys(label for of in speeds.values() for label in of))
        title, draw = f"Tokens per second of each user, {name} in vLLM", partial(_served, speeds, labels)
        yield Picture(f"serving-{slug(name)}", SERVING, title, draw, "95 % intervals", _height(speeds))


def _served(speeds: Rows, labels: list[str], axes: "Axes") -> None:
    _forest(speeds, labels, NUMBER, axes)
    axes.set_xlim(left=0)
