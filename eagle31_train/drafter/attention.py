"""Who sees whom in the unrolled drafter: the one place where the mask lives.

Slot t at step k attends to the step-0 keys of every position s <= t of its own document, and to
its own keys of steps 1..k (its query's own step included). Nothing else.

The causal part is cut into pieces that need no mask tensor: slots at consecutive positions form a
*run*, which sees everything before it in full and itself causally. The pieces and the slots' own
keys are softmaxed apart and merged by their log-sum-exp. On the CPU each piece is a flash kernel, and
memory is linear in the number of slots; on other devices a piece's scores are held in full (no GPU has
been at hand to prove a kernel on).

Shapes: N packed positions; S slots; h query heads; g key/value heads; r = h / g; d key width;
dv value width; k own keys; n slots of a run; m keys of a piece.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Run:
    """Slots first..end-1 lie at consecutive positions, `begin` onwards, of the document that starts at `document`."""

    first: int
    end: int
    document: int
    begin: int


@dataclass(frozen=True)
class Layout:
    """How documents and slots lie in a packed batch.

    documents: (first position, end position) of each document, in order, without gaps.
    slots: [S] int64, the packed position t of each slot, ascending.
    runs: the slots again, as stretches of consecutive positions within one document.
    """

    documents: list[tuple[int, int]]
    slots: Tensor
    runs: list[Run]


def make_layout(documents: list[tuple[int, int]], slots: Tensor) -> Layout:
    """Find the runs of slots [S] (on the CPU, ascending)."""
    starts = torch.tensor([start for start, _ in documents])
    owner = torch.searchsorted(starts, slots, right=True) - 1
    broken = (slots[1:] != slots[:-1] + 1) | (owner[1:] != owner[:-1])
    edges = [0, *(broken.nonzero()[:, 0] + 1).tolist(), len(slots)] if len(slots) else [0]
    runs = [
        Run(first, end, documents[int(owner[first])][0], int(slots[first])) for first, end in itertools.pairwise(edges)
    ]
    return Layout(documents, slots, runs)


def unrolled_attention(
    q: Tensor,
    k0: Tensor,
    v0: Tensor,
    own_k: Sequence[Tensor],
    own_v: Sequence[Tensor],
    layout: Layout,
    scale: float,
) -> Tensor:
    """Attention of every slot at one step; exact, forward and backward.

    Args:
        q: [S, h, d] queries of the slots at this step.
        k0, v0: [N, g, d] and [N, g, dv], step-0 keys and values of every position.
        own_k, own_v: for each step 1..k, [S, g, d] and [S, g, dv]: the slots' own keys and values.
        layout: documents and slots.
        scale: softmax scale.

    Returns:
        [S, h, dv].
    """
    S, g = len(q), k0.shape[1]
    keys = torch.stack(list(own_k), 1) if own_k else k0.new_empty(S, 0, g, k0.shape[-1])
    values = torch.stack(list(own_v), 1) if own_v else v0.new_empty(S, 0, g, v0.shape[-1])
    out: Tensor = _MergedAttention.apply(q, k0, v0, keys, values, layout, scale)
    return out


class _MergedAttention(torch.autograd.Function):
    """The merge's gradient is that of one softmax over all keys, and so is computed as one.

    With the merged output o and merged log-sum-exp L, every share is exp(score - L) and every score's
    gradient is share * (do·v - do·o), whichever piece the key is in. Handing o and L of the *merge* to
    each piece's flash backward gives exactly that. (Its own o and L would drop the gradient through L.)
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k0: Tensor, v0: Tensor, own_k: Tensor, own_v: Tensor, layout: Layout, scale: float
    ) -> Tensor:
        """own_k [S, k, g, d], own_v [S, k, g, dv] → [S, h, dv]."""
        S, h, _ = q.shape
        g, dv = v0.shape[1:]
        wide = torch.promote_types(q.dtype, torch.float32)
        out = q.new_zeros(S, h, dv, dtype=wide)
        lse = q.new_full((S, h), float("-inf"), dtype=wide)
        if own_k.shape[1]:
            own = _own_scores(q, own_k, scale)  # [S, g, r, k]
            lse = own.logsumexp(-1).view(S, h)
            shares = (own - lse.view(S, g, h // g, 1)).exp().to(own_v.dtype)
            out = (shares @ own_v.transpose(1, 2)).reshape(S, h, dv).to(wide)
        for run in layout.runs:
            rows = slice(run.first, run.end)
            queries = _by_group(q[rows], g)
            for piece, causal in _pieces(run):
                piece_out, piece_lse = flash_forward(queries, k0[piece], v0[piece], causal, scale)
                piece_out, piece_lse = _by_slot(piece_out).to(wide), _by_slot(piece_lse[..., None])[..., 0].to(wide)
                merged = torch.logaddexp(lse[rows], piece_lse)
                out[rows] = (
                    out[rows] * (lse[rows] - merged).exp()[..., None]
                    + piece_out * (piece_lse - merged).exp()[..., None]
                )
                lse[rows] = merged
        result = out.to(q.dtype)
        ctx.save_for_backward(q, k0, v0, own_k, own_v, result, lse)
        ctx.layout, ctx.scale = layout, scale
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of q, k0, v0, own_k and own_v."""
        q, k0, v0, own_k, own_v, out, lse = ctx.saved_tensors
        layout, scale, g = ctx.layout, ctx.scale, k0.shape[1]
        S, h, _ = q.shape
        dout = grads[0].to(q.dtype).contiguous()
        dq, dk0, dv0 = torch.zeros_like(q), torch.zeros_like(k0), torch.zeros_like(v0)
        for run in layout.runs:
            rows = slice(run.first, run.end)
            queries, o, do = (_by_group(x[rows], g) for x in (q, out, dout))
            run_lse = _by_group(lse[rows][..., None], g)[..., 0]
            for piece, causal in _pieces(run):
                dq_run, dk, dv = flash_backward(do, queries, k0[piece], v0[piece], o, run_lse, causal, scale)
                dq[rows] += _by_slot(dq_run)
                dk0[piece] += dk
                dv0[piece] += dv
        if not own_k.shape[1]:
            return dq, dk0, dv0, own_k, own_v, None, None

        r = h // g
        shares = (_own_scores(q, own_k, scale) - lse.view(S, g, r, 1)).exp()  # [S, g, r, k]
        do = dout.view(S, g, r, v0.shape[-1])
        through_v = (do @ own_v.permute(0, 2, 3, 1)).to(shares.dtype)
        mean = (dout.to(shares.dtype) * out.to(shares.dtype)).sum(-1).view(S, g, r, 1)
        dscores = (shares * (through_v - mean) * scale).to(q.dtype)
        dq += (dscores @ own_k.transpose(1, 2)).reshape(q.shape)
        down_k = (dscores.transpose(2, 3) @ q.view(S, g, r, q.shape[-1])).transpose(1, 2)
        down_v = (shares.to(q.dtype).transpose(2, 3) @ do).transpose(1, 2)
        return dq, dk0, dv0, down_k, down_v, None, None


def _own_scores(q: Tensor, own_k: Tensor, scale: float) -> Tensor:
    """q [S, h, d] against own_k [S, k, g, d] → [S, g, r, k], fp32 or wider."""
    S, _, g, d = own_k.shape
    wide = torch.promote_types(q.dtype, torch.float32)
    return (q.view(S, g, q.shape[1] // g, d) @ own_k.permute(0, 2, 3, 1)).to(wide) * scale


def _pieces(run: Run) -> Iterator[tuple[slice, bool]]:
    """The key ranges that a run sees: what precedes it, in full; itself, causally."""
    if run.begin > run.document:
        yield slice(run.document, run.begin), False
    yield slice(run.begin, run.begin + run.end - run.first), True


def _by_group(x: Tensor, g: int) -> Tensor:
    """[n, h, w] → [r, g, n, w]: heads that share keys stand along the batch, so that keys need no copy."""
    return x.view(len(x), g, -1, x.shape[-1]).permute(2, 1, 0, 3)


def _by_slot(x: Tensor) -> Tensor:
    """[r, g, n, w] → [n, h, w]."""
    return x.permute(2, 1, 0, 3).flatten(1, 2)


# ---------------------------------------------------------------- one piece: flash, or plain where there is none


def flash_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """q [r, g, n, d] over k [m, g, d], v [m, g, dv] → output [r, g, n, dv] and log-sum-exp [r, g, n]."""
    keys, values = _per_head(k, q), _per_head(v, q)
    if q.device.type == "cpu" and k.shape[-1] == v.shape[-1]:
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = flash(q, keys, values, 0.0, causal, attn_mask=None, scale=scale)
        return out, lse
    scores = _plain_scores(q, keys, causal, scale)
    lse = scores.logsumexp(-1)
    return (scores - lse[..., None]).exp().to(v.dtype) @ values, lse


def flash_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q [r, g, n, d], k [m, g, d] and v [m, g, dv], given the merged output and log-sum-exp."""
    keys, values = _per_head(k, q), _per_head(v, q)
    if q.device.type == "cpu" and k.shape[-1] == v.shape[-1]:
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        dq, dk, dv = flash(dout, q, keys, values, out, lse, 0.0, causal, attn_mask=None, scale=scale)
    else:
        shares = (_plain_scores(q, keys, causal, scale) - lse[..., None]).exp()
        mean = (dout.to(shares.dtype) * out.to(shares.dtype)).sum(-1, keepdim=True)
        dscores = (shares * ((dout @ values.mT).to(shares.dtype) - mean) * scale).to(q.dtype)
        dq, dk, dv = dscores @ keys, dscores.mT @ q, shares.to(q.dtype).mT @ dout
    return dq, dk.sum(0).transpose(0, 1), dv.sum(0).transpose(0, 1)


def _per_head(x: Tensor, q: Tensor) -> Tensor:
    """[m, g, w] → [r, g, m, w] without a copy."""
    return x.transpose(0, 1)[None].expand(len(q), -1, -1, -1)


def _plain_scores(q: Tensor, keys: Tensor, causal: bool, scale: float) -> Tensor:
    scores = (q @ keys.mT).to(torch.promote_types(q.dtype, torch.float32)) * scale
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    return scores
