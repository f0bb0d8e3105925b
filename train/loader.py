"""From the store to a rank's micro-batches, ahead of the training."""

import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice

import torch
from accelerate import Accelerator
from torch import Tensor

from eagle31_train.drafter.batch import Batch, build_batch, choose_slots
from eagle31_train.schema import Config
from eagle31_train.store import StoreSplit
from train import order


def load(
    split: StoreSplit,
    batches: list[list[int]],
    done: int,
    config: Config,
    kept: Tensor,
    accelerator: Accelerator,
) -> Iterator[tuple[int, list[tuple[Batch, bool]], Tensor, float]]:
    """This rank's micro-batches of every step after `done`, read `train.workers` steps ahead in the background.

    A micro-batch is (batch, real): where a global batch has fewer samples than there are parts,
    a rank still takes part in the gradient exchange with a sample that counts for nothing.
    With them come [K+1] int64, their part of N_k and a zero for the loop's own use, and the seconds that training
    waited for all that. What and in which order depends neither on the number of ranks nor on that of workers.
    For a CUDA device all lie in page-locked memory.
    """
    t = config.train
    pin = accelerator.device.type == "cuda"

    def read(step: int) -> tuple[list[tuple[Batch, bool]], Tensor]:
        samples = batches[step]
        split.wait_for(samples)  # here, where every rank waits for the same, and not inside an exchange of gradients
        subset = None
        if t.slots_per_batch is not None:  # chosen alike by every rank, among the slots of all of them
            everything = [split.read(i, states=False) for i in samples]
            subset = choose_slots(everything, t.unroll, kept, t.oov, t.slots_per_batch, config.seed, step + 1)
        share: list[tuple[Batch, bool]] = []
        parts = order.share(samples, split.lengths, accelerator.num_processes * t.accumulation)
        for part in parts[accelerator.process_index :: accelerator.num_processes]:
            mine = part or [min(samples, key=split.lengths.__getitem__)]
            chosen = None if subset is None else subset.of([samples.index(i) for i in mine])
            batch = build_batch(split.read_all(mine), t.unroll, kept, t.oov, chosen)
            share.append((batch.pinned() if pin else batch, bool(part)))
        counts = torch.stack([batch.population * real for batch, real in share]).sum(0)
        counts = torch.cat([counts, counts.new_zeros(1)])
        return share, counts.pin_memory() if pin else counts

    todo = iter(range(done, len(batches)))
    ahead: deque[Future[tuple[list[tuple[Batch, bool]], Tensor]]] = deque()
    pool = ThreadPoolExecutor(max(1, t.workers))
    try:
        ahead.extend(pool.submit(read, step) for step in islice(todo, t.workers))
        for step in range(done, len(batches)):
            began = time.perf_counter()
            if not t.workers:  # nothing is read ahead: what a step trains is read when it is its turn
                ahead.append(pool.submit(read, next(todo)))
            share, counts = ahead.popleft().result()
            waited = time.perf_counter() - began
            ahead.extend(pool.submit(read, step) for step in islice(todo, 1 if t.workers else 0))
            yield step + 1, share, counts, waited
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # who waits for a shard is told so when the store is closed
