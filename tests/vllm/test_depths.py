"""The evaluator tells the counts of every depth from one output of the target; vLLM, serving each, counts the same."""

import pytest

from eagle31_train.evaluation.measurement import Counts

pytestmark = pytest.mark.vllm
PROMPTS = 8


def told(prompt, draft_tokens):
    """What vLLM should count for one prompt."""
    accepted = Counts("", "", len(prompt["output_ids"]), prompt["reach"]).rounds(draft_tokens)
    return {
        "drafts": len(accepted),
        "proposed": draft_tokens * len(accepted),
        "accepted": sum(accepted),
        "accepted_per_position": [sum(count > at for count in accepted) for at in range(draft_tokens)],
    }


@pytest.mark.parametrize("draft_tokens", [1, 5, 8])
def test_counts_at_other_depths_are_vllms(draft_tokens, llama_run, evaluated, requests, serve, plain):
    asked = requests[:PROMPTS]
    assert all(one["kind"] == "whole" for one in asked)
    found = serve(draft_tokens, asked)
    assert found["outputs"] == plain["outputs"][:PROMPTS]
    expected = [told(prompt, draft_tokens) for prompt in evaluated["per_prompt"][:PROMPTS]]
    assert dict(enumerate(found["counters"])) == dict(enumerate(expected))


def test_depth_three_is_told_as_it_was_decoded(llama_run, evaluated, requests, speculative):
    """All three ways: from every place, by the evaluator's own speculation, and by vLLM."""
    for prompt, counted in zip(evaluated["per_prompt"], speculative["counters"], strict=False):
        assert told(prompt, 3) == counted
        accepted = prompt["accepted"]
        assert counted["accepted_per_position"] == [sum(count > at for count in accepted) for at in range(3)]
