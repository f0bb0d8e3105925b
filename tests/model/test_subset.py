"""A random subset of the slots: exactly as many as asked for, and on average what all of them give."""

import numpy as np
import sharing
import torch
from conftest import kept_mask, make_document, make_objective
from hypothesis import given
from hypothesis import strategies as st
from sharing import Mesh

from eagle31_train.model import batch
from eagle31_train.model.batch import build_batch, choose_slots, draw_stretches

K = 3


class Planned:
    """A random generator that gives what it was told."""

    def __init__(self, gaps, turn):
        self.gaps, self.turn = gaps, turn

    def multinomial(self, total, shares):
        assert (sum(self.gaps), len(self.gaps)) == (total, len(shares))
        return np.array(self.gaps)

    def integers(self, end):
        return self.turn % end


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


def test_the_mean_of_the_trainers_steps_over_all_choices_is_its_step_on_all_slots(monkeypatch):
    """Gradients, and what is measured."""
    shape, right, found = sharing.SHAPES["gqa"], batch.draw_stretches, []
    packed = build_batch(sharing.split_of(shape, sharing.RAGGED).documents, K, kept_mask(make_objective(shape)))
    total = len(packed.layout.slots)
    monkeypatch.setattr(batch, "STRETCH", 2)
    for turn in range(total):
        planned = Planned([total - 20, *[0] * 9], turn)
        monkeypatch.setattr(batch, "draw_stretches", lambda *given, planned=planned: right(*given[:2], planned))
        gradients, sums = sharing.step("some slots", Mesh())
        found.append({**gradients, "measured": sums * total / 20})
    mean = {name: sum(each[name] for each in found) / total for name in found[0]}
    gradients, sums = sharing.step("gqa", Mesh())
    torch.testing.assert_close(mean, {**gradients, "measured": sums}, rtol=1e-4, atol=1e-7)
