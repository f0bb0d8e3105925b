"""config.json: every field, read back by transformers and by us; what others write; what vLLM would misread."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file
from transformers import DeepseekV2Config, DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RotaryEmbedding

from eagle31_train.checkpoint import config_json, contract, published_config
from eagle31_train.common.errors import UserError
from eagle31_train.model.rope import Rope
from tests.export.conftest import TINY, TINY_MLA

STORED = Path(__file__).parent.parent / "fixtures" / "v68c343f"


@pytest.mark.parametrize("name", ["run", "eagle3", "mla"])
def test_what_is_written_is_what_an_earlier_version_wrote(name):
    """Every field, also those that only vLLM reads, and every tensor with its shape."""
    stored = json.loads((STORED / name / "export" / "config.json").read_text())
    shape = published_config.shape_from_config(stored)
    assert config_json.config_json(shape, stored["torch_dtype"], stored["target_model_name"]) == stored
    tensors = load_file(STORED / name / "export" / "model.safetensors")
    weights = {name: tuple(tensor.shape) for name, tensor in tensors.items() if name not in ("d2t", "t2d")}
    assert contract.weight_shapes(shape) == weights


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"fc_norm": False, "norm_output": False},
        {"norm_before_residual": True},
        {"norm_before_fc": True, "fc_norm": False, "num_layers": 2},
        {"qk_norm": True, "num_layers": 3, "head_dim": 24},
        {"sliding_window": 64, "num_layers": 2},
        {"sliding_window": 64, "qk_norm": True, "attention_bias": True},
        {"attention_bias": True, "mlp_bias": True},
    ],
)
def test_config_json_reads_back_in_both_formats(change):
    shape = replace(TINY, **change)
    assert published_config.shape_from_config(config_json.config_json(shape, "float32", "x")) == shape
    assert published_config.shape_from_config(config_json.speculators_json(shape, "float32", "x", 3)) == shape


WINDOW = {"sliding_window": 64}
SLIDES, SEES_ALL = ["sliding_attention"], ["full_attention"]
QWEN3 = {"architectures": ["Eagle3Qwen3ForCausalLM"], "model_type": "qwen3"}


@pytest.mark.parametrize(
    ("change", "window"),
    [
        ({**WINDOW, "layer_types": SLIDES}, 64),
        ({**WINDOW, "layer_types": SEES_ALL}, None),
        ({**WINDOW, "use_sliding_window": False}, None),  # as configs of Qwen2 say it
        ({"sliding_window": None, "layer_types": None}, None),
        ({**QWEN3, **WINDOW}, None),
        ({**QWEN3, **WINDOW, "use_sliding_window": True}, None),  # from layer 28 on
        ({**QWEN3, **WINDOW, "use_sliding_window": True, "max_window_layers": 0}, 64),
        ({**QWEN3, **WINDOW, "use_sliding_window": True, "layer_types": SLIDES}, 64),
    ],
)
def test_windows_are_read_as_vllm_finds_them(change, window):
    config = {**PUBLIC, "eagle_aux_hidden_state_layer_ids": [2, 16, 29], **change}
    assert published_config.shape_from_config(config).sliding_window == window


def test_a_config_that_transformers_does_not_go_over_has_the_window_of_its_layer_types():
    """In the format of speculators, vLLM takes the fields as they stand."""
    config = config_json.speculators_json(replace(TINY, qk_norm=True), "float32", "x", 3)
    layer = {**config["transformer_layer_config"], **WINDOW, "use_sliding_window": False, "layer_types": SLIDES}
    assert published_config.shape_from_config({**config, "transformer_layer_config": layer}).sliding_window == 64


@pytest.mark.parametrize("field", ["sliding_window", "attention_bias", "mlp_bias", "norm_before_fc", "qk_norm"])
def test_what_no_mla_draft_is_served_with_is_refused(field):
    assert contract.check_shape(replace(TINY_MLA, **{field: 1})) == [f"vLLM serves no MLA draft with {field}"]


IDS = "eagle_aux_hidden_state_layer_ids"


@pytest.mark.parametrize(
    ("ids", "counted", "layers"),
    [
        ({IDS: [1, 15, 28]}, "outputs", [2, 16, 29]),
        ({"eagle_config": {"layer_ids": [29, 16, 2]}}, "inputs", [2, 16, 29]),
        ({IDS: [2, 16, 29], "eagle_config": {IDS: [1, 15, 28]}}, None, [2, 16, 29]),  # for both servers
        ({IDS: [2, 16, 29], "eagle_config": {IDS: [1, 15, 28]}}, "outputs", [2, 16, 29]),
        ({IDS: [1, 15, 28], "_torchspec_version": "1"}, "outputs", [2, 16, 29]),
        ({IDS: [2, 16, 31], "eagle_config": {}}, "inputs", [2, 16, 31]),
    ],
)
def test_layer_ids_are_inputs_of_layers_however_they_are_counted(ids, counted, layers):
    shape = published_config.shape_from_config({**PUBLIC, **ids}, target_layers=lambda: 32, counted=counted)
    assert shape.aux_layers == layers


def test_layer_ids_of_torchspec_may_count_either_way_and_are_not_guessed():
    """Nor are SGLang's, which `published_configs.jsonl` has."""
    with pytest.raises(UserError, match="add @inputs or @outputs"):
        published_config.shape_from_config({**PUBLIC, IDS: [1, 15, 28], "_torchspec_version": "1"})


