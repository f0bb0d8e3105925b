"""One HTML page with all of a training run in it."""

import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from eagle31_train.report.canvas import percent, short
from eagle31_train.report.figures import GIB, Plot
from eagle31_train.report.history import History
from eagle31_train.report.html import document, facts, figure, figures, folded, table

Pictures = Mapping[Plot, tuple[bytes, bytes]]  # on light and on dark paper
RECENT = 50  # training rows that the table's means are taken over


def render(history: History, pictures: Pictures) -> str:
    """The page as text."""
    sections = dict.fromkeys(plot.section for plot in pictures)
    parts = [
        f"<h1>{escape(history.name)}</h1>",
        *(f'<p class="muted">{escape(line)}</p>' for line in [_state(history), *history.notes]),
        _facts(history),
        *(_section(name, [plot for plot in pictures if plot.section == name], pictures) for name in sections),
        "<h2>Numbers</h2>",
        _numbers(history),
        _depths(history),
        "<h2>How it was made</h2>",
        _launches(history.launches),
        folded("Configuration", history.config_text),
        folded("Manifest", json.dumps(_without_files(history.manifest), indent=2) if history.manifest else ""),
    ]
    return document(f"{history.name}: training", parts)


def _state(history: History) -> str:
    target = str((history.config.get("target") or {}).get("path") or "")
    shown = Path(target).name if Path(target).is_absolute() else target  # a page may be passed on
    what = f"An EAGLE drafter for {shown}. " if shown else ""
    done, total = history.last_step, history.total
    if history.manifest is not None:
        return f"{what}Training ended after {_steps(done)}."
    left = f" of {total:,}" if total else ""
    return f"{what}Training had not ended: step {done:,}{left} was the last when this page was made."


def _facts(history: History) -> str:
    """The numbers that are looked for first."""
    train, timings = history.train, history.timings
    manifest = history.manifest or {}
    told: dict[str, str] = {}
    for rows, label in ((history.heldout, "held-out"), (train, "training")):
        if "tau" in rows and not told:
            told[f"tau, {label}"] = f"{_last(rows['tau']):.3f}"
            told[f"loss, {label}"] = f"{_last(rows['loss']):.3f}"
    left = max((history.total or 0) - history.last_step, 0)
    told["steps"] = f"{history.last_step:,}" + (f" of {history.total:,}" if left else "")
    if "tokens" in train:
        told["tokens read"] = f"{_last(train['tokens']):,.0f}"
    if seconds := float(timings["seconds"].sum()) if len(timings) else float(manifest.get("seconds") or 0):
        told["time"] = duration(seconds)
    if len(timings) and (busy := float(np.nansum(history.busy))):
        told["tokens per second"] = f"{np.nansum(timings['tokens']) / busy:,.0f}"
        told["waiting for data"] = percent(float(np.nansum(timings["waited"])) / busy)
        if left:
            told["still to go"] = f"about {duration(left * seconds / len(timings))}"
    if "memory_bytes" in timings:
        told["most memory"] = f"{short(np.nanmax(timings['memory_bytes']) / GIB)} GiB"
    if len(history.launches) > 1:
        told["launches"] = f"{len(history.launches):,}"
    for name, label in (("spike", "loss spikes"), ("left_out", "steps left out")):
        if len(steps := history.marked(name)):
            told[label] = f"{len(steps):,}"
    return facts(told)


def _section(name: str, plots: Sequence[Plot], pictures: Pictures) -> str:
    drawn = [figure(*pictures[plot], f"{plot.title}, over optimizer steps", plot.caption) for plot in plots]
    return f"<h2>{escape(name)}</h2>\n{figures(drawn)}"


# ---------------------------------------------------------------- tables


