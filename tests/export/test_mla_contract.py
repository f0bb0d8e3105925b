"""The MLA draft: its table, its config.json as vLLM and transformers read it, and what either would misread."""

import math
from dataclasses import replace

import pytest
import torch
from transformers import DeepseekV2Config, DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RotaryEmbedding

from eagle31_train import contract, draft_config
from eagle31_train.drafter.rope import Rope
from eagle31_train.schema import UserError


def full_rank(tensors):
    """The table without q_lora_rank."""
    kept = {name: size for name, size in tensors.items() if "q_a_" not in name and "q_b_" not in name}
    return {**kept, "midlayer.self_attn.q_proj.weight": (30, 32)}


def test_the_table(tiny_mla, tiny_mla_tensors):
    assert contract.weight_shapes(tiny_mla) == tiny_mla_tensors
    assert contract.weight_shapes(replace(tiny_mla, q_lora_rank=None)) == full_rank(tiny_mla_tensors)


def test_a_whole_checkpoint_passes(tiny_mla, good_mla):
    assert contract.check(good_mla, tiny_mla) == []


AT_ONE = ("midlayer.self_attn.q_a_layernorm.weight", "midlayer.self_attn.kv_a_layernorm.weight", "norm.weight")


def test_everything_that_vllm_would_leave_as_it_is_made_is_missed(tiny_mla, good_mla):
    for name in good_mla:
        problems = contract.check({n: t for n, t in good_mla.items() if n != name}, tiny_mla)
        assert len(problems) == 1
        assert problems[0].startswith(f"{name} is missing")
        assert problems[0].endswith("vLLM would silently leave it at one") == ("norm" in name)
    assert set(AT_ONE) < good_mla.keys()


def test_queries_of_the_other_kind_are_superfluous(tiny_mla, good_mla):
    good_mla["midlayer.self_attn.q_proj.weight"] = torch.zeros(30, 32)
    assert any("q_proj.weight is superfluous" in p for p in contract.check(good_mla, tiny_mla))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_key_value_heads": 1}, "num_key_value_heads 1 is not num_attention_heads 3"),
        ({"head_dim": 16}, "head_dim 16 is not the 10"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "every scaling of an MLA drafter for YaRN"),
        ({"max_position_embeddings": 129}, "beyond the 128 positions"),
    ],
)
def test_shapes_that_vllm_reads_otherwise_are_named(change, words, tiny_mla):
    assert any(words in problem for problem in contract.check_shape(replace(tiny_mla, **change)))


def test_heads_need_not_divide_the_hidden_size(tiny_mla):
    assert tiny_mla.hidden_size % tiny_mla.num_attention_heads
    assert contract.check_shape(tiny_mla) == []
    DeepseekV3Config(**draft_config.config_json(tiny_mla, "float32", "x"))


def test_config_json_has_every_field(tiny_mla):
    scaling = {
        "rope_type": "yarn",
        "type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }
    assert draft_config.config_json(tiny_mla, "bfloat16", "Kimi-K2.6") == {
        "architectures": ["Eagle3DeepseekV2ForCausalLM"],
        "model_type": "kimi_k2",
        "target_model_name": "Kimi-K2.6",
        "torch_dtype": "bfloat16",
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "q_lora_rank": 9,
        "kv_lora_rank": 12,
        "qk_nope_head_dim": 6,
        "qk_rope_head_dim": 4,
        "v_head_dim": 5,
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 128,
        "rope_theta": 50000.0,
        "rope_scaling": scaling,
        "rope_parameters": {**scaling, "rope_theta": 50000.0},
        "tie_word_embeddings": False,
        "vocab_size": 40,
        "draft_vocab_size": 12,
        "target_hidden_size": 16,
        "num_aux_hidden_states": 2,
        "eagle_aux_hidden_state_layer_ids": [1, 2],
        "fc_norm": True,
        "norm_output": True,
        "norm_before_residual": False,
    }


def test_full_rank_queries_are_written_because_the_default_is_another(tiny_mla):
    config = draft_config.config_json(replace(tiny_mla, q_lora_rank=None), "float32", "x")
    assert config["q_lora_rank"] is None
    assert DeepseekV3Config(**config).q_lora_rank is None
    del config["q_lora_rank"]
    assert DeepseekV3Config(**config).q_lora_rank == draft_config.shape_from_config(config).q_lora_rank == 1536


def test_defaults_are_those_of_the_classes_that_read():
    for kind, model_types in ((DeepseekV3Config, ("kimi_k2", "deepseek_v3")), (DeepseekV2Config, ("deepseek_v2",))):
        plain = kind()
        assert {name: getattr(plain, name) for name in draft_config.MLA_DEFAULTS} == draft_config.MLA_DEFAULTS
        assert plain.rms_norm_eps == 1e-6
        for model_type in model_types:
            assert draft_config.MODEL_TYPES["mla"][model_type] == plain.max_position_embeddings


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
SCALINGS = {
    "none": None,
    "what must be given": YARN,
    "mscale_all_dim alone": {**YARN, "mscale_all_dim": 0.8},
    "both": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.9},
    "betas": {**YARN, "beta_fast": 24.0, "beta_slow": 2.0},
    "by its old name": {"type": "yarn", **{name: value for name, value in YARN.items() if name != "rope_type"}},
}


