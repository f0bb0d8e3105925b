"""Real vLLM takes the exports of five families' targets: its configuration and modules. It serves two: serving.py."""

import json

import pytest
import speaking
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from eagle31_train.config import TargetConfig
from eagle31_train.targets.description import NO_EAGLE3, WRAPPED, describe_target

pytestmark = pytest.mark.vllm

CLASSES = {
    "llama-tied": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3-moe": "Qwen3MoeForCausalLM",
    "mistral-sliding": "MistralForCausalLM",
    "gpt-oss": "GptOssForCausalLM",
}
BRIEF = ["train.max_steps=1", "evaluate.num_prompts=1"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """name → (target, run folder) of all stages."""
    folder = tmp_path_factory.mktemp("families")
    targets = {name: speaking.make(name, folder / "targets" / name) for name in CLASSES}
    return {name: (target, speaking.run_all_stages(target, name, folder, *BRIEF)) for name, target in targets.items()}


@pytest.fixture(scope="module")
def seen(runs, ask):
    """name → what vLLM reads of the draft beside its target."""
    asked = [{"target": str(target), "draft": str(run / "export")} for target, run in runs.values()]
    return dict(zip(runs, ask("draft", asked), strict=True))


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


# Whose class vLLM names otherwise than transformers, or transformers lacks.
ELSEWHERE = {"exaone": "ExaoneForCausalLM", "internlm2": "InternLM2ForCausalLM", "internvl_chat": "InternVLChatModel"}
ELSEWHERE |= {"qwen2_vl": "Qwen2VLForConditionalGeneration"}
SERVED = ["granite", "llama", "minimax_m2", "mistral3", "phi3", "qwen2", "qwen3", "qwen3_5", "qwen3_next"]
SERVED += ["deepseek_v3", "gpt_oss", "qwen3_vl", *WRAPPED]


def test_kinds_that_are_called_not_served_are_those_whose_classes_take_no_eagle3_draft(ask):
    tables = (MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
    names = {kind: {table[kind] for table in tables if kind in table} for kind in {*NO_EAGLE3, *SERVED}}
    names |= {kind: {name} for kind, name in ELSEWHERE.items()}
    [found] = ask("classes", [{"architectures": sorted(set().union(*names.values()))}])
    classes = {kind: [found[name] for name in of if found[name]] for kind, of in names.items()}
    given = {kind: {takes for _, takes in answers} for kind, answers in classes.items() if answers}
    assert given == {kind: {kind in SERVED} for kind in given}
    wrapped = {kind for kind, answers in classes.items() if any(name.startswith("Transformers") for name, _ in answers)}
    assert wrapped == WRAPPED & given.keys()
    assert given.keys() >= {"gemma2", "mixtral", "qwen2_moe", "granite", "llama", "phi3", "smollm3"}  # of text alone
