"""The data order: every sample once, the same whatever the number of ranks."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from train.order import PACKED, global_batches, schedule, share

LENGTHS = st.lists(st.integers(1, 100), min_size=1, max_size=60)
SEEDS = st.integers(0, 2**32)


@given(LENGTHS, st.integers(0, 300), SEEDS, st.integers(0, 5))
def test_an_epoch_holds_every_sample_once_within_the_bound(lengths, room, seed, epoch):
    bound = max(lengths) + room
    batches = global_batches(lengths, bound, seed, epoch)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    for batch in batches:
        assert sum(lengths[i] for i in batch) <= bound
    if sum(lengths) < PACKED * bound:  # one window
        loads = sorted(sum(lengths[i] for i in batch) for batch in batches)
        assert len(loads) == 1 or loads[0] + loads[1] > bound, "no two batches could have been one"


def test_a_sample_longer_than_the_bound_is_never_packed():
    with pytest.raises(AssertionError, match="longer than the budget"):
        global_batches([3, 7, 3], 6, seed=0, epoch=0)


def test_packing_wastes_less_than_three_percent_of_the_budget():
    lengths = np.random.default_rng(0).lognormal(5.5, 0.6, 4000).astype(int).clip(20, 1024).tolist()
    batches = global_batches(lengths, 2048, seed=0, epoch=0)
    assert sum(lengths) / (len(batches) * 2048) > 0.97


def test_the_order_is_a_function_of_seed_and_epoch_and_of_nothing_else():
    lengths = [7, 3, 9, 4, 8, 2, 6, 5] * 5
    first = global_batches(lengths, 30, seed=1, epoch=0)
    assert first == global_batches(lengths, 30, seed=1, epoch=0)
    others = [global_batches(lengths, 30, seed, epoch) for seed, epoch in ((1, 1), (2, 0), (0, 1))]
    assert all(other != first for other in others)
    assert others[0] != others[1] != others[2] != others[0]
    assert sorted(first[0]) != first[0], "samples are shuffled"


def test_the_order_does_not_move_between_releases():
    """A continued run must read what the stopped one would have: this order is part of the format."""
    assert global_batches([3, 1, 2, 4, 2, 1], 4, seed=0, epoch=0) == [[0, 1], [5], [3], [2, 4]]


def test_the_schedule_is_the_epochs_in_turn_cut_at_max_steps():
    lengths = [5] * 12
    epochs = [global_batches(lengths, 20, 3, epoch) for epoch in range(3)]
    every = [batch for epoch in epochs for batch in epoch]
    assert schedule(lengths, 20, 3, 3, None) == every
    assert schedule(lengths, 20, 3, 3, 7) == every[:7]
    assert schedule(lengths, 20, 3, 3, 100) == every
    assert schedule(lengths, 20, 3, 1, 9) == epochs[0]


@given(LENGTHS, st.integers(1, 9))
def test_shares_hold_every_sample_once_and_are_balanced(lengths, parts):
    batch = list(range(len(lengths)))
    shares = share(batch, lengths, parts)
    assert len(shares) == parts
    assert sorted(i for part in shares for i in part) == batch
    loads = [sum(lengths[i] for i in part) for part in shares]
    assert max(loads) - min(loads) <= max(lengths)
    assert shares == share(list(reversed(batch)), lengths, parts), "the order within a batch does not matter"


def test_a_batch_with_fewer_samples_than_parts_leaves_parts_empty():
    assert share([4, 2], [1, 1, 8, 1, 9], 3) == [[4], [2], []]
