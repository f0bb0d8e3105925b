"""Attention of slots to the step-0 keys of their documents, and its gradient: the kernels.

Each kernel returns the output and its log-sum-exp. Its gradient takes both as arguments: those of the *merged* softmax
if other keys were merged in. That is exact, because every share is exp(score - log-sum-exp) and every score's gradient
is share * (do·v - do·o), whichever part of the softmax the key is in.

    CPU            flash, run by run: linear memory
    CUDA, 16 bits  flash over all runs in one call: linear memory. torch's own kernel, or the one `flash.py` switched to
    otherwise      plain products, in blocks of queries. Also for sliding windows on a CPU, whose flash kernel would
                   need a mask for them

A slot sees its own position and `left` positions before it (None: all). `attention.py` derives `left` from the sliding
window. With a negative `left`, a slot sees no step-0 key.

Shapes: N packed positions; S slots; h query heads; g key/value heads; r = h / g; d key width; dv value
width; n queries and m keys of a piece.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import attention
from torch.nn import functional as F

from eagle31_train.model.linear import since_ampere
from eagle31_train.model.packing import Layout, Run, Segments

BLOCK = 256  # queries whose scores the plain kernel holds at once
LONG = 1024  # average keys per run from which adding run by run is worth one operator per run
Left = int | None  # positions before its own that a slot sees, see above
Band = tuple[int | None, int]  # lowest (None: no bound) and highest key index - query index that a query sees
CAUSAL: Band = (None, 0)


def context_forward(
    q: Tensor, k0: Tensor, v0: Tensor, layout: Layout, scale: float, left: Left
) -> tuple[Tensor, Tensor]:
    """q [S, h, d] over k0 [N, g, d], v0 [N, g, dv] → output [S, h, dv] and log-sum-exp [S, h].

    Both are fp32 or wider, except that CUDA's kernel returns the output in 16 bits."""
    wide = torch.promote_types(q.dtype, torch.float32)
    S, h, dv = len(q), q.shape[1], v0.shape[2]
    if left is not None and left < 0:
        return q.new_zeros(S, h, dv, dtype=wide), q.new_full((S, h), float("-inf"), dtype=wide)
    if takes_flash(q, v0) and layout.segments is not None:
        return _cuda_forward(q, k0, v0, layout.segments, scale, left)
    out, lse = q.new_empty(S, h, dv, dtype=wide), q.new_empty(S, h, dtype=wide)
    for run in layout.runs:
        for rows, keys, band in _pieces(run, q, left):
            piece_out, piece_lse = _piece_forward(q[rows], k0[keys], v0[keys], band, scale)
            if left is not None or keys.start == run.document:  # these rows have seen no keys yet
                out[rows], lse[rows] = piece_out, piece_lse
            else:
                out[rows], lse[rows] = merge(out[rows], lse[rows], piece_out.to(wide), piece_lse)
    return out, lse


