"""The unrolled training pass against a reference written apart from it, and every known mistake planted."""

from functools import cache

import pytest
import torch
from conftest import kept_mask, make_document, make_mla_shape, make_objective, make_shape, make_tiny
from model.test_exactness import assert_same_counts, reference, train, weights_of
from planting import instead_of, replaced
from reference import ReferenceDrafter, dense_scores

from eagle31_train.model import drafter, layer
from eagle31_train.model.batch import build_batch
from eagle31_train.model.linear import linear

pytestmark = pytest.mark.core

K = 7
GAMMA = 0.8


def trained(objective, documents, unroll=K):
    """Loss, gradients and measures of the project."""
    packed = build_batch(documents, unroll, kept_mask(objective))
    return train(objective, packed, weights_of(packed.trained.tolist(), GAMMA))


def assert_same(ours, truth, tolerance):
    found, wanted = ({"loss": one.loss, **one.grads} for one in (ours, truth))
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


# In which mistakes are planted. Equality in random shapes: test_exactness.py.
VARIANTS = {
    "three layers, normed": make_shape(num_layers=3, norm_before_fc=True, qk_norm=True, norm_before_residual=True),
    "MLA": make_mla_shape(),
    "a window": make_shape(sliding_window=3),
    "biases": make_shape(attention_bias=True, mlp_bias=True),
    "parallel": make_shape(parallel=True, ptd_token_id=49),
}


def variant(name, exact=True):
    """(objective, documents, steps) of one of VARIANTS, or of `tiny` without a name; `exact`: as of make_objective."""
    if name is None:
        return *make_tiny(), K
    shape, generator = VARIANTS[name], torch.Generator().manual_seed(5)
    return make_objective(shape, exact=exact), [make_document(shape, length, generator) for length in (7, 10)], 3


def assert_right(objective, documents):
    """Loss, gradients and counts of `tiny` are the reference's."""
    ours, truth = trained(objective, documents), truth_of(None)
    assert_same_counts(ours, truth)
    assert_same(ours, truth, 1e-9)


# ---------------------------------------------------------------- mistakes seen in public trainers


@instead_of(drafter.Drafter, "forward")
def norm_twice(forward, self, packed):
    z, rms = forward(self, packed)
    return self.norm(z), rms


@instead_of(drafter, "unrolled_attention")
def own_keys_under_an_additive_one_zero_mask(_, q, k0, v0, own_k, own_v, layout, scale, **more):
    """Every slot's own keys are in the softmax of every other slot, told apart by +1 and +0 only."""
    scores, values, seen = dense_scores(q, k0, v0, own_k, own_v, layout, scale)
    context = scores[..., : len(k0)].masked_fill(~seen[:, None, : len(k0)], float("-inf"))
    own = scores[..., len(k0) :] + seen[:, None, len(k0) :].to(scores.dtype)
    return torch.einsum("sht,thd->shd", torch.cat([context, own], -1).softmax(-1), values)


@instead_of(drafter, "unrolled_attention")
def merge_that_ignores_the_gradient_of_the_log_sum_exp(_, q, k0, v0, own_k, own_v, layout, scale, **more):
    """Causal part and own keys merged by log-sum-exp, with the causal log-sum-exp treated as a constant."""
    scores, values, seen = dense_scores(q, k0, v0, own_k, own_v, layout, scale)
    scores = scores.masked_fill(~seen[:, None], float("-inf"))
    context, own = scores[..., : len(k0)], scores[..., len(k0) :]
    out = torch.einsum("sht,thd->shd", context.softmax(-1), values[: len(k0)])
    shares = torch.cat([context.logsumexp(-1, keepdim=True).detach(), own], -1).softmax(-1)
    return shares[..., :1] * out + torch.einsum("sht,thd->shd", shares[..., 1:], values[len(k0) :])


@instead_of(drafter.Drafter, "forward")
def positions_that_stand_still(forward, self, packed):
    """Every step of a slot is rotated as at position t."""
    rope, origin = self.midlayer.self_attn.rope, packed.positions[packed.layout.slots]
    right = rope.forward
    rope.forward = lambda x, p: right(x, origin if len(p) == len(origin) else p)
    return forward(self, packed)


# ---------------------------------------------------------------- mistakes of further shapes


def upper_layers_read_the_slots_state_of_step_0(monkeypatch):
    """Step-0 keys of the layers above from g_0, not from what the layer below makes of it."""

    @replaced(monkeypatch, drafter.AttendingLayer, "keep_context")
    def wrong(right, self, states, read, positions):
        wrong.first = states if self._layer.first else wrong.first
        right(self, wrong.first, read, positions)


@instead_of(layer.GroupedQueryAttention, "queries")
def heads_normed_after_their_rotation(_, self, project, positions):
    return self.q_norm(self.rope(project(self.q_proj).unflatten(-1, (self.heads, self.width)), positions))


@instead_of(drafter.Drafter, "fuse")
def norm_before_fc_after_fc_norm(_, self, aux):
    states = [norm(layer.decode()) for norm, layer in zip(self.fc_norm, aux.unbind(), strict=True)]
    return self.fc(self.input_norm(torch.cat(states, -1)))


