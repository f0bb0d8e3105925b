"""Pictures by matplotlib, which is imported only where it draws."""

import io
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np

from eagle31_train.common import shown
from eagle31_train.evaluation.intervals import Floats, Interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH, HEIGHT, ROW = 5.6, 3.25, 0.25  # inches: of a picture, and of one row of a chart that has rows
TITLE = 60  # letters in one line of a title
MEANS = 64  # points of a noisy curve's mean
MARKERS = "os^Dvp"
STYLE: Any = {
    # Training (C0) and held-out (C1) also differ in brightness, for the colour-blind.
    "axes.prop_cycle": "cycler('color', ['#2563c9', '#d9650b', '#0e8a6a', '#a8379b', '#8a6d00', '#5d6873'])",
    "font.size": 8,
    "axes.titlesize": 7.5,
    "axes.titlelocation": "left",
    "figure.titlesize": 11,
    "figure.titleweight": "bold",
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.formatter.useoffset": False,
    "grid.color": "#e7e9ec",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "lines.markersize": 4,
    "legend.frameon": False,
    "savefig.dpi": 200,
    "text.parse_math": False,  # names may hold a $
}


@dataclass(frozen=True)
class Picture:
    """A picture to draw. name: of its file. section: of the page. remark: below the title. draw: draws onto axes."""

    name: str
    section: str
    title: str
    draw: Callable[["Axes"], None]
    remark: str = ""
    height: float = HEIGHT

    def figure(self) -> "Figure":
        from matplotlib import rc_context
        from matplotlib.figure import Figure
        from matplotlib.text import Text

        with rc_context(STYLE):
            figure = Figure((WIDTH, self.height), layout="constrained")
            axes = figure.subplots()
            axes.set_title(self.remark)
            self.draw(axes)
            figure.suptitle(fill(shown.clean(self.title), TITLE), x=0.02, ha="left")
            if axes.get_legend_handles_labels()[1]:
                axes.legend(loc="upper left", bbox_to_anchor=(1.02, 1))
            for text in figure.findobj(Text):
                text.set_text(drawable(shown.clean(text.get_text())))
            return figure

    def png(self) -> bytes:
        from matplotlib import rc_context

        buffer = io.BytesIO()
        with rc_context(STYLE):
            self.figure().savefig(buffer, format="png")
        return buffer.getvalue()


def drawable(text: str) -> str:
    """Spell letters that matplotlib's own font lacks as U+7532, because boxes would all look alike."""
    from matplotlib.font_manager import findfont, get_font

    there = get_font(findfont("DejaVu Sans")).get_charmap()
    return "".join(letter if ord(letter) in there or letter.isspace() else f"U+{ord(letter):04X} " for letter in text)


def noisy(axes: "Axes", steps: Floats, values: Floats, label: str, colour: Any, form: str = "{:.3g}") -> None:
    """Draw a curve [N], pale, and its mean, with the last value in the label. NaN is left out."""
    valid = np.isfinite(values)
    if not valid.any():
        return
    steps, values = steps[valid], values[valid]
    parts = min(MEANS, len(steps))
    centres, means = ([part.mean() for part in np.array_split(some, parts)] for some in (steps, values))
    marker = "o" if len(steps) == 1 else ""
    axes.plot(steps, values, color=colour, alpha=0.25, linewidth=0.5)
    axes.plot(centres, means, color=colour, marker=marker, label=f"{label}  {form.format(means[-1])}")


def marker(index: int) -> str:
    """Return the marker of a curve of colour C{index}. When colours repeat, their markers differ."""
    return MARKERS[(index + index // len(MARKERS)) % len(MARKERS)]


def columns(intervals: Iterable[Interval]) -> tuple[Floats, Floats, Floats]:
    """Return values, lows and highs, each [N], NaN where there is none."""
    table = np.array([[np.nan if part is None else part for part in each] for each in intervals], dtype=float)
    return table[:, 0], table[:, 1], table[:, 2]


@dataclass(frozen=True)
class Kind:
    """A kind of number. low, high: its bounds. percent: it is a share. even: where nothing is gained or lost."""

    low: float = 0
    high: float = np.inf
    percent: bool = False
    even: float | None = None

    def scale(self, axes: "Axes", which: str = "y") -> None:
        """Set the limits and labels of an axis for numbers of this kind."""
        from matplotlib.ticker import PercentFormatter

        if self.percent:
            getattr(axes, f"{which}axis").set_major_formatter(PercentFormatter(1))
            if which == "x":
                axes.locator_params(axis="x", nbins=5)  # more labels would touch
        if self.even is not None:
            (axes.axvline if which == "x" else axes.axhline)(self.even, color="gray", linestyle="--", linewidth=0.8)
        low, high = getattr(axes, f"get_{which}lim")()
        getattr(axes, f"set_{which}lim")(max(low, self.low), min(high, self.high))


LENGTH, RATIO, NUMBER = Kind(low=1), Kind(even=1), Kind()
SHARE, KEPT = Kind(high=1, percent=True), Kind(percent=True, even=1)


def logarithmic(axes: "Axes") -> None:
    """Make the vertical axis logarithmic, with plain numbers: matplotlib's are formulas, which STYLE does not parse."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def whole_numbers(axes: "Axes", label: str) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel(label)
    axes.xaxis.set_major_locator(MaxNLocator(9, integer=True, min_n_ticks=1))
