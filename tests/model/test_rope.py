"""RoPE of the Llama drafter and of MLA's against transformers and fp64, and what vLLM would read otherwise than it was
trained, which is refused. MLA's against vLLM's formulas and defaults, with random options: test_exactness.py."""

from dataclasses import replace

import pytest
import reference_mla
import torch
from conftest import YARN as MLAS
from conftest import make_mla_shape, make_shape
from made import message_of
from transformers import DeepseekV3Config, LlamaConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from eagle31_train.checkpoint.config_json import config_json, rope_scaling
from eagle31_train.checkpoint.contract import check_shape, weight_shapes
from eagle31_train.checkpoint.published_config import shape_from_config
from eagle31_train.model.layer import LatentAttention
from eagle31_train.model.rope import Rope

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3["original_max_position_embeddings"] = 64
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LONG = {**YARN, "rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
SCALINGS = {
    "linear": {"rope_type": "linear", "factor": 2},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn by its old name": {**{key: YARN[key] for key in YARN if key != "rope_type"}, "type": "yarn"},
    "yarn, its shares": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.0},
    "yarn, its bounds": {**YARN, "beta_fast": 16, "beta_slow": 2, "truncate": False},
    "yarn, a magnitude of its own": {**YARN, "attention_factor": 1.2},
}
REFUSED = {
    "a misspelt key, which transformers passes over": {**YARN, "beta_fasst": 3},
    "no original length": {"rope_type": "yarn", "factor": 4.0},
    "a factor that follows from the longest position, in one of the two": {**YARN, "factor": None},
    "bounds in the wrong order, read in two ways": {**LLAMA3, "low_freq_factor": 4.0, "high_freq_factor": 1.0},
    "two tables, of which vLLM may take the other": LONG,
    "an unknown kind": {"rope_type": "twisted"},
    "two kinds, of which the two read one each": {"type": "linear", "rope_type": "dynamic", "factor": 4.0},
}
REFUSED_OF_MLA = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "an attention_factor, which vLLM passes over": {**MLAS, "attention_factor": 1.4},
    "a correction range that is not rounded, which vLLM passes over": {**MLAS, "truncate": False},
    "a base of its own, which would be lost": {**MLAS, "rope_theta": 10000.0},
}
NOT_SERVED = {name: make_shape(rope_scaling=scaling) for name, scaling in REFUSED.items()}
NOT_SERVED |= {f"mla: {name}": make_mla_shape(rope_scaling=scaling) for name, scaling in REFUSED_OF_MLA.items()}


@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS.keys())
def test_a_scaling_is_the_targets_and_survives_config_json(scaling):
    shape = make_shape(rope_scaling=scaling)
    assert check_shape(shape) == []
    ours, config = Rope(shape), config_json(shape, "float32", "x")
    theirs = LlamaRotaryEmbedding(LlamaConfig(**config))
    assert torch.equal(ours.inv_freq, theirs.inv_freq)
    assert ours.factor == theirs.attention_scaling
    assert isinstance(config["rope_parameters"]["factor"], float)  # vLLM iterates over any other factor of linear
    again = shape_from_config(config)
    assert torch.equal(Rope(again).inv_freq, ours.inv_freq)


@pytest.mark.parametrize("shape", NOT_SERVED.values(), ids=NOT_SERVED.keys())
def test_a_scaling_that_vllm_reads_otherwise_is_refused_in_one_line(shape):
    said = message_of(Rope, shape)
    assert said.startswith("drafter.rope_scaling")
    assert check_shape(shape) == [said]


@pytest.mark.parametrize("kind", [YARN, LLAMA3], ids=["yarn", "llama3"])
def test_a_published_draft_without_its_original_length_is_read_as_transformers_does(kind):
    shape = make_shape(rope_scaling={**kind, "original_max_position_embeddings": 128}, max_position_embeddings=128)
    config = config_json(shape, "float32", "x")
    for written in (config["rope_scaling"], config["rope_parameters"]):
        written.pop("original_max_position_embeddings", None)
    assert torch.equal(Rope(shape_from_config(config)).inv_freq, Rope(shape).inv_freq)
    assert torch.equal(LlamaRotaryEmbedding(LlamaConfig(**config)).inv_freq, Rope(shape).inv_freq)


# ---------------------------------------------------------------- MLA

