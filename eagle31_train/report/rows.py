"""Pictures with a named row for each of many things: intervals side by side, and a table whose cells are coloured."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from eagle31_train.report.canvas import HEAD, MARKERS, SMALL, Canvas, Style, Theme
from eagle31_train.report.thin import Floats

ROW, FOOT = 0.235, 0.55  # inches of a row, and of axis and legend


class Rows(Canvas):
    """A canvas whose vertical axis names rows, the first at the top; `lines` stand below each other in each."""

    def __init__(
        self, theme: Theme, title: str, names: Sequence[str], across: str, remarks: list[str], lines: int = 1
    ) -> None:
        super().__init__(theme, title, remarks, across, HEAD + FOOT + ROW * max(len(names) * (1 + lines) / 2, 2))
        self.table = False
        self.axis.set_yticks(range(len(names)), names)
        self.axis.set_ylim(len(names) - 0.5, -0.5)

    def whiskers(self, values: Floats, low: Floats, high: Floats, index: int, of: int, label: str) -> None:
        """A point and its interval in every row.

        Args:
            index, of: which of how many kinds of points this is; they stand below each other.
            label: of the legend; none if empty.
        """
        colour = self.theme.series(index)
        at = np.arange(len(values)) + (0 if of == 1 else (index / (of - 1) - 0.5) * min(0.66, 0.2 * of))
        self.axis.hlines(at, low, high, color=colour, linewidth=1.3)
        style: Style = {"marker": MARKERS[index % len(MARKERS)], "markersize": 4.2, "linestyle": "", "color": colour}
        self.axis.plot(values, at, label=label or None, **style)

    def line(self, at: float) -> None:
        """What the points are held against."""
        self.axis.axvline(at, color=self.theme.muted, linewidth=0.9, linestyle=(0, (5, 3)), zorder=1)

    def beside(self, texts: Sequence[str], colours: Sequence[str]) -> None:
        """Text right of every row."""
        for row, (text, colour) in enumerate(zip(texts, colours, strict=True)):
            where: Style = {"transform": self.axis.get_yaxis_transform(), "va": "center", "fontsize": SMALL}
            self.axis.text(1.02, row, text, color=colour, **where)

    def cells(
        self, values: Floats, texts: Sequence[Sequence[str]], firm: Any, columns: Sequence[str], least: float
    ) -> None:
        """A table: cells in the first series' colour below zero and in the second's above, as strong as they are large.

        Args:
            values: [rows, columns], NaN where there is nothing. texts: what stands in the cells.
            firm: [rows, columns] bool, cells that are certain: their text is bold.
            least: a value that has no strong colour even if no other is larger.
        """
        from matplotlib.colors import LinearSegmentedColormap

        ends = [self.theme.series(0), self.theme.paper, self.theme.series(1)]
        most = max(least, float(np.abs(values[np.isfinite(values)]).max(initial=0)))
        colours = LinearSegmentedColormap.from_list("", ends)
        style: Style = {"cmap": colours, "vmin": -1.6 * most, "vmax": 1.6 * most, "aspect": "auto"}
        self.axis.imshow(np.ma.masked_invalid(values), **style)
        self.axis.set_xticks(range(len(columns)), columns)
        for row, line in enumerate(texts):
            for column, text in enumerate(line):
                weight: Style = (
                    {"fontweight": "bold", "color": self.theme.ink}
                    if firm[row][column]
                    else {"color": self.theme.muted}
                )
                self.axis.text(column, row, text, ha="center", va="center", fontsize=SMALL, **weight)
        self.table = True

    def _frame(self) -> None:
        super()._frame()
        self.axis.grid(visible=False)
        if not self.table:
            self.axis.grid(axis="x", color=self.theme.grid, linewidth=0.8)
        self.axis.tick_params(axis="y", labelcolor=self.theme.ink, labelsize=SMALL + 0.5)
        if self.axis.get_legend_handles_labels()[1]:
            place: Style = {"loc": "lower left", "bbox_to_anchor": (0, 1), "ncols": 3, "borderaxespad": 0.2}
            legend = self.axis.legend(frameon=False, fontsize=SMALL + 0.5, **place)
            for text in legend.get_texts():
                text.set_color(self.theme.ink)
