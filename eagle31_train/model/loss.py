"""The unrolled loss, computed block by block.

    L = sum_k gamma^k / N_k * sum_{trained (t,k)} KL(p[t+1+k] || q_k[t])

p is the target's softmax over the draft rows of its lm_head, computed from the stored last hidden state once per block
of positions for all steps that it supervises. Loss, accuracy and all gradients of a block are computed while its
[pairs, Vd] logits exist; no tensor of size [tokens, Vd] ever does.

Shapes: K steps, S slots, P pairs, J supervised positions, D draft hidden, H target hidden, Vd draft vocabulary.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from eagle31_train.kernels.divergence import fused_divergence, teacher_sums
from eagle31_train.model.batch import Batch, Chunk
from eagle31_train.model.drafter import Drafter
from eagle31_train.model.layer import Mlp
from eagle31_train.model.linear import (
    compute_dtype,
    filled_up,
    first_largest,
    linear,
    product,
    since_ampere,
    soft_capped,
    spare_rows,
)
from eagle31_train.model.norm import RMSNorm, rms_norm


class Teacher(nn.Module):
    """The target's distribution over the draft vocabulary, from its last hidden state before the final norm.

    Args:
        norm_weight: [H] effective weight of the target's final RMSNorm (1 + w where the target says so).
        eps: its epsilon.
        head_rows: [Vd, H] rows of the target's lm_head that the draft vocabulary keeps.
        target_ids: [Vd] int64, the target's id of each draft token.
        soft_cap: the target's cap on logits (`soft_capped`); None for none.
    """

    def __init__(
        self, norm_weight: Tensor, eps: float, head_rows: Tensor, target_ids: Tensor, soft_cap: float | None = None
    ) -> None:
        super().__init__()
        self.eps, self.soft_cap = eps, soft_cap
        self.norm_weight: Tensor
        self.head_rows: Tensor
        self.target_ids: Tensor
        self.register_buffer("norm_weight", norm_weight, persistent=False)
        self.register_buffer("head_rows", head_rows, persistent=False)
        self.register_buffer("target_ids", target_ids, persistent=False)

    def logits(self, last: Tensor) -> Tensor:
        """last [n, H] → [n, Vd], in the dtype of head_rows; without a gradient if they are capped."""
        wide = last if last.dtype == torch.float64 else last.float()
        normed = rms_norm(wide, self.norm_weight.to(wide.dtype), self.eps)
        return soft_capped(linear(normed.to(self.head_rows.dtype), self.head_rows), self.soft_cap)


# Measures of a batch, [K] each. All are sums, so that batches and ranks add up.
MEASURES = (
    "loss",  # summed divergence
    "trained",  # pairs in that sum
    "correct",  # pairs whose arg-max is the target's over the full vocabulary
    "eligible",  # pairs: the denominator of `correct`
    "prefix",  # slots that are correct at every step 0..k
    "eligible_prefix",  # slots: the denominator of `prefix`
    "rms",  # summed RMS of the states that step k reads
    "slots",
)

# The most logits (rows × Vd) at once, by device: in one matrix product, and in one piece of softmax and divergence,
# which makes several copies. Products are faster with many rows, and a CPU is faster with pieces that fit its cache.
# The fused kernel makes no copies.
LOGITS = {"cpu": (2**23, 2**18), "other": (2**28, 2**26), "fused": (2**30, 2**26)}

# torch 2.9 cannot add bf16 products to an fp32 sum (PyTorch pull request 167931 allowed it); 2.11 was checked and can.
ADDS_IN_FP32 = torch.torch_version.__version__ >= "2.11"


class Objective(nn.Module):
    """Drafter and teacher in one module whose forward is the loss, for DDP, FSDP2 and DeepSpeed to wrap. `loss` is "kl"
    or "ce", `lk` the share of the LK loss: see `divergence`."""

    # Autocast dtype of matrix products; None: the caller's, or the weights'. Set here, not by the launcher, so that a
    # recipe computes the same under every launch profile.
    autocast: torch.dtype | None = None
    fused: bool = False  # see `fuse_kernels`

    def __init__(self, drafter: Drafter, teacher: Teacher, loss: str, lk: float = 0.0) -> None:
        super().__init__()
        self.drafter = drafter
        self.teacher = teacher
        self.kind = loss
        self.lk = lk

    def logit_counts(self, device: torch.device) -> tuple[int, int]:
        """The entry of LOGITS for this objective on a device."""
        return LOGITS["fused" if self.fused else "cpu" if device.type == "cpu" else "other"]

    def fuse_kernels(self) -> None:
        """Use the fused kernels, which compute in fp32, for divergence, norms, SwiGLU and own keys."""
        self.fused = self.drafter.fused = True
        for module in self.drafter.modules():
            if isinstance(module, RMSNorm | Mlp):
                module.fused = True

    def forward(self, batch: Batch, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weighted loss of a batch and its measures [len(MEASURES), K] fp32. weights: [K] fp32, gamma^k /
        N_k with N_k counted over the whole global batch."""
        with torch.autocast(weights.device.type, self.autocast) if self.autocast else nullcontext():
            z, rms = self.drafter(batch)
            head, learn = self.drafter.lm_head.weight, torch.is_grad_enabled()
            total, sums, hits = _ChunkedDivergence.apply(z.flatten(0, 1), head, batch, weights, self, learn)
        correct = hits.view(z.shape[:2])
        measured = [
            sums,
            batch.trained,
            correct.sum(1),
            batch.eligible,
            correct.cumprod(0).sum(1),
            batch.eligible_prefix,
            rms * z.shape[1],
            torch.full_like(sums, z.shape[1]),
        ]
        return total, torch.stack([each.float() for each in measured])


