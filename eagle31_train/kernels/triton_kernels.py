"""The Triton kernels. All compute in fp32; those over logits handle a row per program and read it in blocks.

Row offsets are int64: a step has more than 2**31 logits.
"""

import triton
import triton.language as tl


@triton.jit
def teacher_kernel(logits, lse_out, negentropy_out, width, BLOCK: tl.constexpr):
    """Log-sum-exp of a row, and sum(p log p) of its softmax p, in one pass."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    largest, total, weighted = float("-inf"), 0.0, 0.0
    for start in range(0, width, BLOCK):
        inside = start + columns < width
        x = tl.load(logits + row * width + start + columns, mask=inside, other=float("-inf")).to(tl.float32)
        new = tl.maximum(largest, tl.max(x, 0))
        shrunk = tl.exp(largest - new)
        e = tl.exp(x - new)
        total = total * shrunk + tl.sum(e, 0)
        weighted = weighted * shrunk + tl.sum(tl.where(e > 0, e * x, 0.0), 0)
        largest = new
    lse = largest + tl.log(total)
    tl.store(lse_out + row, lse)
    tl.store(negentropy_out + row, weighted / total - lse)


@triton.jit
def divergence_kernel(
    logits, teacher, teacher_lse, negentropy, supervised, weights, value_out, best_out, width, lk,
    KL: tl.constexpr, LK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A pair's divergence and arg-max; overwrites its logits with weight times the divergence's gradient."""
    pair = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mine = logits + pair * width
    position = tl.load(supervised + pair)
    theirs = teacher + position * width
    lse_p, weight = tl.load(teacher_lse + position), tl.load(weights + pair)

    largest, total, dot = float("-inf"), 0.0, 0.0
    best, where_best = float("-inf"), 0
    for start in range(0, width, BLOCK):
        inside = start + columns < width
        x = tl.load(mine + start + columns, mask=inside, other=float("-inf")).to(tl.float32)
        t = tl.load(theirs + start + columns, mask=inside, other=float("-inf")).to(tl.float32)
        p = tl.exp(t - lse_p)
        here = tl.max(x, 0)
        first = tl.min(tl.where(x == here, start + columns, width), 0)
        where_best = tl.where(here > best, first, where_best)
        best = tl.maximum(here, best)
        new = tl.maximum(largest, here)
        total = total * tl.exp(largest - new) + tl.sum(tl.exp(x - new), 0)
        dot += tl.sum(tl.where(inside, p * x, 0.0), 0)
        largest = new
    lse_q = largest + tl.log(total)
    value = lse_q - dot
    if KL:
        value += tl.load(negentropy + position)

    if LK:
        alpha, short = 0.0, 0.0
        for start in range(0, width, BLOCK):
            inside = start + columns < width
            x = tl.load(mine + start + columns, mask=inside, other=float("-inf")).to(tl.float32)
            t = tl.load(theirs + start + columns, mask=inside, other=float("-inf")).to(tl.float32)
            p, q = tl.exp(t - lse_p), tl.exp(x - lse_q)
            alpha += tl.sum(tl.minimum(p, q), 0)
            short += tl.sum(tl.where(q < p, q, 0.0), 0)
        alpha = tl.maximum(alpha, 1.1754943508222875e-38)  # fp32's smallest normal number
        value = (1 - lk) * value - lk * tl.log(alpha)
    tl.store(value_out + pair, value)
    tl.store(best_out + pair, where_best)

    for start in range(0, width, BLOCK):
        inside = start + columns < width
        x = tl.load(mine + start + columns, mask=inside, other=float("-inf")).to(tl.float32)
        t = tl.load(theirs + start + columns, mask=inside, other=float("-inf")).to(tl.float32)
        p, q = tl.exp(t - lse_p), tl.exp(x - lse_q)
        slope = q - p
        if LK:
            slope = (1 - lk) * slope + lk * (q * short - tl.where(q < p, q, 0.0)) / alpha
        tl.store(mine + start + columns, (slope * weight).to(logits.dtype.element_ty), mask=inside)


@triton.jit
def norm_kernel(x, weight, out, inverse_out, width, row_stride, eps, BLOCK: tl.constexpr):
    """A row's RMSNorm, and 1 / rms."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    wide = tl.load(x + row * row_stride + columns, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(wide * wide, 0) / width + eps)
    tl.store(inverse_out + row, inverse)
    tl.store(out + row * width + columns, (wide * inverse * scale).to(out.dtype.element_ty), mask=inside)


@triton.jit
def norm_backward_kernel(
    dout, x, weight, inverse, dx, dweight, rows, width, row_stride, DX: tl.constexpr, BLOCK: tl.constexpr
):
    """Gradients of every n-th row, for n programs; each writes its partial sum of dweight [programs, width]."""
    program = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    scale = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    sums = tl.zeros([BLOCK], dtype=tl.float32)
    for row in range(program, rows, tl.num_programs(0)):
        one_over = tl.load(inverse + row)
        scaled = tl.load(x + row * row_stride + columns, mask=inside, other=0.0).to(tl.float32) * one_over
        down = tl.load(dout + row * width + columns, mask=inside, other=0.0).to(tl.float32)
        sums += down * scaled
        if DX:
            dscaled = down * scale
            along = tl.sum(dscaled * scaled, 0) / width  # a change along x does not change x / rms(x)
            result = (dscaled - scaled * along) * one_over
            tl.store(dx + row * width + columns, result.to(dx.dtype.element_ty), mask=inside)
    tl.store(dweight + program * width + columns, sums, mask=inside)


@triton.jit
def silu_times_kernel(gate, up, out, count, BLOCK: tl.constexpr):
    """silu(gate) * up."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    g = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, (g / (1 + tl.exp(-g)) * u).to(out.dtype.element_ty), mask=inside)


