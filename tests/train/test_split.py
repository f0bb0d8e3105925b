"""A step's gradient does not depend on how its samples are split over ranks and accumulation steps.

Ranks are threads here, which load and accumulate as the loop does and add up over a barrier; that gradients are then
averaged over ranks is what DDP, FSDP2 and ZeRO do, and test_profiles.py asks them.
"""

import copy
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from conftest import kept_mask, make_document, make_objective, make_shape
from made import Documents

from eagle31_train.config import TrainConfig
from train import loader
from train import step as arithmetic

K = 3
# Length → what the assistant wrote of it (None: random): unequal, fewer than the most parts, one with nothing to train.
ANSWERS = {24: None, 19: [4, 5, 6], 15: [], 32: None, 8: range(2, 8), 21: [10], 27: None}
SPLITS = [(1, 8), (2, 4), (4, 2), (8, 1), (2, 1), (3, 1), (1, 3), (3, 3)]


class Rank:
    """What the loop asks of an accelerator."""

    device = torch.device("cpu")

    def __init__(self, index, meeting):
        self.process_index, self.num_processes, self.meeting = index, meeting.barrier.parties, meeting

    def reduce(self, value, reduction):
        assert reduction == "sum"
        self.meeting.brought[self.process_index] = value
        self.meeting.barrier.wait()
        total = sum(self.meeting.brought)
        self.meeting.barrier.wait()
        return total


def step(objective, split, ranks, accumulation, plant=None, **more):
    """The gradient of one step on all samples, its norm's counts and what it measured, the same for any split.

    Args:
        plant: what a rank makes of its micro-batches, its totals and the weights that its model is called with.
    """
    t = TrainConfig(ttt_length=K, gradient_accumulation_steps=accumulation, num_workers=0, **more)
    meeting = SimpleNamespace(barrier=threading.Barrier(ranks, timeout=60), brought=[None] * ranks)

    def run(index):
        replica, accelerator = copy.deepcopy(objective), Rank(index, meeting)
        batches = [list(range(len(split.lengths)))]
        [batch] = loader.load(split, batches, 0, t, 0, kept_mask(objective), accelerator)
        mine, totals = batch.micro_batches, batch.totals
        mine, reweighted = (mine, lambda _, weights: weights) if plant is None else plant(mine, totals, ranks)
        parallel = SimpleNamespace(
            accelerator=accelerator,
            model=lambda batch, weights: replica(batch, reweighted(batch, weights)),
            micro_batch=lambda last: nullcontext(),
            backward=torch.Tensor.backward,
        )
        sums, totals = arithmetic.accumulate(parallel, mine, totals, t.gamma)
        return {name: p.grad for name, p in replica.drafter.named_parameters()}, sums, totals.packed

    with ThreadPoolExecutor(ranks) as pool:
        results = list(pool.map(run, range(ranks)))
    gradients, (_, sums, counts) = [gradient for gradient, _, _ in results], results[0]
    averaged = {name: sum(gradient[name] for gradient in gradients) / ranks for name in gradients[0]}
    return {name: tensor.double() for name, tensor in {**averaged, "sums": sums, "counts": counts}.items()}


def error(ours, theirs):
    """The largest distance, relative to each tensor's norm."""
    return max(((ours[name] - theirs[name]).norm() / theirs[name].norm()).item() for name in theirs)


def posed(dtype):
    """(objective, split): the same numbers in any dtype."""
    shape, generator = make_shape(), torch.Generator().manual_seed(2)
    documents = [make_document(shape, length, generator, answer) for length, answer in ANSWERS.items()]
    objective, exact = make_objective(shape, dtype), make_objective(shape, torch.float64)
    objective.drafter.load_state_dict({name: w.to(dtype) for name, w in exact.drafter.state_dict().items()})
    return objective, Documents([replace(d, aux=d.aux.to(dtype), last=d.last.to(dtype)) for d in documents])


@cache
def whole_of(dtype, slots=None):
    """One step on everything at once."""
    return step(*posed(dtype), 1, 1, slots_per_batch=slots)


@cache
def tolerance(dtype, slots):
    """How far a split may be from the whole: in fp64 as far as the measured sums round, which are fp32; in fp32 as far
    as the whole is from fp64 by rounding."""
    if dtype == torch.float64:
        return 1e-6
    found = error(whole_of(dtype, slots), whole_of(torch.float64, slots))
    assert 1e-7 < found < 1e-5  # a few roundings of 6e-8, and no mistake
    return found


CASES = [(torch.float64, None, *split) for split in SPLITS]
CASES += [(torch.float64, 20, 1, 8), (torch.float64, 20, 8, 1), (torch.float64, 20, 3, 3)]
CASES += [(torch.float32, None, 2, 4), (torch.float32, None, 8, 1), (torch.float32, 20, 2, 4)]


@pytest.mark.parametrize(("dtype", "slots", "ranks", "accumulation"), CASES)
def test_any_split_gives_the_gradient_of_the_whole(dtype, slots, ranks, accumulation):
    objective, split = posed(dtype)
    whole = whole_of(dtype, slots)
    assert (whole["counts"][:-1] > 10).all()
    parts = step(objective, split, ranks, accumulation, slots_per_batch=slots)
    assert error(parts, whole) < tolerance(dtype, slots)


def per_rank(mine, totals, ranks):
    """Mean over ranks of each one's mean."""
    return mine, lambda batch, weights: arithmetic.step_weights(totals.pairs, 0.8)


def per_micro_batch(mine, totals, ranks):
    """Mean over micro-batches of each one's mean."""
    return mine, lambda batch, weights: arithmetic.step_weights(batch.population, 0.8) / len(mine)


def without_the_number_of_ranks(mine, totals, ranks):
    """The mean over ranks of sums that were to be added up."""
    return mine, lambda batch, weights: weights / ranks


def samples_of_empty_parts_counted(mine, totals, ranks):
    """A rank that has no sample, and takes part with another's, lets it count."""
    return [replace(micro, real=True) for micro in mine], lambda batch, weights: torch.where(weights == 0, 0.1, weights)


@pytest.mark.parametrize(
    ("plant", "ranks", "accumulation"),
    [
        (per_rank, 2, 4),
        (per_rank, 8, 1),
        (per_micro_batch, 1, 8),
        (per_micro_batch, 2, 4),
        (without_the_number_of_ranks, 2, 4),
        (without_the_number_of_ranks, 8, 1),
        (samples_of_empty_parts_counted, 8, 1),
        (samples_of_empty_parts_counted, 1, 8),
    ],
)
def test_planted_mistakes_are_found(plant, ranks, accumulation):
    assert error(step(*posed(torch.float64), ranks, accumulation, plant), whole_of(torch.float64)) > 1e-3
