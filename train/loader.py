"""From the store to a rank's micro-batches, ahead of the training."""

import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import islice

import torch
from accelerate import Accelerator
from torch import Tensor

from eagle31_train.drafter.batch import Batch, build_batch, choose_slots
from eagle31_train.schema import Config, Stopped
from eagle31_train.store import StoreSplit
from train import order
from train.deadline import Deadline

Read = tuple[list[tuple[Batch, bool]], Tensor]  # micro-batches, and counts
POLL, GRACE = 0.5, 10.0  # seconds: of who is told to stop, data that may not come is waited for so long


def load(
    split: StoreSplit,
    batches: list[list[int]],
    done: int,
    config: Config,
    kept: Tensor,
    accelerator: Accelerator,
    deadline: Deadline | None = None,
) -> Iterator[tuple[int, list[tuple[Batch, bool]], Tensor, float]]:
    """This rank's micro-batches of every step after `done`, read `train.workers` steps ahead in the background.

    A micro-batch is (batch, real): where a global batch has fewer samples than there are parts,
    a rank still takes part in the gradient exchange with a sample that counts for nothing.
    With them come [K+1] int64, their part of N_k and a zero for the loop's own use, and the seconds that training
    waited for all that. What and in which order depends neither on the number of ranks nor on that of workers.
    For a CUDA device all lie in page-locked memory.

    Raises:
        Stopped: this process is to stop, and data is still being waited for. To save takes all ranks: nothing is saved.
    """
    t = config.train
    pin = accelerator.device.type == "cuda"

    def read(step: int) -> Read:
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
    ahead: deque[Future[Read]] = deque()
    pool = ThreadPoolExecutor(max(1, t.workers))
    try:
        ahead.extend(pool.submit(read, step) for step in islice(todo, t.workers))
        for step in range(done, len(batches)):
            began = time.perf_counter()
            if not t.workers:  # nothing is read ahead: what a step trains is read when it is its turn
                ahead.append(pool.submit(read, next(todo)))
            share, counts = _result(ahead.popleft(), step, deadline)
            waited = time.perf_counter() - began
            ahead.extend(pool.submit(read, step) for step in islice(todo, 1 if t.workers else 0))
            yield step + 1, share, counts, waited
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # who waits for a shard is told so when the store is closed


def _result(reading: Future[Read], step: int, deadline: Deadline | None) -> Read:
    since: float | None = None
    while not wait([reading], POLL).done:
        if deadline is None or (why := deadline.reason) is None:
            continue
        since = since or time.monotonic()
        if time.monotonic() - since >= GRACE:
            raise Stopped(
                f"train: stopped by {why} while it waited for data after step {step}; the same command goes on from "
                "the last checkpoint"
            )
    return reading.result()
