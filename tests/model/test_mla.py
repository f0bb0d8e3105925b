"""The reference of MLA attends as transformers does; that training is the reference's: test_exactness.py."""

import pytest
import torch
from conftest import YARN, make_mla_shape
from reference_mla import ReferenceMla, softmax_scale
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding


@pytest.mark.parametrize("rank", [9, None])
@pytest.mark.parametrize("shares", [{"mscale": 1.0, "mscale_all_dim": 1.0}, {"mscale": 0.7, "mscale_all_dim": 1.0}])
def test_the_reference_attends_as_transformers_deepseek_v3_does(rank, shares):
    """Where the two agree with vLLM: both mscales given. Theirs has one epsilon, and an input as wide as its output."""
    shape = make_mla_shape(q_lora_rank=rank, rope_scaling={**YARN, **shares}, rms_norm_eps=1e-6)
    own = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "num_attention_heads")
    config = DeepseekV3Config(
        **{name: getattr(shape, name) for name in own},
        num_key_value_heads=shape.num_attention_heads,
        hidden_size=2 * shape.hidden_size,
        max_position_embeddings=64 * 4096,
        rope_parameters={**shape.rope_scaling, "rope_theta": shape.rope_theta},
        attn_implementation="eager",
    )
    torch.manual_seed(0)
    theirs = DeepseekV3Attention(config, 0).double()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, float(parameter.dim() == 1), 0.3)
    T = 9
    x = torch.randn(T, 2 * shape.hidden_size, dtype=torch.float64)
    turns = DeepseekV3RotaryEmbedding(config)(x, torch.arange(T)[None])
    mask = torch.full((T, T), float("-inf"), dtype=torch.float64).triu(1)[None, None]
    wanted, _ = theirs(x[None], turns, mask)

    weights = {f"midlayer.self_attn.{name}": p for name, p in theirs.named_parameters()}
    reference = ReferenceMla(shape, weights, None)
    rows = [reference.row(0, x[t], t) for t in range(T)]
    seen = torch.stack([reference.attend(0, x[t], t, rows[: t + 1]) for t in range(T)])
    assert theirs.scaling == pytest.approx(softmax_scale(shape), rel=1e-12)
    # Frequencies, sines and cosines are fp32 there.
    torch.testing.assert_close(seen @ theirs.o_proj.weight.T, wanted[0], rtol=1e-5, atol=1e-5)
