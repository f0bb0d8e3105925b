"""The results as pictures. matplotlib takes a while to import, so it is imported where it draws."""

import statistics
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks import machine

# Colours that the colour-blind tell apart.
LINES, MARKERS = ("-", "--", ":", "-.", "-"), "osv^D"  # a trainer's variants, in the order in which they are drawn
COLOURS = {"ours": "#0072b2", "speculators": "#d55e00", "specforge": "#009e73", "fp32": "#0072b2", "bf16": "#d55e00"}
LABELS = {"length": "tokens", "share": "share of tokens taught", "unroll": "unroll depth", "vocab": "draft vocabulary"}


def peers(results: list[dict[str, Any]], info: dict[str, Any], path: Path) -> None:
    """A column per shape: time by length, time by share of taught tokens, memory by length.

    Contenders without a number are written into their panel.
    """
    from matplotlib.figure import Figure

    shapes = list(dict.fromkeys(r["shape"] for r in results))
    figure = Figure(figsize=(2.5 + 4.5 * len(shapes), 11), layout="constrained")
    axes = figure.subplots(3, len(shapes), squeeze=False)
    figure.suptitle(f"One training step, unroll 7, fp32, without optimizer\n{machine.summary(info)}", fontsize=8)
    for shape, (top, middle, bottom) in zip(shapes, axes.T, strict=True):
        here = [r for r in results if r["shape"] == shape]
        most = max(r["share"] for r in here)
        by_length = {length: [r for r in here if r["length"] == length] for length in {r["length"] for r in here}}
        swept = max(by_length, key=lambda length: (len(by_length[length]), length))
        full = [r for r in here if r["share"] == most]
        _contenders(top, full, "length", _seconds)
        _contenders(middle, by_length[swept], "share", _seconds)
        _contenders(bottom, full, "length", _memory)
        top.set(title=f"{shape}: time, share {most:g}", ylabel="seconds of a step")
        middle.set(title=f"{shape}: time, {swept} tokens", ylabel="seconds of a step")
        bottom.set(title=f"{shape}: memory, share {most:g}", ylabel="GiB above model and data")
    axes[0][0].legend(fontsize=8, handlelength=3)
    figure.savefig(path, dpi=110)


def growth(results: list[dict[str, Any]], info: dict[str, Any], path: Path) -> None:
    """A column per thing that grows: our time above, the share of the machine's rate below; a line per precision."""
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(r["axis"] for r in results))
    figure = Figure(figsize=(2.5 + 3.6 * len(names), 7), layout="constrained")
    axes = figure.subplots(2, len(names), squeeze=False)
    figure.suptitle(
        f"Our training step, without optimizer, from {results[0]['base']}\n{machine.summary(info)}", fontsize=8
    )
    for name, (top, bottom) in zip(names, axes.T, strict=True):
        for precision in dict.fromkeys(r["precision"] for r in results):
            rows = [r for r in results if r["axis"] == name and r["precision"] == precision]
            for axis, key in ((top, "seconds"), (bottom, "of_limit")):
                values = [r["value"] for r in rows]
                axis.plot(values, [r[key] for r in rows], "o-", color=COLOURS[precision], label=precision, markersize=4)
        _scale(top, name, [r["value"] for r in rows])
        _scale(bottom, name, [r["value"] for r in rows])
        top.set(title=f"time by {name}", ylabel="seconds of a step")
        bottom.set(title="necessary FLOPs / (time × matrix rate)", yscale="linear", ylim=(0, 1))
    axes[0][0].legend(fontsize=8)
    figure.savefig(path, dpi=110)


def lengths(results: list[dict[str, Any]], names: list[str], info: dict[str, Any], path: Path) -> None:
    """Time and memory of contenders as documents grow; one that failed ends where it did."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    figure.suptitle(f"One training step of an MLA drafter, unroll 7, fp32\n{machine.summary(info)}", fontsize=8)
    for axis, title, value in zip(
        figure.subplots(1, 2), ("seconds of a step", "GiB above model and data"), (_seconds, _memory), strict=True
    ):
        for name, colour, marker in zip(names, ("#0072b2", "#d55e00"), MARKERS, strict=False):
            rows = [(r["length"], r["contenders"][name]) for r in results if "error" not in r["contenders"][name]]
            axis.plot([x for x, _ in rows], [value(m) for _, m in rows], "-" + marker, color=colour, label=name)
        _scale(axis, "length", [r["length"] for r in results])
        axis.set(title=title)
        axis.legend(fontsize=8)
    figure.savefig(path, dpi=110)


def _seconds(measured: dict[str, Any]) -> float:
    return statistics.median(measured["seconds"])


def _memory(measured: dict[str, Any]) -> float:
    return (max(measured["peak"]) - statistics.median(measured["base"])) / 2**30


def _contenders(axis: Any, results: list[dict[str, Any]], x: str, y: Any) -> None:
    """One line per contender; those that failed are named."""
    results = sorted(results, key=lambda r: r[x])
    failed = []
    drawn: Counter[str] = Counter()  # variants of each trainer so far
    for name in dict.fromkeys(name for r in results for name in r["contenders"]):
        measured = [(r[x], r["contenders"][name]) for r in results if name in r["contenders"]]
        good = [(value, y(m)) for value, m in measured if "error" not in m]
        failed += [f"{name} at {value:g}: {m['error']}" for value, m in measured if "error" in m]
        trainer = name.partition(", ")[0]
        style = {"color": COLOURS[trainer], "label": name, "markersize": 4, "marker": MARKERS[drawn[trainer]]}
        axis.plot([v for v, _ in good], [h for _, h in good], LINES[drawn[trainer]], **style)
        drawn[trainer] += 1
    _scale(axis, x, [r[x] for r in results])
    if failed:
        axis.text(0.02, 0.98, "\n".join(failed), transform=axis.transAxes, va="top", fontsize=7, color="#a00000")


def _scale(axis: Any, x: str, ticks: list[float]) -> None:
    """Length and vocabulary span decades, so both axes are logarithmic; share and depth start at zero."""
    from matplotlib.ticker import LogLocator, StrMethodFormatter

    drawn = any(len(line.get_xdata()) for line in axis.lines)  # nothing is where all have failed
    if x in ("length", "vocab") and drawn:
        axis.set(xscale="log", yscale="log")
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    else:
        axis.set_xlim(left=0)
        axis.set_ylim(bottom=0)
    axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.minorticks_off()
    axis.grid(alpha=0.3)
    axis.set_xlabel(LABELS[x])
