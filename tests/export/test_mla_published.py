"""An MLA run exported, and MLA drafts in every spelling that vLLM takes read as what was exported."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from eagle31_train import draft_config, published
from eagle31_train.export import export
from eagle31_train.schema import UserError


def never():
    raise AssertionError("the config names its layers")


def write(folder, config, tensors):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


@pytest.fixture
def exported(mla_run):
    export(mla_run.config("target.dtype=float32"))
    return mla_run.exported()


def test_the_export_is_what_was_trained(exported, mla_run, tiny_mla_tensors):
    config, tensors, body = exported
    assert "vLLM 0.32 stops" not in body
    assert config == draft_config.config_json(mla_run.shape, "float32", "someone/a-target")
    maps = {"d2t": (12,), "t2d": (40,)}
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == tiny_mla_tensors | maps
    assert "# EAGLE 3.1 drafter with MLA for someone/a-target" in body
    assert '"method": "eagle3"' in body
    assert "| kv\\_lora\\_rank | 12 |" in body
    assert "drafter.architecture=mla" in body


@pytest.mark.parametrize("name", ["q_a_layernorm", "kv_a_layernorm"])
def test_a_norm_that_vllm_would_leave_at_one_stops_the_export(name, mla_run):
    mla_run.change_tensors(**{f"midlayer__self_attn__{name}__weight": None})
    with pytest.raises(UserError, match=f"{name}.weight is missing: vLLM would silently leave it at one"):
        export(mla_run.config())
    assert not (mla_run.folder / "export").exists()


def test_full_rank_queries_are_exported_too(mla_run, capsys):
    low = ("q_a_proj", "q_a_layernorm", "q_b_proj")
    mla_run.set_shape(replace(mla_run.shape, q_lora_rank=None))
    mla_run.change_tensors(
        **{f"midlayer__self_attn__{name}__weight": None for name in low},
        midlayer__self_attn__q_proj__weight=torch.ones(30, 32),
    )
    export(mla_run.config("target.dtype=float32"))
    config, tensors, body = mla_run.exported()
    assert "vLLM 0.32 stops when it loads an MLA draft with full-rank queries" in body
    assert "export: vLLM 0.32 stops" in capsys.readouterr().out
    assert config["q_lora_rank"] is None
    assert "midlayer.self_attn.q_proj.weight" in tensors
    assert published.read(mla_run.folder / "export", "it", never).shape.q_lora_rank is None


def joined(tensors):
    """Fused as vLLM fuses them."""
    tensors = dict(tensors)
    for fused, parts in {
        "midlayer.self_attn.fused_qkv_a_proj": ["self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"],
        "midlayer.mlp.gate_up_proj": ["mlp.gate_proj", "mlp.up_proj"],
    }.items():
        tensors[f"{fused}.weight"] = torch.cat([tensors.pop(f"midlayer.{part}.weight") for part in parts])
    return tensors


def in_layers_0(tensors):
    return {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}


def copied(config):
    """With what a trainer leaves of the target's config.json."""
    experts = {"n_routed_experts": 8, "moe_intermediate_size": 4, "first_k_dense_replace": 1, "head_dim": 4}
    return {**config, **experts, "model_type": "deepseek_v3", "architectures": ["Eagle3DeepseekV3ForCausalLM"]}


def old_rope(config):
    scaling = {key: value for key, value in config["rope_scaling"].items() if key != "rope_type"}
    return {**{key: value for key, value in config.items() if key != "rope_parameters"}, "rope_scaling": scaling}


def same(value):
    return value


SPELLINGS = {
    "as exported": (same, same),
    "layers.0": (same, in_layers_0),
    "joined": (same, joined),
    "joined layers.0": (same, lambda tensors: in_layers_0(joined(tensors))),
    "a copied config": (copied, same),
    "RoPE as DeepSeek wrote it": (old_rope, same),
    "model. before it": (same, lambda t: {f"model.{n}" if n[0] in "fmn" else n: tensor for n, tensor in t.items()}),
    "tables of RoPE": (same, lambda t: {**t, "midlayer.self_attn.rotary_emb.inv_freq": torch.ones(2)}),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_reads_as_the_same_drafter(spelling, exported, tmp_path, mla_run):
    of_config, of_tensors = SPELLINGS[spelling]
    config, tensors, _ = exported
    draft = published.read(write(tmp_path / "draft", of_config(config), of_tensors(tensors)), "it", never)
    meant = replace(mla_run.shape, rope_scaling=draft_config.rope_scaling(mla_run.shape))
    assert draft.shape == meant
    assert draft.tensors.keys() == tensors.keys() - {"d2t", "t2d"}
    assert all(torch.equal(draft.tensors[name], tensors[name]) for name in draft.tensors)


def without(name):
    return lambda tensors: {key: tensor for key, tensor in tensors.items() if key != name}


FAULTS = {
    "no latent norm": (same, without("midlayer.self_attn.kv_a_layernorm.weight"), "kv_a_layernorm.weight is missing"),
    "no query norm": (same, without("midlayer.self_attn.q_a_layernorm.weight"), "q_a_layernorm.weight is missing"),
    "another rank": (lambda c: {**c, "kv_lora_rank": 13}, same, "kv_a_layernorm.weight has shape [12], not [13]"),
    "full rank by the config": (lambda c: {**c, "q_lora_rank": None}, same, "q_proj.weight is missing"),
    "experts": (
        same,
        lambda t: {**t, "midlayer.mlp.experts.0.up_proj.weight": torch.ones(1, 1)},
        "experts.0.up_proj.weight is superfluous",
    ),
    "another scaling": (
        lambda c: {**c, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        same,
        "takes every scaling of an MLA drafter for YaRN",
    ),
    "fused of another size": (
        same,
        lambda t: {**joined(t), "midlayer.self_attn.fused_qkv_a_proj.weight": torch.ones(7, 32)},
        "q_a_proj.weight is missing",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_one_line_that_names_it(fault, exported, tmp_path):
    of_config, of_tensors, words = FAULTS[fault]
    config, tensors, _ = exported
    folder = write(tmp_path / "draft", of_config(config), of_tensors(tensors))
    with pytest.raises(UserError) as error:
        published.read(folder, "it", never)
    assert words in str(error.value)
    assert "\n" not in str(error.value)