@pytest.mark.parametrize("more", [{}, {"qk_norm": True, "num_layers": 2}])
def test_a_parallel_drafters_token_is_where_vllm_looks_for_it(more):
    shape = replace(TINY, parallel=True, ptd_token_id=7, **more)
    config = config_json.config_json(shape, "float32", "x")
    chain = config_json.config_json(replace(TINY, **more), "float32", "x")
    assert config == chain | {"ptd_token_id": 7}
    assert published_config.shape_from_config(config, ["mask_hidden"]) == shape
    for name in ("pard_token", "mask_token_id"):  # of other trainers; the later one goes first
        config |= {"ptd_token_id": 3, "pard_token": 4, name: 7}
        assert published_config.shape_from_config(config, ["mask_hidden"]) == shape
    with pytest.raises(UserError, match="lacks ptd_token_id"):
        published_config.shape_from_config(chain, ["mask_hidden"])
    assert not published_config.shape_from_config(chain | {"mask_token_id": 7}).parallel  # nothing reads it


def test_what_the_format_of_speculators_does_not_have_is_refused():
    for shape in (TINY_MLA, replace(TINY, norm_before_fc=True), replace(TINY, parallel=True, ptd_token_id=1)):
        with pytest.raises(UserError, match="export_format=vllm"):
            config_json.speculators_json(shape, "float32", "x", 3)


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
    shape = published_config.shape_from_config(PUBLIC, target_layers=lambda: 32)
    wanted = {"target_hidden_size": 4096, "aux_layers": [2, 16, 29], "head_dim": 128, "rms_norm_eps": 1e-6}
    wanted |= {"rope_theta": 10000.0, "rope_scaling": None, "max_position_embeddings": 2048, "architecture": "llama"}
    wanted |= dict.fromkeys(("fc_norm", "norm_output", "norm_before_residual", "qk_norm", "parallel"), False)
    assert {name: getattr(shape, name) for name in wanted} == wanted
    with pytest.raises(UserError, match="how many layers"):
        published_config.shape_from_config(PUBLIC)


@pytest.mark.parametrize(("beside", "inside", "taken"), [(1024, None, 1024), (1024, 512, 1024), (None, 512, 512)])
def test_the_context_that_yarn_stretches_is_vllms(beside, inside, taken):
    """It goes by the one that stands beside the scaling, where there are two."""
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": inside}
    config = {**PUBLIC, "rope_scaling": scaling, "original_max_position_embeddings": beside}
    shape = published_config.shape_from_config(config, target_layers=lambda: 32)
    assert shape.rope_scaling["original_max_position_embeddings"] == taken


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"logit_scale": 0.5}, "logit_scale"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"num_hidden_layers": 0}, "num_hidden_layers: "),
        ({"num_hidden_layers": 10**15}, "num_hidden_layers: "),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state"),
        ({"num_aux_hidden_states": 4}, "num_aux_hidden_states 4"),
        (WINDOW, "sliding_window 64 without layer_types"),
        ({"layer_types": SLIDES}, "no sliding_window"),
        ({**QWEN3, **WINDOW, "layer_types": SLIDES}, "no use_sliding_window"),
        ({**WINDOW, "num_hidden_layers": 2, "layer_types": SLIDES + SEES_ALL}, "some layers"),
        ({**WINDOW, "layer_types": ["chunked_attention"]}, "layer_types"),
        ({"sliding_window": 0, "layer_types": SLIDES}, "sliding_window: "),
        ({"bias": True}, "sets bias"),
    ],
)
def test_what_vllm_would_not_serve_is_refused(change, named):
    with pytest.raises(UserError, match=named):
        published_config.shape_from_config({**PUBLIC, "eagle_aux_hidden_state_layer_ids": [2, 16, 29], **change})


def test_full_rank_queries_are_written_because_the_default_is_another():
    config = config_json.config_json(replace(TINY_MLA, q_lora_rank=None), "float32", "x")
    assert config["q_lora_rank"] is None
    assert DeepseekV3Config(**config).q_lora_rank is None
    del config["q_lora_rank"]
    assert DeepseekV3Config(**config).q_lora_rank == published_config.shape_from_config(config).q_lora_rank == 1536


def test_defaults_are_those_of_the_classes_that_read():
    for kind, model_types in ((DeepseekV3Config, ("kimi_k2", "deepseek_v3")), (DeepseekV2Config, ("deepseek_v2",))):
        plain = kind()
        assert {name: getattr(plain, name) for name in config_json.MLA_DEFAULTS} == config_json.MLA_DEFAULTS
        assert plain.rms_norm_eps == 1e-6
        for model_type in model_types:
            assert published_config.MODEL_TYPES["mla"][model_type] == plain.max_position_embeddings


MLA_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize("mscale", [{"mscale": 0.7}, {"mscale": 0.0, "mscale_all_dim": 1.0}])
def test_mscales_that_transformers_reads_otherwise_are_refused(mscale):
    shape = replace(TINY_MLA, rope_scaling={**MLA_YARN, **mscale})
    read = DeepseekV3Config(**config_json.config_json(shape, "float32", "x"))
    assert DeepseekV3RotaryEmbedding(read).attention_scaling != pytest.approx(Rope(shape).factor, rel=1e-3)
    assert any("read differently" in problem for problem in contract.check_shape(shape))
