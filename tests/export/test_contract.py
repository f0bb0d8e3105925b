"""The contract's table, its config.json, and every fault that vLLM would load in silence."""

from dataclasses import asdict, replace

import pytest
import torch
from transformers import AutoConfig

from eagle31_train import contract
from eagle31_train.schema import DrafterShape, UserError, require_available

SMOLLM2 = DrafterShape(
    architecture="llama",
    hidden_size=576,
    target_hidden_size=576,
    aux_layers=[2, 15, 27],
    vocab_size=49152,
    draft_vocab_size=8192,
    intermediate_size=1536,
    num_attention_heads=9,
    num_key_value_heads=3,
    head_dim=64,
    rms_norm_eps=1e-5,
    rope_theta=100000.0,
    rope_scaling=None,
    max_position_embeddings=8192,
    fc_norm=True,
    norm_output=True,
    norm_before_residual=False,
    share_embedding=True,
)
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


def test_the_table_for_a_tiny_drafter(tiny, tiny_tensors):
    assert contract.expected_tensors(tiny) == tiny_tensors
    assert contract.map_tensors(tiny) == {"d2t": (12,), "t2d": (40,)}


def test_the_table_for_smollm2():
    assert contract.expected_tensors(SMOLLM2) == {
        "fc.weight": (576, 1728),
        "fc_norm.0.weight": (576,),
        "fc_norm.1.weight": (576,),
        "fc_norm.2.weight": (576,),
        "midlayer.input_layernorm.weight": (576,),
        "midlayer.hidden_norm.weight": (576,),
        "midlayer.post_attention_layernorm.weight": (576,),
        "midlayer.self_attn.q_proj.weight": (576, 1152),
        "midlayer.self_attn.k_proj.weight": (192, 1152),
        "midlayer.self_attn.v_proj.weight": (192, 1152),
        "midlayer.self_attn.o_proj.weight": (576, 576),
        "midlayer.mlp.gate_proj.weight": (1536, 576),
        "midlayer.mlp.up_proj.weight": (1536, 576),
        "midlayer.mlp.down_proj.weight": (576, 1536),
        "norm.weight": (576,),
        "lm_head.weight": (8192, 576),
    }


def test_the_table_follows_the_flags(tiny, tiny_tensors):
    eagle3 = contract.expected_tensors(replace(tiny, fc_norm=False))
    assert tiny_tensors.keys() - eagle3.keys() == {"fc_norm.0.weight", "fc_norm.1.weight"}
    own = contract.expected_tensors(replace(tiny, share_embedding=False))
    assert own.keys() - tiny_tensors.keys() == {"embed_tokens.weight"}
    assert own["embed_tokens.weight"] == (40, 16)
    assert contract.map_tensors(replace(tiny, draft_vocab_size=40)) == {}


def test_a_whole_checkpoint_passes(tiny, good):
    assert contract.check(good, tiny) == []
    assert contract.check({name: tuple(t.shape) for name, t in good.items()}, tiny) == []


def without(name):
    return lambda tensors: tensors.pop(name)


def with_(name, make):
    return lambda tensors: tensors.update({name: make(tensors)})


def rename(old, new):
    return lambda tensors: tensors.update({new: tensors.pop(old)})


def nan(tensors):
    tensors["midlayer.mlp.up_proj.weight"][3, 4] = float("nan")


@pytest.mark.parametrize(
    ("plant", "named"),
    [
        (without("lm_head.weight"), "lm_head.weight is missing"),
        (without("fc_norm.1.weight"), "fc_norm.1.weight is missing"),
        (without("d2t"), "d2t is missing though the vocabulary is pruned"),
        (without("t2d"), "t2d is missing"),
        (without("midlayer.hidden_norm.weight"), "midlayer.hidden_norm.weight is missing"),
        (rename("norm.weight", "model.norm.weight"), "model.norm.weight has the prefix 'model.'"),
        (nan, "midlayer.mlp.up_proj.weight holds 1 NaN"),
        (with_("fc.weight", lambda t: t["fc.weight"] / 0), "fc.weight holds"),
        (with_("midlayer.mlp.bias", lambda _: torch.zeros(3)), "midlayer.mlp.bias is superfluous"),
        (with_("fc_norm.2.weight", lambda _: torch.ones(16)), "fc_norm.2.weight is superfluous"),
        (with_("embed_tokens.weight", lambda _: torch.ones(40, 16)), "embed_tokens.weight is superfluous"),
        (with_("fc.weight", lambda t: t["fc.weight"].T), "fc.weight has shape [32, 16], not [16, 32]"),
        (with_("d2t", lambda t: t["d2t"] + torch.arange(12)), "d2t"),
        (with_("d2t", lambda t: t["d2t"].clamp(max=2)), "contradict"),
        (with_("d2t", lambda t: t["d2t"].int()), "d2t is torch.int32"),
        (with_("t2d", lambda t: ~t["t2d"]), "contradict"),
        (with_("t2d", lambda t: t["t2d"].long()), "t2d is torch.int64"),
        (with_("norm.weight", lambda t: t["norm.weight"].long()), "norm.weight is torch.int64"),
    ],
)
def test_each_fault_is_named(plant, named, tiny, good):
    plant(good)
    assert any(named in problem for problem in contract.check(good, tiny)), contract.check(good, tiny)


