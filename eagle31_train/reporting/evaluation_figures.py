"""Pictures of a result, which `results.py` describes: acceptance and drift by depth, all workloads, and serving.

Names and order of the pictures are part of what makes a model card new: they stay as they are.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np

from eagle31_train.evaluation.intervals import Interval
from eagle31_train.reporting import figures, tables
from eagle31_train.reporting.figures import ROW, Picture
from eagle31_train.reporting.tables import ALL, SERVING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Result = dict[str, Any]
Curves = dict[str, list[Interval]]  # by drafter
KINDS = ("sink", "prompt", "verified", "own")
BAND = "95 % intervals shaded"
NOTHING: Interval = [None, None, None]
WIDE = 0.5  # a share whose interval is wider is not worth a point


@dataclass(frozen=True)
class Kind:
    """low, high: what numbers of a kind cannot leave. percent: of shares. even: where nothing is gained or lost."""

    low: float = 0
    high: float = np.inf
    percent: bool = False
    even: float | None = None

    @property
    def form(self) -> str:
        """As the legend tells them."""
        return "{:.1%}" if self.percent else "{:.2f}"

    def scale(self, axes: "Axes", which: str) -> None:
        """An axis of such numbers."""
        if self.percent:
            figures.shares(axes, which)
        if self.even is not None:
            (axes.axvline if which == "x" else axes.axhline)(self.even, color="gray", linestyle="--", linewidth=0.8)
        figures.within(axes, self.low, self.high, which)


LENGTH, RATIO, NUMBER = Kind(low=1), Kind(even=1), Kind()
SHARE, KEPT = Kind(high=1, percent=True), Kind(percent=True, even=1)


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


def _curves(across: str, curves: Curves, names: list[str], kind: Kind, axes: "Axes") -> None:
    """A curve for each drafter, over 1, 2, 3, …"""
    for name, intervals in curves.items():
        last = [value for value, *_ in intervals if value is not None][-1:]
        figures.banded(axes, intervals, "  ".join([name, *map(kind.form.format, last)]), names.index(name))
    kind.scale(axes, "y")
    figures.whole_numbers(axes, across)


def _acceptance(workload: Result, names: list[str]) -> Iterator[Picture]:
    section, drafters, differences = workload["name"], workload["drafters"], workload["differences"]
    first = next(iter(drafters))
    depths = list(drafters[first]["by_depth"])

    def picture(name: str, title: str, across: str, curves: Curves, kind: Kind, remark: str = "") -> Picture:
        draw = partial(_curves, across, curves, names, kind)
        return Picture(f"{slug(section)}-{name}", section, title, draw, f"{section} · {BAND}{remark}")

    lengths = {name: [of["by_depth"][k]["acceptance_length"] for k in depths] for name, of in drafters.items()}
    yield picture("acceptance", "Acceptance length", "draft tokens", lengths, LENGTH)
    if differences:
        ratios = {name: [of[k]["ratio"] for k in depths] for name, of in differences.items()}
        yield picture("gain", f"Acceptance length, times that of {first}", "draft tokens", ratios, RATIO)
    if workload["perturbation"] is None:
        shares = {name: [_known(one) for one in numbers["conditional"]] for name, numbers in drafters.items()}
        remark = f" · without positions whose interval is wider than {WIDE:.0%}" if _lacks(shares) else ""
        yield picture("conditional", "Accepted, if all before it is", "position", shares, SHARE, remark)


def _known(share: Interval) -> Interval:
    """The share, or nothing where too few drafts came so far."""
    _, low, high = share
    return NOTHING if low is not None and high is not None and high - low > WIDE else share


def _lacks(curves: Curves) -> bool:
    return any(interval == NOTHING for intervals in curves.values() for interval in intervals)


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
    of_all = {workload["name"]: workload for workload in result["workloads"]}

    def forest(name: str, title: str, found: dict[str, dict[str, Interval]], kind: Kind) -> Picture:
        rows = {row: intervals for row, intervals in found.items() if intervals}
        shown = [one for one in names if any(one in row for row in rows.values())]
        draw, height = partial(_forest, rows, names, kind), _height(rows, shown)
        return Picture(f"workloads-{name}", ALL, title, draw, "95 % intervals", height)

    lengths = {
        row: {name: of["by_depth"][depth]["acceptance_length"] for name, of in workload["drafters"].items()}
        for row, workload in of_all.items()
    }
    yield forest("acceptance", f"Acceptance length at {depth} draft tokens", lengths, LENGTH)
    kept = {
        row: {name: of["kept"][depth] for name, of in workload["drafters"].items() if of.get("kept")}
        for row, workload in of_all.items()
    }
    if any(kept.values()):
        yield forest("kept", f"Kept of the plain form's acceptance length, at {depth} draft tokens", kept, KEPT)
    if all(of["drift"] for workload in of_all.values() for of in workload["drafters"].values()):
        own = {
            row: {name: of["drift"]["own"][-1] for name, of in workload["drafters"].items()}
            for row, workload in of_all.items()
        }
        yield forest("own", "Attention on its own drafts, at the last step", own, SHARE)
    for name in names[1:]:
        ratios = {
            row: {name: workload["differences"][name][depth]["ratio"]}
            for row, workload in of_all.items()
            if name in workload["differences"]
        }
        if ratios:
            title = f"Acceptance length of {name}, times that of {names[0]}, at {depth} draft tokens"
            yield forest(f"gain-{slug(name)}", title, ratios, RATIO)


def _forest(rows: dict[str, dict[str, Interval]], names: list[str], kind: Kind, axes: "Axes") -> None:
    shown = [name for name in names if any(name in row for row in rows.values())]
    for at, name in enumerate(shown):
        intervals = [row.get(name, NOTHING) for row in rows.values()]
        figures.whiskers(axes, intervals, name, names.index(name), at, len(shown))
    axes.set_yticks(range(len(rows)), list(rows))
    axes.set_ylim(len(rows) - 0.5, -0.5)
    kind.scale(axes, "x")


def _height(rows: Mapping[str, Any], names: Sequence[str]) -> float:
    """Inches of a chart with a row for each of these, and a point for each name in it."""
    return 1.1 + ROW * max(len(rows) * (1 + len(names)) / 2, 2)


# ---------------------------------------------------------------- serving


def _serving(serving: Result) -> Iterator[Picture]:
    rows = serving["rows"]
    for name in dict.fromkeys(row["drafter"] for row in rows if row["drafter"]):
        speeds: dict[str, dict[str, Interval]] = {}
        for row in sorted(rows, key=lambda row: (row["concurrency"], row["draft_tokens"])):
            if row["drafter"] in (None, name):
                label = tables.count(row["draft_tokens"], "draft token") if row["drafter"] else "no drafter"
                speeds.setdefault(tables.count(row["concurrency"], "user"), {})[label] = row["per_user"]
        labels = list(dict.fromkeys(label for of in speeds.values() for label in of))
        title, draw = f"Tokens per second of each user, {name} in vLLM", partial(_served, speeds, labels)
        yield Picture(f"serving-{slug(name)}", SERVING, title, draw, "95 % intervals", _height(speeds, labels))


def _served(speeds: dict[str, dict[str, Interval]], labels: list[str], axes: "Axes") -> None:
    _forest(speeds, labels, NUMBER, axes)
    axes.set_xlim(left=0)
