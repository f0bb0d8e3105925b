"""Pictures on light and on dark paper, by matplotlib, which is loaded where it draws."""

import io
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from eagle31_train.evaluation.intervals import Interval

Floats = NDArray[np.float64]
WIDTH, HEIGHT, ROW = 5.6, 3.25, 0.25  # inches: of a picture, and of one row of a chart that has rows
MEANS, PIXELS = 64, 400  # points of a noisy curve's mean, and of its band: about a pixel each
DECADE = 8.0  # curves that span more than this factor get a logarithmic axis
MARKERS = "os^Dvp"


def _style(paper: str, ink: str, muted: str, grid: str, colours: Sequence[str], depths: str) -> dict[str, Any]:
    """matplotlib's settings. colours: C0, C1, …, of training, of held-out, of drafters. depths: a colour map."""
    return {
        "figure.facecolor": paper,
        "axes.facecolor": paper,
        "axes.edgecolor": muted,
        "axes.labelcolor": muted,
        "axes.titlecolor": muted,
        "text.color": ink,
        "xtick.color": muted,
        "ytick.color": muted,
        "grid.color": grid,
        "axes.prop_cycle": f"cycler('color', {list(colours)})",
        "image.cmap": depths,
        "font.size": 8,
        "axes.titlesize": 7.5,
        "axes.titlelocation": "left",
        "figure.titlesize": 11,
        "figure.titleweight": "bold",
        "xaxis.labellocation": "right",
        "axes.grid": True,
        "axes.grid.axis": "y",
        "axes.axisbelow": True,
        "grid.linewidth": 0.8,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.spines.left": False,
        "ytick.major.size": 0,
        "ytick.minor.size": 0,
        "lines.linewidth": 1.5,
        "lines.markersize": 4,
        "legend.frameon": False,
        "legend.borderaxespad": 0,
        "legend.handlelength": 1.2,
        "savefig.dpi": 200,
    }


# The colour-blind tell training from held-out by brightness, too; depths differ in brightness from first to last.
THEMES: dict[str, Any] = {
    "light": _style(
        "#ffffff",
        "#1f2328",
        "#656d76",
        "#e7e9ec",
        ["#2563c9", "#d9650b", "#0e8a6a", "#a8379b", "#8a6d00", "#5d6873"],
        "viridis",
    ),
    "dark": _style(
        "#14181f",
        "#e6edf3",
        "#8d96a0",
        "#272d36",
        ["#79b0ff", "#f5a35c", "#4fd0ae", "#e58fdc", "#d8bd52", "#a9b4bf"],
        "cool",
    ),
}
ALARM = "#e5484d"


@dataclass(frozen=True)
class Picture:
    """name: of its file. section: of the page. caption, remark: below the picture, and its title. draw: onto axes."""

    name: str
    section: str
    title: str
    caption: str
    draw: Callable[["Axes"], None]
    remark: str = ""
    height: float = HEIGHT

    def figure(self, theme: str = "light") -> "Figure":
        """The picture as a matplotlib figure."""
        from matplotlib import rc_context
        from matplotlib.figure import Figure

        with rc_context(THEMES[theme]):
            figure = Figure((WIDTH, self.height), layout="constrained")
            axes = figure.subplots()
            axes.set_title(self.remark)
            self.draw(axes)
            figure.suptitle(self.title, x=0.02, ha="left")
            if axes.get_legend_handles_labels()[1]:
                axes.legend(loc="upper left", bbox_to_anchor=(1.02, 1))
            return figure

    def png(self, theme: str) -> bytes:
        """The picture's file, on "light" or "dark" paper."""
        from matplotlib import rc_context

        buffer = io.BytesIO()
        with rc_context(THEMES[theme]):
            self.figure(theme).savefig(buffer, format="png")
        return buffer.getvalue()


# ---------------------------------------------------------------- curves over steps


def noisy(
    axes: "Axes",
    steps: Floats,
    values: Floats,
    label: Callable[[float], str],
    colour: Any,
    per: Floats | float = 1.0,
) -> None:
    """A curve as its mean, above a band from its lowest to its highest values. Arrays are [N]; NaN is left out.

    Args:
        label: the text for the mean's last value.
        per: the values are divided by it, as sums: the mean of a rate is all tokens over all seconds.
    """
    per = np.broadcast_to(np.asarray(per, dtype=float), values.shape)
    valid = np.isfinite(values) & (per > 0)
    if not valid.any():
        return
    steps, values, per = steps[valid], values[valid], per[valid]
    line, band = (np.unique(np.linspace(0, len(steps), count, endpoint=False).astype(int)) for count in (MEANS, PIXELS))
    middle = np.add.reduceat(steps, line) / np.diff(line, append=len(steps))
    mean = np.add.reduceat(values, line) / np.add.reduceat(per, line)
    low, high = (extreme.reduceat(values / per, band) for extreme in (np.minimum, np.maximum))
    axes.fill_between(steps[band], low, high, color=colour, alpha=0.25, linewidth=0.5)
    axes.plot(middle, mean, color=colour, label=label(mean[-1]), marker="o" if len(steps) == 1 else "")


