"""Attention as most public trainers of MLA drafters have it: every score of a step at once, and autograd keeps them.

Only attention differs from ours: the slots, the loss and the projections are the same, so that what is measured is
the merged, linear-memory attention alone.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from eagle31_train.model.packing import Layout


def eager_attention(
    q: Tensor,
    k0: Tensor,
    v0: Tensor,
    own_k: Sequence[Tensor],
    own_v: Sequence[Tensor],
    layout: Layout,
    scale: float,
    **_: object,
) -> Tensor:
    """As `unrolled_attention`, for one document without a window: q [S, h, d] over k0 [N, g, d] and the slots' own
    keys → [S, h, dv]."""
    repeat = q.shape[1] // k0.shape[1]

    def by_head(x: Tensor) -> Tensor:
        return x.repeat_interleave(repeat, 1).transpose(0, 1)  # [h, rows, width]

    queries = q.transpose(0, 1)
    hidden = torch.arange(len(k0), device=q.device) > layout.slots[:, None]
    scores = (queries @ by_head(k0).mT * scale).masked_fill(hidden, float("-inf"))  # [h, S, N]
    own = [(queries * by_head(key)).sum(-1, keepdim=True) * scale for key in own_k]
    shares = torch.cat([scores, *own], -1).softmax(-1)
    out = shares[..., : len(k0)] @ by_head(v0)
    for step, value in enumerate(own_v, len(k0)):
        out = out + shares[..., step : step + 1] * by_head(value)
    return out.transpose(0, 1)
