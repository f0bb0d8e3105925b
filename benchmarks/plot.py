"""The results as pictures. matplotlib is in the peers' environment only, so it is imported where it draws."""

import statistics
from pathlib import Path
from typing import Any

from benchmarks import machine

# One colour per trainer, one dash per variant; blue and orange stay apart for the colour-blind.
COLOURS = {"ours": "#0072b2", "speculators": "#d55e00", "specforge": "#009e73"}


def style(name: str) -> dict[str, Any]:
    """Line style of a contender: a trainer's variants share its colour."""
    trainer, _, variant = name.partition(", ")
    return {"color": COLOURS[trainer], "linestyle": "--" if variant else "-", "marker": "o", "markersize": 4}


def peers(results: list[dict[str, Any]], info: dict[str, Any], path: Path) -> None:
    """A column per shape: time by length, time by share of taught tokens, memory by length.

    Contenders without a number are written out below their panel.
    """
    from matplotlib.figure import Figure

    shapes = list(dict.fromkeys(r["shape"] for r in results))
    figure = Figure(figsize=(1 + 4.5 * len(shapes), 11), layout="constrained")
    axes = figure.subplots(3, len(shapes), squeeze=False)
    figure.suptitle(f"One training step, unroll 7, fp32, without optimizer\n{machine.summary(info)}", fontsize=9)
    for column, shape in enumerate(shapes):
        here = [r for r in results if r["shape"] == shape]
        full = [r for r in here if r["share"] == max(s["share"] for s in here)]
        by_length = {length: [r for r in here if r["length"] == length] for length in {r["length"] for r in here}}
        longest = max(by_length, key=lambda length: (len(by_length[length]), length))
        at = f"share {full[0]['share']:g}"
        _lines(axes[0][column], full, "length", _seconds, f"{shape}: time, {at}", "seconds of a step")
        _lines(
            axes[1][column],
            by_length[longest],
            "share",
            _seconds,
            f"{shape}: time, {longest} tokens",
            "seconds of a step",
        )
        _lines(axes[2][column], full, "length", _memory, f"{shape}: memory, {at}", "GiB above model and data")
    axes[0][0].legend(fontsize=8)
    figure.savefig(path, dpi=120)


def growth(results: list[dict[str, Any]], info: dict[str, Any], path: Path) -> None:
    """A column per thing that grows: our time above, the share of the machine's rate below; a line per precision."""
    from matplotlib.figure import Figure

    axes_names = list(dict.fromkeys(r["axis"] for r in results))
    figure = Figure(figsize=(1 + 3.6 * len(axes_names), 7), layout="constrained")
    axes = figure.subplots(2, len(axes_names), squeeze=False)
    figure.suptitle(f"Our training step, without optimizer: {results[0]['base']}\n{machine.summary(info)}", fontsize=9)
    for column, name in enumerate(axes_names):
        for precision, colour in (("fp32", "#0072b2"), ("bf16", "#d55e00")):
            rows = [r for r in results if r["axis"] == name and r["precision"] == precision]
            x = [r["value"] for r in rows]
            for axis, key in ((axes[0][column], "seconds"), (axes[1][column], "of_limit")):
                axis.plot(x, [r[key] for r in rows], "o-", color=colour, label=precision, markersize=4)
        top, bottom = axes[0][column], axes[1][column]
        top.set(xscale="log", yscale="log", title=f"time by {name}", ylabel="seconds of a step")
        bottom.set(xscale="log", ylim=(0, 1), title="necessary FLOPs / (time × matrix rate)", xlabel=name)
        for axis in (top, bottom):
            axis.set_xticks(x, [f"{v:g}" for v in x])
            axis.minorticks_off()
            axis.grid(alpha=0.3)
    axes[0][0].legend(fontsize=8)
    figure.savefig(path, dpi=120)


def _seconds(measured: dict[str, Any]) -> float:
    return statistics.median(measured["seconds"])


def _memory(measured: dict[str, Any]) -> float:
    return (max(measured["peak"]) - statistics.median(measured["base"])) / 2**30


def _lines(axis: Any, results: list[dict[str, Any]], x: str, y: Any, title: str, label: str) -> None:
    """One line per contender; those that failed are named."""
    results = sorted(results, key=lambda r: r[x])
    failed = []
    for name in results[0]["contenders"]:
        measured = [(r[x], r["contenders"][name]) for r in results if name in r["contenders"]]
        good = [(value, y(m)) for value, m in measured if "error" not in m]
        failed += [f"{name} at {value:g}: {m['error']}" for value, m in measured if "error" in m]
        axis.plot([v for v, _ in good], [h for _, h in good], label=name, **style(name))
    axis.set(title=title, xlabel="tokens" if x == "length" else "share of tokens taught", ylabel=label, yscale="log")
    if x == "length":
        axis.set_xscale("log")
    ticks = [r[x] for r in results]
    axis.set_xticks(ticks, [f"{t:g}" for t in ticks])
    axis.minorticks_off()
    axis.grid(alpha=0.3)
    if failed:
        axis.text(0.02, 0.98, "\n".join(failed), transform=axis.transAxes, va="top", fontsize=7, color="#a00000")
