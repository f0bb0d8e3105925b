"""Loads a rank's micro-batches from the store, ahead of training."""

import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import islice
from math import ceil

import torch
from accelerate import Accelerator
from torch import Tensor

from eagle31_train.common import order
from eagle31_train.config import TrainConfig
from eagle31_train.model.batch import Batch, build_batch, choose_slots
from eagle31_train.model.context_parallel import Mesh
from eagle31_train.store import StoreSplit
from train.deadline import Deadline

POLL = 0.5  # seconds between checks of whether this process should stop
GRACE = 10.0  # seconds that a process that should stop still waits for shards that may not come


@dataclass(frozen=True)
class MicroBatch:
    """What a rank runs the model on at once.

    batch: packed documents; with train.context_parallel, this rank's part of them. real: False for a stand-in. If a
    global batch has fewer samples than parts, a rank takes part in the gradient exchange with a sample that does not
    count.
    """

    batch: Batch
    real: bool


@dataclass(frozen=True)
class StepTotals:
    """What ranks add up before a step's gradients, in one tensor, so that one exchange is enough."""

    packed: Tensor  # [K + 1] int64: trained pairs per TTT step, then the number of ranks that should stop

    @property
    def pairs(self) -> Tensor:
        """[K]: N_k, once added up."""
        return self.packed[:-1]

    @property
    def stop_requested(self) -> bool:
        """Whether any rank should stop. Reading it waits for the device that holds it."""
        return bool(self.packed[-1])

    def request_stop(self) -> None:
        """Make this rank stop, and the others with it."""
        self.packed[-1] = 1


@dataclass(frozen=True)
class GlobalBatch:
    """One rank's part of what an optimizer step trains on."""

    step: int  # counted from 1
    samples: list[int]  # of all ranks
    micro_batches: list[MicroBatch]
    totals: StepTotals  # of this rank
    waited: float  # seconds that training waited for it


Reading = Future[tuple[list[MicroBatch], StepTotals]]


def load(
    split: StoreSplit,
    batches: list[list[int]],
    done: int,
    t: TrainConfig,
    seed: int,
    keep_mask: Tensor,
    accelerator: Accelerator,
    deadline: Deadline | None = None,
) -> Iterator[GlobalBatch]:
    """Yield this rank's part of every step after `done`, read `train.num_workers` steps ahead in the background.

    What a step trains on, and the order of steps, depend neither on the number of ranks nor on that of workers. For a
    CUDA device, tensors are in page-locked memory.

    Args:
        batches: the samples of every step of the run.
        keep_mask: [V] bool, as `build_batch` takes it.

    Raises:
        Stopped: this process should stop, and shards that it waits for have not come. Nothing is saved, since that
            takes all ranks. A slow read of shards that are there is waited for; its step ends on all ranks and is
            saved.
    """
    pin = accelerator.device.type == "cuda"
    mesh = Mesh(accelerator.num_processes, accelerator.process_index, t.context_parallel)

    lacking: set[int] = set()  # steps whose shards the store may not all have yet

    def read(step: int, samples: list[int]) -> tuple[list[MicroBatch], StepTotals]:
        lacking.add(step)
        split.wait_for(samples)  # here, where all ranks wait for the same, not inside an exchange of gradients
        lacking.discard(step)
        subset = None
        if t.slots_per_batch is not None:  # every rank makes the same choice, among the slots of all
            documents = [split.read(i, states=False) for i in samples]
            subset = choose_slots(documents, t.ttt_length, keep_mask, t.slots_per_batch, seed, step)
        micro_batches = []
        lengths, slots = split.sizes(samples)
        if subset is not None:  # drawn in runs, so that some documents have many and others none
            slots = subset.slots
        costs = order.costs(lengths, slots, t.ttt_length)
        # No more micro-batches than can each have a conversation on some rank.
        parts = mesh.replicas * min(t.gradient_accumulation_steps, ceil(len(samples) / mesh.replicas))
        dealt = order.share(samples, costs, parts)
        for part in dealt[mesh.replica :: mesh.replicas]:
            mine = order.longest_first(part, split.lengths) or [min(samples, key=split.lengths.__getitem__)]
            chosen = None if subset is None else subset.of([samples.index(i) for i in mine])
            batch = build_batch(split.read_all(mine), t.ttt_length, keep_mask, chosen, mesh.part)
            micro_batches.append(MicroBatch(batch.pinned() if pin else batch, bool(part)))
        split.passed(step)
        pairs = torch.stack([micro.batch.population * micro.real for micro in micro_batches]).sum(0)
        packed = torch.cat([pairs, pairs.new_zeros(1)])
        return micro_batches, StepTotals(packed.pin_memory() if pin else packed)

    steps = list(enumerate(batches[done:], done + 1))
    todo, ahead = iter(steps), deque[Reading]()
    pool = ThreadPoolExecutor(max(1, t.num_workers))
    try:
        for step, samples in steps:
            began = time.perf_counter()
            ahead.extend(pool.submit(read, *one) for one in islice(todo, 1 + t.num_workers - len(ahead)))
            micro_batches, totals = _result(ahead.popleft(), step, lacking, deadline)
            yield GlobalBatch(step, samples, micro_batches, totals, time.perf_counter() - began)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # closing the store ends the wait for a shard


def _result(
    reading: Reading, step: int, lacking: set[int], deadline: Deadline | None
) -> tuple[list[MicroBatch], StepTotals]:
    since: float | None = None
    while not wait([reading], POLL).done:
        if deadline is None or (why := deadline.reason) is None or step not in lacking:
            continue
        since = since or time.monotonic()
        if time.monotonic() - since >= GRACE:
            raise deadline.stopped(
                f"train: stopped by {why} while waiting for data after step {step - 1}; run the same command again to "
                "resume from the last checkpoint"
            )
    return reading.result()
