"""One picture: a title, axes, curves that are labelled where they end. matplotlib is loaded where it draws."""

import io
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from eagle31_train.report.thin import PICTURE, Band, Floats, spread, thin

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Style = dict[str, Any]
Label = Callable[[float], str]  # the value at a curve's end → the text beside it
SIZE, DPI = (5.6, 3.25), 200  # inches; legible at a phone's width
HEAD = 0.455  # inches that title and remarks take
TEXT, SMALL = 9.0, 7.5  # points
FEW = 12  # restarts
DECADE = 8.0  # curves that span more than this factor are drawn on a logarithmic axis


@dataclass(frozen=True)
class Theme:
    """Colours on light or dark paper; the colour-blind tell training from held-out by brightness too."""

    paper: str
    ink: str
    muted: str
    grid: str
    train: str
    heldout: str
    alarm: str
    depths: tuple[float, float]  # the part of the map that stands out from the paper
    others: tuple[str, ...]  # colours of further curves, after those two

    def series(self, index: int) -> str:
        """The colour of one of several curves of a kind; they come round again after six."""
        return [self.train, self.heldout, *self.others][index % (2 + len(self.others))]


THEMES = {
    "light": Theme(
        "#ffffff",
        "#1f2328",
        "#656d76",
        "#e7e9ec",
        "#2563c9",
        "#d9650b",
        "#c9252d",
        (0.0, 0.84),
        ("#0e8a6a", "#a8379b", "#8a6d00", "#5d6873"),
    ),
    "dark": Theme(
        "#14181f",
        "#e6edf3",
        "#8d96a0",
        "#272d36",
        "#79b0ff",
        "#f5a35c",
        "#ff7b72",
        (0.4, 1.0),
        ("#4fd0ae", "#e58fdc", "#d8bd52", "#a9b4bf"),
    ),
}
MARKERS = "os^Dvp"