def divergence(
    logits: Tensor, p: Tensor, negentropy: Tensor, supervised: Tensor, kind: str, lk: float
) -> tuple[Tensor, Tensor]:
    """Return the loss of each pair and its gradient with respect to the logits.

    Args:
        logits: [P, Vd] of the drafter, fp32 or wider.
        p: [J, Vd] the target's probabilities, fp32 or wider.
        negentropy: [J] sum(p log p) of each row.
        supervised: [P] which row of p supervises each pair.
        kind: "kl", or "ce", which adds the target's entropy and has the same gradient.
        lk: share of the LK loss, -log(alpha) with alpha = sum(min(p, q)), the probability that the
            target accepts a token drawn from q (Leviathan et al. 2023); the rest is `kind`.

    Returns:
        value [P] in nats, gradient [P, Vd].
    """
    log_q = logits.log_softmax(-1)
    p_pairs = p.index_select(0, supervised)
    value = -torch.linalg.vecdot(p_pairs, log_q)
    if kind == "kl":
        value = value + negentropy[supervised]
    q = log_q.exp_()
    if not lk:
        return value, q.sub_(p_pairs)
    # Where p and q overlap by less than fp32 can hold, the loss stays finite and its gradient is 0.
    alpha = torch.minimum(p_pairs, q).sum(-1, keepdim=True).clamp_min(torch.finfo(q.dtype).tiny)
    # d alpha / d q is 1 where q < p, 0 elsewhere; then through the softmax.
    short = q * (q < p_pairs)
    through_alpha = (q * short.sum(-1, keepdim=True) - short) / alpha
    return (1 - lk) * value - lk * alpha[:, 0].log(), (1 - lk) * (q - p_pairs) + lk * through_alpha


