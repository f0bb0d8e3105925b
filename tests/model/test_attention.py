"""The merged attention against one dense softmax, differentiated by autograd."""

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from planting import instead_of
from reference import dense_attention

from eagle31_train.model import attention, context_attention
from eagle31_train.model.attention import unrolled_attention
from eagle31_train.model.packing import make_layout, make_segments

pytestmark = pytest.mark.core


@st.composite
def problems(draw):
    """Documents, slots anywhere in them, 0 to 7 own keys, and head shapes."""
    lengths = draw(st.lists(st.integers(1, 12), min_size=1, max_size=4))
    N = sum(lengths)
    slots = sorted(draw(st.sets(st.integers(0, N - 1), min_size=1)))
    g, r = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    own, width = draw(st.integers(0, 7)), draw(st.sampled_from([4, 8]))
    dv = draw(st.sampled_from([width, width + 2, width - 2]))  # MLA's are unlike
    return lengths, slots, g, r, own, width, dv, draw(st.integers(0, 99))


windows = st.sampled_from([None, None, 1, 2, 3, 5, 8, 11, 40])


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


def run(function, tensors, layout, direction, **options):
    q, k0, v0, own_k, own_v = tensors
    leaves = [q, k0, v0, *own_k, *own_v]
    out = function(q, k0, v0, own_k, own_v, layout, 0.4, **options)
    return [out, *torch.autograd.grad((out * direction).sum(), leaves, materialize_grads=True)]


def in_fp64(tensors, layout, direction):
    """One dense softmax of the same numbers."""
    exact = [[x.detach().double().requires_grad_() for x in group] for group in (tensors[:3], *tensors[3:])]
    return run(dense_attention, (*exact[0], exact[1], exact[2]), layout, direction.double())


def assert_within_16_bits(ours, truth):
    """Outputs to 1 %, gradients to 3 % of their norm: 8 bits of mantissa, products of a few dozen terms."""
    for index, (mine, theirs) in enumerate(zip(ours, truth, strict=True)):
        error = (mine.double() - theirs).norm() / theirs.norm().clamp(min=1e-9)  # of keys that nobody sees it is 0
        assert error < (0.01 if index == 0 else 0.03), index


OWN_KEYS = 3
PROBLEM = ([9, 1, 14], [0, 1, 2, 5, 6, 9, 12, 13, 20, 21, 22, 23], 2, 2, OWN_KEYS, 8, 8, 0)


@pytest.mark.parametrize("kernel", ["flash", "plain", "copied keys", "spread queries"])
def test_bf16_stays_within_its_own_rounding(kernel, monkeypatch):
    tensors, layout, direction = make(PROBLEM, torch.bfloat16)
    low = run(unrolled_attention, tensors, with_kernel(kernel, layout, monkeypatch), direction)
    assert_within_16_bits(low, in_fp64(tensors, layout, direction))


def own_keys_under_autocast(deviation):
    """Errors of the output, dq, all own keys' and all own values' gradients under bf16 autocast, against fp64, where
    scores have this standard deviation."""
    tensors, layout, direction = make(([7, 40], list(range(3, 47)), 2, 4, 5, 64, 64, 0), torch.bfloat16)
    q, *rest = tensors
    q = (q * (deviation / 4 * 64**-0.5 / 0.4)).detach().requires_grad_()  # `make` and `run`: deviations 2, scale 0.4
    with torch.autocast("cpu", torch.bfloat16):
        low = run(unrolled_attention, (q, *rest), layout, direction)
    high = in_fp64((q, *rest), layout, direction)
    parts = [[each[0], each[1], torch.cat(each[4:9]), torch.cat(each[9:])] for each in (low, high)]
    return [((a.double() - b).norm() / b.norm()).item() for a, b in zip(*parts, strict=True)]


def test_own_keys_stay_exact_under_autocast(monkeypatch):
    """To 1 %. Autocast would round scores to 8 bits, which a sharp softmax amplifies: planted, that is seen."""
    assert max(max(own_keys_under_autocast(deviation)) for deviation in (2, 8, 20)) < 0.01
    monkeypatch.setattr(attention, "_dots", lambda a, b: torch.linalg.vecdot(a.float(), b.float()))
    assert max(own_keys_under_autocast(20)) > 0.03


@instead_of(attention._MergedAttention, "apply")
def context_window_as_at_step_0(right, q, k0, v0, layout, scale, left, fused, *own):
    return right(q, k0, v0, layout, scale, left + OWN_KEYS, fused, *own)


@instead_of(attention, "unrolled_attention")
def all_own_keys_in_the_window(right, q, k0, v0, own_k, own_v, layout, scale, window):
    left = window - 1 - len(own_k)
    return attention._MergedAttention.apply(q, k0, v0, layout, scale, left, False, *own_k, *own_v)


@instead_of(attention, "context_backward")
def backward_with_its_parts_own_log_sum_exp(right, dout, q, k0, v0, out, _, *rest):
    return right(dout, q, k0, v0, out, attention.context_forward(q, k0, v0, *rest)[1], *rest)


@instead_of(attention, "context_backward")
def backward_with_its_parts_own_output(right, dout, q, k0, v0, _, lse, *rest):
    return right(dout, q, k0, v0, attention.context_forward(q, k0, v0, *rest)[0], lse, *rest)


