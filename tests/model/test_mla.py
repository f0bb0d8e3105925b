"""The MLA drafter decodes as the reference does, and that attends as transformers does. Training: test_exactness.py."""

import pytest
import torch
from conftest import YARN, make_document, make_mla_shape, make_objective
from model.test_recurrence import reference_of
from reference_mla import ReferenceMla, softmax_scale
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding

from eagle31_train.model.decode import DraftDecoder

K = 7


@pytest.mark.parametrize("rank", [9, None])
def test_every_round_of_drafting_equals_the_reference(rank):
    """As in serving: the prompt at once, then as many rows as were accepted, over what a round left behind."""
    objective = make_objective(make_mla_shape(q_lora_rank=rank))
    document = make_document(objective.drafter.shape, 20, torch.Generator().manual_seed(7))
    decoder = DraftDecoder(objective.drafter, objective.teacher.target_ids, capacity=40)
    reference, done = reference_of(objective), 0
    for rows in (6, 1, 3, 4):
        decoder.extend(document.all_aux[done : done + rows], document.tokens[done + 1 : done + rows + 1])
        done += rows
        drafted = list(decoder.unroll(K))
        read = [*document.tokens[: done + 1], *(token[0] for token, _ in drafted)]
        wanted, _ = reference.slot(read, document.all_aux, done - 1, K)
        torch.testing.assert_close(torch.cat([z for _, z in drafted]), torch.stack(wanted), rtol=1e-9, atol=1e-9)


# ---------------------------------------------------------------- the reference itself


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