def _numbers(history: History) -> str:
    """Where the curves ended: training over its last rows, held-out at its last and its best evaluation."""
    train, heldout = history.train, history.heldout
    recent = min(RECENT, len(train))
    header = ["", f"training, last {_steps(recent)}"]
    if len(heldout):
        header += [f"held-out, step {heldout.steps[-1]:,.0f}", "best held-out"]
    rows = []
    for name, label, best in (
        ("loss", "loss", np.nanargmin),
        ("tau", "tau", np.nanargmax),
        ("oov_share", "targets outside the draft vocabulary", None),
        ("grad_norm", "gradient norm", None),
        ("lr", "learning rate", None),
    ):
        if name not in train and name not in heldout:
            continue
        show: Any = percent if name == "oov_share" else short if name in ("grad_norm", "lr") else "{:.4f}".format
        last = _last(train[name]) if name == "lr" else _mean(train[name][-recent:])
        row = [label, _shown(last, show)]
        if name in heldout:
            values = heldout[name]
            row.append(_shown(_last(values), show))
            at = int(best(values)) if best is not None else None
            row.append(f"{show(values[at])} (step {heldout.steps[at]:,.0f})" if at is not None else "")
        rows.append(row + [""] * (len(header) - len(row)))
    return table(header, rows)


def _depths(history: History) -> str:
    """The same for each depth."""
    train, heldout = history.train, history.heldout
    shown: list[tuple[str, Any]] = [
        ("prefix_at_depth", "{:.1%}".format),
        ("accuracy_at_depth", "{:.1%}".format),
        ("loss_at_depth", "{:.3f}".format),
        ("rms_at_depth", "{:.3f}".format),
    ]
    shown = [(name, show) for name, show in shown if train.depths(name) or heldout.depths(name)]
    count = max((len(train.depths(name)) for name, _ in shown), default=0)
    words = {"prefix_at_depth": "right up to it", "accuracy_at_depth": "right at it"}
    words |= {"loss_at_depth": "loss", "rms_at_depth": "RMS of the state"}
    header, columns = ["depth"], [[str(depth + 1) for depth in range(count)]]
    for name, show in shown:
        for rows, where in ((train, "training"), (heldout, "held-out")):
            if depths := rows.depths(name):
                header.append(f"{words[name]}, {where}")
                ends = [_mean(column[-RECENT:]) if rows is train else _last(column) for column in depths]
                columns.append([_shown(end, show) for end in ends])
    return table(header, list(zip(*columns, strict=True))) if count else ""


def _launches(launches: Sequence[Mapping[str, Any]]) -> str:
    if not launches:
        return '<p class="muted">No launch was written down: the run is of an earlier version.</p>'
    rows = []
    for launch in launches:
        known, git = launch.get("facts") or {}, launch.get("git")
        commit = f"{git['commit'][:12]}{', changed' if git['changed'] else ''}" if git else "no checkout"
        host, versions = launch.get("host") or {}, launch.get("versions") or {}
        devices = host.get("devices") or [str(host.get("cpu", ""))]
        rows.append(
            [
                str(launch.get("time", "")).replace("T", " ").replace("+00:00", " UTC"),
                f"{known.get('after_step', 0):,}",
                str(known.get("profile", "")),
                str(known.get("processes", "")),
                f"{len(devices)} × {devices[0]}" if len(devices) > 1 else devices[0],
                commit,
                str(versions.get("torch", "")),
            ]
        )
    listed = table(["launched", "after step", "profile", "processes", "device", "commit", "torch"], rows)
    everything = "\n".join(json.dumps(launch, indent=2, ensure_ascii=False) for launch in launches)
    return listed + folded(f"Launches in full ({len(launches):,})", everything)


# ---------------------------------------------------------------- values


def duration(seconds: float) -> str:
    """Hours and minutes, or what is left of them."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:,} h {minutes:02d} min" if hours else f"{minutes} min"


def _steps(count: int) -> str:
    return "1 step" if count == 1 else f"{count:,} steps"


def _last(values: Any) -> float:
    """The last that is a number; NaN if none is."""
    good = values[np.isfinite(values)]
    return float(good[-1]) if len(good) else float("nan")


def _mean(values: Any) -> float:
    good = values[np.isfinite(values)]
    return float(good.mean()) if len(good) else float("nan")


def _shown(value: float, show: Any) -> str:
    return show(value) if np.isfinite(value) else ""


def _without_files(manifest: Mapping[str, Any] | None) -> dict[str, Any]:
    return {name: value for name, value in (manifest or {}).items() if name != "files"}
