"""The arithmetic of an optimizer step: accumulated gradients, the weights of the loss, the learning rate."""

import math

import torch
from accelerate.utils import gather_object
from torch import Tensor

from eagle31_train.config import TrainConfig
from eagle31_train.model.loss import MEASURES
from eagle31_train.store import StoreSplit
from train.loader import GlobalBatch, MicroBatch, StepTotals
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
    """Linear warm-up, then a cosine to min_lr_ratio · lr, which is given; `step` counts from 1."""
    assert t.lr is not None
    warmup = max(1, round(t.warmup_ratio * total))
    if step <= warmup:
        return t.lr * step / warmup
    progress = (step - warmup) / max(1, total - warmup)
    return t.lr * (t.min_lr_ratio + (1 - t.min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * progress)))


def broken_samples(batch: GlobalBatch, split: StoreSplit) -> list[int]:
    """Samples of a step, on any rank, with a stored state that is not finite."""
    mine = [i for micro in batch.micro_batches if micro.real for i in micro.samples]
    documents = [(i, split.read(i)) for i in mine]
    broken = [i for i, one in documents if not (one.aux.finite and one.last.finite)]
    return sorted(set(gather_object(broken)))  # ranks may share a sample


def samples_to_blame(parallel: Parallel, batch: GlobalBatch) -> list[int]:
    """Samples of the micro-batches, on any rank, whose loss is not finite; all of the step's if there are none."""
    device, guilty = parallel.accelerator.device, []
    for micro in batch.micro_batches:
        weights = torch.ones(micro.batch.ttt_length, device=device)
        with torch.no_grad():
            loss, _ = parallel.model(micro.batch.to(device), weights)
        guilty += micro.samples if micro.real and not loss.isfinite() else []
    return sorted(set(gather_object(guilty))) or sorted(batch.samples)
