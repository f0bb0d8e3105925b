"""What a training run looks like: its curves as pictures, and one HTML page that shows all of it."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from eagle31_train import artifacts
from eagle31_train.errors import UserError
from eagle31_train.reporting import html
from eagle31_train.reporting.figures import Floats, percent, short
from eagle31_train.reporting.training_figures import ESTIMATED, GIB, PLOTS, pictures
from eagle31_train.reporting.training_log import ESTIMATE, History, Table, read

PAGE = "report.html"
RECENT = 50  # training rows that the table's means are taken over
LABELS = {
    "loss": "loss",
    ESTIMATE: ESTIMATED,
    "oov_share": "targets outside the draft vocabulary",
    "grad_norm": "gradient norm",
    "lr": "learning rate",
    "prefix_at_depth": "right up to it",
    "accuracy_at_depth": "right at it",
    "loss_at_depth": "loss",
    "rms_at_depth": "RMS of the state",
}
Form = Callable[[float], str]


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
    _, drawn = html.draw(out, pictures(history), [*earlier, out / "tau.png"])  # as the estimate was called once
    artifacts.write_text(out / PAGE, render(history, drawn))
    return out / PAGE, history.notes


# ---------------------------------------------------------------- the page


def render(history: History, drawn: Mapping[str, str]) -> str:
    """The page as text; `drawn`: pictures by section, as HTML."""
    manifest = {name: value for name, value in (history.manifest or {}).items() if name != "files"}
    launches = "\n".join(json.dumps(launch, indent=2, ensure_ascii=False) for launch in history.launches)
    parts = [
        *map(html.muted, [_state(history), *history.notes]),
        html.facts(_facts(history)),
        *(part for name, shown in drawn.items() for part in (html.heading(name), shown)),
        html.heading("Numbers"),
        _numbers(history),
        _depths(history),
        html.heading("How it was made"),
        _launches(history),
        html.folded(f"Launches in full ({len(history.launches):,})", html.code(launches)),
        html.folded("Configuration", html.code(history.config_text)),
        html.folded("Manifest", html.code(json.dumps(manifest, indent=2) if manifest else "")),
    ]
    return html.document(f"{history.name}: training", parts)


def _state(history: History) -> str:
    target = str((history.config.get("target") or {}).get("path") or "")
    shown = Path(target).name if Path(target).is_absolute() else target  # a page may be passed on
    what = f"An EAGLE drafter for {shown}. " if shown else ""
    if history.manifest is not None:
        return f"{what}Training ended after step {history.last_step:,}."
    total = f" of {history.total:,}" if history.total else ""
    return f"{what}Training had not ended: step {history.last_step:,}{total} was the last when this page was made."


def _facts(history: History) -> dict[str, str]:
    """The numbers that are looked for first."""
    train, timings = history.train, history.timings
    facts: dict[str, str] = {}
    for rows, label in ((history.heldout, "held-out"), (train, "training")):
        if ESTIMATE in rows and not facts:
            facts[f"{ESTIMATED}, {label}"] = f"{_last(rows[ESTIMATE]):.3f}"
            facts[f"loss, {label}"] = f"{_last(rows['loss']):.3f}"
    left = max((history.total or 0) - history.last_step, 0)
    facts["steps"] = f"{history.last_step:,}" + (f" of {history.total:,}" if left else "")
    if "tokens" in train:
        facts["tokens read"] = f"{_last(train['tokens']):,.0f}"
    seconds = float(timings["seconds"].sum()) if len(timings) else float((history.manifest or {}).get("seconds") or 0)
    if seconds:
        facts["time"] = duration(seconds)
    if len(timings) and (busy := float(np.nansum(history.busy))):
        facts["tokens per second"] = f"{np.nansum(timings['tokens']) / busy:,.0f}"
        facts["waiting for data"] = percent(float(np.nansum(timings["waited"])) / busy)
        if left:
            facts["still to go"] = f"about {duration(left * seconds / len(timings))}"
    if "memory_bytes" in timings:
        facts["most memory"] = f"{short(np.nanmax(timings['memory_bytes']) / GIB)} GiB"
    counts = {"launches": len(history.launches) if len(history.launches) > 1 else 0}
    counts |= {"loss spikes": len(history.marked("spike")), "steps left out": len(history.marked("left_out"))}
    return facts | {name: f"{count:,}" for name, count in counts.items() if count}


def _numbers(history: History) -> str:
    """Where the curves ended: training over its last rows, held-out at its last and its best evaluation."""
    train, heldout = history.train, history.heldout
    header = ["", f"training, last {min(RECENT, len(train)):,} steps"]
    if len(heldout):
        header += [f"held-out, step {heldout.steps[-1]:,.0f}", "best held-out"]
    forms: dict[str, Form] = {"loss": "{:.4f}".format, ESTIMATE: "{:.4f}".format, "oov_share": percent}
    forms |= {"grad_norm": short, "lr": short}
    rows = []
    for name, form in forms.items():
        if name not in train and name not in heldout:
            continue
        row = [LABELS[name], _shown(_last(train[name]) if name == "lr" else _recent(train[name]), form)]
        if name in heldout:
            values = heldout[name]
            row.append(_shown(_last(values), form))
            if name in ("loss", ESTIMATE):
                at = int(np.nanargmin(values) if name == "loss" else np.nanargmax(values))
                row.append(f"{form(values[at])} (step {heldout.steps[at]:,.0f})")
        rows.append(row + [""] * (len(header) - len(row)))
    return html.table(header, rows)


def _depths(history: History) -> str:
    """The same for each depth."""
    sources: list[tuple[Table, str, Callable[[Floats], float]]] = [
        (history.train, "training", _recent),
        (history.heldout, "held-out", _last),
    ]
    forms: dict[str, Form] = {"prefix_at_depth": "{:.1%}".format, "accuracy_at_depth": "{:.1%}".format}
    forms |= {"loss_at_depth": "{:.3f}".format, "rms_at_depth": "{:.3f}".format}
    ends = {
        f"{LABELS[name]}, {where}": [_shown(end(column), form) for column in depths]
        for name, form in forms.items()
        for table, where, end in sources
        if (depths := table.depths(name))
    }
    rows = [[str(depth), *row] for depth, row in enumerate(zip(*ends.values(), strict=True), 1)]
    return html.table(["depth", *ends], rows) if ends else ""


def _launches(history: History) -> str:
    if not history.launches:
        return html.muted("No launch was written down: the run is of an earlier version.")
    rows = []
    for launch in history.launches:
        facts, git = launch.get("facts") or {}, launch.get("git")
        host, versions = launch.get("host") or {}, launch.get("versions") or {}
        devices = host.get("devices") or [str(host.get("cpu", ""))]
        rows.append(
            [
                str(launch.get("time", "")).replace("T", " ").replace("+00:00", " UTC"),
                f"{facts.get('after_step', 0):,}",
                str(facts.get("profile", "")),
                str(facts.get("processes", "")),
                f"{len(devices)} × {devices[0]}" if len(devices) > 1 else devices[0],
                f"{git['commit'][:12]}{', changed' if git['changed'] else ''}" if git else "no checkout",
                str(versions.get("torch", "")),
            ]
        )
    return html.table(["launched", "after step", "profile", "processes", "device", "commit", "torch"], rows)


def duration(seconds: float) -> str:
    """Hours and minutes, or what is left of them."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours:,} h {minutes:02d} min" if hours else f"{minutes} min"


def _last(values: Floats) -> float:
    """The last that is a number; NaN if none is."""
    valid = values[np.isfinite(values)]
    return float(valid[-1]) if len(valid) else np.nan


def _recent(values: Floats) -> float:
    """The mean of the last RECENT; NaN if none is a number."""
    valid = values[-RECENT:][np.isfinite(values[-RECENT:])]
    return float(valid.mean()) if len(valid) else np.nan


def _shown(value: float, form: Any) -> str:
    return form(value) if np.isfinite(value) else ""