# Kimi's and DeepSeek-V3's; the widths are theirs too.
KIMI = {**MLAS, "beta_fast": 32.0, "beta_slow": 1.0, "mscale_all_dim": 1.0}
LEAST = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
OF_MLA = {
    "none": None,
    "what must be given": LEAST,
    "by its old name": {"type": "yarn", **{name: value for name, value in LEAST.items() if name != "rope_type"}},
    "kimi, betas 32 and 1": KIMI,
    "deepseek v3": {**KIMI, "factor": 40.0},
    "unlike shares": {**KIMI, "mscale": 0.707},
    "other betas": {**KIMI, "beta_fast": 16.0, "beta_slow": 4.0, "original_max_position_embeddings": 8192},
}
WIDTHS = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}


def attention_of(scaling):
    """A drafter's attention with few heads, and its shape."""
    shape = make_mla_shape(**WIDTHS, num_attention_heads=2, rope_scaling=scaling)
    return LatentAttention(shape, 2 * shape.hidden_size), shape


@pytest.mark.parametrize("scaling", OF_MLA.values(), ids=OF_MLA.keys())
def test_mlas_rope_and_softmax_are_deepseek_v3s_of_transformers_by_every_spelling(scaling):
    ours, shape = attention_of(scaling)
    assert check_shape(shape) == []
    config = config_json(shape, "float32", "x")
    new = {key: value for key, value in config.items() if key not in ("rope_theta", "rope_scaling")}
    old = {key: value for key, value in config.items() if key != "rope_parameters"}
    for spelling in (config, new, old):
        whole = replace(shape, rope_scaling=rope_scaling(shape))
        assert shape_from_config(spelling, weight_shapes(shape)) == whole
        read = DeepseekV3Config(**spelling)
        theirs = DeepseekV3RotaryEmbedding(read)
        assert torch.equal(ours.rope.inv_freq, theirs.inv_freq)
        assert ours.rope.factor == pytest.approx(theirs.attention_scaling, rel=1e-12)
        assert ours.scale == pytest.approx(DeepseekV3Attention(read, 0).scaling, rel=1e-12)
    positions = torch.arange(0, 3000, 7)
    cos, sin = theirs(torch.zeros(1), positions[None])
    turned = ours.rope(torch.tensor([1.0, 0.0]).repeat(32).expand(len(positions), 1, -1), positions)[:, 0]
    torch.testing.assert_close(turned[:, 0::2], cos[0, :, :32], rtol=0, atol=1e-6)
    torch.testing.assert_close(turned[:, 1::2], sin[0, :, :32], rtol=0, atol=1e-6)


@pytest.mark.parametrize("position", [20_000, 200_000])
def test_long_positions_are_as_exact_as_fp32_angles_can_be(position):
    """An angle of p radians is known to p / 2^22 in fp32, frequency included: 0.008 were seen at 200 k."""
    attention, shape = attention_of(KIMI)
    x = torch.randn(64, generator=torch.Generator().manual_seed(0))
    angle = position * reference_mla.frequencies(shape)
    ours = attention.rope(x[None, None], torch.tensor([position]))[0, 0].double()
    error = (ours - reference_mla.rotate_pairs(x.double(), position, shape)).view(32, 2).norm(dim=1)
    size = x.double().view(32, 2).norm(dim=1)
    assert (error <= size * (angle * 2**-22 + 1e-6)).all()
    # The same bits as vLLM's table, which holds fp32 products of the same fp32 frequencies.
    turn = torch.tensor(float(position)) * attention.rope.inv_freq
    cos, sin = turn.cos(), turn.sin()
    first, second = x[0::2], x[1::2]
    table = torch.stack([first * cos - second * sin, second * cos + first * sin], 1).flatten()
    torch.testing.assert_close(ours.float(), table, rtol=0, atol=1e-6)
    for dtype in (torch.bfloat16, torch.float16, torch.float64):  # a drafter's precision is not its frequencies'
        wanted = attention.rope.inv_freq.clone()
        assert torch.equal(attention.to(dtype).rope.inv_freq, wanted)


@pytest.mark.parametrize("make", [make_shape, make_mla_shape])
@pytest.mark.parametrize("position", [257, 4099])
def test_what_is_in_16_bits_is_turned_by_its_exact_position(make, position):
    """bf16 has no 257: angles are of whole numbers in fp32, whatever is turned by them."""
    rope, at = Rope(make(rope_theta=1e4)), torch.tensor([position])
    x = torch.randn(1, 2, 2 * len(rope.exact), generator=torch.Generator().manual_seed(0)).bfloat16()
    torch.testing.assert_close(rope(x, at).float(), rope(x.float(), at), rtol=0, atol=0.04)
