"""The page and the pictures of a result: that they show what was measured, and that the page stands alone."""

import io
import re
from html import unescape

import numpy as np
import pytest
from PIL import Image

from eagle31_train.measure import page
from eagle31_train.measure.acceptance import Sheet, tell
from eagle31_train.measure.pictures import ALL, SERVING, pictures
from eagle31_train.measure.results import Drift, Measured
from eagle31_train.report import canvas as drawing
from eagle31_train.report.canvas import THEMES

DEPTHS = range(1, 5)


def answers(rate, prompts=12, drift=True):
    generator = np.random.default_rng(round(1000 * rate))
    found = []
    for number in range(prompts):
        reach = np.minimum(generator.geometric(1 - rate, size=30) - 1, 4).tolist()
        own = [0.0, 0.1, 0.2, rate / 2]
        rest = [(1 - share) / 4 for share in own]
        told = Drift(rest, [2 * r for r in rest], rest, own, [1, 2, 3, 4 + number], [2.0] * 4) if drift else None
        found.append(Measured(f"p{number}", "ab"[number % 2], 31, reach, told))
    return found


def sheet(name, rates, prompts=12, drift=True, **more):
    suite, _, perturbation = name.partition(" · ")
    measured = {drafter: answers(rate, prompts, drift) for drafter, rate in rates.items()}
    return Sheet(name, suite, perturbation or None, 0.0, 1.0, measured, **more)


def serving():
    times = {"ttft": {"mean": 0.05, "p50": 0.041, "p95": 0.0912}, "tpot": dict.fromkeys(("mean", "p50", "p95"))}
    accepted = {"drafts": 1234, "acceptance_length": 1.95, "acceptance_at_depth": [0.6, 0.25, 0.1]}
    rows = [
        {
            "drafter": "B" if tokens else None,
            "draft_tokens": tokens,
            "concurrency": users,
            "requests": 24,
            "per_user": [value, value - 1, value + 1],
            "speedup": [value / 20, None, None] if tokens else None,
            "total": 99.5,
            "different": 2 if tokens else 0,
            "acceptance": accepted if tokens else None,
            "counted": {"ttft": 0.0487, "tpot": 0.0123},
            **times,
        }
        for tokens, users, value in ((0, 1, 20.0), (0, 16, 9.0), (3, 1, 30.0), (3, 16, 8.0))
    ]
    return {
        "vllm": "0.32",
        "dtype": "bfloat16",
        "workload": "heldout",
        "prompts": 12,
        "max_new_tokens": 64,
        "temperature": 0.7,
        "top_p": 1.0,
        "rows": rows,
        "verdict": ["B: at concurrency 1 num_speculative_tokens=3 is best."],
        "notes": ["B, 3 draft tokens, 1 users: 2 of 24 answers are <different>"],
        "definitions": "TTFT: …",
    }


def result(*sheets, **more):
    return {**tell(sheets, DEPTHS, 3), "title": "B against <A>", **more}


@pytest.fixture(scope="module")
def whole():
    """Two drafters on three workloads, and served."""
    rates = {"A": 0.5, "B": 0.7}
    sheets = [
        sheet("heldout", rates, notes=["first turns & no more"], speeds={"plain": (90, 9.0), "B": (90, 6.0)}),
        sheet("heldout · system_long", {"A": 0.3, "B": 0.6}),
        sheet("mt_bench", rates, prompts=4),
    ]
    how = {"machine": "a processor", "dtype": "float32", "max_new_tokens": 128, "command": "python -m this a>b"}
    return result(*sheets, serving=serving(), **how)


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(drawing, "DPI", 30)


def drawn(given, name, theme="light"):
    """One of a result's pictures, before it is a file."""
    (found,) = [picture for picture in pictures(given) if picture.name == name]
    return found.draw(THEMES[theme])


def text_of(html):
    return unescape(re.sub(r"\s+", " ", re.sub(r"<style>.*?</style>|<[^>]+>", " ", html, flags=re.DOTALL)))


# ---------------------------------------------------------------- the page


def test_the_page_stands_alone_and_has_every_picture_as_a_file_beside_it(tmp_path, whole, quick):
    (tmp_path / "of-an-earlier-result.png").write_bytes(b"old")
    (tmp_path / page.RESULT).write_text('{"files": {"of-an-earlier-result.png": "its hash", "index.html": "its hash"}}')
    stays = {page.RESULT, "holiday.png", "notes.txt"}
    for name in stays - {page.RESULT}:
        (tmp_path / name).write_text("mine")
    files = page.write(tmp_path, whole)
    names = {picture.name for picture in pictures(whole)}
    assert {file.stem for file in files if file.suffix == ".png"} == names
    assert {file.name for file in tmp_path.iterdir()} == {file.name for file in files} | stays
    html = (tmp_path / page.PAGE).read_text()
    sources = re.findall(r'(?:src|srcset|href|url)\s*=\s*"([^"]*)"', html)
    assert len(sources) == 2 * len(names)
    assert all(source.startswith("data:image/png;base64,") for source in sources)
    assert "http" not in html.replace("http-equiv", "")
    sizes = [tuple(map(int, size)) for size in re.findall(r'width="(\d+)" height="(\d+)"', html)]
    assert sorted(sizes) == sorted(Image.open(file).size for file in files if file.suffix == ".png")


