"""Real vLLM takes the exports of five families' targets: its configuration, its modules, and of some what it serves."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import speaking

from eagle31_train.config import TargetConfig
from eagle31_train.targets.description import describe_target

pytestmark = pytest.mark.vllm

CLASSES = {
    "llama-tied": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3-moe": "Qwen3MoeForCausalLM",
    "mistral-sliding": "MistralForCausalLM",
    "gpt-oss": "GptOssForCausalLM",
}
SERVED = ("llama-tied", "qwen3")  # each takes an engine's start


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """name → (target, run folder) of all stages."""
    folder = tmp_path_factory.mktemp("families")
    targets = {name: speaking.make(name, folder / "targets" / name) for name in CLASSES}
    return {name: (target, speaking.run_all_stages(target, name, folder)) for name, target in targets.items()}


@pytest.fixture(scope="module")
def seen(runs, tmp_path_factory, vllm_python):
    """name → what vLLM reads of the draft beside its target."""
    folder = tmp_path_factory.mktemp("read")
    asked, answer = folder / "asked.json", folder / "answer.json"
    request = {
        "target": {name: str(target) for name, (target, _) in runs.items()},
        "drafts": {name: str(run / "export") for name, (_, run) in runs.items()},
    }
    asked.write_text(json.dumps(request))
    done = subprocess.run(
        [str(vllm_python), str(Path(__file__).with_name("read_draft.py")), str(asked), str(answer)],
        env={**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(answer.read_text())


@pytest.mark.parametrize("name", CLASSES)
def test_vllm_takes_the_target_and_reads_the_draft_as_it_was_meant(name, runs, seen):
    facts, draft = seen[name], json.loads((runs[name][1] / "export" / "config.json").read_text())
    assert "error" not in facts, facts["error"]
    assert (facts["class"], facts["eagle3"]) == (CLASSES[name], True)
    told = {field: value for field, value in facts["fields"].items() if value != "absent"}
    assert told == {field: draft[field] for field in told}
    assert {"num_attention_heads", "rope_parameters", "fc_norm", "norm_output"} <= told.keys()
    assert facts["left"] == {"model.embed_tokens.weight": False}  # the target's own takes its place


def test_vllm_limits_a_draft_to_the_window_of_a_target_all_of_whose_layers_slide(runs, seen):
    """Which stage 1 and `plan` tell of such targets, and of no other."""
    assert {name: facts["window"] for name, facts in seen.items() if facts["window"]} == {"mistral-sliding": 16}
    described = {name: describe_target(TargetConfig(path=str(target))) for name, (target, _) in runs.items()}
    assert {name: of.sliding_window for name, of in described.items() if of.sliding_window} == {"mistral-sliding": 16}


@pytest.mark.parametrize("name", SERVED)
def test_vllm_accepts_what_the_evaluator_counted(name, runs, answers_of):
    target, run = runs[name]
    manifest = json.loads((run / "evaluate" / "manifest.json").read_text())
    limit, decoded = manifest["report"]["max_new_tokens"], manifest["per_prompt"]
    asked = [{"prompt": p["prompt_ids"], "max_new_tokens": limit, "end_ids": manifest["end_ids"]} for p in decoded]
    answers = answers_of(str(target), str(run / "export"), 3, asked)
    assert answers["outputs"] == [prompt["output_ids"] for prompt in decoded]
    counted = [(c["drafts"], c["accepted"], c["accepted_per_position"]) for c in answers["counters"]]
    assert counted == [(p["drafts"], sum(p["accepted"]), p["accepted_per_position"]) for p in decoded]
    assert sum(accepted for _, accepted, _ in counted) > 0