def test_fc_norm_keys_without_the_flag_are_named(tiny, good):
    problems = contract.check(good, replace(tiny, fc_norm=False))
    assert [problem.split(" is ")[0] for problem in problems] == ["fc_norm.0.weight", "fc_norm.1.weight"]


def test_maps_of_a_whole_vocabulary_are_superfluous(tiny, good):
    whole = replace(tiny, draft_vocab_size=40)
    good["lm_head.weight"] = torch.zeros(40, 16)
    assert [problem.split(" is ")[0] for problem in contract.check(good, whole)] == ["d2t", "t2d"]
    del good["d2t"], good["t2d"]
    assert contract.check(good, whole) == []


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"aux_layers": [2, 1]}, "ascend"),
        ({"hidden_size": 8}, "share_embedding"),
        ({"num_attention_heads": 3}, "no multiple"),
    ],
)
def test_shapes_that_vllm_reads_otherwise_are_named(change, named, tiny, good):
    assert any(named in problem for problem in contract.check(good, replace(tiny, **change)))


def test_mla_is_refused_clearly(tiny):
    with pytest.raises(UserError, match="the MLA drafter is not available yet"):
        require_available("mla")
    with pytest.raises(UserError, match="not available yet"):
        contract.expected_tensors(replace(tiny, architecture="mla"))
    with pytest.raises(UserError, match="llama or mla"):
        require_available("mamba")


def test_config_json_has_every_field():
    config = contract.config_json(SMOLLM2, "bfloat16", "SmolLM2-135M-Instruct")
    assert config == {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "target_model_name": "SmolLM2-135M-Instruct",
        "torch_dtype": "bfloat16",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 1,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 8192,
        "rope_theta": 100000.0,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
        "tie_word_embeddings": False,
        "vocab_size": 49152,
        "draft_vocab_size": 8192,
        "target_hidden_size": 576,
        "num_aux_hidden_states": 3,
        "eagle_aux_hidden_state_layer_ids": [2, 15, 27],
        "fc_norm": True,
        "norm_output": True,
        "norm_before_residual": False,
    }


@pytest.mark.parametrize("scaling", [None, YARN, {"rope_type": "llama3", "factor": 8.0}])
def test_transformers_reads_the_rope_that_was_meant(scaling, tiny, tmp_path):
    if scaling and scaling.get("rope_type") == "llama3":
        scaling = {
            **scaling,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    shape = replace(tiny, rope_scaling=scaling)
    from eagle31_train.artifacts import write_json

    write_json(tmp_path / "config.json", contract.config_json(shape, "float32", "x"))
    rope = AutoConfig.from_pretrained(tmp_path).rope_parameters
    assert rope["rope_theta"] == 5000.0
    assert rope["rope_type"] == ("default" if scaling is None else scaling.get("type", "llama3"))
    if scaling:
        assert (rope["factor"], rope["original_max_position_embeddings"]) == (scaling["factor"], 32)


@pytest.mark.parametrize("change", [{}, {"fc_norm": False, "norm_output": False}, {"norm_before_residual": True}])
def test_config_json_reads_back(change, tiny):
    shape = replace(tiny, **change)
    assert contract.shape_from_config(contract.config_json(shape, "float32", "x")) == shape


def test_config_json_with_scaling_and_an_embedding_reads_back(tiny):
    shape = replace(tiny, rope_scaling=YARN, share_embedding=False)
    read = contract.shape_from_config(contract.config_json(shape, "float32", "x"), ["embed_tokens.weight"])
    assert read == replace(shape, rope_scaling={**{k: YARN[k] for k in YARN if k != "type"}, "rope_type": "yarn"})


# The config of a public EAGLE 3 drafter for an 8 B Llama, as far as it bears on the shape.
PUBLIC = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "draft_vocab_size": 32000,
}