def by_each_spelling(config):
    """config.json for readers of one spelling of RoPE each, and of both."""
    new = {key: value for key, value in config.items() if key not in ("rope_theta", "rope_scaling")}
    old = {key: value for key, value in config.items() if key != "rope_parameters"}
    return {"both": config, "new": new, "old": old}


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("spelling", ["both", "new", "old"])
def test_transformers_turns_as_the_drafter_does(name, spelling, tiny_mla):
    shape = replace(tiny_mla, rope_scaling=SCALINGS[name])
    assert contract.check_shape(shape) == []
    read = DeepseekV3Config(**by_each_spelling(draft_config.config_json(shape, "float32", "x"))[spelling])
    assert (read.head_dim, read.rope_parameters["rope_theta"]) == (4, 50000.0)
    theirs, ours = DeepseekV3RotaryEmbedding(read), Rope(shape)
    torch.testing.assert_close(theirs.inv_freq, ours.exact, rtol=1e-6, atol=0)
    assert theirs.attention_scaling == pytest.approx(ours.factor, rel=1e-12)
    # Its attention, written out: the softmax's own factor.
    mscale = read.rope_parameters.get("mscale_all_dim", 0)
    softmax = (0.1 * mscale * math.log(4.0) + 1) ** 2 if mscale else 1.0
    assert ours.softmax_factor == pytest.approx(softmax, rel=1e-12)


@pytest.mark.parametrize("mscale", [{"mscale": 0.7}, {"mscale": 0.0, "mscale_all_dim": 1.0}])
def test_mscales_that_transformers_reads_otherwise_are_refused(mscale, tiny_mla):
    shape = replace(tiny_mla, rope_scaling={**YARN, **mscale})
    read = DeepseekV3Config(**draft_config.config_json(shape, "float32", "x"))
    assert DeepseekV3RotaryEmbedding(read).attention_scaling != pytest.approx(Rope(shape).factor, rel=1e-3)
    assert any("read differently" in problem for problem in contract.check_shape(shape))


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("spelling", ["both", "new", "old"])
def test_what_is_written_reads_back(name, spelling, tiny_mla, tiny_mla_tensors):
    shape = replace(tiny_mla, rope_scaling=SCALINGS[name])
    config = by_each_spelling(draft_config.config_json(shape, "float32", "x"))[spelling]
    whole = replace(shape, rope_scaling=draft_config.rope_scaling(shape))
    assert draft_config.shape_from_config(config, tiny_mla_tensors) == whole
    assert Rope(whole).factor == Rope(shape).factor


# As a trainer writes it that copies the target's config.json: experts and all.
COPIED = {
    "architectures": ["Eagle3DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_hidden_layers": 1,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 163840,
    "draft_vocab_size": 163840,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 262144,
    "rope_theta": 50000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 64.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "attention_factor": None,
    },
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 30, 58], "use_aux_hidden_state": True},
    "fc_norm": True,
    "norm_output": True,
    "n_routed_experts": 384,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "num_nextn_predict_layers": 0,
    "head_dim": 64,
    "rope_interleave": True,
}


@pytest.mark.parametrize("model_type", ["deepseek_v3", "kimi_k2", "deepseek_v2"])
@pytest.mark.parametrize(
    "name", ["Eagle3DeepseekV3ForCausalLM", "Eagle3DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"]
)
def test_a_copied_config_is_read(model_type, name):
    shape = draft_config.shape_from_config({**COPIED, "model_type": model_type, "architectures": [name]})
    assert (shape.architecture, shape.num_key_value_heads, shape.head_dim) == ("mla", 64, 192)
    assert shape.aux_layers == [2, 30, 58]
    assert (shape.rope_theta, shape.max_position_embeddings) == (50000.0, 262144)
    dropped = ("type", "attention_factor")
    given = {key: value for key, value in COPIED["rope_scaling"].items() if key not in dropped}
    assert shape.rope_scaling == {**given, "rope_type": "yarn"}
    assert contract.check_shape(shape) == []
    assert draft_config.config_json(shape, "bfloat16", "x")["model_type"] == "kimi_k2"


def test_the_original_length_is_the_longest_position_where_it_is_not_given():
    scaling = {"type": "yarn", "factor": 1.0, "mscale_all_dim": 1.0}
    config = {**COPIED, "rope_scaling": scaling}
    read = DeepseekV3Config(**{**config, "rope_scaling": dict(scaling)}).rope_parameters
    ours = draft_config.shape_from_config(config).rope_scaling
    assert ours["original_max_position_embeddings"] == read["original_max_position_embeddings"] == 262144


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "llama"}, "model_type llama"),
        ({"model_type": "deepseek_v32", "index_topk": 2048}, "model_type deepseek_v32, index_topk"),
        ({"rope_interleave": False}, "rope_interleave"),
        ({"is_causal": False}, "is_causal"),
        ({"num_hidden_layers": 2}, "num_hidden_layers"),
        ({"kv_lora_rank": None}, "kv_lora_rank: None"),
        ({"qk_rope_head_dim": "64"}, "qk_rope_head_dim: 64"),
        ({"rope_scaling": {**COPIED["rope_scaling"], "attention_factor": 1.0}}, "attention_factor 1.0"),
        ({"rope_scaling": {**COPIED["rope_scaling"], "attention_factor": 1.2}}, "attention_factor 1.2"),
        ({"speculators_model_type": "eagle3", "transformer_layer_config": COPIED}, "model_type deepseek_v3"),
    ],
)
def test_what_vllm_would_serve_otherwise_is_refused(change, words):
    with pytest.raises(UserError) as error:
        draft_config.shape_from_config({**COPIED, **change})
    assert words in str(error.value)
    assert "\n" not in str(error.value)
