"""Real vLLM serves the exported drafter, and counts what the evaluator counts: equalities, not tolerances."""

import pytest

pytestmark = pytest.mark.vllm


def named(requests, values):
    """Values by what they belong to, so that a failure says which prompt."""
    return {
        f"{number} {one['id']} ({one['kind']})": v for number, (one, v) in enumerate(zip(requests, values, strict=True))
    }


def test_the_requests_reach_the_edges(requests):
    kinds = [one["kind"] for one in requests]
    assert kinds.count("whole") >= 20
    assert kinds.count("limit") >= 3
    assert kinds.count("end") >= 3


def test_speculation_changes_no_output(requests, speculative, plain):
    assert named(requests, speculative["outputs"]) == named(requests, plain["outputs"])


def test_outputs_are_the_evaluators(requests, speculative):
    assert named(requests, speculative["outputs"]) == named(requests, [one["output"] for one in requests])


def test_counts_are_the_evaluators(requests, speculative):
    assert named(requests, speculative["counters"]) == named(requests, [one["counters"] for one in requests])


def test_totals_are_the_reports(evaluated, requests, speculative):
    report = evaluated["report"]
    counted = [c for one, c in zip(requests, speculative["counters"], strict=True) if one["kind"] == "whole"]
    assert sum(c["drafts"] for c in counted) == report["drafts"]
    assert sum(c["proposed"] for c in counted) == report["draft_tokens_proposed"]
    per_position = [sum(column) for column in zip(*(c["accepted_per_position"] for c in counted), strict=True)]
    assert per_position == report["accepted_per_position"]


def test_the_drafter_is_of_use(evaluated, requests, speculative, plain, capsys):
    assert evaluated["report"]["acceptance_length"] > 1.02  # an untrained drafter has 1.0
    speeds = []
    for answer in (speculative, plain):
        whole = [i for i, one in enumerate(requests) if one["kind"] == "whole"]
        speeds.append(sum(len(answer["outputs"][i]) for i in whole) / sum(answer["seconds"][i] for i in whole))
    with capsys.disabled():
        print(
            f"\nvLLM, float32, one request at a time, {len(whole)} prompts: {speeds[0]:.1f} tokens/s with the drafter, "
            f"{speeds[1]:.1f} without; acceptance length {evaluated['report']['acceptance_length']:.3f}"
        )
    assert min(speeds) > 0
