"""Which pictures a run gets: those that its rows hold numbers for."""

from collections.abc import Callable
from dataclasses import dataclass

from eagle31_train.report.canvas import THEMES, Canvas, percent, short
from eagle31_train.report.history import History, ratio

GIB = 2**30
Draw = Callable[[Canvas, History], None]


@dataclass(frozen=True)
class Plot:
    """One kind of picture.

    name: of its file. section, title, caption: where it stands on the page, and what is said there.
    draw: draws it. needs: the column without which there is nothing to draw, of the training's rows or,
    if `timed`, of the timings.
    """

    name: str
    section: str
    title: str
    caption: str
    draw: Draw
    needs: str
    timed: bool = False

    def on(self, theme: str, history: History) -> Canvas:
        """The picture of a run, on "light" or "dark" paper."""
        canvas = Canvas(THEMES[theme], self.title)
        self.draw(canvas, history)
        canvas.steps(int(history.train.steps[0]), history.last_step)
        canvas.restarts(history.restarts)
        return canvas


def _loss(canvas: Canvas, history: History) -> None:
    _both(canvas, history, "loss")
    train = history.train
    spikes = train["spike"] == 1
    canvas.heights()
    canvas.spikes(train.steps[spikes], train["loss"][spikes])
    canvas.left_out(history.marked("left_out"))


def _tau(canvas: Canvas, history: History) -> None:
    _both(canvas, history, "tau")
    canvas.heights()


def _both(canvas: Canvas, history: History, name: str) -> None:
    """Training and held-out."""
    train, heldout = history.train, history.heldout
    canvas.noisy(train.steps, train[name], lambda value: f"training  {short(value)}", canvas.theme.train)
    canvas.measured(heldout.steps, heldout[name], lambda value: f"held-out  {short(value)}", canvas.theme.heldout)


def _depths(name: str, share: bool) -> Draw:
    def draw(canvas: Canvas, history: History) -> None:
        canvas.by_depth(history.train.steps, history.train.depths(name), percent if share else short)
        canvas.heights(0.0 if share else None, share)

    return draw


def _gradient(canvas: Canvas, history: History) -> None:
    train = history.train
    canvas.noisy(train.steps, train["grad_norm"], lambda value: f"norm  {short(value)}", canvas.theme.train)
    if clip := history.option("clip"):
        canvas.level(float(clip), f"clip  {clip:g}")
    canvas.heights()
    canvas.left_out(history.marked("left_out"))


def _rate(canvas: Canvas, history: History) -> None:
    canvas.measured(history.train.steps, history.train["lr"], short, canvas.theme.train)
    canvas.heights(0.0)


def _throughput(canvas: Canvas, history: History) -> None:
    timings, seconds = history.timings, history.busy
    canvas.noisy(timings.steps, ratio(timings["tokens"], seconds), short, canvas.theme.train, weights=seconds)
    canvas.heights(0.0)


def _waiting(canvas: Canvas, history: History) -> None:
    timings, seconds = history.timings, history.busy
    canvas.noisy(timings.steps, ratio(timings["waited"], seconds), percent, canvas.theme.train, weights=seconds)
    canvas.heights(0.0, share=True)


def _memory(canvas: Canvas, history: History) -> None:
    timings = history.timings
    canvas.noisy(timings.steps, timings["memory_bytes"] / GIB, short, canvas.theme.train)
    canvas.heights(0.0)


LEARNING, DEPTH, OPTIMIZER, MACHINE = "Learning", "By depth", "Optimizer", "Machine"
PLOTS = [
    Plot(
        "loss",
        LEARNING,
        "Loss",
        "Mean divergence from the target's distribution, in nats, averaged over depths.",
        _loss,
        "loss",
    ),
    Plot(
        "tau",
        LEARNING,
        "Acceptance length, estimated (tau)",
        "Tokens gained per verification, the target's own included, if all tokens before are the target's: "
        "1 + the rates of right prefixes, summed over depths.",
        _tau,
        "tau",
    ),
    Plot(
        "prefix",
        DEPTH,
        "Right up to this depth (J)",
        "Share of drafts whose tokens are the target's choice at this depth and at all before. Their sum + 1 is tau.",
        _depths("prefix_at_depth", True),
        "prefix_at_depth/0",
    ),
    Plot(
        "accuracy",
        DEPTH,
        "Right at this depth",
        "Share of drafted tokens that are the target's choice, whatever was drafted before; depth 1 is the first.",
        _depths("accuracy_at_depth", True),
        "accuracy_at_depth/0",
    ),
    Plot(
        "loss_at_depth",
        DEPTH,
        "Loss at this depth",
        "Mean divergence from the target's distribution, in nats.",
        _depths("loss_at_depth", False),
        "loss_at_depth/0",
    ),
    Plot(
        "rms",
        DEPTH,
        "RMS of the state that is read",
        "Depth 1 reads what fc makes of the target's states, deeper ones read the state that the depth before fed "
        "back. Deeper curves that rise above each other mean that it drifts.",
        _depths("rms_at_depth", False),
        "rms_at_depth/0",
    ),
    Plot(
        "gradient",
        OPTIMIZER,
        "Gradient norm",
        "Before it is clipped; what lies above the dashed line is scaled down to it.",
        _gradient,
        "grad_norm",
    ),
    Plot("lr", OPTIMIZER, "Learning rate", "A warm-up, then a cosine.", _rate, "lr"),
    Plot(
        "throughput",
        MACHINE,
        "Tokens per second",
        "Tokens that a step read, on all devices, over the time that it took.",
        _throughput,
        "tokens",
        timed=True,
    ),
    Plot("waiting", MACHINE, "Time spent waiting for data", "Share of a step's time.", _waiting, "waited", timed=True),
    Plot(
        "memory",
        MACHINE,
        "Memory, GiB",
        "Of the main process, or of its device where there is one.",
        _memory,
        "memory_bytes",
        timed=True,
    ),
]


def plots(history: History) -> list[Plot]:
    """The pictures for which there are numbers, in the order of the page."""
    return [plot for plot in PLOTS if plot.needs in (history.timings if plot.timed else history.train)]
