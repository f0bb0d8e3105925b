"""Who sees whom in the unrolled drafter.

Slot t at step k attends to the step-0 keys of every position s <= t of its own document, and to
its own keys of steps 1..k (its query's own step included). Nothing else.

The two parts are softmaxed apart and merged by their log-sum-exp: the first by the kernels of
`history.py`, the second, k keys per slot, by small products. Memory is linear in the number of slots.

Shapes: N packed positions; S slots; h query heads; g key/value heads; r = h / g; d key width;
dv value width; k own keys.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from eagle31_train.drafter.history import history_backward, history_forward
from eagle31_train.drafter.layout import Layout


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
    out: Tensor = _MergedAttention.apply(q, k0, v0, layout, scale, *own_k, *own_v)
    return out


class _MergedAttention(torch.autograd.Function):
    """The merge's gradient is that of one softmax over all keys, and so is computed as one.

    With the merged output o and merged log-sum-exp L, every share is exp(score - L) and every score's
    gradient is share * (do·v - do·o), whichever part the key is in. Handing o and L of the *merge* to
    the flash backward gives exactly that. (Its own o and L would drop the gradient through L.)
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k0: Tensor, v0: Tensor, layout: Layout, scale: float, *own: Tensor) -> Tensor:
        """own: k keys [S, g, d], then k values [S, g, dv] → [S, h, dv]."""
        S, h, _ = q.shape
        g = k0.shape[1]
        out, lse = history_forward(q, k0, v0, layout, scale)
        if own:
            own_k, own_v = _stack(own)
            scores = _own_scores(q, own_k, scale)  # [S, g, r, k]
            merged = torch.logaddexp(lse, scores.logsumexp(-1).view(S, h))
            shares = (scores - merged.view(S, g, h // g, 1)).exp().to(own_v.dtype)
            own_out = _times(shares, own_v.transpose(1, 2)).reshape(out.shape)
            out = torch.addcmul(own_out.to(lse.dtype), out, (lse - merged).exp()[..., None])
            lse = merged
        result = out.to(q.dtype)
        ctx.save_for_backward(q, k0, v0, result, lse, *own)
        ctx.layout, ctx.scale = layout, scale
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of q, k0, v0, and of the own keys and values."""
        q, k0, v0, out, lse, *own = ctx.saved_tensors
        scale = ctx.scale
        S, h, d = q.shape
        g, r = k0.shape[1], h // k0.shape[1]
        dout = grads[0].to(q.dtype).contiguous()
        dq, dk0, dv0 = history_backward(dout, q, k0, v0, out, lse, ctx.layout, scale)
        if not own:
            return dq, dk0, dv0, None, None

        own_k, own_v = _stack(own)
        shares = (_own_scores(q, own_k, scale) - lse.view(S, g, r, 1)).exp()  # [S, g, r, k]
        do = dout.view(S, g, r, v0.shape[-1])
        through_v = (do @ own_v.permute(0, 2, 3, 1)).to(shares.dtype)
        mean = (dout.to(shares.dtype) * out.to(shares.dtype)).sum(-1).view(S, g, r, 1)
        dscores = (shares * (through_v - mean) * scale).to(q.dtype)
        dq = dq + _times(dscores, own_k.transpose(1, 2)).reshape(q.shape)
        down_k = _times(dscores.transpose(2, 3), q.view(S, g, r, d)).transpose(1, 2)  # [S, k, g, d]
        down_v = _times(shares.to(q.dtype).transpose(2, 3), do).transpose(1, 2)
        return dq, dk0, dv0, None, None, *down_k.unbind(1), *down_v.unbind(1)


def _stack(own: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """k keys, then k values, of the slots → [S, k, g, d] and [S, k, g, dv]; made anew rather than kept for backward."""
    steps = len(own) // 2
    return torch.stack(list(own[:steps]), 1), torch.stack(list(own[steps:]), 1)


def _own_scores(q: Tensor, own_k: Tensor, scale: float) -> Tensor:
    """q [S, h, d] against own_k [S, k, g, d] → [S, g, r, k], fp32 or wider."""
    S, _, g, d = own_k.shape
    wide = torch.promote_types(q.dtype, torch.float32)
    return (q.view(S, g, q.shape[1] // g, d) @ own_k.permute(0, 2, 3, 1)).to(wide) * scale


def _times(a: Tensor, b: Tensor) -> Tensor:
    """a [..., n, k] @ b [..., k, m]; for k = 1 without a product, whose CUDA kernel some versions of torch overflow."""
    return a * b if a.shape[-1] == 1 else a @ b
