"""What is shown of a result: pictures, the page, the terminal's table and the card have the numbers as they were."""

import copy
import json
import re
from dataclasses import replace
from html import unescape
from pathlib import Path

import numpy as np
import pytest
from plan_cases import shape_of
from sample_results import DEPTHS, comparison, measured, result, sheet

from eagle31_train.compose import load_config
from eagle31_train.evaluation.intervals import bracket
from eagle31_train.evaluation.measurement import Counts, Measurement
from eagle31_train.evaluation.results import summarise
from eagle31_train.reporting import card, evaluation_page, figures
from eagle31_train.reporting.card import CardResult, CardResults
from eagle31_train.reporting.evaluation_page import pictures
from eagle31_train.reporting.markdown import plain
from eagle31_train.reporting.tables import ALL, SERVING, as_text, sampling, sections

RESULTS = Path(__file__).parents[2] / "docs" / "results"


@pytest.fixture(scope="module")
def whole():
    return comparison()


@pytest.mark.parametrize(("top_k", "told"), [(None, ""), (20, ", top_k 20")])
def test_how_tokens_were_sampled_is_told(top_k, told):
    workload, measurements = sheet("heldout", {"A": 0.5}, temperature=0.6, top_p=0.95)
    (shown,) = result((replace(workload, top_k=top_k), measurements))["workloads"]
    assert sampling(shown) == f"sampled at temperature 0.6, top_p 0.95{told}"
    assert ("top_k" in shown) == bool(told), "what was stored before stays as it is"


def drawn(given, name):
    """The axes of one of a result's pictures."""
    (picture,) = [picture for picture in pictures(given) if picture.name == name]
    return picture.figure().axes[0]


def text_of(html):
    """What a reader sees of a page."""
    return unescape(re.sub(r"\s+", " ", re.sub(r"<style>.*?</style>|<[^>]+>", " ", html, flags=re.DOTALL)))


def test_page_and_card_show_the_same_tables(whole):
    """Every cell and every remark; nothing is taken for HTML or Markdown."""
    html = evaluation_page.render({**whole, "target": "org/target"}, {})
    config, results = load_config(["+experiment=smollm2"]), CardResults(comparisons=[CardResult(whole, names=["B"])])
    shown = card.render(config, shape_of(), {}, None, results)
    page = text_of(html)
    assert "target org/target · a | processor · float32" in page
    assert page.index("Verdict") < page.index("What the numbers mean")
    for section in sections(whole):
        for remark in section.remarks:
            assert remark in page
            assert f"- {plain(remark)}" in shown
        for row in (row for table in section.tables for row in table.rows):
            assert " ".join(" ".join(row).split()) in page
            assert f"| {' | '.join(map(plain, row))} |" in shown
    assert "<A>" not in html + shown
    names = [workload["name"] for workload in whole["workloads"]]
    assert [section.title for section in sections(whole)] == ["Verdict", ALL, *names, SERVING]


def test_speed_is_said_of_the_prompts_that_were_timed():
    """Whose acceptance may be another than that of all."""
    rows = [Counts(f"p{i}", "a", 6, [accepted] * 5) for i, accepted in enumerate((0, 0, 2, 2))]
    workload, _ = measured("heldout", {"A": rows})
    measurement = Measurement([[1] * 6] * 4, rows, tokens=12, plain=2.0, speculative=1.0)
    text = as_text(summarise([(workload, {"A": [measurement]})], [2], 2))
    said = "one user, at 2, first 2 prompts (acceptance length 1.00): plain 6.0 (1.00x), A 12.0 (2.00x)"
    assert f"  tokens per second of {said}\n" in text


def test_tables_have_every_number_with_its_interval(whole):
    by_title = {section.title: {table.title: table for table in section.tables} for section in sections(whole)}
    for workload in whole["workloads"]:
        lengths = by_title[workload["name"]]["acceptance length"]
        for depth, row in zip(map(str, DEPTHS), lengths.rows, strict=True):
            both = [workload["drafters"][name]["by_depth"][depth]["acceptance_length"] for name in "AB"]
            difference = workload["differences"]["B"][depth]["difference"]
            assert list(row[:4]) == [depth, *map(bracket, [*both, difference])]
    assert by_title["Verdict"][""].rows[2][3:] == ["1, 2, 3, 4", "–"]
    drift = by_title["heldout"]["drift of B: attention on …, and its state"]
    assert list(drift.rows[3]) == ["4", "0.163", "0.325", "0.163", "0.350", "9.500", "2.000"]
    speeds, times, accepted = by_title[SERVING].values()
    assert speeds.rows[3] == ["B", "3", "16", "8.0 [7.0, 9.0]", "0.40", "99.5", "2 of 24"]
    assert times.rows[3][3:] == ["50.0", "41.0", "91.2", "–", "–", "–"]
    assert accepted.rows[1][3:] == ["1.95", "60.0%, 25.0%, –"]


def test_results_of_earlier_versions_are_shown():
    files = list(RESULTS.glob("study*.json"))
    assert files
    for file in files:
        given = json.loads(file.read_text())
        given = given if "workloads" in given else {"title": "served", "serving": given}
        assert len(as_text(given)) > 300
        assert len(evaluation_page.render(given, {})) > 1000
        assert list(pictures(given))


def test_no_two_pictures_are_written_to_one_file():
    names = [one.name for one in pictures(result(sheet("heldout", {"A": 0.5, "a": 0.6, "a-2": 0.7})))]
    assert len([name for name in names if "attention" in name]) == 3
    assert len(set(names)) == len(names)


def test_a_position_that_few_drafts_reached_has_no_point(whole):
    """Its interval is wide; or no draft was accepted there, or every one: of five that tells nothing, of six little."""
    own = copy.deepcopy(whole)
    numbers = own["workloads"][0]["drafters"]["A"]
    for share, came, points in (([0.0, 0.0, 0.9], 20, 3), ([1.0, None, None], 5, 3), ([1.0, None, None], 6, 4)):
        numbers["conditional"][3] = share
        numbers["by_depth"]["4"]["accepted_per_position"][2] = came
        assert [len(line.get_xdata()) for line in drawn(own, "heldout-conditional").lines] == [points, 4]


def test_letters_without_a_font_are_told_apart():
    assert [figures.drawable(text) for text in ("é ∑", "a甲", "乙")] == ["é ∑", "aU+7532 ", "U+4E59 "]


def test_curves_are_the_numbers_with_their_intervals(whole):
    numbers = whole["workloads"][0]["drafters"]
    axes = drawn(whole, "heldout-acceptance")
    for line, band, name in zip(axes.lines, axes.collections, "AB", strict=True):
        lengths = np.array([of["acceptance_length"] for of in numbers[name]["by_depth"].values()])
        assert line.get_xdata().tolist() == [1, 2, 3, 4]
        assert line.get_ydata().tolist() == lengths[:, 0].tolist()
        corners = {(round(x), y) for x, y in band.get_paths()[0].vertices}
        assert {(1, lengths[0, 1]), (4, lengths[3, 1]), (1, lengths[0, 2]), (4, lengths[3, 2])} <= corners
