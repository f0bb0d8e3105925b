"""config.json: every field, read back by transformers and by us; what others write; what vLLM would misread."""

import copy
import json
from dataclasses import replace
from pathlib import Path

import pytest
from made import message_of
from safetensors.torch import load_file
from transformers import CONFIG_MAPPING, DeepseekV2Config, DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RotaryEmbedding

from eagle31_train import compare
from eagle31_train.checkpoint import config_json, contract, published_config
from eagle31_train.common.errors import UserError
from eagle31_train.model.rope import Rope
from tests.export.conftest import TINY, TINY_MLA, YARN

FIXTURES = Path(__file__).parent.parent / "fixtures"
STORED = FIXTURES / "v68c343f"
# Of others' drafts, each from the public source that its line names.
FOUND = [json.loads(line) for line in (FIXTURES / "published_configs.jsonl").read_text().splitlines()]


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
        {"target_hidden_size": 2 * TINY.hidden_size},
    ],
)
def test_config_json_reads_back_in_both_formats(change):
    shape = replace(TINY, **change)
    written = config_json.config_json(shape, "float32", "x")
    assert published_config.shape_from_config(written) == shape
    assert CONFIG_MAPPING[written["model_type"]].from_dict(written).num_hidden_layers == shape.num_layers
    assert published_config.shape_from_config(config_json.speculators_json(shape, "float32", "x", 3)) == shape


