"""A result as one HTML page and as PNG files beside it, for people who decide whether to serve a drafter.

`evaluation/results.py` describes the result. Names and order of the pictures are part of a model card's fingerprint:
keep them as they are.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from eagle31_train.common import artifacts
from eagle31_train.evaluation.intervals import LEVEL, NOTHING, Interval
from eagle31_train.reporting import figures, html, tables
from eagle31_train.reporting.figures import KEPT, LENGTH, NUMBER, RATIO, ROW, SHARE, Kind, Picture
from eagle31_train.reporting.tables import ALL, SERVING, Section

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PAGE = "index.html"
RESULT = "result.json"  # of a comparison: its numbers, and the files drawn from them
Result = dict[str, Any]
Curves = dict[str, list[Interval]]  # by drafter
Rows = dict[str, dict[str, Interval]]  # by row, then by drafter
WIDE = 0.5  # a share with a wider interval gets no point
INTERVALS = f"{LEVEL * 100:.0f} % intervals"
KINDS = ("sink", "prompt", "verified", "own")


def write(folder: Path, result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Draw a result of acceptance, serving, or both as PAGE and a PNG of every picture; return a manifest's `files`.
    result: see `evaluation/results.py`, with title, and what else is known: machine, dtype, max_new_tokens, command,
    serving."""
    files, images = html.draw(folder, list(pictures(result)))
    artifacts.write_text(folder / PAGE, render(result, images))
    return artifacts.list_files(folder, [*files, folder / PAGE])


def render(result: dict[str, Any], images: html.Images) -> str:
    command = result.get("command") or result.get("serving", {}).get("command", "")
    sections = [Section("", [" · ".join(conditions(result))], []), *tables.sections(result)]
    return html.page(result["title"], sections, images, {"The command that repeats this": command}, glossary=True)


def conditions(result: Mapping[str, Any]) -> list[str]:
    shown = [f"target {result['target']}"] if "target" in result else []
    shown += [str(result[key]) for key in ("machine", "dtype") if key in result]
    if result.get("weights", result.get("dtype")) != result.get("dtype"):
        shown.append(f"drafters' weights rounded to {result['weights']}")
    if "max_new_tokens" in result:
        shown.append(f"at most {result['max_new_tokens']:,} tokens per answer")
    return shown


def pictures(result: Result) -> Iterator[Picture]:
    """Yield every picture that there are numbers for: first those of all workloads, then those of each."""
    workloads = result.get("workloads", [])
    drawn = list(_overview(result)) if len(workloads) > 1 else []
    for workload in workloads:
        drawn += _acceptance(workload)
        if workload is workloads[0]:  # the drift of the others is only in tables
            drawn += _drift(workload)
    if result.get("serving"):
        drawn += _serving(result["serving"])
    taken = set[str]()
    for picture in drawn:
        name, number = picture.name, 1
        while name in taken:  # names that differ only in case or punctuation would give the same file
            number += 1
            name = f"{picture.name}-{number}"
        taken.add(name)
        yield replace(picture, name=name)


