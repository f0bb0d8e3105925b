"""The store's results as pictures, in the project's style."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.plot import drawn

PARTS = {
    "states": "C0", "top1": "C1", "encode": "C2", "join": "C3", "save": "C4", "checksum": "#7fb2f0", "fsync": "#e8c65a",
    "rest": "C5",
}  # fmt: skip


Case = tuple[str, Sequence[dict[str, Any]]]  # what it is called, and its rows


def storage_rates(cases: Sequence[Case], info: dict[str, Any], path: Path) -> None:
    """A column per case: bytes per token, writing, and reading beside memcpy; a bar per format."""
    with drawn(1.5 + 3.2 * len(cases), 6, "Hidden states written and read", info, path) as figure:
        axes = figure.subplots(3, len(cases), squeeze=False, sharey="row")
        for (name, rows), (top, middle, bottom) in zip(cases, axes.T, strict=True):
            read = [row for row in rows if "read" in row]
            _bars(top, rows, [row["bytes_per_token"] / 1024 for row in rows])
            _bars(middle, rows, [row["write"] / 1000 for row in rows])
            _bars(bottom, read, [row["of_memcpy"]["first, fresh"] * 100 for row in read])
            bottom.axvline(80, color="gray", linestyle="--", linewidth=1)
            top.set_title(name, fontsize=9)
            top.set_xlabel("KiB per token")
            middle.set_xlabel("1,000 tokens/s written")
            bottom.set_xlabel("bytes/s read, % of memcpy (goal: 80)")
        for first in axes[:, 0]:
            first.invert_yaxis()


def _bars(axis: Any, rows: Sequence[dict[str, Any]], values: Sequence[float]) -> None:
    names = [row["name"] for row in rows]
    bars = axis.barh(names, values, color=["C0" if name.startswith("ours") else "C1" for name in names])
    axis.bar_label(bars, fmt="%.3g", fontsize=7, padding=2)
    axis.grid(visible=False, axis="y")
    axis.margins(x=0.15)


def extraction(rows: Sequence[dict[str, Any]], info: dict[str, Any], path: Path) -> None:
    """Time of every contender in units of the bare forward pass, split into parts where they are known."""
    with drawn(8, 3.2, "Extraction beside the target's bare forward pass", info, path) as figure:
        axis = figure.subplots()
        for row in rows:
            left, whole = 0.0, 1 / row["of_bare"]
            for part, share in (row["parts"] or {"states": 1.0}).items():
                axis.barh(row["name"], share * whole, left=left, color=PARTS[part])
                left += share * whole
            axis.annotate(f" {row['of_bare']:.1%} of its speed", (whole, row["name"]), va="center", fontsize=7)
        for part, colour in PARTS.items():
            axis.barh([rows[0]["name"]], [0], color=colour, label=part)
        axis.axvline(1 / 0.9, color="gray", linestyle="--", linewidth=1)
        axis.invert_yaxis()
        axis.grid(visible=False, axis="y")
        axis.set(xlabel="time, bare forward pass = 1 (dashed: the goal, 90 % of its speed)", xlim=(0, 1.35))
        figure.legend(loc="outside right upper")
