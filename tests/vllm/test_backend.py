"""Real vLLM's server, measured with the exported drafter and without: its counts are the evaluator's."""

import json
import os
from contextlib import contextmanager
from pathlib import Path

import pytest

from data_prep import client
from eagle31_train.compose import load_config
from eagle31_train.evaluation import serving
from eagle31_train.evaluation.prompts import Prompt
from eagle31_train.evaluation.serving.engine import check
from eagle31_train.targets.completions import Request, Sampling

# A server takes a minute to start: one drafter says it, of a small target or yours.
pytestmark = [pytest.mark.vllm, pytest.mark.runs("Llama, tied embeddings")]
PROMPTS, USERS = 4, 3


@pytest.fixture(scope="module")
def asked(requests):
    """Prompts answered whole; the shortest answers, which an end token ends where one does, are among them."""
    return sorted((one for one in requests if one["kind"] == "whole"), key=lambda one: len(one["output"]))[:PROMPTS]


def answers_of(server, asked):
    """Stage 1's answers from the same server."""
    model = json.loads(server.ask("/v1/models")[1])["data"][0]["id"]
    target = client.Server(f"http://127.0.0.1:{server.port}/v1", model, longest=512)
    up_to = Sampling(asked[0]["max_new_tokens"], 1.0, asked[0]["end_ids"])
    return [target.complete(Request(one["prompt"], 0.0, 0), up_to) for one in asked]


@pytest.fixture(scope="module")
def served(asked, finished_run, target, vllm_python, tmp_path_factory):
    config = load_config([
        "+experiment=smollm2", f"target.path={target}", f"run_dir={tmp_path_factory.mktemp('backend')}",
        f"evaluate.vllm_python={vllm_python}",
        "evaluate.vllm_args={enforce_eager: true, dtype: float32, kv_cache_memory_bytes: 67108864}",
        "evaluate.serve_speculative_tokens=[3]",
        f"evaluate.concurrency=[1,{USERS}]", f"evaluate.max_new_tokens={asked[0]['max_new_tokens']}",
    ])  # fmt: skip
    answers, start = [], serving.serving

    @contextmanager
    def asked_once_more(*given, **more):
        """A last question, not counted any more: a server of its own would take another minute."""
        with start(*given, **more) as server:
            yield server
            answers.append(answers_of(server, asked))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serving, "serving", asked_once_more)
        patch.setenv("HF_HUB_OFFLINE", os.environ.get("HF_HUB_OFFLINE", "1"))
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # a server and an engine, and no third process that works
        prompts = [Prompt(str(i), "", one["prompt"]) for i, one in enumerate(asked)]
        drafts = {"ours": Path(finished_run) / "export"}
        measured = serving.measure_serving(config, drafts, prompts, asked[0]["end_ids"], check(config))
        return {**measured, "answers": answers}


def test_counts_of_the_server_are_the_evaluators(asked, served):
    assert [(row["draft_tokens"], row["concurrency"]) for row in served["rows"]] == [
        (0, 1), (0, USERS), (3, 1), (3, USERS)
    ]  # fmt: skip
    for row in served["rows"]:
        assert row["counted"]["requests"] == row["requests"]
        assert row["counted"]["output_tokens"] == row["output_tokens"]
        times = row["requests"] // PROMPTS
        if row["concurrency"] == 1:
            assert (times, row["different"]) == (1, 0)
        elif row["different"]:
            continue  # others in the batch may turn a choice between equals
        assert row["output_tokens"] == times * sum(len(one["output"]) for one in asked)
        if row["draft_tokens"]:
            theirs = [one["counters"]["accepted_per_position"] for one in asked]
            assert row["acceptance"]["accepted_per_position"] == [times * sum(at) for at in zip(*theirs, strict=True)]
            assert row["acceptance"]["drafts"] == times * sum(one["counters"]["drafts"] for one in asked)


def test_stage_1_has_of_the_server_the_tokens_that_the_target_writes(asked, served):
    """With the end token, be there a drafter or not."""
    ended = ["stop" if one["output"][-1] in one["end_ids"] else "length" for one in asked]
    assert served["answers"] == [[(one["output"], why) for one, why in zip(asked, ended, strict=True)]] * 2