def context_backward(
    dout: Tensor, q: Tensor, k0: Tensor, v0: Tensor, out: Tensor, lse: Tensor, layout: Layout, scale: float, left: Left
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k0 and v0, given dout and out [S, h, dv] and lse [S, h] of the merged softmax."""
    unseen = left is not None and left < 0
    if takes_flash(q, v0) and layout.segments is not None and not unseen:
        return _cuda_backward(dout, q, k0, v0, out, lse, layout, scale, left)
    dq, dk0, dv0 = torch.zeros_like(q), torch.zeros_like(k0), torch.zeros_like(v0)
    for run in () if unseen else layout.runs:
        for rows, keys, band in _pieces(run, q, left):
            piece = (dout[rows], q[rows], k0[keys], v0[keys], out[rows], lse[rows])
            dq_piece, dk, dv = _piece_backward(*piece, band, scale)
            dq[rows].add_(dq_piece)
            dk0[keys].add_(dk)
            dv0[keys].add_(dv)
    return dq, dk0, dv0


def merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merge two softmaxes over different keys, outputs [n, h, dv] and log-sum-exps [n, h], into one over all keys."""
    merged = torch.logaddexp(lse, other_lse)
    mine, theirs = (lse - merged).exp()[..., None], (other_lse - merged).exp()[..., None]
    return out * mine + other * theirs, merged


def _pieces(run: Run, q: Tensor, left: Left) -> Iterator[tuple[slice, slice, Band | None]]:
    """Yield the pieces of a run: slots, keys, and the band of these keys that each slot sees (None for all).

    A block of slots sees the keys before it in full and its own causally; with a window both are one piece."""
    step = run.end - run.first if _flash_cpu(q) and left is None else BLOCK
    for first in range(run.first, run.end, step):
        end = min(first + step, run.end)
        begin = run.begin + first - run.first
        start = begin if left is None else max(run.document, begin - left)
        if left is None and begin > run.document:
            yield slice(first, end), slice(run.document, begin), None
        before = begin - start  # keys of the piece before its first slot
        yield slice(first, end), slice(start, begin + end - first), (None if left is None else before - left, before)


# ---------------------------------------------------------------- one piece: CPU flash, or plain products


def _piece_forward(q: Tensor, k: Tensor, v: Tensor, band: Band | None, scale: float) -> tuple[Tensor, Tensor]:
    """q [n, h, d] over k [m, g, d], v [m, g, dv] → [n, h, dv] and [n, h]."""
    queries, keys, values = _by_group(q, k.shape[1]), _per_head(k, q), _per_head(v, q)
    if _flash_cpu(q) and band in (None, CAUSAL):
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        queries, keys, values = _same_width(queries, keys, values)
        out, lse = flash(queries, keys, values, 0.0, band is not None, attn_mask=None, scale=scale)
        out = out[..., : v.shape[-1]]
    else:
        scores = _plain_scores(queries, keys, band, scale)
        lse = scores.logsumexp(-1)
        out = (scores - lse[..., None]).exp().to(v.dtype) @ values
    return _by_slot(out), _by_slot(lse[..., None])[..., 0]


def _piece_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, band: Band | None, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q [n, h, d], k [m, g, d] and v [m, g, dv]."""
    g, d, dv = k.shape[1], k.shape[-1], v.shape[-1]
    queries, dout, out = _by_group(q, g), _by_group(dout, g), _by_group(out, g)
    lse = _by_group(lse[..., None], g)[..., 0]
    keys, values = _per_head(k, q), _per_head(v, q)
    if _flash_cpu(q) and band in (None, CAUSAL):
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        # In fp32: in 16 bits the kernel compiles its products for every new shape, which takes longer (docs/log.md).
        queries, keys, values, dout, out = (x.to(lse.dtype) for x in _same_width(queries, keys, values, dout, out))
        down = flash(dout, queries, keys, values, out, lse, 0.0, band is not None, attn_mask=None, scale=scale)
        down_q, down_k, down_v = down[0][..., :d], down[1][..., :d], down[2][..., :dv]
    else:
        shares = (_plain_scores(queries, keys, band, scale) - lse[..., None]).exp()
        mean = (dout.to(shares.dtype) * out.to(shares.dtype)).sum(-1, keepdim=True)
        dscores = (shares * ((dout @ values.mT).to(shares.dtype) - mean) * scale).to(q.dtype)
        down_q, down_k, down_v = dscores @ keys, dscores.mT @ queries, shares.to(q.dtype).mT @ dout
    return _by_slot(down_q), down_k.sum(0).transpose(0, 1), down_v.sum(0).transpose(0, 1)


def _flash_cpu(q: Tensor) -> bool:
    return q.device.type == "cpu"


def _by_group(x: Tensor, g: int) -> Tensor:
    """[n, h, w] → [r, g, n, w]: heads that share keys lie along the batch, so that keys need no copy."""
    return x.view(len(x), g, -1, x.shape[-1]).permute(2, 1, 0, 3)


def _by_slot(x: Tensor) -> Tensor:
    """[r, g, n, w] → [n, h, w]."""
    return x.permute(2, 1, 0, 3).flatten(1, 2)


def _per_head(x: Tensor, q: Tensor) -> Tensor:
    """x [m, g, w] for q [n, h, d] → [r, g, m, w] without a copy."""
    return x.transpose(0, 1)[None].expand(q.shape[1] // x.shape[1], -1, -1, -1)


def _same_width(*tensors: Tensor) -> list[Tensor]:
    """Pad narrower tensors with zeros, which change no product: flash kernels need a single width."""
    width = max(x.shape[-1] for x in tensors)
    return [F.pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x for x in tensors]


def _plain_scores(q: Tensor, keys: Tensor, band: Band | None, scale: float) -> Tensor:
    scores = (q @ keys.mT).to(torch.promote_types(q.dtype, torch.float32)) * scale
    if band is not None:
        lowest, highest = band
        every = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device)
        hidden = every.triu(highest + 1) if lowest is None else every.triu(highest + 1) | every.tril(lowest - 1)
        scores = scores.masked_fill(hidden, float("-inf"))
    return scores


# ---------------------------------------------------------------- all runs at once: CUDA flash


def takes_flash(q: Tensor, v: Tensor) -> bool:
    """Return whether CUDA's flash kernel takes q and v, and the GPU has it: 16 bits, the larger width at most 256 and a
    multiple of 8, NVIDIA's Ampere or later. (AMD's kernel lays out the log-sum-exp differently.)"""
    width = max(q.shape[-1], v.shape[-1])
    fits = q.dtype in (torch.bfloat16, torch.float16) and width <= 256 and width % 8 == 0
    return q.device.type == "cuda" and fits and since_ampere(q.device)


def replaced() -> str | None:
    """The kernel that torch uses in place of its own flash kernel, if any; see `flash.py`."""
    current = getattr(attention, "current_flash_attention_impl", None)  # absent before torch 2.11
    return current() if current else None


def _kernel_widths(*tensors: Tensor) -> list[Tensor]:
    """Pad to one width for torch's own kernel. Others take narrower values, and some refuse padded ones."""
    return list(tensors) if replaced() else _same_width(*tensors)


