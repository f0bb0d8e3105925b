"""A step of the loop queues its work without a question to the device, and then asks once."""

import pytest
import torch
from accelerate import Accelerator
from conftest import kept_mask
from waits import Waits

from eagle31_train.config import TrainConfig
from eagle31_train.model.batch import build_batch, choose_slots
from train import step as arithmetic
from train.loader import MicroBatch, StepTotals
from train.parallel import parallelise

K = 3
SETTINGS = TrainConfig(weight_decay=0.1)
ASKED = ["cpu", "_local_scalar_dense"]  # one transfer, and a look at the norm in what it brought


def one_step(objective, documents, subset=None):
    """Names of the waits in one step up to its update, and in that, which reads the step's results."""
    spread = parallelise(Accelerator(), objective.float(), SETTINGS)
    parts = [documents[:1], documents[1:]]
    places = [[0], range(1, len(documents))]
    batches = [
        build_batch(part, K, kept_mask(objective), "mask", None if subset is None else subset.of(place))
        for part, place in zip(parts, places, strict=True)
    ]
    totals = StepTotals(torch.cat([sum(batch.population for batch in batches), torch.zeros(1, dtype=torch.int64)]))
    micro_batches = [MicroBatch(batch, [], True) for batch in batches]
    micro_batches.append(MicroBatch(batches[0], [], False))  # a rank without a sample
    with Waits() as queued:
        sums, totals = arithmetic.accumulate(spread, micro_batches, totals, 0.8)
    counts = totals.packed
    with Waits() as asked:
        norm, *values = spread.update(1e-3, totals.pairs, counts, sums)
    assert norm.shape == ()
    assert norm > 0
    assert spread.updates == 1
    assert all(map(torch.equal, values, (counts.double(), sums.double())))
    return queued, asked


@pytest.mark.parametrize("slots", [None, 5])
def test_a_step_asks_the_device_nothing_and_its_results_are_one_question(tiny, slots):
    objective, documents = tiny
    subset = slots and choose_slots(documents, K, kept_mask(objective), "mask", slots, 0, 1)
    assert one_step(objective, documents, subset) == ([], ASKED)


def test_a_planted_question_is_found(tiny, monkeypatch):
    right = arithmetic.step_weights
    monkeypatch.setattr(
        arithmetic, "step_weights", lambda counts, gamma: right(counts, gamma) * (counts.sum().item() > 0)
    )
    assert one_step(*tiny) == (["_local_scalar_dense"], ASKED)
