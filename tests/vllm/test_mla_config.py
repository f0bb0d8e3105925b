"""What real vLLM reads of an MLA draft's config.json and tensors: what was trained, however it is spelt."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import make_mla_shape
from spelling import joined, layers_0, random_tensors, same, write
from transformers import DeepseekV3Config

from eagle31_train.checkpoint import config_json, contract, published_config
from eagle31_train.checkpoint.drafter_checkpoint import DrafterCheckpoint
from eagle31_train.model.layer import LatentAttention

pytestmark = pytest.mark.vllm

YARN = {"rope_type": "yarn", "factor": 64.0, "original_max_position_embeddings": 64}
SHAPE = make_mla_shape(
    hidden_size=50,
    target_hidden_size=50,
    aux_layers=[1, 3],
    vocab_size=96,
    draft_vocab_size=96,
    intermediate_size=64,
    num_attention_heads=5,
    rms_norm_eps=2e-5,
    rope_scaling={**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    q_lora_rank=24,
    kv_lora_rank=512,
    qk_nope_head_dim=20,
    qk_rope_head_dim=64,
    v_head_dim=12,
)
# What vLLM must read back as it was trained.
SHAPES = {
    "the published kind": SHAPE,
    "heads that do not divide": replace(SHAPE, num_attention_heads=3, num_key_value_heads=3),
    "EAGLE 3": replace(SHAPE, fc_norm=False, norm_output=False, norm_before_residual=True),
    "mscale_all_dim alone": replace(SHAPE, rope_scaling={**YARN, "mscale_all_dim": 0.7}),
    "no mscale": replace(SHAPE, rope_scaling={**YARN, "beta_fast": 20.0, "beta_slow": 2.0}),
    "plain RoPE": replace(SHAPE, rope_scaling=None),
}

FULL_RANK = replace(SHAPE, q_lora_rank=None)


def old_rope(config):
    return {key: value for key, value in config.items() if key != "rope_parameters"}


def new_rope(config):
    return {key: value for key, value in config.items() if key not in ("rope_theta", "rope_scaling")}


# Of the published kind, written in other ways: config.json, tensors.
WRITTEN = {
    "RoPE as transformers 4 writes it": (old_rope, same),
    "RoPE as transformers 5 writes it": (new_rope, same),
    "joined": (same, joined),
    "layers.0": (same, lambda tensors: layers_0(joined(tensors))),
    "deepseek_v2": (lambda config: {**config, "model_type": "deepseek_v2"}, same),
    "experts": (lambda config: {**config, "n_routed_experts": 8, "moe_intermediate_size": 4}, same),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """name → draft."""
    root = tmp_path_factory.mktemp("drafts")
    drafts = {name: (config_json.config_json(shape, "float32", "x"), shape) for name, shape in SHAPES.items()}
    drafts["full rank"] = config_json.config_json(FULL_RANK, "float32", "x"), FULL_RANK
    published_kind = drafts["the published kind"][0]
    written = {name: write(root / name, config, random_tensors(shape)) for name, (config, shape) in drafts.items()}
    for name, (of_config, of_tensors) in WRITTEN.items():
        written[name] = write(root / name, of_config(published_kind), of_tensors(random_tensors(SHAPE)))
    return written


@pytest.fixture(scope="module")
def seen(tmp_path_factory, ask, folders):
    """name → what vLLM reads of the draft."""
    folder = tmp_path_factory.mktemp("target")
    sizes = {"hidden_size": 50, "num_hidden_layers": 6, "num_attention_heads": 5, "vocab_size": 96}
    widths = {"q_lora_rank": 24, "qk_nope_head_dim": 20, "v_head_dim": 12, "max_position_embeddings": 4096}
    DeepseekV3Config(**sizes, **widths, architectures=["DeepseekV3ForCausalLM"]).save_pretrained(folder)
    return dict(
        zip(folders, ask("draft", [{"target": str(folder), "draft": str(at)} for at in folders.values()]), strict=True)
    )


@pytest.mark.parametrize("name", SHAPES)
def test_vllm_reads_the_fields_that_were_meant_and_finds_a_place_for_every_tensor(name, seen):
    shape, fields = SHAPES[name], seen[name]["fields"]
    meant = config_json.config_json(shape, "float32", "x")
    assert fields == {field: meant[field] for field in fields}
    read = published_config.shape_from_config({**fields, "model_type": "kimi_k2"})
    assert read == replace(shape, rope_scaling=config_json.rope_scaling(shape))
    assert seen[name]["eps"] == [2e-5]
    assert seen[name]["left"] == {"model.embed_tokens.weight": False}  # the target's own takes its place


@pytest.mark.parametrize("name", SHAPES)
def test_vllm_turns_and_scales_as_the_drafter_does(name, seen):
    attention, theirs = LatentAttention(SHAPES[name], 2 * SHAPES[name].hidden_size), seen[name]
    assert theirs["interleaved"]
    assert theirs["scale"] == pytest.approx(attention.scale, rel=1e-9)
    table = torch.tensor(theirs["cos_sin"])
    positions = torch.arange(len(table))
    ones = torch.tensor([1.0, 0.0]).repeat(32).expand(len(table), 1, 64)  # turned, it is each pair's cos and sin
    turned = attention.rope(ones, positions)[:, 0].unflatten(-1, (-1, 2))
    torch.testing.assert_close(torch.cat([turned[..., 0], turned[..., 1]], -1), table, rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", WRITTEN)
def test_vllm_makes_the_same_drafter_of_every_spelling(name, seen, folders):
    kind, other = seen["the published kind"], seen[name]
    for fact in ("scale", "cos_sin", "left"):
        assert other[fact] == kind[fact]
    here = {parameter: value for parameter, value in kind["sums"].items() if parameter not in kind["left"]}
    assert {parameter: other["sums"][parameter] for parameter in here} == here
    draft = DrafterCheckpoint.open(Path(folders[name]), target_layers=lambda: 6)
    assert draft.shape == replace(SHAPE, rope_scaling=config_json.rope_scaling(SHAPE))


def test_full_rank_queries_are_read_but_vllm_finds_no_place_for_the_latent(seen, folders):
    assert "no module or parameter named 'layers.0.self_attn.fused_qkv_a_proj'" in seen["full rank"]["error"]
    *usual, caveat = contract.caveats(FULL_RANK)
    assert "drafter.q_lora_rank" in caveat
    assert all(contract.caveats(shape) == usual for shape in SHAPES.values() if shape.rope_scaling)
    assert DrafterCheckpoint.open(Path(folders["full rank"]), target_layers=lambda: 6).shape.q_lora_rank is None