def other_mask(part, change):
    """Of a parallel drafter, another token or state than the mask's."""
    return instead_of(drafter.Drafter, f"mask_{part}")(lambda right, self: change(self, right(self)))


def mask_rows_beside_the_texts_tokens(monkeypatch):
    forward, right = drafter.Drafter.forward, drafter.TokenHalf.step

    def wrong(self, packed):
        rows = iter(packed.reads)
        monkeypatch.setattr(drafter.TokenHalf, "step", lambda half, _: right(half, next(rows)))
        return forward(self, packed)

    monkeypatch.setattr(drafter.Drafter, "forward", wrong)


OF_TINY = {
    "the state before the norm fed back": instead_of(drafter.Drafter, "feedback")(lambda _, self, h, z: h),
    "a state fed back detached": instead_of(drafter.Drafter, "feedback")(lambda right, *given: right(*given).detach()),
    "a state normed twice": norm_twice,
    "own keys under an additive one-zero mask": own_keys_under_an_additive_one_zero_mask,
    "a merge that ignores the gradient of the log-sum-exp": merge_that_ignores_the_gradient_of_the_log_sum_exp,
    "positions that stand still": positions_that_stand_still,
}
OF_LAYERS = {
    "own keys in the first layer alone": instead_of(drafter.AttendingLayer, "keep_own")(
        lambda right, self, *own: right(self, *own) if self._layer.first else None
    ),
    "upper layers that keep their normed input": instead_of(layer.Layer, "residual")(lambda _, self, g, normed: normed),
    "upper layers that read the slot's state of step 0": upper_layers_read_the_slots_state_of_step_0,
    "heads normed after their rotation": heads_normed_after_their_rotation,
    "norm_before_fc after fc_norm": norm_before_fc_after_fc_norm,
}
OF_PARALLEL = {
    "a mask state that is normed as an output": other_mask("state", lambda self, g: self.norm(g)),
    "another token than the mask's": other_mask("token", lambda _, token: token - 1),
    "the text's tokens beside the mask's state": mask_rows_beside_the_texts_tokens,
    "a mask state that never learns": other_mask("state", lambda _, g: g.detach()),
    "mask_hidden past fc_norm": other_mask("state", lambda self, _: self.fc(self.mask_hidden)),
    "mask rows that do not see each other": instead_of(drafter.AttendingLayer, "keep_own")(lambda *_: None),
    "mask rows all at the slot's position": positions_that_stand_still,
}


def another_window(width):
    return instead_of(layer.GroupedQueryAttention, "__init__")(
        lambda right, self, *given: (right(self, *given), setattr(self, "window", width))[0]
    )


@instead_of(drafter.TokenHalf, "_join")
def a_forgotten_bias(_, self, projection, token_half, normed):
    return token_half - projection.bias + linear(normed, self._state[projection])


MISTAKES = {
    **{name: (None, mistake) for name, mistake in OF_TINY.items()},
    **{name: ("three layers, normed", mistake) for name, mistake in OF_LAYERS.items()},
    **{name: ("parallel", mistake) for name, mistake in OF_PARALLEL.items()},
    **{f"a window of {width}": ("a window", another_window(width)) for width in (2, 4, None)},
    "a forgotten bias": ("biases", a_forgotten_bias),
}


@cache
def truth_of(shape):
    """The reference's loss and gradients, which are the project's where nothing is planted."""
    objective, documents, unroll = variant(shape)
    ours, truth = trained(objective, documents, unroll), reference(objective, documents, unroll, GAMMA)
    assert_same_counts(ours, truth)
    assert_same(ours, truth, 1e-9)
    return truth


@pytest.mark.parametrize(("shape", "mistake"), MISTAKES.values(), ids=MISTAKES.keys())
def test_a_planted_mistake_is_caught(shape, mistake, monkeypatch):
    truth = truth_of(shape)
    mistake(monkeypatch)
    with pytest.raises(AssertionError):
        assert_same(trained(*variant(shape)), truth, 1e-5)


def test_rms_is_of_the_state_that_each_step_reads():
    objective, _ = make_tiny()
    d = make_document(objective.drafter.shape, 24, torch.Generator().manual_seed(1), list(range(9, 14)))
    packed = build_batch([d], K, kept_mask(objective, "keep"))  # no step is past its end
    found = train(objective, packed, weights_of(packed.trained.tolist(), 0.8)).measured
    weights, sums = dict(objective.drafter.named_parameters()), torch.zeros(K, dtype=torch.float64)
    reference = ReferenceDrafter(objective.drafter.shape, weights, objective.drafter.shared_embedding)
    for t in packed.positions[packed.slot_rows].tolist():
        _, states = reference.slot(d.tokens, d.all_aux, t, K)
        sums += torch.stack([state.detach().square().mean().sqrt() for state in states[:K]])
    torch.testing.assert_close(found.rms.double(), sums, rtol=1e-6, atol=0)
