"""RoPE of the MLA drafter: frequencies, magnitude and softmax scale, against transformers and fp64. Against vLLM's
formulas and defaults, with random options: test_mla.py."""

import pytest
import reference_mla
import torch
from conftest import make_mla_shape
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding

from eagle31_train.model.layer import LatentAttention

# Kimi's and DeepSeek-V3's; the widths are theirs too.
KIMI = {
    "rope_type": "yarn",
    "factor": 64.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
SCALINGS = {
    "kimi, betas 32 and 1": KIMI,
    "kimi, betas 1 and 1": {**KIMI, "beta_fast": 1.0},
    "deepseek v3": {**KIMI, "factor": 40.0},
    "unlike shares": {**KIMI, "mscale": 0.707},
    "other betas": {**KIMI, "beta_fast": 16.0, "beta_slow": 4.0, "original_max_position_embeddings": 8192},
}
WIDTHS = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}


def attention_of(scaling, theta=50000.0):
    """A drafter's attention with few heads, and its shape."""
    shape = make_mla_shape(**WIDTHS, num_attention_heads=2, rope_theta=theta, rope_scaling=scaling)
    return LatentAttention(shape, 2 * shape.hidden_size), shape


@pytest.mark.parametrize("theta", [50000.0, 10000.0])
@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS.keys())
def test_frequencies_magnitude_and_scale_are_those_of_transformers_deepseek_v3(scaling, theta):
    ours, _ = attention_of(scaling, theta)
    config = DeepseekV3Config(
        **WIDTHS,
        hidden_size=32,
        num_attention_heads=2,
        num_key_value_heads=2,
        kv_lora_rank=8,
        q_lora_rank=None,
        max_position_embeddings=int(scaling["factor"] * scaling["original_max_position_embeddings"]),
        rope_parameters={**scaling, "rope_theta": theta},
    )
    theirs = DeepseekV3RotaryEmbedding(config)
    assert torch.equal(ours.rope.inv_freq, theirs.inv_freq)
    assert ours.rope.factor == pytest.approx(theirs.attention_scaling, rel=1e-12)
    assert ours.scale == pytest.approx(DeepseekV3Attention(config, 0).scaling, rel=1e-12)
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_moving_a_drafter_to_another_precision_leaves_the_frequencies(dtype):
    attention, _ = attention_of(KIMI)
    wanted = attention.rope.inv_freq.clone()
    assert torch.equal(attention.to(dtype).rope.inv_freq, wanted)
