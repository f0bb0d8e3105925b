"""A random subset of the slots: exactly as many as asked for, and on average what all of them give."""

import numpy as np
import pytest
import sharing
import torch
from conftest import kept_mask, make_document, make_objective
from hypothesis import given
from hypothesis import strategies as st
from model.test_exactness import train
from sharing import Mesh

from eagle31_train.model import batch
from eagle31_train.model.batch import build_batch, choose_slots, draw_stretches

K, SLOTS = 3, 5
GAMMA = 0.8


class Planned:
    """A random generator that gives what it was told."""

    def __init__(self, gaps, turn):
        self.gaps, self.turn = gaps, turn

    def multinomial(self, total, shares):
        assert (sum(self.gaps), len(self.gaps)) == (total, len(shares))
        return np.array(self.gaps)

    def integers(self, end):
        return self.turn % end


@pytest.fixture
def plan(monkeypatch):
    """plan(gaps, turn): the next choices of slots are these."""
    monkeypatch.setattr(batch, "STRETCH", 2)
    real = batch.draw_stretches

    def planned(gaps, turn):
        monkeypatch.setattr(batch, "draw_stretches", lambda total, count, _: real(total, count, Planned(gaps, turn)))

    return planned


def slots_in(objective, documents):
    return len(build_batch(documents, K, kept_mask(objective)).layout.slots)


@given(st.integers(1, 90), st.data())
def test_exactly_as_many_as_asked_for_in_few_stretches_each_slot_with_the_same_chance(count, data):
    stretches = -(-count // batch.STRETCH)
    gaps = data.draw(st.lists(st.integers(0, 40), min_size=stretches, max_size=stretches))
    total = count + sum(gaps)
    taken = np.stack([draw_stretches(total, count, Planned(gaps, turn)) for turn in range(total)])
    assert (taken.sum(1) == count).all()
    assert (taken & ~np.roll(taken, 1, axis=1)).sum(1).max() <= stretches  # on the ring
    assert (taken.sum(0) == count).all()  # of `total` turns: the chance is count / total, exactly


def test_the_choice_does_not_move_between_releases(tiny):
    """A continued run must train what the stopped one would have: this choice is part of the format."""
    objective, generator = tiny[0], torch.Generator().manual_seed(0)
    documents = [make_document(objective.drafter.shape, 100, generator, range(2, 100)) for _ in range(2)]
    chosen = choose_slots(documents, K, kept_mask(objective, "keep"), 70, 7, 3)
    wanted = [[*range(29), *range(73, 79)], [*range(25, 57), *range(95, 100)]]
    assert [flags.nonzero()[:, 0].tolist() for flags in chosen.taken] == wanted


def measure(objective, documents, subset=None):
    """Loss, gradients and scaled sums of measures of one choice."""
    packed = build_batch(documents, K, kept_mask(objective), subset)
    weights = GAMMA ** torch.arange(K, dtype=torch.float64) / packed.population.clamp(min=1)
    found = train(objective, packed, weights * packed.scale)
    sums = {name: measured.double() * packed.scale for name, measured in vars(found.measured).items()}
    return {"total": found.loss, **found.grads, **sums}


def mean(found):
    return {name: sum(each[name] for each in found) / len(found) for name in found[0]}


@pytest.mark.parametrize("spread", ["one gap", "even gaps"])
def test_the_mean_over_all_choices_is_loss_gradient_and_measures_of_all_slots(tiny, plan, spread):
    objective, documents = tiny
    left = slots_in(objective, documents) - SLOTS
    gaps = [0, left, 0] if spread == "one gap" else [left // 3, left // 3, left - 2 * (left // 3)]
    found = []
    for turn in range(slots_in(objective, documents)):
        plan(gaps, turn)
        chosen = choose_slots(documents, K, kept_mask(objective), SLOTS, 0, 1)
        found.append(measure(objective, documents, chosen))
    ours = mean(found)
    for name, theirs in measure(objective, documents).items():
        near = 1e-6 if name in ("loss", "rms") else 1e-9  # reported in fp32
        torch.testing.assert_close({name: ours[name]}, {name: theirs}, rtol=near, atol=near)


def test_the_mean_of_the_trainers_steps_over_all_choices_is_its_step_on_all_slots(plan):
    shape = sharing.SHAPES["gqa"]
    left = slots_in(make_objective(shape), sharing.split_of(shape, sharing.RAGGED).documents) - 20
    found = []
    for turn in range(left + 20):
        plan([left, *[0] * 9], turn)
        found.append(sharing.step("some slots", Mesh())[0])
    torch.testing.assert_close(mean(found), sharing.step("gqa", Mesh())[0], rtol=1e-4, atol=1e-7)
