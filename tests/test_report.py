"""The report of a run: what it reads, what it draws and what the page says, for whole, young, old and damaged runs."""

import base64
import io
import json
import math
import random
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from eagle31_train.report import canvas as drawing
from eagle31_train.report import figures, make
from eagle31_train.report.__main__ import main
from eagle31_train.report.canvas import THEMES, exponent, percent, short
from eagle31_train.report.history import read
from eagle31_train.report.page import duration
from eagle31_train.report.thin import spread, thin

DEPTHS = 3
EVERYTHING = {plot.name for plot in figures.PLOTS}
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
            row = {"step": step, "loss": loss, "tau": 1 + sum(depths), "oov_share": 0.01, **common}
            row |= {f"{name}_at_depth": depths for name in ("loss", "accuracy", "prefix", "rms")}
            yield {**row, "grad_norm": loss / 3, **({"spike": True} if step in spikes else {})}
        if heldout and step % heldout == 0:
            measured = {"loss": 3.0 + step / 1000, "tau": 1.5 + step / 1000, "oov_share": 0.02}
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
    page, notes = make(run)
    assert page == run / "report" / "report.html"
    assert notes == []
    return run, page.read_text()


@pytest.fixture
def quick(monkeypatch):
    """Small pictures, and on light paper only."""
    original = drawing.Canvas.png

    def png(self):
        return original(self) if self.theme is THEMES["light"] else b""

    monkeypatch.setattr(drawing, "DPI", 40)
    monkeypatch.setattr(drawing.Canvas, "png", png)


def drawn(history, name):
    """One of a run's pictures, before it is a file."""
    (plot,) = [plot for plot in figures.plots(history) if plot.name == name]
    return plot.on("light", history)


def corner(png):
    """How bright a picture is in its corner, of 255."""
    return Image.open(io.BytesIO(png)).convert("L").getpixel((2, 2))


def text_of(page):
    """What a reader sees of a page."""
    return re.sub(r"\s+", " ", re.sub(r"<style>.*?</style>|<[^>]+>", " ", page, flags=re.DOTALL))


# ---------------------------------------------------------------- the page


def test_the_page_needs_no_other_file_and_no_network(whole):
    _, page = whole
    sources = re.findall(r'(?:src|srcset|href|url)\s*=\s*"([^"]*)"', page)
    assert len(sources) == 2 * len(EVERYTHING)
    assert all(source.startswith("data:image/png;base64,") for source in sources)
    for word in ("http:", "https:", "<script", "<link", "@import", "url("):
        assert word not in page
    assert "default-src 'none'" in page
    assert 'name="viewport" content="width=device-width' in page


def test_every_picture_is_there_as_a_file_on_the_page_and_on_dark_paper(whole):
    run, page = whole
    assert {path.stem for path in (run / "report").glob("*.png")} == EVERYTHING
    shown = [base64.b64decode(data) for data in re.findall(r'<img src="data:image/png;base64,([^"]+)"', page)]
    assert shown == [(run / "report" / f"{plot.name}.png").read_bytes() for plot in figures.PLOTS]
    dark = re.findall(r'prefers-color-scheme: dark\)" srcset="data:image/png;base64,([^"]+)"', page)
    for bright, dim in zip(shown, dark, strict=True):
        corners = [
            Image.open(io.BytesIO(data)).convert("L").getpixel((2, 2)) for data in (bright, base64.b64decode(dim))
        ]
        assert corners[0] > 250
        assert corners[1] < 40
    assert sorted(path.name for path in (run / "report").iterdir() if path.suffix != ".png") == ["report.html"]


def test_the_page_says_where_the_curves_ended(whole):
    _, page = whole
    text = text_of(page)
    rows = [row for row in metrics(40, spikes=[20, 21], left_out=[7]) if "loss" in row]
    loss, depth = np.mean([row["loss"] for row in rows]), np.mean([row["prefix_at_depth"][2] for row in rows])
    assert f"loss {loss:.4f} 3.0400 3.0050 (step 5)" in text
    assert "1.5400 1.5400 (step 40)" in text
    assert f"3 {depth:.1%} 6.2%" in text
    for words in (
        "tau, held-out 1.540",
        "tokens read 4,000",
        "time 1 min",
        "tokens per second 50",
        "waiting for data 25%",
        "most memory 2.00 GiB",
        "launches 3",
        "loss spikes 2",
        "steps left out 1",
        "An EAGLE drafter for Target-7B. Training ended after 40 steps.",
        "2026-11-21 10:00:00 UTC 12 ddp 2 a processor abababababab, changed 2.13.0",
    ):
        assert words in text, words
    assert "still to go" not in text


