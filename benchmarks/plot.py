"""The training step's results as pictures, in the project's style. matplotlib is imported where it draws."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks import machine
from eagle31_train.reporting.figures import MARKERS, STYLE, logarithmic

LABELS = {"length": "tokens", "share": "share of supervised tokens", "unroll": "TTT length", "vocab": "vocabulary"}
LOGARITHMIC = ("length", "vocab")
Row = dict[str, Any]


@contextmanager
def drawn(width: float, height: float, title: str, info: dict[str, Any], path: Path) -> Iterator[Any]:
    """Yield a figure of `width` by `height` inches with the machine below it, and save it at the end."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        figure = Figure((width, height), layout="constrained")
        figure.suptitle(title, x=0.01, ha="left")
        figure.supxlabel(machine.summary(info), x=0.01, ha="left", fontsize=6, color="gray")
        yield figure
        figure.savefig(path)


def peers(cases: Mapping[str, Sequence[Row]], info: dict[str, Any], path: Path) -> None:
    """Draw time and memory of every contender, times ours: a row per case, and in it a point per contender. Failures
    are listed. cases: title of a case → its rows, as made by `peers.numbers`."""
    names = [row["name"] for rows in cases.values() for row in rows if row["name"] not in ("ours", "ours, frozen head")]
    names = list(dict.fromkeys(names))
    failed = [f"{case}, {row['name']}: {row['error']}" for case, rows in cases.items() for row in rows if row["error"]]
    title = "A training step beside ours (1.0): TTT length 7, fp32"
    with drawn(8, 1.6 + 0.3 * len(cases), title, info, path) as figure:
        time, memory = figure.subplots(1, 2, sharey=True)
        for axes, key, what in ((time, "speed", "time of a step"), (memory, "size", "memory above model and data")):
            for at, name in enumerate(names):
                points = [
                    (row[key], place)
                    for place, rows in enumerate(cases.values())
                    for row in rows
                    if row["name"] == name and row[key]
                ]
                axes.plot(*zip(*points, strict=True), MARKERS[at], color=f"C{at + 1}", label=name, markersize=5)
            axes.axvline(1, color="C0")
            axes.set(xlabel=f"{what}, times ours", xlim=(0, None))
        time.set_yticks(range(len(cases)), list(cases))
        time.set_ylim(len(cases) - 0.5, -0.5)
        time.set_title("\n".join(failed), color="#a00000")
        figure.legend(*time.get_legend_handles_labels(), loc="outside right upper")


def growth(results: list[Row], info: dict[str, Any], path: Path) -> None:
    """Draw a column per thing that grows: our time above, share of the machine's rate below; a line per precision."""
    names = list(dict.fromkeys(r["axis"] for r in results))
    shape, length, share = results[0]["base"].split(":")
    title = (
        f"Our training step without optimizer: {shape}, {int(length):,} tokens, {float(share):.0%} of them supervised"
    )
    with drawn(1.5 + 2.1 * len(names), 4.4, title, info, path) as figure:
        axes = figure.subplots(2, len(names), squeeze=False, sharex="col")
        for name, (top, bottom) in zip(names, axes.T, strict=True):
            for at, precision in enumerate(dict.fromkeys(r["precision"] for r in results)):
                rows = [r for r in results if r["axis"] == name and r["precision"] == precision]
                for axis, key in ((top, "seconds"), (bottom, "of_limit")):
                    values = [r["value"] for r in rows]
                    axis.plot(values, [r[key] for r in rows], "-" + MARKERS[at], color=f"C{at}", label=precision)
            _scale(top, name, [r["value"] for r in rows])
            _scale(bottom, name, [r["value"] for r in rows])
            note = " (log scales)" if name in LOGARITHMIC else ""
            bottom.set(yscale="linear", ylim=(0, 1), xlabel=LABELS[name] + note)
        axes[0][0].set_ylabel("seconds of a step")
        axes[1][0].set_ylabel("necessary FLOPs /\n(time × matrix rate)")
        figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside right upper")


def _scale(axis: Any, x: str, ticks: list[float]) -> None:
    """Make both axes logarithmic for length and vocabulary, which span decades; otherwise start time at zero."""
    if x in LOGARITHMIC:
        axis.set_xscale("log")
        logarithmic(axis)
    else:
        axis.set_ylim(bottom=0)
    axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks], rotation=45 if x == "share" else 0)
    axis.minorticks_off()
