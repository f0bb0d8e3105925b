"""A training run's curves as pictures, and one HTML page that shows all of them. Needs no torch."""

import json
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from eagle31_train.common import artifacts, foreign
from eagle31_train.common.errors import UserError
from eagle31_train.common.locks import writing
from eagle31_train.evaluation.intervals import Floats
from eagle31_train.reporting import figures, html
from eagle31_train.reporting.figures import SHARE, Picture
from eagle31_train.reporting.tables import Section, Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

METRICS, TIMINGS, LAUNCHES, CONFIG = "metrics.jsonl", "timings.jsonl", "launches.jsonl", "config.yaml"
HELDOUT = "heldout_"  # prefix of what was measured on held-out samples and prompts
ESTIMATE = "acceptance_estimate"
EARLIER = {"tau": ESTIMATE, f"{HELDOUT}tau": HELDOUT + ESTIMATE}  # as earlier versions called it
LENGTH = "acceptance_length"  # on held-out prompts; only if the store had trajectories
Row = dict[str, Any]
PAGE = "report.html"
GIB = 2**30
DECADE = 8.0  # curves that span more than this factor get a logarithmic axis
RECENT = 50  # steps that the table's means are taken over
LEARNING, DEPTH, OPTIMIZER, MACHINE = "Learning", "By depth", "Optimizer", "Machine"
NUMBERS = (LENGTH, "loss", ESTIMATE, "oov_share", "grad_norm", "lr")
BEST = {LENGTH: np.nanargmax, ESTIMATE: np.nanargmax, "loss": np.nanargmin}


class Log:
    """Rows of one kind by column: steps [N], and numbers [N] with NaN where a row has none."""

    def __init__(self, rows: list[Row]) -> None:
        self._rows = rows
        self.steps = np.array([row["step"] for row in rows], dtype=np.float64)

    def __contains__(self, name: str) -> bool:
        return bool(np.isfinite(self[name]).any())

    def __getitem__(self, name: str) -> Floats:
        """[N]; NaN throughout for a column that no row has."""
        return np.array([_number(row.get(name)) for row in self._rows], dtype=np.float64)

    def depths(self, name: str) -> list[Floats]:
        """The columns [N] of a list, one per depth; [] if no row has it."""
        lists = [values if isinstance(values := row.get(name), list) else [] for row in self._rows]
        count = max(map(len, lists), default=0)
        return [np.array([_number(v[k]) if k < len(v) else np.nan for v in lists]) for k in range(count)]


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else np.nan


@dataclass(frozen=True)
class History:
    """All that is known of a training: its folder, run/train; the rows of metrics and timings; launches, newest last;
    the resolved config as YAML, "" if it was not saved; the manifest, None before the end; notes on the files."""

    folder: Path
    metrics: Log
    timings: Log
    launches: list[Row]
    config: str
    manifest: dict[str, Any] | None
    notes: list[str]

    @property
    def restarts(self) -> list[int]:
        """The steps after which later launches went on."""
        steps = [(launch.get("facts") or {}).get("after_step") for launch in self.launches]
        return [int(step) for step in steps if step]

    @property
    def busy(self) -> Floats:
        """Seconds of each timed step, without those spent `aside`, on evaluating and saving, if known."""
        return self.timings["seconds"] - np.nan_to_num(self.timings["aside"])

    def marked(self, name: str) -> Floats:
        """Steps whose rows say `"name": true`."""
        return self.metrics.steps[self.metrics[name] == 1]


def read(run: Path) -> History:
    """Read the folder of a run, or the folder `train` in it; UserError if it has no step yet, or is damaged."""
    folder = next((folder for folder in (run / "train", run) if (folder / METRICS).is_file()), None)
    if folder is None:
        raise UserError(f"there is no training in {run}: {run / 'train' / METRICS} is missing")
    notes: list[str] = []
    rows = _rows(folder / METRICS, notes)
    metrics = [{EARLIER.get(name, name): value for name, value in row.items()} for row in rows]
    if not metrics:
        raise UserError(f"{folder / METRICS} has no step yet: wait for the first one")
    timings, launches = _rows(folder / TIMINGS, notes), _rows(folder / LAUNCHES, notes, needs=None)
    config, manifest = folder / CONFIG, folder / artifacts.MANIFEST
    text = config.read_text(encoding="utf-8", errors="replace") if config.is_file() else ""
    ended = artifacts.read_json(manifest, "train.py") if manifest.exists() else None
    return History(folder, Log(metrics), Log(list(timings)), list(launches), text, ended, notes)