def test_configuration_and_launches_are_folded_away_and_nothing_is_taken_for_html(whole):
    _, page = whole
    assert "<b>mine</b>" not in page
    assert page.count("&lt;b&gt;mine&lt;/b&gt;") >= 3
    folded = re.findall(r"<details><summary>([^<]+)</summary><pre>(.*?)</pre></details>", page, re.DOTALL)
    assert [title for title, _ in folded] == ["Launches in full (3)", "Configuration", "Manifest"]
    assert "&quot;after_step&quot;: 30" in folded[0][1]
    assert "path: /home/somebody/Target-7B" in folded[1][1]
    assert "bytes" not in folded[2][1]


# ---------------------------------------------------------------- what a run may lack


@pytest.mark.parametrize(
    ("options", "pictures", "words"),
    [
        ({"ended": False}, EVERYTHING, "step 40 of 50 was the last when this page was made"),
        ({"heldout": 0}, EVERYTHING, "tau, training"),
        ({"steps": 1, "heldout": 0, "ended": False}, EVERYTHING, "step 1 of 50 was the last"),
        ({"steps": 2}, EVERYTHING, "Training ended after 2 steps"),
        ({"timed": False, "launches": (), "config": False}, UNTIMED, "No launch was written down"),
        ({"steps": 2, "left_out": [1, 2], "timed": False}, {"lr"}, "steps left out 2"),
    ],
)
def test_a_run_that_lacks_something_is_shown_without_it(tmp_path, quick, options, pictures, words):
    page, notes = make(make_run(tmp_path / "run", **options))
    assert {path.stem for path in page.parent.glob("*.png")} == pictures
    assert words in text_of(page.read_text())
    assert "nan" not in text_of(page.read_text()).lower()
    assert notes == []


def test_a_run_that_goes_on_says_how_long(tmp_path, quick):
    page, _ = make(make_run(tmp_path / "run", ended=False))
    assert "still to go about 20 s" in text_of(page.read_text())
    (tmp_path / "run" / "train" / "timings.jsonl").unlink()
    make(tmp_path / "run" / "train")  # the folder of the stage is understood, too
    assert {path.stem for path in page.parent.glob("*.png")} == UNTIMED, "pictures of an earlier report stayed"
    assert "still to go" not in page.read_text()


def test_time_that_went_aside_slows_no_step(tmp_path):
    run = make_run(tmp_path / "run")
    timing = {"seconds": 2.0, "waited": 0.5, "tokens": 100}
    rows = [
        {"step": step, **timing, **({"seconds": 9.0, "aside": 7.0} if step % 5 == 0 else {})} for step in range(1, 9)
    ]
    (run / "train" / "timings.jsonl").write_text(lines(rows))
    history = read(run)
    assert history.busy.tolist() == [2.0] * 8
    assert drawn(history, "throughput").highest == 50.0


# ---------------------------------------------------------------- files that are not whole


