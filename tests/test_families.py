"""Targets of five families from their path alone to an export, by the command line and through every stage."""

import json

import pytest
import speaking
import torch
from transformers import AutoModelForCausalLM

# Each is of its family's kind: what of the drafter's shape is not in config.json under the same name.
MLP = {"llama-tied": 192, "qwen3": 160, "qwen3-moe": 2 * 48, "mistral-sliding": 144, "gpt-oss": 2 * 64}
QUICK = {"gpt-oss"}  # vLLM serves drafters of two others: tests/serving.py
SAME = ["vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps"]
SAME += ["max_position_embeddings"]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in speaking.TARGETS]
)
def test_a_targets_path_is_enough(name, tmp_path, capsys):
    target = speaking.make(name, tmp_path / "target")
    run = speaking.run_all_stages(target, name, tmp_path, "train.max_steps=8")
    said = capsys.readouterr().out
    assert "UNLIKE" not in said
    assert ("every layer of the target sees 16 tokens" in said) == (name == "mistral-sliding")
    told, draft = (json.loads((folder / "config.json").read_text()) for folder in (target, run / "export"))
    assert {field: draft[field] for field in SAME} == {field: told[field] for field in SAME}
    assert draft["rope_parameters"] == told["rope_parameters"]
    assert (draft["target_hidden_size"], draft["intermediate_size"]) == (told["hidden_size"], MLP[name])
    assert draft["architectures"] == ["LlamaForCausalLMEagle3"]
    model = AutoModelForCausalLM.from_pretrained(target).eval()
    decoded = json.loads((run / "evaluate" / "manifest.json").read_text())["per_prompt"]
    assert len(decoded) > 1
    for prompt in decoded:
        ids = torch.tensor([prompt["prompt_ids"]])
        output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False)
        assert output[0, ids.shape[1] :].tolist() == prompt["output_ids"]
