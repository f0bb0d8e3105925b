"""The report of a run: what it reads, what it draws and what the page says, for whole, young, old and damaged runs."""

import json
import math
import random
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure

from eagle31_train.report import main
from eagle31_train.reporting import figures
from eagle31_train.reporting.figures import short
from eagle31_train.reporting.training_figures import PLOTS, pictures
from eagle31_train.reporting.training_log import ESTIMATE, read
from eagle31_train.reporting.training_page import write

DEPTHS = 3
EVERYTHING = {plot.name for plot in PLOTS}
UNTIMED = EVERYTHING - {"throughput", "waiting", "memory"}


def metrics(steps, heldout=5, spikes=(), left_out=()):
    """Rows as training writes them, with numbers that say where they come from."""
    rng = random.Random(0)
    for step in range(1, steps + 1):
        common = {"lr": 1e-4 * step / steps, "tokens": 100 * step}
        if step in left_out:
            yield {"step": step, "left_out": True, **common}
        else:
            depths = [rng.uniform(0.4, 0.6) / (depth + 1) for depth in range(DEPTHS)]
            loss = rng.uniform(2, 3) * (10 if step in spikes else 1)
            row = {"step": step, "loss": loss, ESTIMATE: 1 + sum(depths), "oov_share": 0.01, **common}
            row |= {f"{name}_at_depth": depths for name in ("loss", "accuracy", "prefix", "rms")}
            yield {**row, "grad_norm": loss / 3, **({"spike": True} if step in spikes else {})}
        if heldout and step % heldout == 0:
            measured = {"loss": 3.0 + step / 1000, ESTIMATE: 1.5 + step / 1000, "oov_share": 0.02}
            measured |= {f"{name}_at_depth": [0.25, 0.125, 0.0625] for name in ("loss", "accuracy", "prefix", "rms")}
            yield {"step": step, **{f"heldout_{name}": value for name, value in measured.items()}}


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def make_run(folder, steps=40, timed=True, launches=(0, 12, 30), ended=True, config=True, **options):
    train = folder / "train"
    train.mkdir(parents=True)
    (train / "metrics.jsonl").write_text(lines(metrics(steps, **options)))
    if timed:
        timing = {"seconds": 2.0, "waited": 0.5, "tokens": 100, "memory_bytes": 2**31}
        (train / "timings.jsonl").write_text(lines({"step": step, **timing} for step in range(1, steps + 1)))
    if launches:
        facts = [{"after_step": step, "profile": "ddp", "processes": 2, "steps": 50} for step in launches]
        launch = {"time": "2026-11-21T10:00:00+00:00", "git": {"commit": "ab" * 20, "changed": True}}
        launch |= {"host": {"cpu": "a processor", "devices": []}, "versions": {"torch": "2.13.0"}}
        (train / "launches.jsonl").write_text(lines({**launch, "facts": fact} for fact in facts))
    if config:
        text = "name: <b>mine</b>\ntarget:\n  path: /home/somebody/Target-7B\ntrain:\n  clip: 0.5\n"
        (train / "config.yaml").write_text(text)
    if ended:
        (train / "manifest.json").write_text(json.dumps({"steps": steps, "seconds": 90, "files": {"a": {"bytes": 1}}}))
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """(run, page as text) of a run that has everything."""
    run = make_run(tmp_path_factory.mktemp("whole") / "run", spikes=[20, 21], left_out=[7])
    with pytest.MonkeyPatch.context() as patch:
        for theme in figures.THEMES.values():
            patch.setitem(theme, "savefig.dpi", 25)
        page, notes = write(run)
    assert page == run / "report" / "report.html"
    assert notes == []
    return run, page.read_text()


def drawn(history, name):
    """The axes of one of a run's pictures."""
    (picture,) = [picture for picture in pictures(history) if picture.name == name]
    return picture.figure().axes[0]


def text_of(page):
    """What a reader sees of a page."""
    return re.sub(r"\s+", " ", re.sub(r"<style>.*?</style>|<[^>]+>", " ", page, flags=re.DOTALL))


# ---------------------------------------------------------------- the page


def test_the_page_stands_alone_with_every_picture(whole):
    run, page = whole
    assert {path.stem for path in (run / "report").glob("*.png")} == EVERYTHING
    sources = re.findall(r'(?:src|srcset|href|url)\s*=\s*"([^"]*)"', page)
    assert len(sources) == 2 * len(EVERYTHING)
    assert all(source.startswith("data:image/png;base64,") for source in sources)
    for word in ("http:", "https:", "<script", "<link", "@import", "url("):
        assert word not in page
    assert "default-src 'none'" in page
    # A name is not taken for HTML, and files of a manifest are not told.
    assert "<b>mine</b>" not in page
    assert page.count("&lt;b&gt;mine&lt;/b&gt;") >= 3
    folded = re.findall(r"<details><summary>([^<]+)</summary><pre>(.*?)</pre></details>", page, re.DOTALL)
    assert [title for title, _ in folded] == ["Launches in full (3)", "Configuration", "Manifest"]
    assert "&quot;after_step&quot;: 30" in folded[0][1]
    assert "bytes" not in folded[2][1]