def _cuda_forward(
    q: Tensor, k0: Tensor, v0: Tensor, segments: Segments, scale: float, left: Left
) -> tuple[Tensor, Tensor]:
    queries, keys, values = _kernel_widths(q, k0, v0)
    queries = _spread(queries, segments)
    keys, values = (_rows(x, segments.key_rows) for x in (keys, values))
    edges = (segments.query_edges, segments.key_edges, segments.queries, segments.keys)
    # Causal here means aligned at the end: the last query of a stretch sees all keys of its stretch.
    flash = torch.ops.aten._flash_attention_forward
    out, lse, *_ = flash(queries, keys, values, *edges, 0.0, True, False, scale=scale, **_window(left))
    assert lse.shape == (q.shape[1], segments.query_total), "this torch lays the log-sum-exp out otherwise"
    return _rows(out, segments.query_rows)[..., : v0.shape[-1]], _rows(lse.t(), segments.query_rows)


def _cuda_backward(
    dout: Tensor, q: Tensor, k0: Tensor, v0: Tensor, out: Tensor, lse: Tensor, layout: Layout, scale: float, left: Left
) -> tuple[Tensor, Tensor, Tensor]:
    segments = layout.segments
    assert segments is not None
    queries, keys, values, dout, out = _kernel_widths(q, k0, v0, dout, out)
    keys, values = (_rows(x, segments.key_rows) for x in (keys, values))
    queries, dout, out = (_spread(x, segments) for x in (queries, dout, out))
    edges = (segments.query_edges, segments.key_edges, segments.queries, segments.keys)
    none = torch.empty(0, dtype=torch.uint64, device=q.device)  # no dropout, so no random state
    # Idle rows have dout = 0 and out = 0, and so no gradient, whatever their log-sum-exp.
    flash = torch.ops.aten._flash_attention_backward
    lse = _spread(lse, segments).t().contiguous()
    down = flash(dout, queries, keys, values, out, lse, *edges, 0.0, True, none, none, scale=scale, **_window(left))
    dq = _rows(down[0], segments.query_rows)[..., : q.shape[-1]]
    return dq, _added(down[1], k0, layout.runs, segments), _added(down[2], v0, layout.runs, segments)


def _window(left: Left) -> dict[str, int]:
    """Return the kernel's arguments for a window. It aligns windows at the end, too."""
    return {} if left is None else {"window_size_left": left, "window_size_right": 0}


def _added(copies: Tensor, x: Tensor, runs: Sequence[Run], segments: Segments) -> Tensor:
    """Add up the gradients of the copies of x [N, g, w] to the gradient of x. In fp32, since a key of a long document
    may be in many runs."""
    copies = copies[..., : x.shape[-1]]
    if segments.key_rows is None:
        return copies
    total = torch.zeros_like(x, dtype=torch.float32)
    if len(copies) >= LONG * len(runs):  # moves little more than half the bytes, always in the same order
        for run, some in zip(runs, copies.split([run.keys.stop - run.keys.start for run in runs]), strict=True):
            total[run.keys].add_(some)
        return total.to(x.dtype)
    # Part by part: there may be eight times as many copies as keys, and each part is converted to fp32 first.
    for rows, some in zip(segments.key_rows.split(len(x)), copies.split(len(x)), strict=True):
        total.index_add_(0, rows, some.float())
    return total.to(x.dtype)


def _spread(x: Tensor, segments: Segments) -> Tensor:
    """[S, ...] → [query_total, ...], with zeros in idle rows."""
    if segments.query_rows is None:
        return x
    return x.new_zeros(segments.query_total, *x.shape[1:]).index_copy_(0, segments.query_rows, x)


def _rows(x: Tensor, rows: Tensor | None) -> Tensor:
    """Return these rows of x, or all of x without a copy if `rows` is None."""
    return x if rows is None else x.index_select(0, rows)