def test_what_a_config_leaves_out_is_read_as_vllm_does():
    shape = contract.shape_from_config(PUBLIC, target_layers=32)
    assert asdict(shape) == {
        **asdict(SMOLLM2),
        "hidden_size": 4096,
        "target_hidden_size": 4096,
        "aux_layers": [2, 16, 29],
        "vocab_size": 128256,
        "draft_vocab_size": 32000,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 2048,
        "fc_norm": False,
        "norm_output": False,
        "norm_before_residual": False,
    }
    with pytest.raises(UserError, match="how many layers"):
        contract.shape_from_config(PUBLIC)


@pytest.mark.parametrize(
    "where",
    [
        {"eagle_aux_hidden_state_layer_ids": [29, 2, 16]},
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 16, 29]}},
        {"eagle_config": {"layer_ids": [2, 16, 29]}},
    ],
)
def test_layer_ids_are_found_where_vllm_finds_them(where):
    assert contract.shape_from_config({**PUBLIC, **where}).aux_layers == [2, 16, 29]


def test_speculators_format_is_read():
    layer = {key: value for key, value in PUBLIC.items() if key not in ("architectures", "draft_vocab_size")}
    config = {
        "speculators_model_type": "eagle3",
        "transformer_layer_config": {**layer, "model_type": "llama"},
        "draft_vocab_size": 32000,
        "eagle_aux_hidden_state_layer_ids": [2, 16, 29],
        "norm_output": True,
    }
    shape = contract.shape_from_config(config)
    assert (shape.draft_vocab_size, shape.vocab_size, shape.intermediate_size) == (32000, 128256, 14336)
    assert (shape.norm_before_residual, shape.norm_output, shape.fc_norm) == (True, True, False)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"architectures": ["Eagle3DeepseekV2ForCausalLM"]}, "MLA drafter is not available"),
        ({"architectures": ["MistralForCausalLM"]}, "of MistralForCausalLM: LlamaForCausalLMEagle3 is needed"),
        ({"architectures": None}, "of no architecture"),
        ({"hidden_size": "wide"}, "no number"),
        ({"logit_scale": 0.5}, "logit_scale"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"layer_types": ["sliding_attention"], "sliding_window": 64}, "layer_types"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"norm_before_fc": True}, "norm_before_fc"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state"),
        ({"num_hidden_layers": 2}, "num_hidden_layers"),
        ({"num_aux_hidden_states": 4}, "num_aux_hidden_states 4"),
        ({"hidden_size": None, "speculators_model_type": "dflash"}, "no EAGLE 3 drafter"),
    ],
)
def test_other_drafters_are_refused(change, named):
    with pytest.raises(UserError, match=named):
        contract.shape_from_config({**PUBLIC, "eagle_aux_hidden_state_layer_ids": [2, 16, 29], **change})


def test_layers_0_means_midlayer():
    assert contract.canonical_name("layers.0.mlp.up_proj.weight") == "midlayer.mlp.up_proj.weight"
    assert contract.canonical_name("midlayer.mlp.up_proj.weight") == "midlayer.mlp.up_proj.weight"
    assert contract.canonical_name("fc.weight") == "fc.weight"
    assert contract.canonical_name("model.layers.0.mlp.up_proj.weight") == "midlayer.mlp.up_proj.weight"


# vLLM's registry has the first five; the others are what it makes of other names before it looks there.
NAMES = "LlamaForCausalLMEagle3 Eagle3LlamaForCausalLM Eagle3MiniMaxM2ForCausalLM Eagle3Qwen2_5vlForCausalLM"
NAMES += " Eagle3Qwen3vlForCausalLM LlamaForCausalLM MiniMaxM2ForCausalLM"


@pytest.mark.parametrize("name", NAMES.split())
def test_every_name_of_the_llama_style_drafter_is_read(name):
    shape = contract.shape_from_config({**PUBLIC, "architectures": [name]}, target_layers=32)
    assert shape == contract.shape_from_config(PUBLIC, target_layers=32)


def test_joined_projections_are_taken_apart(tiny, good):
    joined = dict(good)
    parts = [joined.pop(f"midlayer.self_attn.{part}_proj.weight") for part in "qkv"]
    joined["midlayer.self_attn.qkv_proj.weight"] = torch.cat(parts)
    parts = [joined.pop(f"midlayer.mlp.{part}_proj.weight") for part in ("gate", "up")]
    joined["midlayer.mlp.gate_up_proj.weight"] = torch.cat(parts)
    apart = contract.separate(joined, tiny)
    assert apart.keys() == good.keys()
    assert all(torch.equal(apart[name], good[name]) for name in good)
    joined["midlayer.mlp.gate_up_proj.weight"] = torch.zeros(7, 16)
    assert any("gate_up_proj.weight is superfluous" in p for p in contract.check(contract.separate(joined, tiny), tiny))
