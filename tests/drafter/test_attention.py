"""The merged attention against one dense softmax, differentiated by autograd."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import dense_attention

from eagle31_train.drafter import attention
from eagle31_train.drafter.attention import make_layout, unrolled_attention


@st.composite
def problems(draw):
    """Documents, slots anywhere in them, 0 to 7 own keys, and head shapes."""
    lengths = draw(st.lists(st.integers(1, 12), min_size=1, max_size=4))
    N = sum(lengths)
    slots = sorted(draw(st.sets(st.integers(0, N - 1), min_size=1)))
    g, r = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    own, width = draw(st.integers(0, 7)), draw(st.sampled_from([4, 8]))
    dv = draw(st.sampled_from([width, width + 2]))  # unlike widths take the plain path
    return lengths, slots, g, r, own, width, dv, draw(st.integers(0, 99))


def make(problem, dtype):
    lengths, slots, g, r, own, d, dv, seed = problem
    generator = torch.Generator().manual_seed(seed)
    S, N = len(slots), sum(lengths)

    def random(*size):
        return (torch.randn(*size, generator=generator, dtype=torch.float64) * 2).to(dtype).requires_grad_()

    edges = torch.tensor([0, *lengths]).cumsum(0).tolist()
    layout = make_layout(list(itertools.pairwise(edges)), torch.tensor(slots))
    q, k0, v0 = random(S, g * r, d), random(N, g, d), random(N, g, dv)
    own_k, own_v = [random(S, g, d) for _ in range(own)], [random(S, g, dv) for _ in range(own)]
    return (q, k0, v0, own_k, own_v), layout, random(S, g * r, dv).detach()


def run(function, tensors, layout, direction):
    q, k0, v0, own_k, own_v = tensors
    leaves = [q, k0, v0, *own_k, *own_v]
    out = function(q, k0, v0, own_k, own_v, layout, 0.4)
    return [out, *torch.autograd.grad((out * direction).sum(), leaves)]


@settings(max_examples=60, deadline=None)
@given(problems())
def test_output_and_gradients_equal_one_dense_softmax(problem):
    tensors, layout, direction = make(problem, torch.float64)
    for ours, truth in zip(
        run(unrolled_attention, tensors, layout, direction),
        run(dense_attention, tensors, layout, direction),
        strict=True,
    ):
        torch.testing.assert_close(ours, truth, rtol=1e-9, atol=1e-9)


PROBLEM = ([9, 1, 14], [0, 1, 2, 5, 6, 9, 12, 13, 20, 21, 22, 23], 2, 2, 3, 8, 8, 0)


def test_bf16_stays_within_its_own_rounding():
    """Outputs to 1 %, gradients to 3 % of their norm: 8 bits of mantissa, products of a few dozen terms."""
    tensors, layout, direction = make(PROBLEM, torch.bfloat16)
    low = run(unrolled_attention, tensors, layout, direction)
    exact = [[x.detach().double().requires_grad_() for x in group] for group in (tensors[:3], *tensors[3:])]
    high = run(dense_attention, (*exact[0], exact[1], exact[2]), layout, direction.double())
    for index, (ours, truth) in enumerate(zip(low, high, strict=True)):
        error = (ours.double() - truth).norm() / truth.norm()
        assert error < (0.01 if index == 0 else 0.03), index


@pytest.mark.parametrize("wrong", ["own log-sum-exp", "own output"])
def test_a_backward_with_the_pieces_own_statistics_is_caught(wrong, monkeypatch):
    """The mistake of one public trainer: each piece's flash backward gets the piece's own log-sum-exp or output."""
    right = attention.flash_backward

    def planted(dout, q, k, v, out, lse, causal, scale):
        own_out, own_lse = attention.flash_forward(q, k, v, causal, scale)
        if wrong == "own log-sum-exp":
            return right(dout, q, k, v, out, own_lse, causal, scale)
        return right(dout, q, k, v, own_out, lse, causal, scale)

    tensors, layout, direction = make(PROBLEM, torch.float64)
    truth = run(dense_attention, tensors, layout, direction)
    monkeypatch.setattr(attention, "flash_backward", planted)
    ours = run(unrolled_attention, tensors, layout, direction)
    torch.testing.assert_close(ours[0], truth[0])
    assert (ours[1] - truth[1]).norm() / truth[1].norm() > 0.01


def test_runs_are_broken_at_gaps_and_at_documents():
    layout = make_layout([(0, 5), (5, 9)], torch.tensor([1, 2, 4, 5, 6, 8]))
    found = [(run.first, run.end, run.document, run.begin) for run in layout.runs]
    assert found == [(0, 2, 0, 1), (2, 3, 0, 4), (3, 5, 5, 5), (5, 6, 5, 8)]


def test_no_slots_at_all():
    tensors, layout, _ = make(([3], [0], 1, 1, 2, 4, 4, 0), torch.float64)
    q, k0, v0, own_k, own_v = tensors
    layout = make_layout(layout.documents, torch.tensor([], dtype=torch.int64))
    out = unrolled_attention(q[:0], k0, v0, [k[:0] for k in own_k], [v[:0] for v in own_v], layout, 1.0)
    assert out.shape == (0, 1, 4)