@pytest.mark.core
def test_the_page_says_where_the_curves_ended(whole):
    text = text_of(whole[1])
    rows = [row for row in metrics(40, spikes=[20, 21], left_out=[7]) if "loss" in row]
    loss, depth = np.mean([row["loss"] for row in rows]), np.mean([row["prefix_at_depth"][2] for row in rows])
    for words in (
        f"loss {loss:.4f} 3.0400 3.0050 (step 5)",
        "1.5400 1.5400 (step 40)",
        f"3 {depth:.1%} 6.2%",
        "acceptance estimate (teacher-forced), held-out 1.540",
        "tokens read 4,000",
        "time 1 min",
        "tokens per second 50",
        "waiting for data 25%",
        "most memory 2.00 GiB",
        "launches 3",
        "loss spikes 2",
        "steps left out 1",
        "An EAGLE drafter for Target-7B. Training ended after step 40.",
        "2026-11-21 10:00:00 UTC 12 ddp 2 a processor abababababab, changed 2.13.0",
    ):
        assert words in text, words
    assert "still to go" not in text
    assert not re.search(r"\btau\b", text)


# ---------------------------------------------------------------- what a run may lack


@pytest.mark.parametrize(
    ("options", "names", "words"),
    [
        ({"ended": False}, EVERYTHING, "step 40 of 50 was the last when this page was made"),
        ({"heldout": 0}, EVERYTHING, "acceptance estimate (teacher-forced), training"),
        ({"steps": 1, "heldout": 0, "ended": False}, EVERYTHING, "step 1 of 50 was the last"),
        ({"timed": False, "launches": (), "config": False}, UNTIMED, "No launch was written down"),
        ({"steps": 2, "left_out": [1, 2], "timed": False}, {"lr"}, "steps left out 2"),
    ],
)
def test_a_run_that_lacks_something_is_shown_without_it(tmp_path, quick, options, names, words):
    page, notes = write(make_run(tmp_path / "run", **options))
    assert {path.stem for path in page.parent.glob("*.png")} == names
    assert words in text_of(page.read_text())
    assert "nan" not in text_of(page.read_text()).lower()
    assert notes == []


def test_runs_of_earlier_versions_call_the_estimate_tau(tmp_path):
    run = make_run(tmp_path / "run")
    new = read(run)
    path = run / "train" / "metrics.jsonl"
    path.write_text(path.read_text().replace(ESTIMATE, "tau"))
    old = read(run)
    for rows in ("train", "heldout"):
        assert getattr(old, rows)[ESTIMATE].tolist() == getattr(new, rows)[ESTIMATE].tolist()
        assert ESTIMATE in getattr(old, rows)


def test_time_that_went_aside_slows_no_step(tmp_path):
    run = make_run(tmp_path / "run")
    timing = {"seconds": 2.0, "waited": 0.5, "tokens": 100}
    rows = [
        {"step": step, **timing, **({"seconds": 9.0, "aside": 7.0} if step % 5 == 0 else {})} for step in range(1, 9)
    ]
    (run / "train" / "timings.jsonl").write_text(lines(rows))
    history = read(run)
    assert history.busy.tolist() == [2.0] * 8
    assert drawn(history, "throughput").lines[0].get_ydata().tolist() == [50.0] * 8


# ---------------------------------------------------------------- files that are not whole


def test_the_torn_last_line_of_a_running_training_is_left_out_and_said(tmp_path, quick, capsys):
    run = make_run(tmp_path / "run", timed=False)
    with (run / "train" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 41, "lo')
    assert main([str(run), "--out", str(tmp_path / "out")]) == 0
    said, page = capsys.readouterr().out.splitlines()
    assert said.startswith(f"{run / 'train' / 'metrics.jsonl'}:49 is only half written and was left out")
    assert page == str(tmp_path / "out" / "report.html")
    assert said in text_of(Path(page).read_text())
    assert not (run / "report").exists()


@pytest.mark.parametrize(
    ("file", "number", "line"),
    [
        ("metrics.jsonl", 3, '{"step": 3, "lo'),
        ("metrics.jsonl", 48, "\x00\x00"),
        ("metrics.jsonl", 1, '["step", 1]'),
        ("metrics.jsonl", 2, '{"loss": 1.0}'),
        ("timings.jsonl", 7, '{"step": "7"}'),
        ("launches.jsonl", 2, "oops"),
    ],
)
def test_a_damaged_line_is_named(tmp_path, capsys, file, number, line):
    run = make_run(tmp_path / "run")
    path = run / "train" / file
    whole = path.read_text().splitlines()
    whole[number - 1] = line
    path.write_text("\n".join(whole) + "\n")
    assert main([str(run)]) == 2
    error = capsys.readouterr().err
    assert error == f"error: {path}:{number} is damaged: remove the line, and the report lacks its row\n"
    assert not (run / "report").exists()


# ---------------------------------------------------------------- the pictures


# ---------------------------------------------------------------- curves, numbers


@given(st.lists(st.floats(-1e6, 1e6) | st.just(math.nan), min_size=1, max_size=900), st.integers(1, 1000))
def test_long_curves_keep_their_extremes_and_mean_in_few_points(values, first):
    values = np.array(values)
    steps = np.arange(first, first + len(values), dtype=float)
    axes, valid = Figure().subplots(), np.isfinite(values)
    figures.noisy(axes, steps, values, short, "C0")
    if not valid.any():
        assert not axes.lines
        return
    (line,), (band,) = axes.lines, axes.collections
    assert len(line.get_xdata()) <= figures.MEANS
    assert len(band.get_paths()[0].vertices) < 3 * figures.PIXELS
    assert (np.diff(line.get_xdata()) > 0).all()
    vertices = band.get_paths()[0].vertices[:, 1]
    assert (vertices.min(), vertices.max()) == (values[valid].min(), values[valid].max())
    if valid.sum() <= figures.MEANS:
        assert line.get_ydata().tolist() == values[valid].tolist()
