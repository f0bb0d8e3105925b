"""config.json of the Llama draft: every field, read back by transformers and by us, and what others write."""

from dataclasses import asdict, replace

import pytest
from transformers import AutoConfig

from eagle31_train import draft_config
from eagle31_train.artifacts import write_json
from eagle31_train.schema import UserError

YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


def test_config_json_has_every_field(smollm2):
    config = draft_config.config_json(smollm2, "bfloat16", "SmolLM2-135M-Instruct")
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
    write_json(tmp_path / "config.json", draft_config.config_json(shape, "float32", "x"))
    rope = AutoConfig.from_pretrained(tmp_path).rope_parameters
    assert rope["rope_theta"] == 5000.0
    assert rope["rope_type"] == ("default" if scaling is None else scaling.get("type", "llama3"))
    if scaling:
        assert (rope["factor"], rope["original_max_position_embeddings"]) == (scaling["factor"], 32)


@pytest.mark.parametrize("change", [{}, {"fc_norm": False, "norm_output": False}, {"norm_before_residual": True}])
def test_config_json_reads_back(change, tiny):
    shape = replace(tiny, **change)
    assert draft_config.shape_from_config(draft_config.config_json(shape, "float32", "x")) == shape


def test_config_json_with_scaling_and_an_embedding_reads_back(tiny):
    shape = replace(tiny, rope_scaling=YARN, share_embedding=False)
    read = draft_config.shape_from_config(draft_config.config_json(shape, "float32", "x"), ["embed_tokens.weight"])
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


def test_what_a_config_leaves_out_is_read_as_vllm_does(smollm2):
    shape = draft_config.shape_from_config(PUBLIC, target_layers=32)
    assert asdict(shape) == {
        **asdict(smollm2),
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
        draft_config.shape_from_config(PUBLIC)


@pytest.mark.parametrize(
    "where",
    [
        {"eagle_aux_hidden_state_layer_ids": [29, 2, 16]},
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 16, 29]}},
        {"eagle_config": {"layer_ids": [2, 16, 29]}},
    ],
)
def test_layer_ids_are_found_where_vllm_finds_them(where):
    assert draft_config.shape_from_config({**PUBLIC, **where}).aux_layers == [2, 16, 29]


def test_speculators_format_is_read():
    layer = {key: value for key, value in PUBLIC.items() if key not in ("architectures", "draft_vocab_size")}
    config = {
        "speculators_model_type": "eagle3",
        "transformer_layer_config": {**layer, "model_type": "llama"},
        "draft_vocab_size": 32000,
        "eagle_aux_hidden_state_layer_ids": [2, 16, 29],
        "norm_output": True,
    }
    shape = draft_config.shape_from_config(config)
    assert (shape.draft_vocab_size, shape.vocab_size, shape.intermediate_size) == (32000, 128256, 14336)
    assert (shape.norm_before_residual, shape.norm_output, shape.fc_norm) == (True, True, False)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"architectures": ["MistralForCausalLM"]}, "of MistralForCausalLM: LlamaForCausalLMEagle3 or Eagle3Deepseek"),
        ({"model_type": "qwen3"}, "model_type qwen3"),
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
        draft_config.shape_from_config({**PUBLIC, "eagle_aux_hidden_state_layer_ids": [2, 16, 29], **change})


# vLLM's registry has the first five; the others are what it makes of other names before it looks there.
NAMES = "LlamaForCausalLMEagle3 Eagle3LlamaForCausalLM Eagle3MiniMaxM2ForCausalLM Eagle3Qwen2_5vlForCausalLM"
NAMES += " Eagle3Qwen3vlForCausalLM LlamaForCausalLM MiniMaxM2ForCausalLM"


@pytest.mark.parametrize("name", NAMES.split())
def test_every_name_of_the_llama_style_drafter_is_read(name):
    shape = draft_config.shape_from_config({**PUBLIC, "architectures": [name]}, target_layers=32)
    assert shape == draft_config.shape_from_config(PUBLIC, target_layers=32)