def test_the_page_says_what_was_measured(whole):
    html = page.render(whole, {})
    text = text_of(html)
    value, low, high = whole["workloads"][0]["drafters"]["B"]["by_depth"]["3"]["acceptance_length"]
    more = whole["workloads"][1]["differences"]["B"]["1"]["kept_ratio"]
    for words in (
        "B against <A>",
        "a processor · float32 · at most 128 tokens per answer",
        f"B, heldout, 3 draft tokens {value:.2f} [{low:.2f}, {high:.2f}]",
        "speed with B 1.50 × prompts 16",
        whole["workloads"][0]["verdict"]["B"]["text"],
        "only 4 prompts, which is too few to rely on",
        "of its plain form [",
        f"B / A: kept {more[0]:.3f} [{more[1]:.3f}, {more[2]:.3f}]",
        "12 prompts · greedy · none decoded by real speculation · first turns & no more",
        "Acceptance length: tokens per draft, the bonus token included",
        "num_speculative_tokens=3 is best",
        "vLLM 0.32, bfloat16 · 12 prompts of heldout · sampled at temperature 0.7 · at most 64 tokens per answer",
        "2 of 24 answers are <different>",
        "B 3 16 8.0 [7.0, 9.0] 0.40 99.5 2 of 24",
        "none 0 1 20.0 [19.0, 21.0] – 99.5 0 of 24",
        "B 3 16 50.0 41.0 91.2 48.7 – – – 12.3",
        "acceptance length accepted, position 1 accepted, position 2 accepted, position 3",
        "B 3 16 1,234 1.95 60.0% 25.0% 10.0%",
        "Repeat python -m this a>b",
    ):
        assert words in text, words
    assert "<A>" not in html
    assert "nan" not in text.lower()
    assert "None" not in text


def test_serving_alone_and_one_drafter_alone_have_a_page(tmp_path, quick):
    files = page.write(
        tmp_path / "serving",
        {"title": "mine", "serving": {**serving(), "command": "repeat this", "machine": "a processor"}},
    )
    assert [file.name for file in files] == ["serving-b.png", page.PAGE]
    text = text_of(files[-1].read_text())
    assert "Serving a processor · vLLM 0.32" in text
    assert "Repeat repeat this" in text
    alone = result(sheet("heldout", {"A": 0.5}, prompts=1, drift=False))
    files = page.write(tmp_path / "alone", alone)
    assert [file.stem for file in files] == ["heldout-acceptance", "heldout-conditional", "index"]
    assert "Verdict" not in text_of(files[-1].read_text())


# ---------------------------------------------------------------- the pictures


def test_every_workload_has_its_pictures_and_drift_is_drawn_of_the_first(whole):
    by_section = {}
    for picture in pictures(whole):
        by_section.setdefault(picture.section, []).append(picture.name)
    drift = [f"heldout-{name}" for name in ("attention-a", "attention-b", "own", "rms", "entropy")]
    assert by_section == {
        ALL: [f"workloads-{name}" for name in ("acceptance", "kept", "own", "gain-b")],
        "heldout": ["heldout-acceptance", "heldout-gain", "heldout-conditional", *drift],
        "heldout · system_long": ["heldout-system-long-acceptance", "heldout-system-long-gain"],
        "mt_bench": ["mt-bench-acceptance", "mt-bench-gain", "mt-bench-conditional"],
        SERVING: ["serving-b"],
    }


def test_names_that_differ_in_signs_alone_have_files_of_their_own():
    rates = {"first": 0.5, "neu!": 0.6, "Neu?": 0.7}
    names = [picture.name for picture in pictures(result(sheet("a_b", rates), sheet("a-b", rates)))]
    assert len(set(names)) == len(names)
    assert {"workloads-gain-neu", "workloads-gain-neu-2", "a-b-acceptance", "a-b-acceptance-2"} <= set(names)


