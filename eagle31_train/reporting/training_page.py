"""What a training run looks like: its curves as pictures, and one HTML page that shows all of it."""

import json
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from eagle31_train import artifacts
from eagle31_train.errors import UserError
from eagle31_train.reporting import figures, html
from eagle31_train.reporting.figures import Floats, Picture
from eagle31_train.reporting.tables import Section, Table
from eagle31_train.reporting.training_log import ESTIMATE, HELDOUT, LENGTH, History, read

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PAGE = "report.html"
GIB = 2**30
RECENT = 50  # steps that the table's means are taken over
LEARNING, DEPTH, OPTIMIZER, MACHINE = "Learning", "By depth", "Optimizer", "Machine"
NUMBERS = (LENGTH, "loss", ESTIMATE, "oov_share", "grad_norm", "lr")
BEST = {LENGTH: np.nanargmax, ESTIMATE: np.nanargmax, "loss": np.nanargmin}
BY_DEPTH = ("prefix_at_depth", "accuracy_at_depth", "loss_at_depth", "rms_at_depth", "acceptance_at_depth")


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
    Plot(ESTIMATE, LEARNING, "Acceptance estimate (teacher-forced)", ESTIMATE, low=1, form="{:.2f}"),
    Plot(LENGTH, LEARNING, "Acceptance length (decoding of held-out prompts)", LENGTH, low=1, form="{:.2f}"),
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


def write(run: Path, out: Path | None = None) -> tuple[Path, list[str]]:
    """Draw a run, whether it has ended or not.

    Args:
        run: the run's folder, or the folder `train` in it.
        out: where the page and the pictures go; default: the folder `report` in the run's.

    Returns:
        The page, and what the reader should know of the files that it was made from, a line each.

    Raises:
        UserError: there is no run, or one of its files is damaged.
    """
    history = read(run)
    out = out or history.folder.parent / "report"
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file: give another --out")
    earlier = [out / f"{plot.name}.png" for plot in PLOTS]
    made = out if out.exists() else out.with_name(f".{out.name}.tmp")  # a new folder is there whole or not at all
    try:
        _, images = html.draw(made, list(pictures(history)), earlier)
        artifacts.write_text(made / PAGE, render(history, images))
        if made != out:
            artifacts.commit(made, out)
    finally:
        if made != out:
            shutil.rmtree(made, ignore_errors=True)
    return out / PAGE, history.notes


# ---------------------------------------------------------------- pictures


def pictures(history: History) -> Iterator[Picture]:
    """The pictures that there are numbers for, in the order of the page."""
    remark = f"strokes above: {len(history.restarts):,} restarts" if history.restarts else ""
    for plot in PLOTS:
        table = history.timings if plot.section == MACHINE else history.metrics
        if plot.column in table or HELDOUT + plot.column in table or table.depths(plot.column):
            yield Picture(plot.name, plot.section, plot.title, partial(_draw, plot, history), remark)


def _draw(plot: Plot, history: History, axes: "Axes") -> None:
    """The curves, and marks for restarts and steps that were left out."""
    table = history.metrics
    if plot.section == MACHINE:
        values = history.timings[plot.column] / (GIB if plot.name == "memory" else history.busy)
        figures.noisy(axes, history.timings.steps, values, "mean", "C0", plot.form)
    elif depths := table.depths(plot.column):
        figures.by_depth(axes, table.steps, depths, plot.form)
    else:
        figures.noisy(axes, table.steps, table[plot.column], "training", "C0", plot.form)
        figures.measured(axes, table.steps, table[HELDOUT + plot.column], "held-out", "C1", plot.form)
    if plot.high == 1:
        figures.shares(axes)
    if plot.section == MACHINE or plot.high == 1 or plot.name == "lr":
        axes.set_ylim(bottom=0)
    else:
        figures.logarithmic(axes)
    figures.within(axes, plot.low, plot.high)
    figures.whole_numbers(axes, "optimizer step")
    top_to_bottom = axes.get_xaxis_transform()
    axes.vlines(history.restarts, 0.95, 1, color="gray", linewidth=0.8, transform=top_to_bottom)
    if plot.name in ("loss", "gradient"):
        left_out = history.marked("left_out")
        axes.plot(left_out, np.full(len(left_out), 0.03), "rx", transform=top_to_bottom)