@triton.jit
def silu_times_backward_kernel(dout, gate, up, dgate, dup, count, BLOCK: tl.constexpr):
    """Gradients of silu(gate) * up."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    down = tl.load(dout + at, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    share = 1 / (1 + tl.exp(-g))
    slope = share * (1 + g * (1 - share))  # derivative of silu
    tl.store(dgate + at, (down * u * slope).to(dgate.dtype.element_ty), mask=inside)
    tl.store(dup + at, (down * g * share).to(dup.dtype.element_ty), mask=inside)


@triton.jit
def merge_kernel(
    q, out, lse, keys, values, merged, merged_lse, slots, scale,
    OWN: tl.constexpr, G: tl.constexpr, R: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    R_BLOCK: tl.constexpr, D_BLOCK: tl.constexpr, DV_BLOCK: tl.constexpr,
):  # fmt: skip
    """Merge a slot's own keys, one by one, into the softmax of the query heads [R] that share them."""
    slot, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    r, c, cv = tl.arange(0, R_BLOCK), tl.arange(0, D_BLOCK), tl.arange(0, DV_BLOCK)
    heads = (slot * G + group) * R + r
    here, herev = (r < R)[:, None] & (c < D)[None, :], (r < R)[:, None] & (cv < DV)[None, :]
    query = tl.load(q + heads[:, None] * D + c[None, :], mask=here, other=0.0).to(tl.float32)
    result = tl.load(out + heads[:, None] * DV + cv[None, :], mask=herev, other=0.0).to(tl.float32)
    total = tl.load(lse + heads, mask=r < R, other=0.0)
    for own in range(OWN):
        row = (own * slots + slot) * G + group
        key = tl.load(keys + row * D + c, mask=c < D, other=0.0).to(tl.float32)
        value = tl.load(values + row * DV + cv, mask=cv < DV, other=0.0).to(tl.float32)
        score = tl.sum(query * key[None, :], 1) * scale
        larger = tl.maximum(total, score)
        new = larger + tl.log(tl.exp(total - larger) + tl.exp(score - larger))
        result = result * tl.exp(total - new)[:, None] + tl.exp(score - new)[:, None] * value[None, :]
        total = new
    tl.store(merged + heads[:, None] * DV + cv[None, :], result.to(merged.dtype.element_ty), mask=herev)
    tl.store(merged_lse + heads, total, mask=r < R)


@triton.jit
def merge_backward_kernel(
    dout, q, out, lse, keys, values, dq, dq_out, dkeys, dvalues, slots, scale,
    OWN: tl.constexpr, G: tl.constexpr, R: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    R_BLOCK: tl.constexpr, D_BLOCK: tl.constexpr, DV_BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient of `merge_kernel`: shares are exp(score - lse), scores' gradients share * (do·v - do·o)."""
    slot, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    r, c, cv = tl.arange(0, R_BLOCK), tl.arange(0, D_BLOCK), tl.arange(0, DV_BLOCK)
    heads = (slot * G + group) * R + r
    here, herev = (r < R)[:, None] & (c < D)[None, :], (r < R)[:, None] & (cv < DV)[None, :]
    query = tl.load(q + heads[:, None] * D + c[None, :], mask=here, other=0.0).to(tl.float32)
    down = tl.load(dout + heads[:, None] * DV + cv[None, :], mask=herev, other=0.0).to(tl.float32)
    result = tl.load(out + heads[:, None] * DV + cv[None, :], mask=herev, other=0.0).to(tl.float32)
    dquery = tl.load(dq + heads[:, None] * D + c[None, :], mask=here, other=0.0).to(tl.float32)
    total = tl.load(lse + heads, mask=r < R, other=float("inf"))  # exp(score - inf) = 0: heads past R get no share
    mean = tl.sum(down * result, 1)
    for own in range(OWN):
        row = (own * slots + slot) * G + group
        key = tl.load(keys + row * D + c, mask=c < D, other=0.0).to(tl.float32)
        value = tl.load(values + row * DV + cv, mask=cv < DV, other=0.0).to(tl.float32)
        share = tl.exp(tl.sum(query * key[None, :], 1) * scale - total)
        slope = share * (tl.sum(down * value[None, :], 1) - mean) * scale
        dquery += slope[:, None] * key[None, :]
        dkey, dvalue = tl.sum(slope[:, None] * query, 0), tl.sum(share[:, None] * down, 0)
        tl.store(dkeys + row * D + c, dkey.to(dkeys.dtype.element_ty), mask=c < D)
        tl.store(dvalues + row * DV + cv, dvalue.to(dvalues.dtype.element_ty), mask=cv < DV)
    tl.store(dq_out + heads[:, None] * D + c[None, :], dquery.to(dq_out.dtype.element_ty), mask=here)
