"""One HTML page with everything in it: no other file, no network, no script."""

import base64
import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from eagle31_train.report.canvas import DPI, SIZE, percent, short
from eagle31_train.report.figures import GIB, Plot
from eagle31_train.report.history import History

Pictures = Mapping[Plot, tuple[bytes, bytes]]  # on light and on dark paper
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"  # nothing may ask a network for anything
RECENT = 50  # training rows that the table's means are taken over

STYLE = """
:root { color-scheme: light dark; --paper: #ffffff; --ink: #1f2328; --muted: #656d76; --line: #e1e4e8; --box: #f6f8fa; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #14181f; --ink: #e6edf3; --muted: #8d96a0; --line: #2d343f; --box: #1b212a; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 74rem; padding: 1.25rem clamp(.75rem, 3vw, 2rem) 3rem; background: var(--paper);
  color: var(--ink); font: 1rem/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
h1 { margin: 0; font-size: 1.7rem; line-height: 1.2; overflow-wrap: anywhere; }
h2 { margin: 2.2rem 0 .6rem; font-size: 1.15rem; border-bottom: 1px solid var(--line); padding-bottom: .3rem; }
p { margin: .3rem 0; }
.muted, figcaption { color: var(--muted); }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(8.5rem, 1fr)); gap: .6rem; margin: 1.2rem 0 0; }
.facts div { background: var(--box); border-radius: .5rem; padding: .55rem .8rem; }
.facts dt { color: var(--muted); font-size: .82rem; }
.facts dd { margin: 0; font-size: 1.15rem; font-weight: 600; overflow-wrap: anywhere; }
.pictures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); gap: 1.4rem 2rem; }
figure { margin: 0; max-width: 40rem; }
img { display: block; width: 100%; height: auto; }
figcaption { font-size: .88rem; line-height: 1.4; margin-top: .2rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; margin: 0 0 1.4rem; font-variant-numeric: tabular-nums; font-size: .92rem; }
th, td { text-align: right; padding: .3rem .8rem; border-bottom: 1px solid var(--line); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
th { color: var(--muted); font-weight: 500; white-space: normal; min-width: 5.5rem; vertical-align: bottom; }
th:first-child { min-width: 0; }
details { margin: .6rem 0; border: 1px solid var(--line); border-radius: .5rem; padding: .5rem .9rem; }
summary { cursor: pointer; font-weight: 500; }
pre { overflow-x: auto; font-size: .82rem; line-height: 1.45; margin: .6rem 0 .2rem; }
@media print { details { display: none; } }
"""


def render(history: History, pictures: Pictures) -> str:
    """The page as text."""
    title = f"{escape(history.name)}: training"
    sections = dict.fromkeys(plot.section for plot in pictures)
    parts = [
        "<!doctype html>",
        '<html lang="en">',
        '<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
        f"<title>{title}</title>",
        f"<style>{STYLE}</style>",
        f"<h1>{escape(history.name)}</h1>",
        *(f'<p class="muted">{escape(line)}</p>' for line in [_state(history), *history.notes]),
        _facts(history),
        *(_section(name, [plot for plot in pictures if plot.section == name], pictures) for name in sections),
        "<h2>Numbers</h2>",
        _numbers(history),
        _depths(history),
        "<h2>How it was made</h2>",
        _launches(history.launches),
        _folded("Configuration", history.config_text),
        _folded("Manifest", json.dumps(_without_files(history.manifest), indent=2) if history.manifest else ""),
        "</html>",
    ]
    return "\n".join(part for part in parts if part) + "\n"


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
    facts: dict[str, str] = {}
    for table, label in ((history.heldout, "held-out"), (train, "training")):
        if "tau" in table and not facts:
            facts[f"tau, {label}"] = f"{_last(table['tau']):.3f}"
            facts[f"loss, {label}"] = f"{_last(table['loss']):.3f}"
    left = max((history.total or 0) - history.last_step, 0)
    facts["steps"] = f"{history.last_step:,}" + (f" of {history.total:,}" if left else "")
    if "tokens" in train:
        facts["tokens read"] = f"{_last(train['tokens']):,.0f}"
    if seconds := float(timings["seconds"].sum()) if len(timings) else float(manifest.get("seconds") or 0):
        facts["time"] = duration(seconds)
    if len(timings) and (busy := float(np.nansum(history.busy))):
        facts["tokens per second"] = f"{np.nansum(timings['tokens']) / busy:,.0f}"
        facts["waiting for data"] = percent(float(np.nansum(timings["waited"])) / busy)
        if left:
            facts["still to go"] = f"about {duration(left * seconds / len(timings))}"
    if "memory_bytes" in timings:
        facts["most memory"] = f"{short(np.nanmax(timings['memory_bytes']) / GIB)} GiB"
    if len(history.launches) > 1:
        facts["launches"] = f"{len(history.launches):,}"
    for name, label in (("spike", "loss spikes"), ("left_out", "steps left out")):
        if len(steps := history.marked(name)):
            facts[label] = f"{len(steps):,}"
    cells = "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in facts.items())
    return f'<dl class="facts">{cells}</dl>'


