"""The divergence, gradient and arg-max of every pair, in one kernel that overwrites the logits.

Shapes: P pairs; J supervised positions; Vd draft vocabulary.
"""

import torch
from torch import Tensor

from eagle31_train.kernels.launching import launch

BLOCK = 4096  # logits that a program reads at once
WARPS = 8


@torch.library.custom_op("eagle31::teacher_sums", mutates_args=())
def teacher_sums(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Logits [J, Vd] of the teacher → log-sum-exp [J] and sum(p log p) [J], fp32."""
    from eagle31_train.kernels.triton_kernels import teacher_kernel

    lse, negentropy = _rows(logits), _rows(logits)
    launch(teacher_kernel, (len(logits),), logits, lse, negentropy, logits.shape[1], BLOCK=BLOCK, num_warps=WARPS)
    return lse, negentropy


teacher_sums.register_fake(lambda logits: (_rows(logits), _rows(logits)))


@torch.library.custom_op("eagle31::divergence", mutates_args=("logits",))
def fused_divergence(
    logits: Tensor,
    teacher: Tensor,
    lse: Tensor,
    negentropy: Tensor,
    supervised: Tensor,
    weights: Tensor,
    kl: bool,
    lk: float,
) -> tuple[Tensor, Tensor]:
    """Compute `model.loss.divergence` of every pair; overwrite its logits with weight times gradient, in their dtype.

    Args:
        logits: [P, Vd] of the drafter, contiguous, in 16 bits or fp32.
        teacher: [J, Vd] logits of the target, contiguous, in 16 bits or fp32.
        lse, negentropy: [J] fp32, from `teacher_sums`.
        supervised: [P] int64, which row of `teacher` supervises each pair.
        weights: [P] fp32.

    Returns:
        value [P] fp32 in nats, not weighted; arg-max of the logits [P] int64, the first of equal values.
    """
    from eagle31_train.kernels.triton_kernels import divergence_kernel

    assert logits.is_contiguous()
    assert teacher.is_contiguous()
    value, best = _rows(logits), _rows(logits, torch.int64)
    tensors = (logits, teacher, lse, negentropy, supervised, weights, value, best)
    options = {"KL": kl, "LK": lk > 0, "BLOCK": BLOCK, "num_warps": WARPS}
    launch(divergence_kernel, (len(logits),), *tensors, logits.shape[1], lk, **options)
    return value, best


fused_divergence.register_fake(lambda logits, *_: (_rows(logits), _rows(logits, torch.int64)))


def _rows(x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    return x.new_empty(len(x), dtype=dtype)
