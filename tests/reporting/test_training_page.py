"""The report of a run: what it reads, what it draws and what the page says, for a whole run and a running one."""

import json
from pathlib import Path

import numpy as np
import pytest
from made import message_of

from eagle31_train.report import main
from eagle31_train.reporting import figures, training_page
from eagle31_train.reporting.training_page import ESTIMATE, PLOTS, read, write
from tests.reporting.test_evaluation_page import text_of

STEPS = range(1, 41)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setitem(figures.STYLE, "savefig.dpi", 25)


def metrics():
    """Rows as training writes them, with numbers that say where they come from; step 7 was left out."""
    for step in STEPS:
        row = {"step": step, "lr": 1e-4 * step / 40, "tokens": 100 * step}
        if step == 7:
            yield {**row, "left_out": True}
        else:
            depths = [(0.4 + step % 7 / 35) / depth for depth in (1, 2, 3)]
            row |= {"loss": 2 + step % 11 / 11, ESTIMATE: 1 + sum(depths), "oov_share": 0.01, "grad_norm": step % 5}
            yield row | {f"{name}_at_depth": depths for name in ("loss", "accuracy", "prefix", "rms")}
        if step % 5 == 0:
            measured = {"loss": 3.0 + step / 1000, "tau": 1.5 + step / 1000, "oov_share": 0.02}  # an earlier name
            measured |= {"acceptance_length": 1.9 - abs(step - 25) / 100, "acceptance_at_depth": [0.5, 0.25]}
            yield {"step": step, **{f"heldout_{name}": value for name, value in measured.items()}}


def make_run(folder):
    train = folder / "train"
    train.mkdir(parents=True)
    timing = {"seconds": 2.0, "waited": 0.5, "tokens": 100, "memory_bytes": 2**31}
    timings = [{"step": step, **timing} for step in STEPS]
    launches = [{"facts": {"after_step": step}} for step in (0, 12, 30)]
    for name, rows in {"metrics": metrics(), "timings": timings, "launches": launches}.items():
        (train / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (train / "config.yaml").write_text("name: <b>mine</b>\n")
    manifest = {"steps": 40, "seconds": 90, "files": {"a": {"bytes": 1}}, "kept": {"step": 25}}
    (train / "manifest.json").write_text(json.dumps(manifest))
    return folder


def test_the_page_stands_alone_and_says_where_the_curves_ended(tmp_path):
    run = make_run(tmp_path / "run")
    page, notes = write(run)
    assert (page, notes) == (run / "report" / "report.html", [])
    assert {path.stem for path in page.parent.glob("*.png")} == {plot.name for plot in PLOTS}
    html = page.read_text()
    for word in ("http:", "https:", "<script", "<link", "@import", "url(", "<b>mine"):
        assert word not in html
    loss = np.mean([row["loss"] for row in metrics() if "loss" in row])
    for words in (
        "Training ended; the last step was 40, and step 25 is kept.",
        f"loss {loss:.4g} 3.04 3.005 (step 5)",
        "acceptance_length 1.75 1.9 (step 25)",
        "acceptance_at_depth 0.5, 0.25",
        "1.54 1.54 (step 40)",
        "tokens per second 50",
        "waiting for data 25.0%",
        "steps skipped 1",
    ):
        assert words in text_of(html), words


def test_the_torn_last_line_of_a_running_training_is_left_out_and_said(tmp_path, monkeypatch, capsys):
    run = make_run(tmp_path / "run")
    monkeypatch.setattr(training_page, "PLOTS", PLOTS[:1])
    with (run / "train" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 41, "lo')
    main([str(run), "--out", str(tmp_path / "out")])
    said, page = capsys.readouterr().out.splitlines()
    assert said.startswith(f"{run / 'train' / 'metrics.jsonl'}:49 is incomplete and was left out")
    assert page == str(tmp_path / "out" / "report.html")
    assert said in text_of(Path(page).read_text())
    assert not (run / "report").exists()


@pytest.mark.parametrize("line", ["[" * 5000, '{"step": Infinity}', "[1]"], ids=range(3))
def test_a_damaged_line_is_named(tmp_path, line):
    run = make_run(tmp_path / "run")
    file = run / "train" / "metrics.jsonl"
    file.write_text(f"{line}\n{file.read_text()}")
    assert f"{file}:1 is damaged" in message_of(read, run)
