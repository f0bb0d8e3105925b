"""train.slots_per_batch in the loop: right on average, and the same however a batch is split or a run stopped."""

import torch
from accelerate import Accelerator
from conftest import kept_mask
from pipeline import assert_close, assert_equal

from eagle31_train.config import TrainConfig
from eagle31_train.model import batch
from eagle31_train.model.batch import build_batch, choose_slots
from train import loader
from train.parallel import parallelise
from train.step import accumulate

OPTIONS = ["train.slots_per_batch=12"]


def test_other_slots_are_trained_than_without(new_run):
    some, all_of_them = new_run().fit("train.max_steps=1", *OPTIONS), new_run().fit("train.max_steps=1")
    assert not torch.equal(some.weights()["fc.weight"], all_of_them.weights()["fc.weight"])
    # More than there are: the same run to the bit.
    assert_equal(new_run().fit("train.max_steps=1", "train.slots_per_batch=60").weights(), all_of_them.weights())


def test_a_step_of_the_loop_is_unbiased(tiny, monkeypatch):
    """The mean of its gradients over all turns of the ring is the gradient of all slots."""
    objective, documents = tiny
    kept, drawn = kept_mask(objective), batch.draw_stretches
    spread = parallelise(Accelerator(), objective, TrainConfig())
    total = len(build_batch(documents, 3, kept, "mask").layout.slots)

    def gradient(subset):
        objective.zero_grad()
        packed = build_batch(documents, 3, kept, "mask", subset)
        totals = loader.StepTotals(torch.cat([packed.population, torch.zeros(1, dtype=torch.int64)]))
        accumulate(spread, [loader.MicroBatch(packed, [], True)], totals, 0.8)
        return {name: parameter.grad.clone() for name, parameter in objective.drafter.named_parameters()}

    def turned(turn):
        class Turned:
            def multinomial(self, left, shares):
                return [left]

            def integers(self, end):
                return turn

        monkeypatch.setattr(batch, "draw_stretches", lambda total, count, _: drawn(total, count, Turned()))
        return gradient(choose_slots(documents, 3, kept, "mask", 4, 0, 1))

    found = [turned(turn) for turn in range(total)]
    mean = {name: sum(each[name] for each in found) / total for name in found[0]}
    assert_close(mean, gradient(None), 1e-6)  # the weights of the steps are fp32
