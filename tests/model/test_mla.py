"""The MLA drafter against a reference written apart from it, from vLLM's formulas; RoPE is test_rope.py's.

Asked for: outputs to 1e-5, gradients to 1e-4. In fp64 all agree to 1e-9, in fp32 to 1e-5.
"""

from dataclasses import replace

import pytest
import torch
from conftest import YARN, kept_mask, make_document, make_mla_shape, make_objective
from hypothesis import given, settings
from hypothesis import strategies as st
from model import test_exactness
from model.test_exactness import PROPERTY, cases, check_fp32, check_fp64, reference, train, train_in, weights_of
from model.test_recurrence import assert_same, reference_of
from reference_mla import ReferenceMla, softmax_scale
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding

from eagle31_train.model.batch import Subset, build_batch
from eagle31_train.model.decode import DraftDecoder

K = 7


@st.composite
def yarns(draw):
    """With and without what has a default. Of 16 positions, most pairs turn less than once."""
    given = {
        "beta_fast": st.sampled_from([2.0, 32]),
        "beta_slow": st.sampled_from([0.5, 1]),
        "mscale": st.sampled_from([0.0, 0.7, 1.0]),
        "mscale_all_dim": st.sampled_from([0.0, 0.7, 1.0]),
    }
    chosen = {name: draw(values) for name, values in given.items() if draw(st.booleans())}
    original = draw(st.sampled_from([32, 4096]))
    return {"rope_type": "yarn", "factor": draw(st.sampled_from([1.0, 4.0, 64.0])), **chosen} | {
        "original_max_position_embeddings": original
    }


@st.composite
def mla_shapes(draw):
    """Any widths, full or low rank of the queries; a latent of one number would be a sign after its norm."""
    base = draw(test_exactness.shapes())
    shape = make_mla_shape(
        num_attention_heads=draw(st.integers(1, 4)),
        q_lora_rank=draw(st.one_of(st.none(), st.integers(2, 9))),
        kv_lora_rank=draw(st.integers(2, 9)),
        qk_nope_head_dim=draw(st.integers(1, 6)),
        qk_rope_head_dim=draw(st.sampled_from([2, 4, 8])),
        v_head_dim=draw(st.integers(1, 9)),
        rope_theta=draw(st.sampled_from([10.0, 50000.0])),
        rope_scaling=draw(st.one_of(st.none(), yarns())),
    )
    general = ("hidden_size", "target_hidden_size", "aux_layers", "vocab_size", "draft_vocab_size", "intermediate_size")
    general += ("rms_norm_eps", "fc_norm", "norm_output", "norm_before_residual", "share_embedding")
    return replace(shape, **{name: getattr(base, name) for name in general})


# ---------------------------------------------------------------- training equals the reference


@pytest.mark.parametrize("check", [check_fp64, check_fp32])
@PROPERTY
@given(case=cases(shapes=mla_shapes()))
def test_loss_and_every_gradient_equal_the_reference(check, case):
    check(case)


@PROPERTY
@given(cases(most_documents=4, longest=24, shapes=mla_shapes()))
def test_packed_documents_train_as_each_does_alone(case):
    test_exactness.check_packing(case)


@pytest.fixture(params=["queries of low rank", "queries of full rank"])
def problem(request):
    """(objective in fp64, three documents) of one small drafter, YaRN and all norms on."""
    shape = make_mla_shape(q_lora_rank=None if request.param == "queries of full rank" else 9)
    generator = torch.Generator().manual_seed(1)
    return make_objective(shape), [make_document(shape, length, generator) for length in (9, 5, 14)]


def test_a_subset_of_the_slots_equals_the_reference_of_these_slots(problem):
    objective, documents = problem
    generator = torch.Generator().manual_seed(5)
    subset = Subset([torch.rand(len(d), generator=generator) < 0.5 for d in documents], 2.0)
    packed, whole = (build_batch(documents, K, kept_mask(objective), "mask", some) for some in (subset, None))
    truth = reference(objective, documents, K, 0.8, taken=subset.taken)
    assert truth.counts == packed.trained.tolist()
    assert 0 < sum(truth.counts) < whole.trained.sum()
    assert_same(train(objective, packed, weights_of(truth.counts, 0.8)), truth, 1e-9)


# ---------------------------------------------------------------- decoding equals the reference


def test_every_round_of_drafting_equals_the_reference(problem):
    """As in serving: the prompt at once, then as many rows as were accepted, over what a round left behind."""
    objective, _ = problem
    document = make_document(objective.drafter.shape, 20, torch.Generator().manual_seed(7))
    decoder = DraftDecoder(objective.drafter, objective.teacher.target_ids, capacity=40)
    reference, done = reference_of(objective), 0
    for rows in (6, 1, 3, 4):
        decoder.extend(document.aux[done : done + rows], document.tokens[done + 1 : done + rows + 1])
        done += rows
        drafted = list(decoder.unroll(K))
        read = [*document.tokens[: done + 1], *(token[0] for token, _ in drafted)]
        wanted, _ = reference.slot(read, document.aux, done - 1, K)
        torch.testing.assert_close(torch.cat([z for _, z in drafted]), torch.stack(wanted), rtol=1e-9, atol=1e-9)


# ---------------------------------------------------------------- the same step, with other resources


@settings(PROPERTY, max_examples=6)
@given(
    test_exactness.realistic(
        make_mla_shape, qk_rope_head_dim=16, qk_nope_head_dim=16, v_head_dim=16, q_lora_rank=32, kv_lora_rank=24
    )
)
def test_bf16_stays_close_to_fp32(problem):
    """Twice the worst of 150: loss 2.9e-4 of itself, the norm of any gradient's error 6.5 % of the gradient's norm."""
    low, high = (train_in(low, *problem) for low in (True, False))
    assert abs(low.loss / high.loss - 1) < 6e-4
    for name, wanted in high.grads.items():
        assert (low.grads[name] - wanted).norm() / wanted.norm() < 0.13, name


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