# ---------------------------------------------------------------- the page


def render(history: History, images: html.Images) -> str:
    """The page as text."""
    manifest = {name: value for name, value in (history.manifest or {}).items() if name != "files"}
    total = f" of {history.total:,}" if history.total else ""
    state = "Training ended" if history.manifest is not None else "Training had not ended when this page was made"
    remarks = [f"{state}; the last step was {history.metrics.steps[-1]:,.0f}{total}.", *history.notes]
    sections = [
        Section("", remarks, [_numbers(history)]),
        *(Section(name, [], []) for name in images),
        Section("Each depth", [], [_depths(history)]),
        Section("Tokens and time", [], [Table("", ["", ""], list(_facts(history).items()))]),
    ]
    texts = {
        f"Launches ({len(history.launches):,})": "\n".join(json.dumps(each, indent=2) for each in history.launches),
        "Configuration": history.config_text,
        "Manifest": json.dumps(manifest, indent=2) if manifest else "",
    }
    return html.page(f"{history.name}: training", sections, images, texts)


def _numbers(history: History) -> Table:
    """Where the curves ended: training over its last steps, held-out at its last and its best evaluation."""
    table, rows = history.metrics, []
    for name in NUMBERS:
        heldout, best = table[HELDOUT + name], ""
        if name in BEST and HELDOUT + name in table:
            at = int(BEST[name](heldout))
            best = f"{heldout[at]:.4g} (step {table.steps[at]:,.0f})"
        rows.append([name, _shown(table[name], 1 if name == "lr" else RECENT), _shown(heldout), best])
    return Table("", ["", f"training, mean of the last {RECENT} steps", "held-out, last", "held-out, best"], rows)


def _depths(history: History) -> Table:
    """The same for each depth."""
    rows = [
        [f"{name}, {where}", *(_shown(column, last) for column in history.metrics.depths(prefix + name))]
        for name in BY_DEPTH
        for prefix, where, last in (("", "training", RECENT), (HELDOUT, "held-out", 1))
    ]
    depths = max(map(len, rows))  # as deep as was trained, or drafted
    return Table("", ["", *(f"depth {depth}" for depth in range(1, depths))], [row for row in rows if len(row) > 1])


def _facts(history: History) -> dict[str, str]:
    """How much was read, how fast, and what was left out."""
    timings, facts = history.timings, dict[str, str]()
    if "tokens" in history.metrics:
        facts["tokens read"] = f"{np.nanmax(history.metrics['tokens']):,.0f}"
    seconds = float(timings["seconds"].sum()) if len(timings) else float((history.manifest or {}).get("seconds") or 0)
    facts["hours"] = f"{seconds / 3600:,.2f}"
    if len(timings) and (busy := float(np.nansum(history.busy))):
        left = max((history.total or 0) - history.metrics.steps[-1], 0)
        facts["tokens per second"] = f"{np.nansum(timings['tokens']) / busy:,.0f}"
        facts["waiting for data"] = f"{np.nansum(timings['waited']) / busy:.1%}"
        facts["hours to go"] = f"{left * seconds / len(timings) / 3600:,.2f}"
    if "memory_bytes" in timings:
        facts["most memory"] = f"{np.nanmax(timings['memory_bytes']) / GIB:.2f} GiB"
    marks = {"steps left out": "left_out", "steps with nothing to train": "no_pairs"}
    return facts | {name: f"{len(history.marked(mark)):,}" for name, mark in marks.items()}


def _shown(values: Floats, last: int = 1) -> str:
    """The mean of the last numbers among `values` [N]; nothing if none is a number."""
    valid = values[np.isfinite(values)][-last:]
    return f"{valid.mean():.4g}" if len(valid) else ""