def slug(name: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-")


def _curves(workload: Result, name: str, title: str, across: str, curves: Curves, kind: Kind) -> Picture:

    def draw(axes: "Axes") -> None:
        for drafter, intervals in curves.items():
            last = [f"{value:.1%}" if kind.percent else f"{value:.2f}" for value, *_ in intervals if value is not None]
            values, low, high = figures.columns(intervals)
            at, valid, index = np.arange(1.0, len(values) + 1), np.isfinite(values), drafters.index(drafter)
            label = "  ".join([drafter, *last[-1:]])
            style: dict[str, Any] = {"color": f"C{index}", "marker": figures.marker(index), "label": label, "zorder": 3}
            axes.fill_between(at, low, high, color=f"C{index}", alpha=0.16, linewidth=0)
            axes.plot(at[valid], values[valid], clip_on=False, **style)
            # An interval without neighbours cannot be shaded: draw it as a line.
            alone = np.isfinite(low) & ~np.isfinite([*low[1:], np.nan]) & ~np.isfinite([np.nan, *low[:-1]])
            if alone.any():
                axes.vlines(at[alone], low[alone], high[alone], color=f"C{index}", alpha=0.5)
        kind.scale(axes)
        figures.whole_numbers(axes, across)

    section, drafters = workload["name"], list(workload["drafters"])
    remark = f"{section} · {INTERVALS} shaded" if _have_intervals(curves.values()) else section
    return Picture(f"{slug(section)}-{name}", section, title, draw, remark)


def _have_intervals(curves: Iterable[Iterable[Interval]]) -> bool:
    return any(low is not None for intervals in curves for _, low, _ in intervals)


def _acceptance(workload: Result) -> Iterator[Picture]:
    drafters, differences = workload["drafters"], workload["differences"]
    first = next(iter(drafters))
    lengths = {name: [k["acceptance_length"] for k in of["by_depth"].values()] for name, of in drafters.items()}
    yield _curves(workload, "acceptance", "Acceptance length", "draft tokens", lengths, LENGTH)
    if differences:
        ratios = {name: [k["ratio"] for k in of.values()] for name, of in differences.items()}
        title = f"Acceptance length, times that of {first}"
        yield _curves(workload, "gain", title, "draft tokens", ratios, RATIO)
    if workload["perturbation"] is None:
        shares = {name: _told(of) for name, of in drafters.items()}
        yield _curves(workload, "conditional", "Conditional acceptance", "position", shares, SHARE)


def _told(numbers: Result) -> list[Interval]:
    """Return conditional acceptance by position, or NOTHING where too few drafts came that far."""
    deepest = list(numbers["by_depth"].values())[-1]
    came = [deepest["drafts"], *deepest["accepted_per_position"]]
    # A share of 0 or 1 has no interval: n drafts determine it to within 3 / n.
    told = []
    for n, share in zip(came[:-1], numbers["conditional"], strict=True):
        _, low, high = share
        width = high - low if low is not None and high is not None else 3 / max(n, 1)
        told.append(NOTHING if width > WIDE else share)
    return told


def _drift(workload: Result) -> Iterator[Picture]:
    section = workload["name"]
    drift = {name: numbers["drift"] for name, numbers in workload["drafters"].items() if numbers["drift"]}
    for name, measures in drift.items():
        title, remark = f"Attention of {name}", f"{section} · share of the attention"
        yield Picture(f"{slug(section)}-attention-{slug(name)}", section, title, partial(_attention, measures), remark)
    titles = {
        "own": "Attention on its own drafts",
        "rms": "RMS of the state that a step reads",
        "entropy": "Entropy of the draft distribution, nats",
    }
    for measure, title in titles.items() if drift else ():
        curves = {name: measures[measure] for name, measures in drift.items()}
        kind = SHARE if measure == "own" else NUMBER
        yield _curves(workload, measure, title, "draft step", curves, kind)


def _attention(measures: Curves, axes: "Axes") -> None:
    parts = np.array([figures.columns(measures[kind])[0] for kind in KINDS])
    labels = [f"{kind} {part[-1]:.0%}" for kind, part in zip(KINDS, parts, strict=True)]
    at = np.arange(1.0, parts.shape[1] + 1)
    if len(at) == 1:  # draw a bar, since an area without width is invisible
        at, parts = np.array([0.75, 1.25]), parts.repeat(2, axis=1)
    axes.stackplot(at, parts, labels=labels)
    axes.margins(0)
    axes.set_ylim(0, 1)
    SHARE.scale(axes)
    figures.whole_numbers(axes, "draft step")


def _overview(result: Result) -> Iterator[Picture]:
    """Yield charts with a row for each workload, and in it an interval for each drafter."""
    names, depth, workloads = result["drafters"], str(result["draft_tokens"]), result["workloads"]
    at = f", at {tables.count(result['draft_tokens'], 'draft token')}"
    lengths, kept, own = Rows(), Rows(), Rows()
    ratios: dict[str, Rows] = {name: {} for name in names[1:]}
    for one in workloads:
        row, drafters = one["name"], one["drafters"]
        lengths[row] = {name: of["by_depth"][depth]["acceptance_length"] for name, of in drafters.items()}
        kept[row] = {name: of["kept"][depth] for name, of in drafters.items() if "kept" in of}
        own[row] = {name: of["drift"]["own"][-1] for name, of in drafters.items() if of["drift"]}
        for name, of in one["differences"].items():
            ratios[name][row] = {name: of[depth]["ratio"]}
    charts = [
        ("acceptance", f"Acceptance length{at}", LENGTH, lengths),
        ("kept", f"Kept of the plain form's acceptance length{at}", KEPT, kept),
        ("own", "Attention on its own drafts at the last draft step", SHARE, own),
    ]
    for name, rows in ratios.items():
        title = f"Acceptance length of {name}, times that of {names[0]}{at}"
        charts.append((f"gain-{slug(name)}", title, RATIO, rows))
    for chart, title, kind, rows in charts:
        if rows := {row: intervals for row, intervals in rows.items() if intervals}:
            yield _forest(f"workloads-{chart}", ALL, title, rows, names, kind)


def _serving(serving: Result) -> Iterator[Picture]:
    rows = sorted(serving["rows"], key=lambda row: (row["concurrency"], row["draft_tokens"]))
    for name in dict.fromkeys(row["drafter"] for row in serving["rows"] if row["drafter"]):
        speeds: Rows = {}
        for row in rows:
            if row["drafter"] in (None, name):
                label = tables.count(row["draft_tokens"], "draft token") if row["drafter"] else "no drafter"
                speeds.setdefault(tables.count(row["concurrency"], "user"), {})[label] = row["per_user"]
        labels = list(dict.fromkeys(label for of in speeds.values() for label in of))
        title = f"Tokens per second of each user, {name} in vLLM"
        yield _forest(f"serving-{slug(name)}", SERVING, title, speeds, labels, NUMBER, left=0)


def _forest(
    name: str, section: str, title: str, rows: Rows, names: list[str], kind: Kind, left: float | None = None
) -> Picture:
    """Return a chart with a row for each of `rows`, and in it a point with its interval for each of its `names`."""
    shown = [name for name in names if any(name in row for row in rows.values())]

    def draw(axes: "Axes") -> None:
        for place, name in enumerate(shown):
            values, low, high = figures.columns(row.get(name, NOTHING) for row in rows.values())
            at = np.arange(len(values)) + ((place + 0.5) / len(shown) - 0.5) * 0.7
            bars, index = np.nan_to_num([values - low, high - values]), names.index(name)
            style: dict[str, Any] = {"fmt": figures.marker(index), "color": f"C{index}", "label": name}
            axes.errorbar(values, at, xerr=bars, clip_on=False, **style)
        axes.set_yticks(range(len(rows)), list(rows))
        axes.set_ylim(len(rows) - 0.5, -0.5)
        kind.scale(axes, "x")
        axes.set_xlim(left=left)

    height = 1.1 + ROW * max(len(rows) * (1 + len(shown)) / 2, 2)
    return Picture(
        name, section, title, draw, INTERVALS if _have_intervals(row.values() for row in rows.values()) else "", height
    )
