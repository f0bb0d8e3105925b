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


def codecs(rows: Sequence[dict[str, Any]], info: dict[str, Any], path: Path) -> None:
    """Acceptance length and tau against bytes per token, in % of bf16: the mean, and every seed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    axis = figure.subplots()
    figure.suptitle(f"What a codec costs, beside bf16 of the same seed\n{machine.summary(info)}", fontsize=8)
    kinds = {
        "forced": ("same drafter: tau", GREY, "s"),
        "tau": ("tau", OURS, "o"),
        "acceptance": ("acceptance length", THEIRS, "D"),
    }
    wide = [row["wide"] / 1024 for row in rows]
    places = [x - 0.8 * wide[:i].count(x) for i, x in enumerate(wide)]  # two codecs of one size, side by side
    for shift, (label, (name, colour, marker)) in enumerate(kinds.items()):
        for row, place in zip(rows, places, strict=True):
            x = place + 0.15 * (shift - 1)
            values = [100 * (1 + value) for value in row[f"{label}_differences"]]
            axis.plot([x] * len(values), values, ".", color=colour, markersize=4, alpha=0.5)
            axis.plot(x, sum(values) / len(values), marker, color=colour, markersize=7, label=name)
            name = ""
    for row, place in zip(rows, places, strict=True):
        axis.annotate(row["name"], (place, 1.01), xycoords=("data", "axes fraction"), rotation=45, fontsize=8)
    axis.axhspan(99, 101, color=GREY, alpha=0.15)
    axis.axvline(16.5, color=GREY, linestyle="--", linewidth=1)
    axis.set(
        xlabel="KiB per token at H = 4096 (dashed: the goal, 16.5)",
        ylabel="% of bf16 (band: within 1 %)",
        xlim=(0, None),
    )
    axis.legend(fontsize=8)
    figure.savefig(path, dpi=110)
