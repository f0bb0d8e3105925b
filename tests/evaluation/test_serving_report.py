"""What the answers of a server say, from times and counts made by hand."""

from collections import Counter
from dataclasses import replace

import pytest

from eagle31_train.evaluation.serving import report
from eagle31_train.evaluation.serving.server import Answer

NONE = Counter({report.FINISHED: 4.0, report.TOKENS: 15.0})


def answer(prompt, count, sent, first, last):
    return Answer(prompt, list(range(count)), sent, first, last)


# Two prompts, each sent twice; of the last answer there is but one token.
ANSWERS = [
    answer(0, 5, 10.0, 11.0, 13.0),
    answer(1, 5, 10.0, 12.0, 13.0),
    answer(0, 4, 13.0, 13.5, 15.0),
    answer(1, 1, 13.0, 13.5, 13.5),
]


def faster(factor, answers=ANSWERS):
    return [replace(one, last=one.first + (one.last - one.first) / factor) for one in answers]


def test_times_and_speeds_are_what_they_are_called():
    row = report.row(None, 0, 2, ANSWERS, NONE, None, None)
    assert [one.ttft for one in ANSWERS] == [1.0, 2.0, 0.5, 0.5]
    assert [one.tpot for one in ANSWERS] == [0.5, 0.25, 0.5, None]
    assert row["ttft"] == {"mean": 1.0, "p50": 0.75, "p95": pytest.approx(1.85)}
    assert row["tpot"] == {"mean": pytest.approx(1.25 / 3), "p50": 0.5, "p95": 0.5}
    assert row["seconds"] == pytest.approx(5.0)
    assert row["total"] == pytest.approx(15 / 5)
    assert row["per_user"][0] == pytest.approx((4 + 4 + 3 + 0) / (2.0 + 1.0 + 1.5 + 0.0))
    assert row["speedup"] is None
    assert report.notes([row]) == []


def test_a_speedup_is_paired_by_prompt():
    """Everything twice as fast: no prompt drawn again changes that, though the prompts themselves differ much."""
    row = report.row("ours", 3, 2, faster(2), Counter({f"{report.PER_POSITION}[0]": 0.0} | dict.fromkeys(
        (report.DRAFTS, report.PROPOSED, report.ACCEPTED), 0.0)), ANSWERS, ANSWERS)  # fmt: skip
    assert row["speedup"] == pytest.approx([2.0, 2.0, 2.0])
    assert row["per_user"][1] < row["per_user"][0] < row["per_user"][2]
    assert row["acceptance"]["acceptance_length"] is None


def test_one_that_pays_is_better_than_one_that_may_not():
    tried = {"drafter": "ours", "concurrency": 1}
    rows = [{**tried, "draft_tokens": 1, "speedup": [1.1, 1.05, 1.15]}]
    rows += [{**tried, "draft_tokens": 3, "speedup": [1.12, 0.98, 1.26]}]
    assert [one["draft_tokens"] for one in report.best(rows)] == [1]
    assert [one["draft_tokens"] for one in report.best(rows[1:])] == [0]


# ---------------------------------------------------------------- counters

TEXT = """# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m, \\"x\\""} 10.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="m"} 2e+00
vllm:spec_decode_num_draft_tokens_total{engine="0"} 36.0
vllm:spec_decode_num_accepted_tokens_total{engine="0"} 9.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 5.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",position="0"} 1.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="1"} 3.0
vllm:spec_decode_num_accepted_tokens_per_pos_created{engine="0",position="1"} 1.7e+09
vllm:time_to_first_token_seconds_bucket{engine="0",le="+Inf"} 4.0
vllm:time_to_first_token_seconds_sum{engine="0"} 2.0
vllm:time_to_first_token_seconds_count{engine="0"} 4.0
vllm:num_requests_running 0.0
python_gc_objects_collected_total{generation="0"} 5.0
"""


def test_counters_are_sums_over_engines_between_two_readings():
    counted = report.since(Counter({report.DRAFTS: 2.0}), report.parse(TEXT))
    assert report.speculation(counted, 3) == {
        "drafts": 10,
        "draft_tokens_proposed": 36,
        "accepted": 9,
        "accepted_per_position": [6, 3, 0],
        "acceptance_length": 1.9,
        "acceptance_at_depth": [0.6, 0.3, 0.0],
        "conditional_acceptance": [0.6, 0.5, 0.0],
    }
    assert report.mean(counted, report.TTFT) == 0.5
    assert report.mean(counted, report.TPOT) is None
    assert not any("bucket" in name or name.startswith("python") for name in counted)
