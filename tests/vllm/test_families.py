"""Real vLLM takes drafts of several kinds of targets: its configuration and modules. It serves some: serving.py."""

import json
from pathlib import Path

import pytest
import speaking
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from eagle31_train.config import TargetConfig
from eagle31_train.targets.description import NO_EAGLE3, WRAPPED, describe_target

pytestmark = pytest.mark.vllm

NAMES = ("llama-tied", "gpt-oss", "mistral-sliding")  # Llama 3's RoPE; YaRN; a window in every layer
BRIEF = ["train.max_steps=1", "evaluate.num_prompts=1"]


def test_vllm_reads_a_draft_as_it_was_meant_and_gives_it_the_window_of_all_layers_of_its_target(ask, tmp_path):
    """Which stage 1 and `plan` tell of such targets, and of no other."""
    models = []
    for name in NAMES:
        target = speaking.make(name, tmp_path / "targets" / name)
        run = speaking.run_all_stages(target, name, tmp_path, *BRIEF)
        models.append({"target": str(target), "draft": str(run / "export")})
    for name, model, facts in zip(NAMES, models, ask("draft", models), strict=True):
        assert "error" not in facts, facts["error"]
        draft = json.loads(Path(model["draft"], "config.json").read_text())
        told = {field: value for field, value in facts["fields"].items() if value != "absent"}
        assert told == {field: draft[field] for field in told}
        assert {"num_attention_heads", "rope_parameters", "fc_norm", "norm_output"} <= told.keys()
        assert facts["eagle3"]
        assert facts["left"] == {"model.embed_tokens.weight": False}  # the target's own takes its place
        window = 16 if name == "mistral-sliding" else None
        assert (facts["window"] or None) == describe_target(TargetConfig(path=model["target"])).sliding_window == window


# Whose class vLLM names otherwise than transformers, or transformers lacks.
ELSEWHERE = {"exaone": "ExaoneForCausalLM", "internlm2": "InternLM2ForCausalLM", "internvl_chat": "InternVLChatModel"}
ELSEWHERE |= {"qwen2_vl": "Qwen2VLForConditionalGeneration"}
SERVED = ["granite", "llama", "minimax_m2", "mistral", "mistral3", "phi3", "qwen2", "qwen3", "qwen3_5", "qwen3_next"]
SERVED += ["deepseek_v3", "gpt_oss", "qwen3_moe", "qwen3_vl", *WRAPPED]


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
