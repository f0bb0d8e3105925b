"""Who sees whom in the unrolled drafter.

Slot t at step k attends to the step-0 keys of every position s <= t of its own document and to its own keys of steps
1..k (k included), and to nothing else. The query is at position t + k, the own key of step j at t + j. With a sliding
window W, only keys at positions above t + k - W are seen.

The kernels of `context_attention.py` attend to the step-0 keys. A slot's k own keys are then merged in by log-sum-exp,
with element-wise products or a fused kernel. Memory is linear in the number of slots.

Shapes: N packed positions; S slots; h query heads; g key/value heads; r = h / g; d key width;
dv value width; k own keys.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from eagle31_train.kernels.own_keys import merge_own_keys, merge_own_keys_backward
from eagle31_train.model.context_attention import Left, context_backward, context_forward
from eagle31_train.model.packing import Layout


def unrolled_attention(
    q: Tensor,
    k0: Tensor,
    v0: Tensor,
    own_k: Sequence[Tensor],
    own_v: Sequence[Tensor],
    layout: Layout,
    scale: float,
    fused: bool = False,
    window: int | None = None,
) -> Tensor:
    """Return the attention of every slot at one step, [S, h, dv]. Exact, forward and backward.

    Args:
        q: [S, h, d] queries of the slots at this step.
        k0, v0: [N, g, d] and [N, g, dv], step-0 keys and values of every position.
        own_k, own_v: for each step 1..k, [S, g, d] and [S, g, dv]: the slots' own keys and values.
        layout: documents and slots.
        fused: merge own keys with the kernel in eagle31_train/kernels/own_keys.py, which computes in fp32.
        window: width W of the sliding window, if any.
    """
    left = None
    if window is not None:
        left = window - 1 - len(own_k)  # positions before t in the window; negative: t itself is outside
        own_k, own_v = own_k[-window:], own_v[-window:]
    return _MergedAttention.apply(q, k0, v0, layout, scale, left, fused, *own_k, *own_v)


class _MergedAttention(torch.autograd.Function):
    """Attention over step-0 and own keys, with the exact gradient of one softmax over all of them.

    Flash's backward kernel yields that gradient if it is given output and log-sum-exp of the *merge*
    (`context_attention.py`). With those of its own part, the gradient through the log-sum-exp would be lost."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k0: Tensor, v0: Tensor, layout: Layout, scale: float, left: Left, fused: bool, *own: Tensor
    ) -> Tensor:
        """Return the attention, [S, h, dv]. own: k keys [S, g, d], then k values [S, g, dv]."""
        result, lse = context_forward(q, k0, v0, layout, scale, left)
        if own and fused:
            result, lse = merge_own_keys(q, result, lse, *_stacked(own), scale)
        elif own:
            own_k, own_v = _halves(own)
            g = own_k[0].shape[1]
            scores = _own_scores(_grouped(q, g), own_k, scale)
            merged = torch.logaddexp(lse, scores.logsumexp(-1).flatten(1))
            shares = (scores - _grouped(merged, g)[..., None]).exp()
            result = _grouped(result * (lse - merged).exp()[..., None], g)
            for share, value in zip(shares.unbind(-1), own_v, strict=True):
                result.addcmul_(share[..., None], value[:, :, None])
            result, lse = result.flatten(1, 2), merged
        result = result.to(q.dtype)
        ctx.save_for_backward(q, k0, v0, result, lse, *own)
        ctx.layout, ctx.scale, ctx.left, ctx.fused = layout, scale, left, fused
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k0, v0, out, lse, *own = ctx.saved_tensors
        scale, rest = ctx.scale, (None,) * 4
        dout = grads[0].to(q.dtype).contiguous()
        dq, dk0, dv0 = context_backward(dout, q, k0, v0, out, lse, ctx.layout, scale, ctx.left)
        if not own:
            return dq, dk0, dv0, *rest
        if ctx.fused:
            dq, down_keys, down_values = merge_own_keys_backward(dout, q, out, lse, *_stacked(own), dq, scale)
            return dq, dk0, dv0, *rest, *down_keys, *down_values

        own_k, own_v = _halves(own)
        g = own_k[0].shape[1]
        mean = _dots(dout, out)
        q, do = _grouped(q, g), _grouped(dout, g)
        shares = (_own_scores(q, own_k, scale) - _grouped(lse, g)[..., None]).exp()
        slopes = shares * (_own_scores(do, own_v, 1.0) - _grouped(mean, g)[..., None]) * scale
        down_q, down_k, down_v = _grouped(dq.to(lse.dtype), g), [], []
        for slope, share, key in zip(slopes.unbind(-1), shares.unbind(-1), own_k, strict=True):
            down_q.addcmul_(slope[..., None], key[:, :, None])
            down_k.append((slope[..., None].to(q.dtype) * q).sum(2))
            down_v.append((share[..., None].to(do.dtype) * do).sum(2))
        return down_q.flatten(1, 2).to(dq.dtype), dk0, dv0, *rest, *down_k, *down_v


# A slot has only a few own keys. Matrix products would be S * g tiny ones on stacked copies, with scores rounded to 16
# bits. So scores are sums of element-wise products (speed: docs/log.md).


def _halves(own: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    return own[: len(own) // 2], own[len(own) // 2 :]


def _stacked(own: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """[k, S, g, d] and [k, S, g, dv]."""
    keys, values = _halves(own)
    return torch.stack(list(keys)), torch.stack(list(values))


def _grouped(x: Tensor, g: int) -> Tensor:
    """[S, h, ...] → [S, g, r, ...], with query heads that share keys side by side."""
    return x.unflatten(1, (g, -1))


def _own_scores(q: Tensor, own: Sequence[Tensor], scale: float) -> Tensor:
    """Scaled scores of q [S, g, r, w] and k tensors [S, g, w] → [S, g, r, k], fp32 or wider."""
    q = q.to(torch.promote_types(q.dtype, torch.float32))
    return torch.stack([_dots(q, row[:, :, None]) for row in own], -1) * scale


def _dots(a: Tensor, b: Tensor) -> Tensor:
    """Sums of a * b over the last dimension, in fp32 or wider even under autocast: sharp scores must not be rounded."""
    wide = torch.promote_types(a.dtype, torch.float32)
    with torch.autocast(a.device.type, enabled=False):
        return torch.linalg.vecdot(a.to(wide), b.to(wide))