def measured(axes: "Axes", steps: Floats, values: Floats, label: Callable[[float], str], colour: Any) -> None:
    """A curve without noise; its points are shown while they can be told apart."""
    valid = np.isfinite(values)
    if valid.any():
        marker = "o" if valid.sum() <= 40 else ""
        axes.plot(steps[valid], values[valid], color=colour, marker=marker, label=label(values[valid][-1]))


def by_depth(axes: "Axes", steps: Floats, columns: Sequence[Floats], label: Callable[[float], str]) -> None:
    """A noisy curve for each depth, in colours from the first depth to the last."""
    from matplotlib import colormaps, rcParams

    colours = colormaps[rcParams["image.cmap"]](np.linspace(0, 0.85, len(columns)))
    for depth, (values, colour) in enumerate(zip(columns, colours, strict=True), 1):
        prefix = f"depth {depth}  "
        noisy(axes, steps, values, partial(lambda prefix, value: prefix + label(value), prefix), colour)


# ---------------------------------------------------------------- numbers with intervals


def columns(intervals: Iterable["Interval"]) -> tuple[Floats, Floats, Floats]:
    """Values, lows and highs, each [N], NaN where there is none."""
    table = np.array([[np.nan if part is None else part for part in each] for each in intervals], dtype=float)
    return table[:, 0], table[:, 1], table[:, 2]


def banded(axes: "Axes", intervals: Iterable["Interval"], label: str, index: int, shift: float = 0.0) -> None:
    """Curve number `index`, over 1, 2, 3, …, with a band for the intervals; `shift` is added to all values."""
    values, low, high = (part + shift for part in columns(intervals))
    at = np.arange(1.0, len(values) + 1)
    colour, marker = f"C{index}", MARKERS[index % len(MARKERS)]
    axes.fill_between(at, low, high, color=colour, alpha=0.16, linewidth=0)
    axes.plot(at[np.isfinite(values)], values[np.isfinite(values)], color=colour, marker=marker, label=label)


def rows(axes: "Axes", names: Sequence[str]) -> None:
    """Name the rows of a chart, the first at the top."""
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.grid(visible=False, axis="y")
    axes.grid(visible=True, axis="x")


def whiskers(axes: "Axes", intervals: Iterable["Interval"], label: str, index: int, of: int) -> None:
    """A point with its interval in every row: number `index` of the `of` that share a row."""
    values, low, high = columns(intervals)
    at = np.arange(len(values)) + ((index + 0.5) / of - 0.5) * 0.7
    bars = np.nan_to_num([values - low, high - values])
    marker = MARKERS[index % len(MARKERS)]
    axes.errorbar(values, at, xerr=bars, fmt=marker, color=f"C{index}", elinewidth=1.2, label=label)


def cells(axes: "Axes", values: Floats, bold: NDArray[np.bool_], names: Sequence[str], least: float) -> None:
    """A table of signed numbers [rows, columns], coloured by sign and size.

    Args:
        bold: [rows, columns], which are certain. names: of the columns.
        least: the size from which on a colour is strong, where no number is larger.
    """
    from matplotlib import rcParams
    from matplotlib.colors import LinearSegmentedColormap

    most = 1.6 * max(least, float(np.nanmax(np.abs(values), initial=0)))
    colours = LinearSegmentedColormap.from_list("", ["C0", rcParams["axes.facecolor"], "C1"])
    axes.imshow(np.ma.masked_invalid(values), cmap=colours, vmin=-most, vmax=most, aspect="auto")
    axes.set_xticks(range(len(names)), names)
    axes.grid(visible=False)
    for (row, column), value in np.ndenumerate(values):
        if np.isfinite(value):
            style: dict[str, Any] = {"weight": "bold"} if bold[row, column] else {"color": rcParams["xtick.color"]}
            axes.text(column, row, f"{value:+.1f}", ha="center", va="center", **style)


# ---------------------------------------------------------------- axes


def logarithmic(axes: "Axes") -> None:
    """A logarithmic vertical axis where all curves are above 0 and span much."""
    from matplotlib.ticker import LogLocator, NullFormatter

    low, high = axes.dataLim.intervaly
    if 0 < DECADE * low < high:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 300 * low else (1,)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())


def shares(axes: "Axes", which: str = "y") -> None:
    """An axis of shares of one, as percentages."""
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_formatter(lambda value, _: f"{round(100 * value, 9):g}%")


def whole_numbers(axes: "Axes", label: str) -> None:
    """A horizontal axis of whole numbers."""
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel(label)
    axes.xaxis.set_major_locator(MaxNLocator(9, integer=True, min_n_ticks=1))
    axes.xaxis.set_major_formatter("{x:,.0f}")


# ---------------------------------------------------------------- numbers as text


def short(value: float) -> str:
    """Three digits that count."""
    if value and not 0.01 <= abs(value) < 1e6:
        return f"{value:.3g}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:#.3g}".rstrip(".") if value else "0"


def percent(value: float) -> str:
    """A share of one."""
    return f"{value:.0%}" if value >= 0.095 or not value else f"{value:.1%}"
