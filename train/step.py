"""The arithmetic of an optimizer step: accumulated gradients, the weights of the loss, the learning rate."""

import math

import torch
from torch import Tensor

from eagle31_train.config import TrainConfig
from eagle31_train.model.loss import MEASURES
from train.loader import MicroBatch, StepTotals
from train.metrics import reduce_sums
from train.parallel import Parallel


def accumulate(
    parallel: Parallel, micro_batches: list[MicroBatch], totals: StepTotals, gamma: float
) -> tuple[Tensor, StepTotals]:
    """Accumulate the gradients of this rank's micro-batches. Nothing here synchronises with the device.

    Returns:
        Summed over all ranks, on the device: MEASURES [8, K], and the step's totals.
    """
    accelerator = parallel.accelerator
    # N_k of the whole global batch, before any gradient: a pair's weight does not depend on its rank or micro-batch.
    totals = StepTotals(reduce_sums(accelerator, totals.packed.to(accelerator.device, non_blocking=True)))
    weights = step_weights(totals.pairs, gamma)
    sums = torch.zeros(len(MEASURES), len(weights), device=accelerator.device)
    for index, micro in enumerate(micro_batches):
        # DDP and the like average gradients over ranks, but the loss is a sum over ranks.
        factor = float(micro.real) * accelerator.num_processes * micro.batch.scale
        with parallel.micro_batch(last=index == len(micro_batches) - 1):
            loss, measured = parallel.model(micro.batch.to(accelerator.device), weights * factor)
            # A loss that is not finite may have a finite gradient: make it NaN, so that all ranks skip the step.
            parallel.backward(loss * torch.where(loss.detach().isfinite(), 1.0, torch.nan))
        if micro.real:
            sums += measured
    return reduce_sums(accelerator, sums), totals


def step_weights(pairs: Tensor, gamma: float) -> Tensor:
    """[K] fp32: gamma^k / N_k, 0 where a depth has no pairs."""
    depths = torch.arange(len(pairs), device=pairs.device)
    return torch.where(pairs > 0, gamma**depths / pairs.clamp(min=1), 0.0).float()


def learning_rate(step: int, total: int, t: TrainConfig) -> float:
    """Return the learning rate: linear warm-up to lr, then a cosine to min_lr_ratio · lr. `step` counts from 1."""
    assert t.lr is not None
    warmup = max(1, round(t.warmup_ratio * total))
    if step <= warmup:
        return t.lr * step / warmup
    progress = (step - warmup) / max(1, total - warmup)
    return t.lr * (t.min_lr_ratio + (1 - t.min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * progress)))
