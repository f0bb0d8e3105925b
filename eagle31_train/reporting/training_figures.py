"""Which pictures a training run gets: those that its rows hold numbers for."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from eagle31_train.reporting import figures
from eagle31_train.reporting.figures import ALARM, Picture, percent, short
from eagle31_train.reporting.training_log import ESTIMATE, History

if TYPE_CHECKING:
    from matplotlib.axes import Axes

GIB = 2**30
ESTIMATED = "acceptance estimate (teacher-forced)"
LEARNING, DEPTH, OPTIMIZER, MACHINE = "Learning", "By depth", "Optimizer", "Machine"


@dataclass(frozen=True)
class Plot:
    """A kind of picture. name, section, title, caption: as of `Picture`. column: what it shows, of the rows of training
    or, in section MACHINE, of the timings; a list has a curve for each depth. draw: (axes, history, column)."""

    name: str
    section: str
    title: str
    caption: str
    column: str
    draw: Callable[["Axes", History, str], None]


def pictures(history: History) -> list[Picture]:
    """The pictures that there are numbers for, in the order of the page."""
    return [
        Picture(plot.name, plot.section, plot.title, plot.caption, partial(_draw, plot, history), _remark(history))
        for plot in PLOTS
        if plot.column in (history.timings if plot.section == MACHINE else history.train)
        or history.train.depths(plot.column)
    ]


def _draw(plot: Plot, history: History, axes: "Axes") -> None:
    """The curves, and marks for restarts, spikes and steps that were left out."""
    plot.draw(axes, history, plot.column)
    figures.whole_numbers(axes, "optimizer step")
    top_to_bottom = axes.get_xaxis_transform()
    axes.vlines(history.restarts, 0.95, 1, color="gray", linewidth=0.8, transform=top_to_bottom)
    if plot.name in ("loss", "gradient"):
        train, spikes, left_out = history.train, history.train["spike"] == 1, history.marked("left_out")
        if spikes.any():
            axes.plot(train.steps[spikes], train[plot.column][spikes], "^", color=ALARM, label="spike")
        if len(left_out):
            at = np.full(len(left_out), 0.03)
            axes.plot(left_out, at, "x", color=ALARM, transform=top_to_bottom, label="left out")


def _remark(history: History) -> str:
    return f"strokes above: {len(history.restarts):,} restarts" if history.restarts else ""


def _both(axes: "Axes", history: History, column: str) -> None:
    """Training and held-out."""
    train, heldout = history.train, history.heldout
    figures.noisy(axes, train.steps, train[column], lambda value: f"training  {short(value)}", "C0")
    figures.measured(axes, heldout.steps, heldout[column], lambda value: f"held-out  {short(value)}", "C1")
    figures.logarithmic(axes)


def _depths(axes: "Axes", history: History, column: str) -> None:
    figures.by_depth(axes, history.train.steps, history.train.depths(column), short)
    figures.logarithmic(axes)


def _shares_by_depth(axes: "Axes", history: History, column: str) -> None:
    figures.by_depth(axes, history.train.steps, history.train.depths(column), percent)
    axes.set_ylim(bottom=0)
    figures.shares(axes)


def _gradient(axes: "Axes", history: History, column: str) -> None:
    _both(axes, history, column)
    options = history.config.get("train") or {}
    if clip := options.get("max_grad_norm", options.get("clip")):  # runs of earlier versions have the old name
        axes.axhline(float(clip), linestyle="--", color="gray", label=f"clip  {clip:g}")


def _learning_rate(axes: "Axes", history: History, column: str) -> None:
    figures.measured(axes, history.train.steps, history.train[column], short, "C0")
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter("{x:g}")


def _per_second(axes: "Axes", history: History, column: str) -> None:
    figures.noisy(axes, history.timings.steps, history.timings[column], short, "C0", history.busy)
    axes.set_ylim(bottom=0)


def _share_of_time(axes: "Axes", history: History, column: str) -> None:
    figures.noisy(axes, history.timings.steps, history.timings[column], percent, "C0", history.busy)
    axes.set_ylim(bottom=0)
    figures.shares(axes)


def _gibibytes(axes: "Axes", history: History, column: str) -> None:
    figures.noisy(axes, history.timings.steps, history.timings[column] / GIB, short, "C0")
    axes.set_ylim(bottom=0)


PLOTS = [
    Plot(
        "loss",
        LEARNING,
        "Loss",
        "Mean divergence from the target's distribution, in nats, averaged over depths.",
        "loss",
        _both,
    ),
    Plot(
        ESTIMATE,
        LEARNING,
        ESTIMATED.capitalize(),
        "Tokens gained per verification, the target's own included, if all tokens before are the target's: "
        "1 + the rates of right prefixes, summed over depths. Evaluation measures the acceptance length itself.",
        ESTIMATE,
        _both,
    ),
    Plot(
        "prefix",
        DEPTH,
        "Right up to this depth",
        "Share of drafts whose tokens are the target's choice at this depth and at all before. "
        "Their sum + 1 is the acceptance estimate.",
        "prefix_at_depth",
        _shares_by_depth,
    ),
    Plot(
        "accuracy",
        DEPTH,
        "Right at this depth",
        "Share of drafted tokens that are the target's choice, whatever was drafted before; depth 1 is the first.",
        "accuracy_at_depth",
        _shares_by_depth,
    ),
    Plot(
        "loss_at_depth",
        DEPTH,
        "Loss at this depth",
        "Mean divergence from the target's distribution, in nats.",
        "loss_at_depth",
        _depths,
    ),
    Plot(
        "rms",
        DEPTH,
        "RMS of the state that is read",
        "Depth 1 reads what fc makes of the target's states, deeper ones read the state that the depth before fed "
        "back. Deeper curves that rise above each other mean that it drifts.",
        "rms_at_depth",
        _depths,
    ),
    Plot(
        "gradient",
        OPTIMIZER,
        "Gradient norm",
        "Before it is clipped; what lies above the dashed line is scaled down to it.",
        "grad_norm",
        _gradient,
    ),
    Plot("lr", OPTIMIZER, "Learning rate", "A warm-up, then a cosine.", "lr", _learning_rate),
    Plot(
        "throughput",
        MACHINE,
        "Tokens per second",
        "Tokens that a step read, on all devices, over the time that it took.",
        "tokens",
        _per_second,
    ),
    Plot("waiting", MACHINE, "Time spent waiting for data", "Share of a step's time.", "waited", _share_of_time),
    Plot(
        "memory",
        MACHINE,
        "Memory, GiB",
        "Of the main process, or of its device where there is one.",
        "memory_bytes",
        _gibibytes,
    ),
]
