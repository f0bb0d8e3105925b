"""Teacher-forced metrics on the held-out split."""

from typing import Any

import torch
from torch import Tensor

from eagle31_train.config import TrainConfig
from eagle31_train.model.batch import build_batch
from eagle31_train.model.loss import MEASURES
from eagle31_train.store import StoreSplit
from train import order
from train.metrics import reduce_sums, summarise
from train.parallel import Parallel


@torch.no_grad()
def evaluate(
    parallel: Parallel, split: StoreSplit, t: TrainConfig, keep_mask: Tensor, everything: bool = False
) -> dict[str, Any]:
    """`summarise` of the split: of `eval_samples` that are spread over it, or of everything.

    Args:
        keep_mask: [V] bool, which tokens of the target the draft vocabulary holds.
    """
    accelerator = parallel.accelerator
    count = len(split) if everything else min(len(split), t.eval_samples)
    chosen = [i * len(split) // count for i in range(count)]  # sources stand one behind the other in some data
    lengths = [split.lengths[i] for i in chosen]
    ranks, rank = accelerator.num_processes, accelerator.process_index
    # As large as training's micro-batches, for whose memory there is room; or as the longest conversation, which
    # needs none for gradients here. However they are cut, the numbers are the split's.
    size = max([t.batch_tokens // (ranks * t.gradient_accumulation_steps), *lengths])
    batches = order.global_batches(lengths, size, seed=0, epoch=0)
    sums = torch.zeros(MEASURES, t.ttt_length, device=accelerator.device)
    weights = torch.zeros(t.ttt_length, device=accelerator.device)
    for first in range(0, len(batches), ranks):
        # Every rank runs the model equally often, since sharded weights are gathered from all: one that has
        # no batch left takes the first of the round again, and counts it for nothing.
        real = first + rank < len(batches)
        samples = [chosen[i] for i in batches[first + rank if real else first]]
        batch = build_batch(split.read_all(samples), t.ttt_length, keep_mask, t.oov)
        sums += parallel.model(batch.to(accelerator.device), weights)[1].stacked() * float(real)
    return summarise(reduce_sums(accelerator, sums))
