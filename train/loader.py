"""From the store to a rank's micro-batches, one step ahead of the training."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

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
    """This rank's micro-batches of every step after `done`, read one step ahead in the background.

    A micro-batch is (batch, real): where a global batch has fewer samples than there are parts,
    a rank still takes part in the gradient exchange with a sample that counts for nothing.
    With them come their part of N_k, [K] int64, and the seconds that training waited for all that.
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
        return share, counts.pin_memory() if pin else counts

    with ThreadPoolExecutor(1) as pool:
        ahead = pool.submit(read, done) if done < len(batches) else None
        for step in range(done, len(batches)):
            assert ahead is not None
            began = time.perf_counter()
            share, counts = ahead.result()
            waited = time.perf_counter() - began
            ahead = pool.submit(read, step + 1) if step + 1 < len(batches) else None
            yield step + 1, share, counts, waited
