"""A step of the loop queues its work without a question to the device, and then asks once."""

import pytest
import torch
from accelerate import Accelerator
from conftest import kept_mask
from waits import Waits

from eagle31_train.drafter.batch import build_batch, choose_slots
from train import loop
from train.checkpoint import parameter_groups
from train.metrics import fetch

K = 3


def one_step(objective, documents, subset=None):
    """Names of the waits in one step up to its update and that included, and in the reading of its results."""
    accelerator = Accelerator()
    optimizer = torch.optim.AdamW(parameter_groups(objective.drafter, 0.1), fused=True)
    model, prepared = accelerator.prepare(objective.float(), optimizer)
    parts = [documents[:1], documents[1:]]
    places = [[0], range(1, len(documents))]
    share = [
        (build_batch(part, K, kept_mask(objective), "mask", None if subset is None else subset.of(place)), True)
        for part, place in zip(parts, places, strict=True)
    ]
    counts = sum(batch.population for batch, _ in share)
    share.append((share[0][0], False))  # a rank without a sample
    with Waits() as queued:
        sums, counts = loop.accumulate(model, share, counts, 0.8, accelerator)
        norm = accelerator.clip_grad_norm_(objective.drafter.parameters(), 0.5)
        prepared.step()
        prepared.zero_grad(set_to_none=True)
    with Waits() as asked:
        values = fetch(norm, counts, sums)
    assert [value.shape for value in values] == [norm.shape, counts.shape, sums.shape]
    assert all(map(torch.equal, values, (norm.double(), counts.double(), sums.double())))
    return queued, asked


@pytest.mark.parametrize("slots", [None, 5])
def test_a_step_asks_the_device_nothing_and_its_results_are_one_question(tiny, slots):
    objective, documents = tiny
    subset = slots and choose_slots(documents, K, kept_mask(objective), "mask", slots, 0, 1)
    assert one_step(objective, documents, subset) == ([], ["cpu"])


def test_a_planted_question_is_found(tiny, monkeypatch):
    right = loop.step_weights
    monkeypatch.setattr(loop, "step_weights", lambda counts, gamma: right(counts, gamma) * (counts.sum().item() > 0))
    assert one_step(*tiny) == (["_local_scalar_dense"], ["cpu"])
