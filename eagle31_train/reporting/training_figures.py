"""Which pictures a training run gets: those that its rows hold numbers for."""

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from eagle31_train.reporting import figures
from eagle31_train.reporting.figures import Floats, Picture
from eagle31_train.reporting.training_log import ESTIMATE, LENGTH, History

if TYPE_CHECKING:
    from matplotlib.axes import Axes

GIB = 2**30
ESTIMATED = "acceptance estimate (teacher-forced)"
MEASURED = "acceptance length (decoding of held-out prompts)"
LEARNING, DEPTH, OPTIMIZER, MACHINE = "Learning", "By depth", "Optimizer", "Machine"


class Plot(NamedTuple):
    """name, section, title: as of `Picture`. column: what it shows, of metrics.jsonl or, in section MACHINE, of the
    timings; a list has a curve for each depth. low, high: what it cannot leave. form: of numbers in the legend."""

    name: str
    section: str
    title: str
    column: str
    low: float = 0
    high: float = np.inf
    form: str = "{:.3g}"


PLOTS = [
    Plot("loss", LEARNING, "Loss, in nats: mean over depths", "loss"),
    Plot(ESTIMATE, LEARNING, ESTIMATED.capitalize(), ESTIMATE, low=1, form="{:.2f}"),
    Plot(LENGTH, LEARNING, MEASURED.capitalize(), LENGTH, low=1, form="{:.2f}"),
    Plot("prefix", DEPTH, "Share of drafts that are right up to this depth", "prefix_at_depth", 0, 1, "{:.1%}"),
    Plot("accuracy", DEPTH, "Share of tokens that are right at this depth", "accuracy_at_depth", 0, 1, "{:.1%}"),
    Plot("loss_at_depth", DEPTH, "Loss at this depth, in nats", "loss_at_depth"),
    Plot("rms", DEPTH, "RMS of the state that this depth reads", "rms_at_depth"),
    Plot("gradient", OPTIMIZER, "Gradient norm, before it is clipped", "grad_norm"),
    Plot("lr", OPTIMIZER, "Learning rate", "lr"),
    Plot("throughput", MACHINE, "Tokens per second of a step, on all devices", "tokens", form="{:,.0f}"),
    Plot("waiting", MACHINE, "Share of a step's time spent waiting for data", "waited", 0, 1, "{:.2%}"),
    Plot("memory", MACHINE, "Memory of the main process, or of its device, GiB", "memory_bytes", form="{:.2f}"),
]


def pictures(history: History) -> list[Picture]:
    """The pictures that there are numbers for, in the order of the page."""
    restarts = [f"strokes above: {len(history.restarts):,} restarts"] if history.restarts else []
    drafted = {LENGTH: [f"{len(history.heldout.depths('acceptance_at_depth'))} draft tokens"]}
    return [
        Picture(
            *(plot.name, plot.section, plot.title),
            partial(_draw, plot, history),
            "; ".join([*drafted.get(plot.name, []), *restarts]),
        )
        for plot in PLOTS
        if any(plot.column in table for table in ([history.timings] if plot.section == MACHINE else history.learning))
        or history.train.depths(plot.column)
    ]


def _draw(plot: Plot, history: History, axes: "Axes") -> None:
    """The curves, and marks for restarts and steps that were left out."""
    train, heldout = history.train, history.heldout
    if plot.section == MACHINE:
        figures.noisy(axes, history.timings.steps, _machine(plot, history), "mean", "C0", plot.form)
    elif depths := train.depths(plot.column):
        figures.by_depth(axes, train.steps, depths, plot.form)
    else:
        figures.noisy(axes, train.steps, train[plot.column], "training", "C0", plot.form)
        figures.measured(axes, heldout.steps, heldout[plot.column], "held-out", "C1", plot.form)
    if plot.name == LENGTH and (best := history.best) is not None:
        label = f"{'kept' if history.keeps_best else 'best'}, step {best[0]:,.0f}  {plot.form.format(best[1])}"
        axes.plot(*best, "*", color="C2", markersize=9, label=label)
    if plot.high == 1:
        figures.shares(axes)
    if plot.section == MACHINE or plot.high == 1 or plot.name == "lr":
        axes.set_ylim(bottom=0)
    else:
        figures.logarithmic(axes)
    figures.within(axes, plot.low, plot.high)
    options = history.config.get("train") or {}
    clip = options.get("max_grad_norm", options.get("clip"))  # runs of earlier versions have the old name
    if plot.name == "gradient" and clip:
        axes.axhline(float(clip), linestyle="--", color="gray", label=f"clipped to {clip:g}")
    figures.whole_numbers(axes, "optimizer step")
    top_to_bottom = axes.get_xaxis_transform()
    axes.vlines(history.restarts, 0.95, 1, color="gray", linewidth=0.8, transform=top_to_bottom)
    if plot.name in ("loss", "gradient"):
        left_out = history.marked("left_out")
        axes.plot(left_out, np.full(len(left_out), 0.03), "rx", transform=top_to_bottom)


def _machine(plot: Plot, history: History) -> Floats:
    values = history.timings[plot.column]
    return values / GIB if plot.name == "memory" else values / history.busy