IDS = "eagle_aux_hidden_state_layer_ids"
# The config of a public EAGLE 3 drafter for an 8 B Llama, as far as it bears on the shape.
PUBLIC = {"architectures": ["LlamaForCausalLMEagle3"], "hidden_size": 4096, "intermediate_size": 14336}
PUBLIC |= {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "draft_vocab_size": 32000}
DEFAULTS = {"target_hidden_size": 4096, "aux_layers": [2, 16, 29], "head_dim": 128, "rms_norm_eps": 1e-6}
DEFAULTS |= {"rope_theta": 10000.0, "rope_scaling": None, "max_position_embeddings": 2048, "architecture": "llama"}
DEFAULTS |= dict.fromkeys(("fc_norm", "norm_output", "norm_before_residual", "qk_norm", "parallel"), False)
WINDOW, NO_WINDOW = {"sliding_window": 64}, {"sliding_window": None}
SLIDES, SEES_ALL = {"layer_types": ["sliding_attention"]}, {"layer_types": ["full_attention"]}
QWEN3 = {"architectures": ["Eagle3Qwen3ForCausalLM"], "model_type": "qwen3"}
SLIDING_QWEN3 = {**QWEN3, **WINDOW, "use_sliding_window": True}
READ = [  # what a config has besides; how its layers are said to be counted; what is read
    ({}, None, DEFAULTS),
    ({**WINDOW, **SLIDES}, None, WINDOW),
    ({**WINDOW, **SEES_ALL}, None, NO_WINDOW),
    ({**WINDOW, "use_sliding_window": False}, None, NO_WINDOW),  # as configs of Qwen2 say it
    ({"sliding_window": None, "layer_types": None}, None, NO_WINDOW),
    ({**QWEN3, **WINDOW}, None, NO_WINDOW),
    (SLIDING_QWEN3, None, NO_WINDOW),  # from layer 28 on
    ({**SLIDING_QWEN3, "max_window_layers": 0}, None, WINDOW),
    ({**SLIDING_QWEN3, **SLIDES}, None, WINDOW),
    ({IDS: [1, 15, 28]}, "outputs", {"aux_layers": [2, 16, 29]}),
    ({"eagle_config": {"layer_ids": [29, 16, 2]}}, "inputs", {"aux_layers": [2, 16, 29]}),
    ({IDS: [2, 16, 28], "eagle_config": {IDS: [1, 15, 29]}}, None, {"aux_layers": [2, 16, 28]}),  # for both servers
    ({IDS: [2, 16, 28], "eagle_config": {IDS: [1, 15, 29]}}, "outputs", {"aux_layers": [2, 16, 30]}),
    ({IDS: [1, 15, 28], "_torchspec_version": "1"}, "outputs", {"aux_layers": [2, 16, 29]}),
    ({IDS: [2, 16, 31], "eagle_config": {}}, "inputs", {"aux_layers": [2, 16, 31]}),
    ({**WINDOW, "layer_types": ["sliding_attention", "full_attention"]}, None, WINDOW),  # a target's, of two layers
    ({**QWEN3, "mlp_bias": True}, None, {"mlp_bias": False}),
    ({**QWEN3, "num_attention_heads": 16}, None, {"head_dim": 128}),
    ({"norm_before_fc": False, "eagle_config": {"norm_before_fc": True}}, None, {"norm_before_fc": True}),
    ({"rope_theta": 5e5, "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}, None, {"rope_theta": 1e6}),
]


@pytest.mark.parametrize(("change", "counted", "wanted"), READ)
def test_configs_of_others_are_read_as_vllm_does(change, counted, wanted):
    shape = published_config.shape_from_config({**PUBLIC, **change}, target_layers=lambda: 32, counted=counted)
    assert {name: getattr(shape, name) for name in wanted} == wanted


def test_a_config_that_transformers_does_not_go_over_has_the_window_of_its_layer_types():
    """In the format of speculators, vLLM takes the fields as they stand."""
    config = config_json.speculators_json(replace(TINY, qk_norm=True), "float32", "x", 3)
    config["transformer_layer_config"] |= {**WINDOW, **SLIDES, "use_sliding_window": False}
    assert published_config.shape_from_config(config).sliding_window == 64


def read(one):
    """The shape of a published draft, as DrafterCheckpoint.open takes it."""
    layers, counted = one["target_layers"], one["counted"]
    shape = published_config.shape_from_config(one["config"], target_layers=lambda: layers, counted=counted)
    if problems := contract.check_shape(shape):
        raise UserError(problems[0])
    return shape


@pytest.mark.parametrize("one", FOUND, ids=[one["draft"] for one in FOUND])
def test_configs_of_others_are_read_or_refused_by_name(one):
    if "refused" in one:
        with pytest.raises(UserError, match=one["refused"]):
            read(one)
        return
    shape = read(one)
    assert {name: getattr(shape, name) for name in one["read"]} == one["read"]
    if "vllm" not in one:  # it can load it
        published_config.check_served(one["config"])


@pytest.mark.parametrize("speculators", [False, True])
@pytest.mark.parametrize("nested", [False, True])
def test_a_draft_with_code_of_its_own_is_not_given_to_vllm(speculators, nested):
    """Which runs a draft's, too, where the target's is allowed."""
    served = [one["config"] for one in FOUND if "refused" not in one and "vllm" not in one]
    layered = [one for one in served if "transformer_layer_config" in one]
    config = copy.deepcopy((layered if speculators or nested else served)[0])
    (config["transformer_layer_config"] if nested else config)["auto_map"] = code = {"AutoConfig": "evil.Evil"}
    assert "names its own Python code (auto_map)" in message_of(published_config.check_served, config)
    code.clear()
    code[""] = "config.Eagle3SpeculatorConfig"  # speculators', which vLLM does not run
    published_config.check_served(config)


def test_what_vllm_could_not_load_is_refused_before_it_starts(tmp_path):
    """vLLM 0.32 stops over the width of fc; with the count that the line asks for, it does not."""
    (one,) = (copy.deepcopy(one) for one in FOUND if "vllm" in one)
    four, file = one["config"], tmp_path / "config.json"
    file.write_text(json.dumps(four))
    with pytest.raises(UserError, match=r'config.json has 4 layer ids, .* add "num_aux_hidden_states": 4 beside'):
        compare.exported(str(tmp_path))
    four["transformer_layer_config"]["num_aux_hidden_states"] = 4
    file.write_text(json.dumps(four))
    assert compare.exported(str(tmp_path)) == tmp_path
    assert read(one).aux_layers == [2, 46, 91, 93]
    ids = [2, 16, 28, 30]
    assert "would build fc for 3" in message_of(published_config.check_served, {**PUBLIC, IDS: ids})
    published_config.check_served({**PUBLIC, IDS: ids, "eagle_config": {IDS: ids}})  # in both places they are counted


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
    assert "lacks ptd_token_id" in message_of(published_config.shape_from_config, chain, ["mask_hidden"])
    assert not published_config.shape_from_config(chain | {"mask_token_id": 7}).parallel  # nothing reads it


def test_what_the_format_of_speculators_does_not_have_is_refused():
    for shape in (TINY_MLA, replace(TINY, norm_before_fc=True), replace(TINY, parallel=True, ptd_token_id=1)):
        assert "export_format=vllm" in message_of(config_json.speculators_json, shape, "float32", "x", 3)


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
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"logit_scale": 0.5}, "logit_scale"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),  # where transformers 4 writes it
        ({"num_hidden_layers": 0}, "num_hidden_layers: "),
        ({"num_hidden_layers": 10**15}, "num_hidden_layers: "),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state"),
        ({"num_aux_hidden_states": 4}, "num_aux_hidden_states 4"),
        (WINDOW, "sliding_window 64 without layer_types"),
        (SLIDES, "no sliding_window"),
        ({**QWEN3, **WINDOW, **SLIDES}, "no use_sliding_window"),
        ({**WINDOW, "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}, "some layers"),
        ({**WINDOW, "layer_types": ["chunked_attention"]}, "layer_types"),
        ({"sliding_window": 0, **SLIDES}, "sliding_window: "),
        ({"bias": True}, "sets bias"),
        ({"quantization_config": {"quant_method": "compressed-tensors"}}, "sets quantization_config"),
        ({IDS: [1, 15, 28], "_torchspec_version": "1"}, "add @inputs or @outputs"),  # it may count either way
        ({IDS: None}, "pass the number of the target's layers"),
    ],
)
def test_what_vllm_would_not_serve_is_refused(change, named):
    assert named in message_of(published_config.shape_from_config, {**PUBLIC, IDS: [2, 16, 29], **change})


