"""Who sees whom in the unrolled drafter: the one place where the mask lives.

Slot t at step k attends to the step-0 keys of every position s <= t of its own document, and to
its own keys of steps 1..k (its query's own step included). Nothing else.

Shapes: N packed positions; S slots; h query heads; g key/value heads; d key width; dv value width.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """How documents and slots lie in a packed batch.

    documents: (first position, end position) of each document, in order, without gaps.
    slot_ranges: (first slot, end slot) of each document in `slots`.
    slots: [S] int64, the packed position t of each slot, ascending.
    """

    documents: list[tuple[int, int]]
    slot_ranges: list[tuple[int, int]]
    slots: Tensor


def unrolled_attention(
    q: Tensor,
    k0: Tensor,
    v0: Tensor,
    own_k: Sequence[Tensor],
    own_v: Sequence[Tensor],
    layout: Layout,
    scale: float,
) -> Tensor:
    """Attention of every slot at one step.

    Args:
        q: [S, h, d] queries of the slots at this step.
        k0, v0: [N, g, d] and [N, g, dv], step-0 keys and values of every position.
        own_k, own_v: for each step 1..k, [S, g, d] and [S, g, dv]: the slots' own keys and values.
        layout: documents and slots.
        scale: softmax scale.

    Returns:
        [S, h, dv].
    """
    own_keys = torch.stack(list(own_k), dim=-1) if own_k else None  # [S, g, d, k]
    own_values = torch.stack(list(own_v), dim=-2) if own_v else None  # [S, g, k, dv]
    outputs = []
    for (start, end), (first, last) in zip(layout.documents, layout.slot_ranges, strict=True):
        if first == last:
            continue
        outputs.append(
            _document_attention(
                q[first:last],
                k0[start:end],
                v0[start:end],
                None if own_keys is None else own_keys[first:last],
                None if own_values is None else own_values[first:last],
                layout.slots[first:last] - start,
                scale,
            )
        )
    return torch.cat(outputs) if outputs else q.new_zeros(0, q.shape[1], v0.shape[-1])


def _document_attention(
    q: Tensor,
    k0: Tensor,
    v0: Tensor,
    own_k: Tensor | None,
    own_v: Tensor | None,
    at: Tensor,
    scale: float,
) -> Tensor:
    """One document: s slots at positions `at` [s] over T step-0 keys and k own keys → [s, h, dv]."""
    s, h, d = q.shape
    T, g, _ = k0.shape
    wide = torch.promote_types(q.dtype, torch.float32)  # the softmax is never in half precision
    grouped = q.view(s, g, h // g, d).permute(1, 0, 2, 3)  # [g, s, r, d]
    scores = (grouped.reshape(g, -1, d) @ k0.permute(1, 2, 0)).view(g, s, h // g, T).to(wide) * scale
    hidden = torch.arange(T, device=q.device) > at[:, None]
    scores = scores.masked_fill(hidden[:, None], float("-inf"))
    if own_k is not None:
        own = (grouped @ own_k.transpose(0, 1)).to(wide) * scale  # [g, s, r, k]
        scores = torch.cat([scores, own], dim=-1)
    weights = scores.softmax(-1).to(v0.dtype)
    out = (weights[..., :T].reshape(g, -1, T) @ v0.transpose(0, 1)).view(g, s, h // g, -1)
    if own_v is not None:
        out = out + weights[..., T:] @ own_v.transpose(0, 1)
    return out.permute(1, 0, 2, 3).reshape(s, h, -1)
