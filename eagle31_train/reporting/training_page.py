"""What a training run looks like: its curves as pictures, and one HTML page that shows all of it."""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from eagle31_train import artifacts
from eagle31_train.errors import UserError
from eagle31_train.reporting import html
from eagle31_train.reporting.figures import Floats
from eagle31_train.reporting.training_figures import ESTIMATED, GIB, pictures
from eagle31_train.reporting.training_log import ESTIMATE, History, read

PAGE = "report.html"
RECENT = 50  # training rows that the table's means are taken over
NUMBERS = ("loss", ESTIMATE, "oov_share", "grad_norm", "lr")
BY_DEPTH = ("prefix_at_depth", "accuracy_at_depth", "loss_at_depth", "rms_at_depth")


def write(run: Path, out: Path | None = None) -> Path:
    """Draw a run, whether it has ended or not.

    Args:
        run: the run's folder, or the folder `train` in it.
        out: where the page and the pictures go; default: the folder `report` in the run's.

    Returns:
        The page.

    Raises:
        UserError: there is no run, or one of its files is damaged.
    """
    history = read(run)
    out = out or history.folder.parent / "report"
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file: give another --out")
    _, drawn = html.draw(out, pictures(history))
    artifacts.write_text(out / PAGE, render(history, drawn))
    return out / PAGE


# ---------------------------------------------------------------- the page


def render(history: History, drawn: Mapping[str, str]) -> str:
    """The page as text; `drawn`: pictures by section, as HTML."""
    manifest = {name: value for name, value in (history.manifest or {}).items() if name != "files"}
    launches = "\n".join(json.dumps(launch, indent=2, ensure_ascii=False) for launch in history.launches)
    total = f" of {history.total:,}" if history.total else ""
    state = "Training ended" if history.manifest is not None else "Training had not ended when this page was made"
    parts = [
        html.paragraph(f"{state}; the last step was {history.last_step:,}{total}."),
        html.table(["", ""], list(_facts(history).items())),
        *(part for name, shown in drawn.items() for part in (html.heading(name), shown)),
        html.heading("Numbers"),
        _numbers(history),
        html.heading("How it was made"),
        html.folded(f"Launches ({len(history.launches):,})", html.code(launches)),
        html.folded("Configuration", html.code(history.config_text)),
        html.folded("Manifest", html.code(json.dumps(manifest, indent=2) if manifest else "")),
    ]
    return html.document(f"{history.name}: training", parts)


def _facts(history: History) -> dict[str, str]:
    """The numbers that are looked for first."""
    train, timings = history.train, history.timings
    rows, label = (history.heldout, "held-out") if ESTIMATE in history.heldout else (train, "training")
    facts = {f"{ESTIMATED}, {label}": _shown(_last(rows[ESTIMATE])), f"loss, {label}": _shown(_last(rows["loss"]))}
    facts["tokens read"] = f"{_last(train['tokens']):,.0f}"
    if len(timings) and (busy := float(np.nansum(history.busy))):
        seconds, left = float(timings["seconds"].sum()), max((history.total or 0) - history.last_step, 0)
        facts["hours"] = f"{seconds / 3600:,.2f}"
        facts["hours to go"] = f"{left * seconds / len(timings) / 3600:,.2f}"
        facts["tokens per second"] = f"{np.nansum(timings['tokens']) / busy:,.0f}"
        facts["waiting for data"] = f"{np.nansum(timings['waited']) / busy:.1%}"
        facts["most memory"] = f"{np.nanmax(timings['memory_bytes'], initial=0) / GIB:.2f} GiB"
    marks = {"steps left out": "left_out", "steps with nothing to train": "no_pairs"}
    return facts | {name: f"{len(history.marked(mark)):,}" for name, mark in marks.items()}


def _numbers(history: History) -> str:
    """Where the curves ended: training over its last rows, held-out at its last and its best evaluation."""
    train, heldout = history.train, history.heldout
    rows = []
    for name in NUMBERS:
        row = [name, _shown((_last if name == "lr" else _recent)(train[name])), _shown(_last(heldout[name])), ""]
        if name in ("loss", ESTIMATE) and name in heldout:
            at = int((np.nanargmin if name == "loss" else np.nanargmax)(heldout[name]))
            row[-1] = f"{heldout[name][at]:.4g} (step {heldout.steps[at]:,.0f})"
        rows.append(row)
    recent = f"training, mean of the last {min(RECENT, len(train)):,} steps"
    depths = [[name, *(_shown(_last(column)) for column in heldout.depths(name))] for name in BY_DEPTH]
    heads = [f"depth {depth}" for depth in range(1, len(depths[0]))]
    return html.table(["", recent, "held-out, last", "held-out, best"], rows) + html.table(["held-out", *heads], depths)


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