def test_defaults_are_those_of_the_classes_that_read():
    for kind, model_types in ((DeepseekV3Config, ("kimi_k2", "deepseek_v3")), (DeepseekV2Config, ("deepseek_v2",))):
        plain = kind()
        assert {name: getattr(plain, name) for name in config_json.MLA_DEFAULTS} == config_json.MLA_DEFAULTS
        assert plain.rms_norm_eps == 1e-6
        positions = [published_config.MODEL_TYPES["mla"][model_type] for model_type in model_types]
        assert set(positions) == {plain.max_position_embeddings}
    config = config_json.config_json(replace(TINY_MLA, q_lora_rank=None), "float32", "x")
    assert DeepseekV3Config(**config).q_lora_rank is None, "full rank is written, since the default is another"
    del config["q_lora_rank"]
    assert published_config.shape_from_config(config).q_lora_rank == 1536


@pytest.mark.parametrize("mscale", [{"mscale": 0.7}, {"mscale": 0.0, "mscale_all_dim": 1.0}])
def test_mscales_that_transformers_reads_otherwise_are_refused(mscale):
    shape = replace(TINY_MLA, rope_scaling=YARN | mscale)
    read = DeepseekV3Config(**config_json.config_json(shape, "float32", "x"))
    assert DeepseekV3RotaryEmbedding(read).attention_scaling != pytest.approx(Rope(shape).factor, rel=1e-3)
    assert any("set both above 0, or remove both" in problem for problem in contract.check_shape(shape))


def test_in_the_format_of_speculators_the_top_level_counts_and_its_defaults():
    config = config_json.speculators_json(TINY, "bfloat16", "x", 5)
    assert config["torch_dtype"] == config["transformer_layer_config"]["torch_dtype"] == "bfloat16"
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 5
    del config["norm_before_residual"]
    assert published_config.shape_from_config(config) == replace(TINY, norm_before_residual=True)
    config["quantization_config"] = {"quant_method": "compressed-tensors"}
    assert "sets quantization_config" in message_of(published_config.shape_from_config, config)
