"""What a training run looks like: its curves as pictures, and one HTML page that shows all of it."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from eagle31_train import artifacts
from eagle31_train.errors import UserError
from eagle31_train.reporting import html
from eagle31_train.reporting.figures import Floats
from eagle31_train.reporting.training_figures import ESTIMATED, GIB, MEASURED, PLOTS, pictures
from eagle31_train.reporting.training_log import ESTIMATE, LENGTH, History, Table, read

PAGE = "report.html"
RECENT = 50  # training rows that the table's means are taken over
NUMBERS = (LENGTH, "loss", ESTIMATE, "oov_share", "grad_norm", "lr")
BY_DEPTH = ("prefix_at_depth", "accuracy_at_depth", "loss_at_depth", "rms_at_depth", "acceptance_at_depth")


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
        _, drawn = html.draw(made, pictures(history), [*earlier, out / "tau.png"])  # as the estimate was called once
        artifacts.write_text(made / PAGE, render(history, drawn))
        if made != out:
            artifacts.commit(made, out)
    finally:
        if made != out:
            shutil.rmtree(made, ignore_errors=True)
    return out / PAGE, history.notes


# ---------------------------------------------------------------- the page


def render(history: History, drawn: Mapping[str, str]) -> str:
    """The page as text; `drawn`: pictures by section, as HTML."""
    manifest = {name: value for name, value in (history.manifest or {}).items() if name != "files"}
    launches = "\n".join(json.dumps(launch, indent=2, ensure_ascii=False) for launch in history.launches)
    total = f" of {history.total:,}" if history.total else ""
    state = "Training ended" if history.manifest is not None else "Training had not ended when this page was made"
    parts = [
        html.paragraph(f"{state}; the last step was {history.last_step:,}{total}."),
        *map(html.paragraph, history.notes),
        html.table(["", ""], list(_facts(history).items())),
        *(part for name, shown in drawn.items() for part in (html.heading(name), shown)),
        html.heading("Numbers"),
        _numbers(history),
        _depths(history),
        html.heading("How it was made"),
        html.folded(f"Launches ({len(history.launches):,})", html.code(launches)),
        html.folded("Configuration", html.code(history.config_text)),
        html.folded("Manifest", html.code(json.dumps(manifest, indent=2) if manifest else "")),
    ]
    return html.document(f"{history.name}: training", parts)


def _facts(history: History) -> dict[str, str]:
    """The numbers that are looked for first."""
    train, timings = history.train, history.timings
    facts: dict[str, str] = {}
    if history.best is not None:
        step, length = history.best
        facts[MEASURED] = f"{_last(history.heldout[LENGTH]):.3f}"
        kept = ", which is kept" if history.keeps_best else ""
        facts["greatest acceptance length"] = f"{length:.3f}, at step {step:,.0f}{kept}"
    for rows, label in ((history.heldout, "held-out"), (train, "training")):
        if ESTIMATE in rows and f"{ESTIMATED}, held-out" not in facts:
            facts[f"{ESTIMATED}, {label}"] = f"{_last(rows[ESTIMATE]):.3f}"
            facts[f"loss, {label}"] = f"{_last(rows['loss']):.3f}"
    if "tokens" in train:
        facts["tokens read"] = f"{_last(train['tokens']):,.0f}"
    seconds = float(timings["seconds"].sum()) if len(timings) else float((history.manifest or {}).get("seconds") or 0)
    facts["hours"] = f"{seconds / 3600:,.2f}"
    left = max((history.total or 0) - history.last_step, 0)
    if len(timings) and (busy := float(np.nansum(history.busy))):
        facts["tokens per second"] = f"{np.nansum(timings['tokens']) / busy:,.0f}"
        facts["waiting for data"] = f"{np.nansum(timings['waited']) / busy:.1%}"
        facts["hours to go"] = f"{left * seconds / len(timings) / 3600:,.2f}"
    if "memory_bytes" in timings:
        facts["most memory"] = f"{np.nanmax(timings['memory_bytes']) / GIB:.2f} GiB"
    marks = {"steps left out": "left_out", "steps with nothing to train": "no_pairs"}
    facts |= {name: f"{len(history.marked(mark)):,}" for name, mark in marks.items()}
    return facts


def _numbers(history: History) -> str:
    """Where the curves ended: training over its last rows, held-out at its last and its best evaluation."""
    train, heldout = history.train, history.heldout
    rows = []
    for name in NUMBERS:
        row = [name, _shown((_last if name == "lr" else _recent)(train[name])), _shown(_last(heldout[name])), ""]
        if name in ("loss", ESTIMATE, LENGTH) and name in heldout:
            at = int((np.nanargmin if name == "loss" else np.nanargmax)(heldout[name]))
            row[-1] = f"{heldout[name][at]:.4g} (step {heldout.steps[at]:,.0f})"
        rows.append(row)
    recent = f"training, mean of the last {min(RECENT, len(train)):,} steps"
    return html.table(["", recent, "held-out, last", "held-out, best"], rows)


def _depths(history: History) -> str:
    """The same for each depth."""
    sources: list[tuple[Table, str, Callable[[Floats], float]]] = [
        (history.train, "training", _recent),
        (history.heldout, "held-out", _last),
    ]
    rows = [
        [f"{name}, {where}", *(_shown(end(column)) for column in depths)]
        for name in BY_DEPTH
        for table, where, end in sources
        if (depths := table.depths(name))
    ]
    width = max(map(len, rows), default=0)  # as deep as was trained, or drafted
    rows = [[*row, *[""] * (width - len(row))] for row in rows]
    return html.table(["", *(f"depth {depth}" for depth in range(1, width))], rows) if rows else ""


def _last(values: Floats) -> float:
    """The last that is a number; NaN if none is."""
    valid = values[np.isfinite(values)]
    return float(valid[-1]) if len(valid) else np.nan


def _recent(values: Floats) -> float:
    """The mean of the last RECENT; NaN if none is a number."""
    valid = values[-RECENT:][np.isfinite(values[-RECENT:])]
    return float(valid.mean()) if len(valid) else np.nan


def _shown(value: float) -> str:
    return f"{value:.4g}" if np.isfinite(value) else ""