def test_the_torn_last_line_of_a_running_training_is_left_out_and_said(tmp_path, quick, capsys):
    run = make_run(tmp_path / "run", timed=False)
    with (run / "train" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 41, "lo')
    assert main([str(run), "--out", str(tmp_path / "out")]) == 0
    said, page = capsys.readouterr().out.splitlines()
    where = f"{run / 'train' / 'metrics.jsonl'}:49"
    assert said.startswith(f"{where} is only half written and was left out")
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
    assert capsys.readouterr().err == (
        f"error: {path}:{number} is damaged: remove the line, and the report lacks its row\n"
    )
    assert not (run / "report").exists()


def test_other_mistakes_are_one_line_too(tmp_path, capsys):
    def error_of(*arguments):
        assert main([str(argument) for argument in arguments]) == 2
        message = capsys.readouterr().err
        assert message.count("\n") == 1
        return message

    assert "there is no training in" in error_of(tmp_path / "nowhere")
    run = make_run(tmp_path / "run", steps=3)
    (tmp_path / "file").write_text("precious")
    assert "file is a file: give another --out" in error_of(run, "--out", tmp_path / "file")
    (run / "train" / "config.yaml").write_text("name: [1,")
    assert "config.yaml is damaged" in error_of(run)
    (run / "train" / "metrics.jsonl").write_text("")
    assert "holds no step yet" in error_of(run)
    assert (tmp_path / "file").read_text() == "precious"


def test_a_failing_report_leaves_the_one_before(tmp_path, quick, monkeypatch):
    run = make_run(tmp_path / "run", steps=3, timed=False)
    (run / "report").mkdir()
    (run / "report" / "notes.txt").write_text("mine")
    before = make(run)[0].read_bytes()

    def full(self, data):
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        with pytest.raises(OSError, match="No space left"):
            make(run)
    assert (run / "report" / "report.html").read_bytes() == before
    assert not list((run / "report").glob(".*"))
    assert (run / "report" / "notes.txt").read_text() == "mine"


# ---------------------------------------------------------------- the pictures


def test_spikes_restarts_and_steps_left_out_are_marked(tmp_path):
    history = read(make_run(tmp_path / "run", spikes=[20, 21], left_out=[7, 9]))
    canvas = drawn(history, "loss")
    rows = {row["step"]: row for row in metrics(40, spikes=[20, 21], left_out=[7, 9]) if "loss" in row}
    marks = {line.get_marker(): line for line in canvas.axis.lines if line.get_marker() in "^x"}
    assert marks["^"].get_xdata().tolist() == [20, 21]
    assert marks["^"].get_ydata().tolist() == [rows[20]["loss"], rows[21]["loss"]]
    assert marks["x"].get_xdata().tolist() == [7, 9]
    restarts = [line.get_xdata()[0] for line in canvas.axis.lines if line.is_dashed()]
    assert sorted(restarts) == [12, 30]
    assert canvas.remarks == ["▲ 2 spikes", "× 2 steps left out", "dotted: restarts"]
    low, high = canvas.axis.get_ylim()
    assert low < min(row["loss"] for row in rows.values())
    assert high > max(row["loss"] for row in rows.values()), "a spike lies outside of the picture"
    assert canvas.axis.get_yscale() == "log"


def test_many_restarts_do_not_hide_the_curves(tmp_path):
    history = read(make_run(tmp_path / "run", launches=range(0, 40, 2)))
    canvas = drawn(history, "loss")
    strokes = [line for line in canvas.axis.lines if line.get_ydata()[0] == 0.95]
    assert [line.get_xdata()[0] for line in strokes] == list(range(2, 40, 2))
    assert canvas.remarks[-1] == "strokes above: 19 restarts"


def test_the_gradient_is_held_against_the_clip(tmp_path):
    canvas = drawn(read(make_run(tmp_path / "run")), "gradient")
    assert [(height, label) for height, label, _ in canvas.ends][1] == (0.5, "clip  0.5")
    low, high = canvas.axis.get_ylim()
    assert low < 0.5 < high


def test_depths_have_colours_in_order_and_labels_at_their_ends(tmp_path):
    for theme in THEMES.values():
        canvas = drawing.Canvas(theme, "")
        brightness = [sum(canvas._of_depth(depth, 7)[:3]) for depth in range(7)]
        assert brightness == sorted(brightness)
    history = read(make_run(tmp_path / "run"))
    canvas = drawn(history, "prefix")
    assert [label.split()[:2] for _, label, _ in canvas.ends] == [["depth", "1"], ["depth", "2"], ["depth", "3"]]
    assert [height for height, _, _ in canvas.ends] == [depth[-1] for depth in history.train.depths("prefix_at_depth")]


def test_a_long_run_is_drawn_with_few_points_and_no_spike_is_lost(tmp_path):
    spikes = [3, 12_000, 29_999]
    history = read(make_run(tmp_path / "run", steps=30_000, heldout=100, spikes=spikes))
    for name in ("loss", "gradient", "prefix"):
        canvas = drawn(history, name)
        assert max(len(line.get_xdata()) for line in canvas.axis.lines) <= 400
        assert max(len(band.get_paths()[0].vertices) for band in canvas.axis.collections) < 1000
    band = drawn(history, "loss").axis.collections[0].get_paths()[0].vertices
    assert {round(x, -3) for x, y in band if y > 10} == {round(step, -3) for step in spikes}


# ---------------------------------------------------------------- thinning, labels, numbers


@given(
    st.lists(st.floats(-1e6, 1e6) | st.just(math.nan), min_size=1, max_size=300),
    st.integers(1, 50),
    st.integers(1, 1000),
)
def test_thinning_keeps_extremes_means_and_order(values, buckets, first):
    values = np.array(values)
    steps = np.arange(first, first + len(values), dtype=float)
    band, good = thin(steps, values, buckets=buckets), np.isfinite(values)
    assert len(band) <= buckets
    assert (np.diff(band.steps) > 0).all()
    assert (band.low <= band.high).all()
    if good.any():
        assert band.low.min() == values[good].min()
        assert band.high.max() == values[good].max()
        whole = thin(steps, values, buckets=1)
        assert whole.mean[0] == pytest.approx(values[good].mean(), rel=1e-9, abs=1e-6)
        assert whole.steps[0] == pytest.approx(steps[good].mean())
    else:
        assert len(band) == 0


def test_a_short_curve_is_not_thinned():
    steps, values = np.arange(1.0, 41.0), np.random.default_rng(0).normal(size=40)
    band = thin(steps, values, buckets=64)
    for kept in (band.low, band.mean, band.high):
        assert kept.tolist() == values.tolist()


def test_a_rates_mean_is_over_time():
    """Ten steps of 1 s at 100/s and one of 90 s at 10/s: 19 tokens a second, not 92."""
    rates, seconds = np.array([100.0] * 10 + [10.0]), np.array([1.0] * 10 + [90.0])
    assert thin(np.arange(11.0), rates, seconds, buckets=1).mean[0] == pytest.approx(1900 / 100)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=20), st.floats(0.01, 0.2))
