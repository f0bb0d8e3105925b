"""Which pictures a training run gets: those that its rows hold numbers for."""

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from eagle31_train.reporting import figures
from eagle31_train.reporting.figures import Floats, Picture
from eagle31_train.reporting.training_log import ESTIMATE, History

if TYPE_CHECKING:
    from matplotlib.axes import Axes

GIB = 2**30
ESTIMATED = "acceptance estimate (teacher-forced)"
LEARNING, DEPTH, OPTIMIZER, MACHINE = "Learning", "By depth", "Optimizer", "Machine"
SHARE = "{:.1%}"


class Plot(NamedTuple):
    """name, section, title: as of `Picture`. column: what it shows, of the rows of training or, in section MACHINE, of
    the timings; a list has a curve for each depth. form: of numbers in the legend; log: the axis."""

    name: str
    section: str
    title: str
    column: str
    form: str = "{:.3g}"
    log: bool = False


PLOTS = [
    Plot("loss", LEARNING, "Loss, in nats: mean over depths", "loss", log=True),
    Plot(ESTIMATE, LEARNING, ESTIMATED.capitalize(), ESTIMATE, "{:.2f}"),
    Plot("prefix", DEPTH, "Share of drafts that are right up to this depth", "prefix_at_depth", SHARE),
    Plot("accuracy", DEPTH, "Share of tokens that are right at this depth", "accuracy_at_depth", SHARE),
    Plot("loss_at_depth", DEPTH, "Loss at this depth, in nats", "loss_at_depth"),
    Plot("rms", DEPTH, "RMS of the state that this depth reads", "rms_at_depth"),
    Plot("gradient", OPTIMIZER, "Gradient norm, before it is clipped", "grad_norm", log=True),
    Plot("lr", OPTIMIZER, "Learning rate", "lr"),
    Plot("throughput", MACHINE, "Tokens per second of a step, on all devices", "tokens", "{:,.0f}"),
    Plot("waiting", MACHINE, "Share of a step's time spent waiting for data", "waited", SHARE),
    Plot("memory", MACHINE, "Memory of the main process, or of its device, GiB", "memory_bytes", "{:.2f}"),
]


def pictures(history: History) -> list[Picture]:
    """The pictures that there are numbers for, in the order of the page."""
    return [
        Picture(plot.name, plot.section, plot.title, partial(_draw, plot, history))
        for plot in PLOTS
        if plot.column in (history.timings if plot.section == MACHINE else history.train)
        or history.train.depths(plot.column)
    ]


def _draw(plot: Plot, history: History, axes: "Axes") -> None:
    """The curves."""
    train, heldout = history.train, history.heldout
    if plot.section == MACHINE:
        figures.noisy(axes, history.timings.steps, _machine(plot, history), "mean", "C0", plot.form)
    elif depths := train.depths(plot.column):
        figures.by_depth(axes, train.steps, depths, plot.form)
    else:
        figures.noisy(axes, train.steps, train[plot.column], "training", "C0", plot.form)
        figures.measured(axes, heldout.steps, heldout[plot.column], "held-out", "C1", plot.form)
    if plot.form == SHARE:
        figures.shares(axes)
    if plot.log:
        axes.set_yscale("log")
    options = history.config.get("train") or {}
    clip = options.get("max_grad_norm", options.get("clip"))  # runs of earlier versions have the old name
    if plot.name == "gradient" and clip:
        axes.axhline(float(clip), linestyle="--", color="gray", label=f"clipped to {clip:g}")
    figures.whole_numbers(axes, "optimizer step")


def _machine(plot: Plot, history: History) -> Floats:
    values = history.timings[plot.column]
    return values / GIB if plot.name == "memory" else values / history.busy