@pytest.mark.parametrize(
    ("plant", "window"),
    [
        (context_window_as_at_step_0, 2),
        (context_window_as_at_step_0, 5),
        (all_own_keys_in_the_window, 2),
        # The mistake of one public trainer. The output is right.
        (backward_with_its_parts_own_log_sum_exp, None),
        (backward_with_its_parts_own_output, None),
    ],
)
def test_a_planted_mistake_is_caught(plant, window, monkeypatch):
    tensors, layout, direction = make(PROBLEM, torch.float64)
    truth = run(dense_attention, tensors, layout, direction, window=window)
    plant(monkeypatch)
    ours = run(attention.unrolled_attention, tensors, layout, direction, window=window)
    wrong = 1 if window is None else 0
    assert (ours[wrong] - truth[wrong]).norm() / truth[wrong].norm() > 0.01
    assert torch.allclose(ours[0], truth[0]) == (window is None)


def varlen(q, k, v, query_edges, key_edges, left=None, right=None):
    """Heads and stretches of CUDA's flash kernel for packed sequences, and what is hidden: aligned at the end."""
    assert left is None or (left >= 0 and right == 0)  # -1 would be no window
    for head in range(q.shape[1]):
        edges = zip(itertools.pairwise(query_edges.tolist()), itertools.pairwise(key_edges.tolist()), strict=True)
        for rows, keys in edges:
            n, m = rows[1] - rows[0], keys[1] - keys[0]
            own = torch.arange(n)[:, None] + m - n
            hidden = torch.arange(m) > own
            if left is not None:
                hidden |= torch.arange(m) < own - left
            yield head, head // (q.shape[1] // k.shape[1]), slice(*rows), slice(*keys), hidden


def imitated_forward(q, k, v, query_edges, key_edges, queries, keys, dropout, causal, debug, *, scale, **window):
    # At one query it would take another algorithm where heads share keys; so it is told of two at least.
    assert (queries, keys) == (max(2, query_edges.diff().max()), key_edges.diff().max())
    assert causal
    assert query_edges.dtype == key_edges.dtype == torch.int32
    assert (int(query_edges[-1]), int(key_edges[-1])) == (len(q), len(k))
    # As the kernel does: the log-sum-exp is not in 16 bits, whatever the rest is.
    out = q.new_zeros(*q.shape[:2], v.shape[-1])
    lse = q.new_zeros(q.shape[1], len(q), dtype=torch.promote_types(q.dtype, torch.float32))
    for head, group, rows, columns, hidden in varlen(q, k, v, query_edges, key_edges, *window.values()):
        scores = (q[rows, head] @ k[columns, group].T * scale).to(lse.dtype).masked_fill(hidden, float("-inf"))
        lse[head, rows] = scores.logsumexp(-1)
        out[rows, head] = scores.softmax(-1).to(v.dtype) @ v[columns, group]
    return out, lse, None, None, None


def imitated_backward(
    dout, q, k, v, out, lse, query_edges, key_edges, queries, keys, dropout, causal, state, unused, *, scale, **window
):
    assert lse.is_contiguous()
    assert lse.dtype == torch.promote_types(q.dtype, torch.float32)
    assert dout.dtype == q.dtype == k.dtype == v.dtype == out.dtype
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for head, group, rows, columns, hidden in varlen(q, k, v, query_edges, key_edges, *window.values()):
        scores = (q[rows, head] @ k[columns, group].T * scale).to(lse.dtype).masked_fill(hidden, float("-inf"))
        shares = (scores - lse[head, rows, None]).exp().to(q.dtype)
        do = dout[rows, head]
        slope = shares * (do @ v[columns, group].T - (do * out[rows, head]).sum(-1, keepdim=True)) * scale
        dq[rows, head] += slope @ k[columns, group]
        dk[columns, group] += slope.T @ q[rows, head]
        dv[columns, group] += shares.T @ do
    return dq, dk, dv


def with_kernel(kernel, layout, patch):
    """Let the CPU compute as with another kernel; returns the layout that this needs."""
    if kernel == "flash":
        return layout
    if kernel == "plain":
        patch.setattr(context_attention, "_flash_cpu", lambda q: False)
        patch.setattr(context_attention, "BLOCK", 3)
        return layout
    patch.setattr(context_attention, "takes_flash", lambda q, v: True)
    patch.setattr(torch.ops.aten, "_flash_attention_forward", imitated_forward)
    patch.setattr(torch.ops.aten, "_flash_attention_backward", imitated_backward)
    patch.setattr(context_attention, "LONG", 0 if kernel == "copied keys of long runs" else 100)
    most_copies = 0.0 if kernel == "spread queries" else 100.0
    return replace(layout, segments=make_segments(layout.documents, layout.slots, layout.runs, most_copies))


@pytest.mark.parametrize("kernel", ["flash", "plain", "copied keys", "copied keys of long runs", "spread queries"])
@settings(max_examples=100)
@given(problem=problems(), window=windows)
def test_output_and_gradients_equal_one_dense_softmax(kernel, problem, window):
    """By the CPU's flash kernel, by plain products, and by the CUDA path's indices on an imitation of its kernel, which
    adds up the copies of a key in fp32; the kernel itself is for tests/gpu."""
    tensors, layout, direction = make(problem, torch.float64)
    truth = run(dense_attention, tensors, layout, direction, window=window)
    with pytest.MonkeyPatch.context() as patch:
        ours = run(unrolled_attention, tensors, with_kernel(kernel, layout, patch), direction, window=window)
    near = 1e-9 if kernel in ("flash", "plain") else 1e-6
    torch.testing.assert_close(ours, truth, rtol=near, atol=near, check_dtype=False)


def test_slots_scattered_over_a_long_document_do_not_copy_its_keys_for_each():
    segments = make_layout([(0, 1000)], torch.arange(0, 1000, 4)).segments
    assert segments.key_rows is None
    assert segments.query_total == 1000