def _rows(path: Path, notes: list[str], needs: str | None = "step") -> Iterator[Row]:
    """Yield the rows of a file, none if it is missing. A torn last line, as a running training leaves, gets a note."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                row = foreign.parse_json(line)
            except ValueError:  # of JSON or of UTF-8
                row = None
            if isinstance(row, dict) and (needs is None or np.isfinite(_number(row.get(needs)))):
                yield row
            elif line.endswith(b"\n"):
                raise UserError(f"{path}:{number} is damaged: remove the line; the report then lacks its row")
            else:
                notes.append(
                    f"{path}:{number} is incomplete and was left out: it is still being written, or was cut off"
                )


class Plot(NamedTuple):
    """A picture to draw. name, section, title: as in `Picture`. column: what it shows, of metrics.jsonl or, in section
    MACHINE, of the timings; a list gets a curve for each depth. form: format of numbers in the legend."""

    name: str
    section: str
    title: str
    column: str
    kind: figures.Kind = figures.NUMBER
    form: str = "{:.3g}"


PLOTS = [
    Plot("loss", LEARNING, "Loss, in nats: mean over depths", "loss"),
    Plot(ESTIMATE, LEARNING, "Acceptance estimate (teacher-forced)", ESTIMATE, figures.LENGTH, "{:.2f}"),
    Plot(LENGTH, LEARNING, "Acceptance length (decoding of held-out prompts)", LENGTH, figures.LENGTH, "{:.2f}"),
    Plot("prefix", DEPTH, "Share of drafts that are right up to this depth", "prefix_at_depth", SHARE, "{:.1%}"),
    Plot("accuracy", DEPTH, "Share of tokens that are right at this depth", "accuracy_at_depth", SHARE, "{:.1%}"),
    Plot("loss_at_depth", DEPTH, "Loss at this depth, in nats", "loss_at_depth"),
    Plot("rms", DEPTH, "RMS of the state that this depth reads", "rms_at_depth"),
    Plot("gradient", OPTIMIZER, "Gradient norm, before it is clipped", "grad_norm"),
    Plot("lr", OPTIMIZER, "Learning rate", "lr"),
    Plot("throughput", MACHINE, "Tokens per second of a step, on all devices", "tokens", form="{:,.0f}"),
    Plot("waiting", MACHINE, "Share of a step's time spent waiting for data", "waited", SHARE, "{:.2%}"),
    Plot("memory", MACHINE, "Memory of the main process, or of its device, GiB", "memory_bytes", form="{:.2f}"),
]


def write(run: Path, out: Path | None = None) -> tuple[Path, list[str]]:
    """Draw a run, finished or not, into `out` or the run's report/. Return the page, and notes on the files that it was
    made from. UserError if there is no run, or one of its files is damaged."""
    history = read(run)
    out = out or history.folder.parent / "report"
    # A new folder is created atomically.
    with writing(out, "--out"), nullcontext(out) if out.exists() else artifacts.building(out) as folder:
        _, images = html.draw(folder, list(pictures(history)))
        artifacts.write_text(folder / PAGE, render(history, images))
    return out / PAGE, history.notes


def pictures(history: History) -> Iterator[Picture]:
    remark = f"strokes above: {len(history.restarts):,} restarts" if history.restarts else ""
    for plot in PLOTS:
        table = history.timings if plot.section == MACHINE else history.metrics
        if plot.column in table or HELDOUT + plot.column in table or table.depths(plot.column):
            yield Picture(plot.name, plot.section, plot.title, partial(_draw, plot, history), remark)


def _draw(plot: Plot, history: History, axes: "Axes") -> None:
    from matplotlib import colormaps

    table = history.metrics
    if plot.section == MACHINE:
        values = history.timings[plot.column] / (GIB if plot.name == "memory" else history.busy)
        figures.noisy(axes, history.timings.steps, values, "at the end", "C0", plot.form)
    elif depths := table.depths(plot.column):
        colours = colormaps["viridis"](np.linspace(0, 0.85, len(depths)))
        for depth, (column, colour) in enumerate(zip(depths, colours, strict=True), 1):
            figures.noisy(axes, table.steps, column, f"depth {depth}", colour, plot.form)
    else:
        figures.noisy(axes, table.steps, table[plot.column], "training", "C0", plot.form)
        heldout = table[HELDOUT + plot.column]
        if (valid := np.isfinite(heldout)).any():
            last = plot.form.format(heldout[valid][-1])
            axes.plot(table.steps[valid], heldout[valid], "o-", color="C1", label=f"held-out  {last}")
    if plot.section == MACHINE or plot.kind == SHARE or plot.name == "lr":
        axes.set_ylim(bottom=0)
    elif 0 < DECADE * axes.dataLim.intervaly[0] < axes.dataLim.intervaly[1]:
        figures.logarithmic(axes)
    plot.kind.scale(axes)
    figures.whole_numbers(axes, "optimizer step")
    top_to_bottom = axes.get_xaxis_transform()
    axes.vlines(history.restarts, 0.95, 1, color="gray", linewidth=0.8, transform=top_to_bottom)
    if plot.name in ("loss", "gradient"):
        left_out = history.marked("left_out")
        axes.plot(left_out, np.full(len(left_out), 0.03), "rx", transform=top_to_bottom)


def render(history: History, images: html.Images) -> str:
    manifest = {name: value for name, value in (history.manifest or {}).items() if name != "files"}
    state = "Training ended" if history.manifest is not None else "Training had not ended when this page was made"
    kept = f", and step {manifest['kept']['step']:,} is kept" if "kept" in manifest else ""
    remarks = [f"{state}; the last step was {history.metrics.steps[-1]:,.0f}{kept}.", *history.notes]
    sections = [
        Section("", remarks, [_numbers(history)]),
        *(Section(name, [], []) for name in images),
        Section("Tokens and time", [], [Table("", ["", ""], list(_facts(history).items()))]),
    ]
    texts = {
        f"Launches ({len(history.launches):,})": "\n".join(json.dumps(each, indent=2) for each in history.launches),
        "Configuration": history.config,
        "Manifest": json.dumps(manifest, indent=2) if manifest else "",
    }
    name = history.folder.resolve().parent.name
    return html.page(f"{name}: training", sections, images, texts)


def _numbers(history: History) -> Table:
    """Where the curves ended: training over its last steps, held-out at its last and its best evaluation."""
    table, rows = history.metrics, []
    for name in NUMBERS:
        heldout, best = table[HELDOUT + name], ""
        if name in BEST and HELDOUT + name in table:
            at = int(BEST[name](heldout))
            best = f"{heldout[at]:.4g} (step {table.steps[at]:,.0f})"
        rows.append([name, _shown(table[name], 1 if name == "lr" else RECENT), _shown(heldout), best])
    if shares := [_shown(column) for column in table.depths(f"{HELDOUT}acceptance_at_depth")]:
        rows.insert(1, ["acceptance_at_depth", "", ", ".join(shares), ""])
    return Table("", ["", f"training, mean of the last {RECENT} steps", "held-out, last", "held-out, best"], rows)


def _facts(history: History) -> dict[str, str]:
    """How much was read, how fast, and what was left out."""
    timings, facts = history.timings, dict[str, str]()
    if "tokens" in history.metrics:
        facts["tokens read"] = f"{np.nanmax(history.metrics['tokens']):,.0f}"
    seconds = (history.manifest or {}).get("seconds") or (timings["seconds"].sum() if len(timings.steps) else 0)
    facts["hours"] = f"{seconds / 3600:,.2f}"
    if len(timings.steps) and (busy := float(np.nansum(history.busy))):
        facts["tokens per second"] = f"{np.nansum(timings['tokens']) / busy:,.0f}"
        facts["waiting for data"] = f"{np.nansum(timings['waited']) / busy:.1%}"
    if "memory_bytes" in timings:
        facts["peak memory"] = f"{np.nanmax(timings['memory_bytes']) / GIB:.2f} GiB"
    marks = {"steps skipped": "left_out", "steps with nothing to train": "no_pairs"}
    return facts | {name: f"{len(history.marked(mark)):,}" for name, mark in marks.items()}


def _shown(values: Floats, last: int = 1) -> str:
    """Return the mean of the last numbers among `values` [N]; "" if none is a number."""
    valid = values[np.isfinite(values)][-last:]
    return f"{valid.mean():.4g}" if len(valid) else ""