def test_curves_are_the_numbers_with_their_intervals(whole):
    found = whole["workloads"][0]["drafters"]
    canvas = drawn(whole, "heldout-acceptance")
    for line, band, name in zip(canvas.axis.lines, canvas.axis.collections, "AB", strict=True):
        lengths = np.array([of["acceptance_length"] for of in found[name]["by_depth"].values()])
        assert line.get_xdata().tolist() == [1, 2, 3, 4]
        assert line.get_ydata().tolist() == lengths[:, 0].tolist()
        corners = {(round(x), y) for x, y in band.get_paths()[0].vertices}
        assert {(1, lengths[0, 1]), (4, lengths[3, 1]), (1, lengths[0, 2]), (4, lengths[3, 2])} <= corners
    assert [label for _, label, _ in canvas.ends] == [
        f"{name}  {found[name]['by_depth']['4']['acceptance_length'][0]:.2f}" for name in "AB"
    ]
    low, high = canvas.axis.get_ylim()
    assert low < canvas.lowest
    assert high > canvas.highest


def test_a_difference_is_held_against_none(whole):
    canvas = drawn(whole, "heldout-gain")
    curve = next(line for line in canvas.axis.lines if len(line.get_xdata()) == 4)
    ratios = [of["ratio"][0] for of in whole["workloads"][0]["differences"]["B"].values()]
    assert curve.get_ydata() == pytest.approx([ratio - 1 for ratio in ratios])
    assert canvas.ends[0][:2] == (0.0, "A")


def test_attention_is_stacked_up_to_one(whole):
    canvas = drawn(whole, "heldout-attention-b")
    drift = whole["workloads"][0]["drafters"]["B"]["drift"]
    tops = [max(y for x, y in of.get_paths()[0].vertices if round(x) == 4) for of in canvas.axis.collections]
    shares = [drift[kind][3][0] for kind in ("sink", "prompt", "verified", "own")]
    assert tops == pytest.approx(np.cumsum(shares))
    assert tops[-1] == pytest.approx(1)
    assert [label.split()[-1] for _, label, _ in canvas.ends] == [f"{share:.0%}" for share in shares]


def test_the_table_of_gains_is_bold_where_there_is_a_difference(whole):
    canvas = drawn(whole, "workloads-gain-b")
    cells = {(round(text.get_position()[1]), round(text.get_position()[0])): text for text in canvas.axis.texts}
    for row, workload in enumerate(whole["workloads"]):
        for column, depth in enumerate(map(str, DEPTHS)):
            ratio, better = workload["differences"]["B"][depth]["ratio"][0], workload["verdict"]["B"]["better"][depth]
            assert cells[row, column].get_text() == f"{100 * (ratio - 1):+.1f}"
            assert (cells[row, column].get_fontweight() == "bold") == (better is not None)
    assert any(text.get_fontweight() == "bold" for text in cells.values())
    assert canvas.axis.yaxis_inverted(), "the first workload stands at the top"


def test_rows_have_a_point_and_an_interval_for_each_drafter(whole):
    canvas = drawn(whole, "workloads-kept")
    kept = [whole["workloads"][1]["drafters"][name]["kept"]["3"] for name in "AB"]
    points = [line for line in canvas.axis.lines if line.get_linestyle() == "None"]
    assert [line.get_xdata().tolist() for line in points] == [[value] for value, _, _ in kept]
    spans = [of.get_segments()[0][:, 0].tolist() for of in canvas.axis.collections]
    assert spans == [[low, high] for _, low, high in kept]
    canvas.png()
    assert [text.get_text() for text in canvas.axis.get_legend().get_texts()] == ["A", "B"]


def test_what_cannot_be_told_is_left_out_of_a_curve(quick):
    """One prompt has no intervals; a position that no draft reached has no value."""
    rows = [Measured("p", "s", 5, [1, 0, 0, 0])]
    given = result(Sheet("heldout", "heldout", None, 0.0, 1.0, {"A": rows}))
    canvas = drawn(given, "heldout-conditional")
    (line,) = canvas.axis.lines
    assert line.get_xdata().tolist() == [1, 2]
    assert canvas.ends[0][1] == "A  0%"
    canvas.png()
    nothing = result(Sheet("heldout", "heldout", None, 0.0, 1.0, {"A": rows, "B": [Measured("p", "s", 5, [])]}))
    for picture in pictures(nothing):
        picture.png("light")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_drafters_have_colours_and_marks_of_their_own_on_both_papers(theme, quick):
    names = ["A", "B", "C", "D", "E", "F"]
    given = result(sheet("heldout", {name: 0.4 + i / 20 for i, name in enumerate(names)}, drift=False))
    canvas = drawn(given, "heldout-acceptance", theme)
    assert len({line.get_color() for line in canvas.axis.lines}) == 6
    assert len({line.get_marker() for line in canvas.axis.lines}) == 6
    gain = drawn(given, "heldout-gain", theme)
    colours = dict(zip(names, (line.get_color() for line in canvas.axis.lines), strict=True))
    assert {label.split()[0]: colour for _, label, colour in gain.ends[1:]} == {n: colours[n] for n in names[1:]}
    corner = Image.open(io.BytesIO(canvas.png())).convert("L").getpixel((2, 2))
    assert corner > 250 if theme == "light" else corner < 40