def plain_pairs(logits: Tensor, teacher: Tensor, supervised: Tensor, objective: Objective) -> tuple[Tensor, Tensor]:
    """Return each pair's loss [P] in nats, fp32 or wider, and arg-max [P] int64, for one block. Overwrite the drafter's
    logits [P, Vd] with the loss's gradient. teacher: [J, Vd] logits of the target; supervised: [P], which of these rows
    supervises each pair."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    rows = objective.logit_counts(logits.device)[1] // logits.shape[1]
    p, negentropy = torch.empty_like(teacher, dtype=wide), teacher.new_empty(len(teacher), dtype=wide)
    for some in parts(len(teacher), rows):
        log_p = teacher[some].to(wide).log_softmax(-1)
        negentropy[some] = torch.linalg.vecdot(torch.exp(log_p, out=p[some]), log_p)
    value, best = torch.empty_like(supervised, dtype=wide), torch.empty_like(supervised)
    for some in parts(len(logits), rows):
        best[some] = first_largest(logits[some])
        exact = logits[some].to(wide)
        value[some], logits[some] = divergence(exact, p, negentropy, supervised[some], objective.kind, objective.lk)
    return value, best


class _ChunkedDivergence(torch.autograd.Function):
    """Loss and gradients in one pass, so that no logits are kept for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, z: Tensor, head: Tensor, batch: Batch, weights: Tensor, objective: "Objective", learn: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """z [K*S, D], head [Vd, D] → loss (), summed divergence per step [K], hits [K*S] bool.

        With `learn`, z's gradient overwrites z, row by row, after a row has been read. This saves a copy of z. If
        another operator had kept z for its gradient, torch would raise.
        """
        compute = compute_dtype(z)
        wide = torch.float64 if z.dtype == torch.float64 else torch.float32
        z_low, head_low = z.to(compute), head.to(compute)
        dz = z.detach() if learn and ctx.needs_input_grad[0] else None
        dhead = torch.zeros_like(head, dtype=wide) if learn and ctx.needs_input_grad[1] else None
        sums = torch.zeros(batch.ttt_length, dtype=wide, device=z.device)
        hits = torch.zeros(len(z), dtype=torch.bool, device=z.device)
        if dz is not None:  # rows that no pair reads have no gradient
            untrained = torch.ones_like(hits).index_fill_(0, batch.pair_row, False)
            dz.masked_fill_(untrained[:, None], 0)
        block, part = objective.logit_counts(z.device)

        with torch.autocast(z.device.type, enabled=False):
            for positions, pairs in blocks(batch.chunks, block // len(head)):
                rows, steps = batch.pair_row[pairs], batch.pair_step[pairs]
                supervised = batch.pair_teacher[pairs] - positions.start
                teacher = objective.teacher.logits(batch.teacher[positions].decode())
                count, spare = len(rows), spare_rows(len(rows), z_low)
                states = z_low.index_select(0, filled_up(rows, spare))
                logits = product(states, head_low)  # overwritten by their gradient, which is 0 in spare rows
                if spare:
                    logits[count:] = 0
                weight = weights.to(wide).index_select(0, steps)
                if objective.fused:  # the kernel also multiplies the gradients by the weights
                    each, kl = teacher_sums(teacher), objective.kind == "kl"
                    value, best = fused_divergence(logits[:count], teacher, *each, supervised, weight, kl, objective.lk)
                else:
                    value, best = plain_pairs(logits[:count], teacher, supervised, objective)
                outside = None if objective.fused else filled_up(weight, spare)
                del teacher
                hits[rows] = objective.teacher.target_ids[best] == batch.top1[positions][supervised]
                sums.index_add_(0, steps, value)
                if dz is not None:
                    dz.index_copy_(0, rows, weighted(product(logits, head_low.T), outside)[:count].to(dz.dtype))
                if dhead is not None:
                    add_product(dhead, logits, weighted(states, outside).to(compute), part)
                del logits  # free them before the next block's exist
        total = (sums * weights.to(wide)).sum()
        ctx.save_for_backward(dz, dhead)
        ctx.head_dtype = head.dtype
        ctx.mark_non_differentiable(sums, hits)
        return total, sums.float(), hits

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dz, dhead = ctx.saved_tensors
        # In place: only this graph holds them, and torch refuses a second backward pass through it.
        dz = None if dz is None else dz.mul_(grads[0])
        dhead = None if dhead is None else dhead.mul_(grads[0]).to(ctx.head_dtype)
        return dz, dhead, None, None, None, None


def weighted(x: Tensor, weights: Tensor | None) -> Tensor:
    """Rows of x [P, w] times weights [P]; x itself without weights."""
    return x if weights is None else x * weights[:, None]


def blocks(chunks: list[Chunk], most: int) -> list[Chunk]:
    """Join neighbouring chunks as long as they have at most `most` pairs together."""
    joined: list[Chunk] = []
    for positions, pairs in chunks:
        if joined and pairs.stop - joined[-1].pairs.start <= most:
            before = joined.pop()
            positions = slice(before.positions.start, positions.stop)
            pairs = slice(before.pairs.start, pairs.stop)
        joined.append(Chunk(positions, pairs))
    return joined


def add_product(total: Tensor, logits: Tensor, states: Tensor, part: int) -> None:
    """total [Vd, D] += logits [P, Vd].T @ states [P, D], in slices of at most `part` values. In 16 bits on CUDA, cuBLAS
    itself adds to the fp32 sum, which rounds nothing to bf16 and takes a seventh less time on an H100."""
    if ADDS_IN_FP32 and logits.is_cuda and logits.dtype != total.dtype and since_ampere(logits.device):
        torch.addmm(total, logits.T, states, out_dtype=torch.float32, out=total)
        return
    rows = part // total.shape[1]
    # A slice of bf16 logits that is not aligned to 16 bytes takes twice as long on an H100.
    for some in parts(len(total), rows // 64 * 64 or rows):
        total[some].add_(product(logits[:, some].T, states.T))


def parts(count: int, size: int) -> Iterator[slice]:
    """Return slices of at most `size` rows (of one if it is less) that cover `count` rows."""
    size = max(1, size)
    return (slice(first, min(first + size, count)) for first in range(0, count, size))
