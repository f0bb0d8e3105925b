"""The arithmetic of an optimizer step: gradients over micro-batches and ranks, their weights, the learning rate."""

import math

import torch
from accelerate.utils import gather_object
from torch import Tensor

from eagle31_train.config import TrainConfig
from eagle31_train.model.loss import MEASURES
from eagle31_train.store import StoreSplit
from eagle31_train.store.codec import as_encoded
from train.loader import GlobalBatch, MicroBatch, StepTotals
from train.metrics import reduce_sums
from train.parallel import Parallel


def accumulate(
    parallel: Parallel, micro_batches: list[MicroBatch], totals: StepTotals, gamma: float
) -> tuple[Tensor, StepTotals]:
    """Add up the gradients of a step from this rank's micro-batches and totals. Nothing here waits for the device.

    Returns:
        Over all ranks, on the device: what was measured [MEASURES, K], and the totals.
    """
    accelerator = parallel.accelerator
    # N_k is complete before any gradient is taken: what a pair weighs does not depend on who has it.
    totals = StepTotals(reduce_sums(accelerator, totals.packed.to(accelerator.device, non_blocking=True)))
    weights = step_weights(totals.pairs, gamma)
    sums = torch.zeros(MEASURES, len(weights), device=accelerator.device)
    for index, micro in enumerate(micro_batches):
        # Ranks are averaged over; the loss is a sum over them, hence their number.
        factor = float(micro.real) * accelerator.num_processes * micro.batch.scale
        with parallel.micro_batch(last=index == len(micro_batches) - 1):
            loss, measured = parallel.model(micro.batch.to(accelerator.device), weights * factor)
            # A loss that is not finite may have a gradient that is: then none is, on any rank.
            parallel.backward(loss * torch.where(loss.detach().isfinite(), 1.0, torch.nan))
        if micro.real:
            sums += measured.stacked()
    return reduce_sums(accelerator, sums), totals


def step_weights(pairs: Tensor, gamma: float) -> Tensor:
    """[K] fp32: gamma^k / N_k; a depth without pairs weighs nothing."""
    depths = torch.arange(len(pairs), device=pairs.device)
    return torch.where(pairs > 0, gamma**depths / pairs.clamp(min=1), 0.0).float()


def learning_rate(step: int, total: int, t: TrainConfig) -> float:
    """Linear warm-up, then a cosine to min_lr * lr; `step` counts from 1."""
    warmup = max(1, round(t.warmup_ratio * total))
    if step <= warmup:
        return t.lr * step / warmup
    progress = (step - warmup) / max(1, total - warmup)
    return t.lr * (t.min_lr_ratio + (1 - t.min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * progress)))


def broken_samples(batch: GlobalBatch, split: StoreSplit) -> list[int]:
    """Samples of a step, on any rank, of which a stored state is not finite."""
    mine = [i for micro in batch.micro_batches if micro.real for i in micro.samples]
    documents = [(i, split.read(i)) for i in mine]
    found = [i for i, one in documents if not (as_encoded(one.aux).finite and as_encoded(one.last).finite)]
    return sorted(set(gather_object(found)))  # ranks may share a sample


def samples_to_blame(parallel: Parallel, batch: GlobalBatch) -> list[int]:
    """Samples of a step whose micro-batch has a loss that is not finite, on any rank; all if none has."""
    device, guilty = parallel.accelerator.device, []
    for micro in batch.micro_batches:
        weights = torch.ones(micro.batch.ttt_length, device=device)
        with torch.no_grad():
            loss, _ = parallel.model(micro.batch.to(device), weights)
        guilty += micro.samples if micro.real and not loss.isfinite() else []
    return sorted(set(gather_object(guilty))) or sorted(batch.samples)