def _section(name: str, plots: Sequence[Plot], pictures: Pictures) -> str:
    figures = "\n".join(_figure(plot, *pictures[plot]) for plot in plots)
    return f'<h2>{escape(name)}</h2>\n<div class="pictures">\n{figures}\n</div>'


def _figure(plot: Plot, light: bytes, dark: bytes) -> str:
    size = f'width="{round(SIZE[0] * DPI)}" height="{round(SIZE[1] * DPI)}"'
    return (
        f'<figure><picture><source media="(prefers-color-scheme: dark)" srcset="{_data(dark)}">'
        f'<img src="{_data(light)}" {size} alt="{escape(plot.title)}, over optimizer steps"></picture>'
        f"<figcaption>{escape(plot.caption)}</figcaption></figure>"
    )


def _data(png: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(png).decode()


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
    return _table(header, rows)


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
        for table, where in ((train, "training"), (heldout, "held-out")):
            if depths := table.depths(name):
                header.append(f"{words[name]}, {where}")
                ends = [_mean(column[-RECENT:]) if table is train else _last(column) for column in depths]
                columns.append([_shown(end, show) for end in ends])
    return _table(header, list(zip(*columns, strict=True))) if count else ""


def _launches(launches: Sequence[Mapping[str, Any]]) -> str:
    if not launches:
        return '<p class="muted">No launch was written down: the run is of an earlier version.</p>'
    rows = []
    for launch in launches:
        facts, git = launch.get("facts") or {}, launch.get("git")
        commit = f"{git['commit'][:12]}{', changed' if git['changed'] else ''}" if git else "no checkout"
        host, versions = launch.get("host") or {}, launch.get("versions") or {}
        devices = host.get("devices") or [str(host.get("cpu", ""))]
        rows.append(
            [
                str(launch.get("time", "")).replace("T", " ").replace("+00:00", " UTC"),
                f"{facts.get('after_step', 0):,}",
                str(facts.get("profile", "")),
                str(facts.get("processes", "")),
                f"{len(devices)} × {devices[0]}" if len(devices) > 1 else devices[0],
                commit,
                str(versions.get("torch", "")),
            ]
        )
    table = _table(["launched", "after step", "profile", "processes", "device", "commit", "torch"], rows)
    everything = "\n".join(json.dumps(launch, indent=2, ensure_ascii=False) for launch in launches)
    return table + _folded(f"Launches in full ({len(launches):,})", everything)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "\n".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table>\n<tr>{head}</tr>\n{body}\n</table></div>'


def _folded(title: str, text: str) -> str:
    return f"<details><summary>{escape(title)}</summary><pre>{escape(text)}</pre></details>" if text else ""


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