def test_labels_stay_in_order_apart_and_inside(wanted, apart):
    places = spread(wanted, apart)
    gap = min(apart, 1 / max(len(wanted) - 1, 1))
    order = sorted(range(len(wanted)), key=lambda i: places[i])
    assert all(places[b] - places[a] >= gap - 1e-9 for a, b in pairwise(order))
    assert all(wanted[a] <= wanted[b] for a, b in pairwise(order))
    assert min(places) >= -1e-9
    assert max(places) <= 1 + 1e-9


def test_labels_with_room_are_not_moved():
    assert spread([0.9, 0.1, 0.5], 0.2) == pytest.approx([0.9, 0.1, 0.5])
    assert spread([0.5, 0.5], 0.1) == pytest.approx([0.55, 0.45])
    assert spread([0.0, 0.0, 0.0], 0.1) == pytest.approx([0.2, 0.1, 0.0])


def test_numbers_are_short():
    assert [short(value) for value in (0, 1.5, 12.345, 123.4, 45678.9, 0.0123, 1.234e-5, 2e7)] == (
        ["0", "1.50", "12.3", "123", "45,679", "0.0123", "1.23e-5", "2e7"]
    )
    assert [percent(value) for value in (0, 0.004, 0.0949, 0.096, 1)] == ["0%", "0.4%", "9.5%", "10%", "100%"]
    assert [exponent(value) for value in (0, 1e-4, 2.5e-5)] == ["0", "1e-4", "2.5e-5"]
    assert [duration(value) for value in (3, 59.4, 60, 3599, 3600, 90061)] == (
        ["3 s", "59 s", "1 min", "1 h 00 min", "1 h 00 min", "25 h 01 min"]
    )


@pytest.mark.parametrize(
    ("module", "heavy"),
    [("schema", "matplotlib torch numpy yaml accelerate"), ("report", "matplotlib torch accelerate train hydra")],
)
def test_importing_is_cheap(module, heavy):
    """matplotlib is loaded by what draws, torch and the trainer by nothing here."""
    code = f"import sys, eagle31_train.{module}; print(*(set('{heavy}'.split()) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