@dataclass
class Canvas:
    """Draws in the order of the calls; `png` ends it."""

    theme: Theme
    title: str
    remarks: list[str] = field(default_factory=list)  # the small line below the title
    across: str = "optimizer step"  # what the horizontal axis counts
    height: float = SIZE[1]  # inches

    def __post_init__(self) -> None:
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine

        below = ConstrainedLayoutEngine(rect=(0, 0, 1, self._below(HEAD)), w_pad=0.06)
        self.figure: Figure = Figure(figsize=(SIZE[0], self.height), layout=below, facecolor=self.theme.paper)
        self.axis: Axes = self.figure.subplots()
        self.ends: list[tuple[float, str, Any]] = []  # height, label, colour
        self.lowest, self.highest = np.inf, -np.inf

    # ---------------------------------------------------------------- curves

    def noisy(self, steps: Floats, values: Floats, label: Label, colour: str, weights: Floats | None = None) -> None:
        """A curve as its mean, above a band from its lowest to its highest values."""
        band, line = thin(steps, values, weights, PICTURE), thin(steps, values, weights)
        if not len(line):
            return
        shade: Style = {"color": colour, "alpha": 0.22, "linewidth": 0.5}
        self.axis.fill_between(band.steps, band.low, band.high, **shade)
        self._line(line, label(line.mean[-1]), colour, linewidth=1.5)
        self._reach(band)
        if (each := round(len(steps) / len(line))) > 1:
            self.remarks.insert(0, f"mean of {each:,} steps, range shaded")

    def measured(self, steps: Floats, values: Floats, label: Label, colour: str) -> None:
        """A curve without noise; its points are shown while they can be told apart."""
        line = thin(steps, values, buckets=PICTURE)
        if len(line):
            marker: Style = {"marker": "o", "markersize": 3.2, "clip_on": False} if len(line) <= 40 else {}
            self._line(line, label(line.mean[-1]), colour, linewidth=1.5, **marker)
            self._reach(line)

    def by_depth(self, steps: Floats, columns: list[Floats], label: Label) -> None:
        """A curve for each depth, from the first to the last along one map of colours."""
        each = 1
        for depth, values in enumerate(columns):
            line, colour = thin(steps, values), self._of_depth(depth, len(columns))
            if not len(line):
                continue
            each = round(len(steps) / len(line))
            band = thin(steps, values, buckets=PICTURE)
            self.axis.fill_between(band.steps, band.low, band.high, color=colour, alpha=0.10, linewidth=0)
            self._line(line, f"depth {depth + 1}  {label(line.mean[-1])}", colour, linewidth=1.4)
            self._reach(line)
        if each > 1:
            self.remarks.insert(0, f"means of {each:,} steps, ranges shaded")

    def banded(self, at: Floats, values: Floats, low: Floats, high: Floats, label: str, index: int) -> None:
        """The curve number `index` of some, with the interval of every point; what is NaN is left out."""
        if not np.isfinite(values).any():
            return
        colour = self.theme.series(index)
        self.axis.fill_between(at, low, high, color=colour, alpha=0.16, linewidth=0)
        good = np.isfinite(values)
        style: Style = {"marker": MARKERS[index % len(MARKERS)], "markersize": 3.6, "clip_on": False}
        at, values = at[good], values[good]
        self._line(Band(at, values, values, values), label, colour, linewidth=1.5, **style)
        reached = np.concatenate([values, low, high])
        reached = reached[np.isfinite(reached)]
        self.lowest, self.highest = min(self.lowest, reached.min()), max(self.highest, reached.max())

    def stacked(self, at: Floats, parts: list[Floats], labels: list[str]) -> None:
        """Shares of one, one on top of the other, the first at the bottom."""
        tops = np.cumsum(parts, axis=0)
        for index, (part, top, label) in enumerate(zip(parts, tops, labels, strict=True)):
            colour = self.theme.series(index)
            self.axis.fill_between(at, top - part, top, facecolor=colour, edgecolor=self.theme.paper, linewidth=0.8)
            self.ends.append((float(top[-1] - part[-1] / 2), label, colour))
        self.lowest, self.highest = 0.0, 1.0

    def _line(self, line: Band, label: str, colour: Any, **style: Any) -> None:
        if len(line) == 1:
            style |= {"marker": "o", "markersize": 4}
        self.axis.plot(line.steps, line.mean, color=colour, solid_capstyle="round", **style)
        self.ends.append((float(line.mean[-1]), label, colour))

    def _of_depth(self, depth: int, count: int) -> Any:
        from matplotlib import colormaps

        low, high = self.theme.depths
        return colormaps["viridis"](low + (high - low) * depth / max(count - 1, 1))

    def _reach(self, band: Band) -> None:
        self.lowest, self.highest = min(self.lowest, band.low.min()), max(self.highest, band.high.max())

    # ---------------------------------------------------------------- marks

    def restarts(self, steps: list[int]) -> None:
        """Thin lines where a launch went on after a stop; of many only the upper ends, so that nothing is hidden."""
        many = len(steps) > FEW
        style: Style = {"ymin": 0.95, "linestyle": "-"} if many else {"linestyle": (0, (2, 2))}
        for step in set(steps):
            self.axis.axvline(step, color=self.theme.muted, linewidth=0.7, zorder=1, **style)
        if steps:
            self.remarks.append(f"strokes above: {len(steps):,} restarts" if many else "dotted: restarts")

    def spikes(self, steps: Floats, values: Floats) -> None:
        """Triangles on steps whose loss was far above those before."""
        if len(steps):
            style: Style = {"marker": "^", "markersize": 4.5, "linestyle": "", "color": self.theme.alarm, "zorder": 5}
            self.axis.plot(steps, values, markeredgecolor=self.theme.paper, markeredgewidth=0.4, **style)
            self.remarks.append(f"▲ {_count(len(steps), 'spike')}")

    def left_out(self, steps: Floats) -> None:
        """Crosses at the bottom for steps that were left out: they have no value."""
        if len(steps):
            style: Style = {"marker": "x", "markersize": 5, "linestyle": "", "color": self.theme.alarm, "zorder": 5}
            self.axis.plot(steps, np.full(len(steps), 0.03), transform=self.axis.get_xaxis_transform(), **style)
            self.remarks.append(f"× {_count(len(steps), 'step')} left out")

    def level(self, height: float, label: str) -> None:
        """A level that a curve is held against."""
        self.axis.axhline(height, color=self.theme.ink, linewidth=0.9, linestyle=(0, (5, 3)), zorder=3)
        self.ends.append((height, label, self.theme.ink))
        self.lowest, self.highest = min(self.lowest, height), max(self.highest, height)

    # ---------------------------------------------------------------- axes

    def heights(self, floor: float | None = None, share: bool = False) -> None:
        """Choose the vertical axis: linear from `floor`, or else logarithmic where the curves span much.

        Args:
            share: values are shares of one, written as percentages.
        """
        from matplotlib.ticker import MaxNLocator

        low, high = self.lowest, self.highest
        if low > high:  # nothing was drawn
            return
        if floor is None and low > 0 and high / low > DECADE:
            self.axis.set_yscale("log")
            self.axis.set_ylim(low / 1.1, high * 1.15)
            self._plain_decades()
            return
        low = low if floor is None else floor
        margin = 0.06 * (high - low) or abs(high) * 0.1 or 1.0
        self.axis.set_ylim(low - (margin if floor is None else 0), high + margin)
        self.axis.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
        if share:
            self.axis.yaxis.set_major_formatter(lambda value, _: f"{round(100 * value, 9):g}%")
        else:
            tiny = max(abs(low), abs(high)) < 0.01
            self.axis.yaxis.set_major_formatter(lambda value, _: exponent(value) if tiny else f"{value:,.10g}")

    def _plain_decades(self) -> None:
        """Ticks at 1, 2 and 5 of each decade, or at decades alone where there are many; written out."""
        from matplotlib.ticker import LogLocator, NullFormatter

        low, high = self.axis.get_ylim()
        subs = (1.0, 2.0, 5.0) if high / low < 300 else (1.0,)
        self.axis.yaxis.set_major_locator(LogLocator(subs=subs, numticks=12))
        self.axis.yaxis.set_major_formatter(lambda value, _: f"{value:,g}" if 1e-3 <= value < 1e5 else exponent(value))
        self.axis.yaxis.set_minor_formatter(NullFormatter())

    def steps(self, first: int, last: int) -> None:
        """The horizontal axis: from the first to the last optimizer step."""
        from matplotlib.ticker import FixedLocator, MaxNLocator

        alone = first == last
        self.axis.set_xlim((first - 0.5, last + 0.5) if alone else (first, last))
        ticks = FixedLocator([first]) if alone else MaxNLocator(6, integer=True, steps=[1, 2, 2.5, 5, 10])
        self.axis.xaxis.set_major_locator(ticks)
        self.axis.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")

    def counts(self, numbers: list[int]) -> None:
        """The horizontal axis: these whole numbers."""
        from matplotlib.ticker import FixedLocator, NullLocator

        margin = 0.5 if len(numbers) == 1 else 0
        self.axis.set_xlim(numbers[0] - margin, numbers[-1] + margin)
        self.axis.xaxis.set_major_locator(FixedLocator(numbers))
        self.axis.xaxis.set_minor_locator(NullLocator())
        self.axis.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")

    def png(self) -> bytes:
        """Put title, grid and labels in place; the picture's bytes."""
        self._frame()
        self._label_ends()
        buffer = io.BytesIO()
        self.figure.savefig(buffer, format="png", dpi=DPI, facecolor=self.theme.paper)
        return buffer.getvalue()

    def _frame(self) -> None:
        axis, theme = self.axis, self.theme
        axis.set_facecolor(theme.paper)
        axis.set_axisbelow(True)
        axis.grid(axis="y", color=theme.grid, linewidth=0.8)
        axis.spines[["top", "right", "left"]].set_visible(False)
        axis.spines["bottom"].set_color(theme.muted)
        axis.tick_params(which="both", length=0, labelsize=SMALL + 0.5, labelcolor=theme.muted, color=theme.muted)
        axis.tick_params(axis="x", which="major", length=3)
        axis.set_xlabel(self.across, fontsize=SMALL + 0.5, color=theme.muted, loc="right")
        place: Style = {"x": 0.012, "va": "top", "in_layout": False}
        self.figure.text(
            y=self._below(0.08), s=self.title, fontsize=TEXT + 2, fontweight="bold", color=theme.ink, **place
        )
        self.figure.text(y=self._below(0.348), s=" · ".join(self.remarks), fontsize=SMALL, color=theme.muted, **place)

    def _below(self, inches: float) -> float:
        """A height of the picture, by its distance from the upper edge."""
        return 1 - inches / self.height

    def _label_ends(self) -> None:
        """Labels right of the curves' ends, moved apart where they would overlap, with a line to the end."""
        axis = self.axis
        to_axes = axis.transData + axis.transAxes.inverted()
        right = axis.get_xlim()[1]
        ends = [min(max(to_axes.transform((right, height))[1], 0.0), 1.0) for height, _, _ in self.ends]
        apart = TEXT * 1.25 / (self.height * 72 * 0.72)  # of the axes' height
        for end, place, (_, label, colour) in zip(ends, spread(ends, apart), self.ends, strict=True):
            axis.plot(
                [1.0, 1.012, 1.028],
                [end, end, place],
                color=colour,
                linewidth=0.8,
                transform=axis.transAxes,
                clip_on=False,
            )
            axis.text(1.036, place, label, color=colour, fontsize=TEXT - 0.5, va="center", transform=axis.transAxes)


def short(value: float) -> str:
    """Three digits that count, as a label."""
    if value and not 0.01 <= abs(value) < 1e6:
        return exponent(value)
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:#.3g}".rstrip(".") if value else "0"


def percent(value: float) -> str:
    """A share of one."""
    return f"{value:.0%}" if value >= 0.095 or not value else f"{value:.1%}"


def exponent(value: float) -> str:
    """A small or large number, like 2.5e-5."""
    digits, _, power = f"{value:.2e}".partition("e")
    return f"{float(digits):g}e{int(power)}" if value else "0"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"
