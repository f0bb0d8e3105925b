"""The store's results as pictures. matplotlib is imported where it draws: measuring does not need it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import machine

OURS, THEIRS, GREY = "#0072b2", "#d55e00", "#999999"
PARTS = {
    "states": "#0072b2", "top1": "#d55e00", "encode": "#009e73", "join": "#cc79a7", "save": "#e69f00",
    "checksum": "#56b4e9", "fsync": "#f0e442", "rest": "#999999",
}  # fmt: skip


Case = tuple[str, Sequence[dict[str, Any]]]  # what it is called, and its rows


def storage_rates(cases: Sequence[Case], info: dict[str, Any], path: Path) -> None:
    """A column per case: bytes per token, writing, and reading beside memcpy; a bar per format."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3 + 4 * len(cases), 10), layout="constrained")
    axes = figure.subplots(3, len(cases), squeeze=False)
    figure.suptitle(f"Hidden states written and read\n{machine.summary(info)}", fontsize=8)
    for (name, rows), (top, middle, bottom) in zip(cases, axes.T, strict=True):
        read = [row for row in rows if "read" in row]
        _bars(top, rows, [row["bytes_per_token"] / 1024 for row in rows])
        _bars(middle, rows, [row["write"] / 1000 for row in rows])
        _bars(bottom, read, [row["of_memcpy"]["first, fresh"] * 100 for row in read])
        bottom.axvline(80, color=GREY, linestyle="--", linewidth=1)
        top.set(title=name, xlabel="KiB per token")
        middle.set(xlabel="1,000 tokens/s written")
        bottom.set(xlabel="bytes/s read, % of memcpy (goal: 80)")
    figure.savefig(path, dpi=110)


def _bars(axis: Any, rows: Sequence[dict[str, Any]], values: Sequence[float]) -> None:
    names = [row["name"] for row in rows]
    bars = axis.barh(names, values, color=[OURS if name.startswith("ours") else THEIRS for name in names])
    axis.bar_label(bars, fmt="%.3g", fontsize=7, padding=2)
    axis.invert_yaxis()
    axis.margins(x=0.15)
    axis.tick_params(labelsize=7)


def extraction(rows: Sequence[dict[str, Any]], info: dict[str, Any], path: Path) -> None:
    """Time of every contender in units of the bare forward pass, split into parts where they are known."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    axis = figure.subplots()
    figure.suptitle(f"Extraction beside the target's bare forward pass\n{machine.summary(info)}", fontsize=8)
    for row in rows:
        left, whole = 0.0, 1 / row["of_bare"]
        for part, share in (row["parts"] or {"states": 1.0}).items():
            axis.barh(row["name"], share * whole, left=left, color=PARTS[part])
            left += share * whole
        axis.annotate(f" {row['of_bare']:.1%} of its speed", (whole, row["name"]), va="center", fontsize=7)
    for part, colour in PARTS.items():
        axis.barh([rows[0]["name"]], [0], color=colour, label=part)
    axis.axvline(1 / 0.9, color=GREY, linestyle="--", linewidth=1)
    axis.invert_yaxis()
    axis.set(xlabel="time, bare forward pass = 1 (dashed: the goal, 90 % of its speed)", xlim=(0, 1.35))
    axis.legend(fontsize=7, ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    figure.savefig(path, dpi=110)
