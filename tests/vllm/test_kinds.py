"""Random targets of twenty kinds, from a target's path to real vLLM: the table of docs/targets.md, minutes each.

make test-slow ARGS='tests/vllm/test_kinds.py -k gemma2'
"""

import json

import pytest
import speaking
from serving import DEPTH, counters
from speaking import EXPERTS, LOCAL, YARN, sizes

from eagle31_train.config import TargetConfig
from eagle31_train.targets.description import class_without_eagle3

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


def usual(kind: str, layers: int = 7, mlp: int = 160, **more):
    return sizes(kind, layers, mlp, 1e-6, 768, {"rope_theta": 1e4}, **more)


HEADS = {"head_dim": 32}
GEMMA = {**HEADS, "query_pre_attn_scalar": 32, "sliding_window": 16}
MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.1,
    "logits_scaling": 4.0,
}
GLM = {**HEADS, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "n_shared_experts": 1}
GLM |= {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
ERNIE = {"moe_intermediate_size": 48, "moe_num_experts": 8, "moe_k": 2, "moe_num_shared_experts": 1}
ERNIE |= {"moe_layer_start_index": 1, "moe_layer_interval": 1}
KINDS = {
    "llama": usual("llama", tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
    "qwen2": usual("qwen2"),
    "qwen3_moe": usual("qwen3_moe", head_dim=64, **EXPERTS),
    "mistral": usual("mistral"),
    "granite": usual("granite", **MULTIPLIERS),
    "gpt_oss": sizes("gpt_oss", 6, 64, 1e-5, 512, YARN, head_dim=64, sliding_window=16, **LOCAL),
    "olmo2": usual("olmo2"),
    "glm": usual("glm", **HEADS),
    "gemma": usual("gemma", hidden_act="gelu_pytorch_tanh", **HEADS),
    "gemma2": usual("gemma2", **GEMMA),
    "gemma3_text": usual("gemma3_text", **GEMMA),
    "mixtral": usual("mixtral", **LOCAL),
    "qwen2_moe": usual("qwen2_moe", shared_expert_intermediate_size=64, **EXPERTS),
    "olmoe": usual("olmoe", num_experts=8, num_experts_per_tok=2),
    "glm4_moe": usual("glm4_moe", **GLM),
    "ernie4_5_moe": usual("ernie4_5_moe", **ERNIE),
    "exaone4": usual("exaone4", sliding_window=16, sliding_window_pattern=4),
    "exaone_moe": usual("exaone_moe", sliding_window=16, **EXPERTS),
    "granitemoe": usual("granitemoe", **LOCAL, **MULTIPLIERS),
    "granitemoeshared": usual("granitemoeshared", shared_intermediate_size=64, **LOCAL, **MULTIPLIERS),
}
OPTIONS = ["data.self_prompts.count=24", "train.max_steps=30", "train.epochs=60", "evaluate.num_prompts=8"]
OPTIONS += ["evaluate.timed_prompts=1", "evaluate.max_new_tokens=24", "extract.trajectories=0"]
OPTIONS += ["drafter.head_dim=32", "drafter.num_attention_heads=4", "drafter.num_key_value_heads=2"]


@pytest.mark.parametrize("kind", KINDS)
def test_vllm_counts_what_the_evaluator_counts(kind, ask, tell, tmp_path, monkeypatch):
    monkeypatch.setitem(speaking.TARGETS, kind, (KINDS[kind], "qwen3"))
    target = speaking.make(kind, tmp_path / "target")
    run = speaking.run_all_stages(target, kind, tmp_path, *OPTIONS)
    evaluated = json.loads((run / "evaluate" / "manifest.json").read_text())
    end_ids, limit = evaluated["end_ids"], evaluated["result"]["max_new_tokens"]
    prompts = evaluated["per_prompt"]
    requests = [{"prompt": one["prompt_ids"], "max_new_tokens": limit, "end_ids": end_ids} for one in prompts]
    wrapped = class_without_eagle3(TargetConfig(path=str(target)))
    asked = {"target": str(target), "draft": str(run / "export"), "draft_tokens": DEPTH, "requests": requests}
    (answer,) = ask("decode", [{**asked, "model_impl": "transformers" if wrapped else "auto"}])
    assert answer["outputs"] == [one["output_ids"] for one in prompts]
    assert answer["counters"] == [counters(one["accepted"], DEPTH) for one in prompts]
    accepted = [sum(one["accepted_per_position"][i] for one in answer["counters"]) for i in range(DEPTH)]
    drafts = sum(one["drafts"] for one in answer["counters"])
    tell(f"{kind}: {len(prompts)} prompts, {drafts} drafts, accepted {', '.join(map(str, accepted))}")
    assert accepted[0], "nothing was accepted: nothing is shown"
