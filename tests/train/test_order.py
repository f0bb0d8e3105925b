"""The data order: every sample once, the same whatever the number of ranks."""

import re
from contextlib import closing
from itertools import count
from threading import Event
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import make_document, make_shape
from hypothesis import given
from hypothesis import strategies as st
from made import VOCAB, Documents, Made, message_of, plan_of
from planting import replaced, watched
from whole import Whole

from eagle31_train.common import order
from eagle31_train.common.errors import Stopped
from eagle31_train.common.order import PACKED, global_batches, schedule, share
from eagle31_train.config import TrainConfig
from eagle31_train.model import batch as batch_module
from eagle31_train.store import Store
from train import loader

LENGTHS = st.lists(st.integers(1, 100), min_size=1, max_size=60)


def loads_of(rank, ranks, split, batches, t, keep_mask, deadline=None):
    """What a rank loads. Ranks are told apart by their accelerator alone, as in a real launch."""
    accelerator = SimpleNamespace(process_index=rank, num_processes=ranks, device=torch.device("cpu"))
    return loader.load(split, batches, 0, t, 0, keep_mask, accelerator, deadline)


@given(LENGTHS, st.integers(0, 300), st.integers(0, 2**32), st.integers(0, 5))
def test_an_epoch_holds_every_sample_once_within_the_bound(lengths, room, seed, epoch):
    bound = max(lengths) + room
    batches = global_batches(lengths, bound, seed, epoch)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    for batch in batches:
        assert sum(lengths[i] for i in batch) <= bound
    if sum(lengths) < PACKED * bound:  # one window
        loads = sorted(sum(lengths[i] for i in batch) for batch in batches)
        assert len(loads) == 1 or loads[0] + loads[1] > bound, "no two batches could have been one"


def test_a_window_is_packed_by_some_batches_at_a_time(monkeypatch):
    """Not as a whole, which would put samples of one length together, nor each sample alone."""
    lengths = [1] * 500 + [40] * 500
    packed = watched(monkeypatch, order, "best_fit")
    global_batches(lengths, 40, 0, 0, [range(500), range(500, 1000)])
    assert [sum(lengths[i] for i in samples) for samples, *_ in packed] == [500, *[PACKED * 40] * 7, 52 * 40]


def test_windows_come_in_another_order_in_every_epoch_but_the_first():
    windows = [range(first, first + 4) for first in range(0, 40, 4)]
    epochs = [global_batches([10] * 40, 40, 3, epoch, windows) for epoch in range(4)]
    turns = [[batch[0] // 4 for batch in batches] for batches in epochs]
    assert turns[0] == list(range(10))
    assert len(set(map(tuple, turns))) == 4


def test_the_schedule_is_the_epochs_in_turn_cut_at_max_steps():
    lengths = [5] * 12
    epochs = [global_batches(lengths, 20, 3, epoch) for epoch in range(3)]
    every = [batch for epoch in epochs for batch in epoch]
    assert schedule(lengths, 20, 3, 3, None) == every
    assert schedule(lengths, 20, 3, 3, 7) == every[:7]
    assert schedule(lengths, 20, 3, 3, 100) == every
    assert schedule(lengths, 20, 3, 1, 9) == epochs[0]
    said = message_of(schedule, lengths, 20, 3, 10**9, None)
    assert re.match(r"train.epochs=1000000000 makes [0-9,]+ steps: set train.max_steps to at most ", said)
    assert schedule(lengths, 20, 3, 10**9, 7) == every[:7]


@given(LENGTHS, st.integers(1, 9))
def test_shares_hold_every_sample_once_and_are_balanced(lengths, parts):
    batch = list(range(len(lengths)))
    shares = share(batch, lengths, parts)
    assert len(shares) == parts
    assert sorted(i for part in shares for i in part) == batch
    loads = [sum(lengths[i] for i in part) for part in shares]
    assert max(loads) - min(loads) <= max(lengths)
    assert shares == share(batch[::-1], lengths[::-1], parts), "the order within a batch does not matter"


@pytest.mark.parametrize(
    ("slots", "dealt"),
    [([2, 60, 3, 50], [[0, 2, 3], [1]]), (None, [[0, 3], [1, 2]]), ([0, 1, 0, 0], [[0, 2], [1, 3]])],
)
def test_shares_take_equally_long_by_what_is_trained_of_each_sample(slots, dealt):
    """Long prompts with short answers beside others; by their tokens where nobody has counted."""
    assert sorted(map(sorted, share([0, 1, 2, 3], order.costs([100, 90, 80, 70], slots, 7), 2))) == dealt


def slots_apart(split, batches, slots_per_batch):
    """How many slots of a step one of two ranks has more than the other, on average."""
    t, every = TrainConfig(num_workers=1, ttt_length=3, slots_per_batch=slots_per_batch), torch.ones(VOCAB) > 0
    loads = [loads_of(rank, 2, split, batches, t, every) for rank in range(2)]
    slots = [[len(one.micro_batches[0].batch.slot_rows) for one in of_rank] for of_rank in loads]
    return np.abs(np.subtract(*slots)).mean()


def test_a_step_that_trains_some_of_its_slots_is_dealt_by_those(split, monkeypatch):
    """They come in runs, so that of two conversations of one length one may have all of them: dealt by their means, two
    ranks are 9 slots apart."""
    monkeypatch.setattr(batch_module, "STRETCH", 8)
    assert slots_apart(split, schedule(SAMPLES, 200, 5, 9, None), 40) < 4


def test_prompts_that_follow_a_drawn_slot_do_not_count_as_slots():
    """A run of drawn slots may end an answer: the prompt after it costs little all the same."""
    shape, generator, random = make_shape(), torch.Generator().manual_seed(0), np.random.default_rng(0)
    sizes = [(int(random.integers(100, 400)), int(random.integers(20, 80))) for _ in range(32)]
    documents = [make_document(shape, p + a, generator, list(range(p, p + a))) for p, a in sizes]
    batches = [list(range(first, first + 8)) for first in range(0, 32, 8)]
    assert slots_apart(Documents(documents), batches, 200) < 25


# ---------------------------------------------------------------- as it is loaded

SAMPLES = [int(length) for length in np.random.default_rng(1).integers(3, 30, 40)]
BATCHES = schedule(SAMPLES, 70, 5, 2, None)


@pytest.fixture(scope="module")
def split(tmp_path_factory):
    """A stored split in which every token of sample i is i, so that a batch shows whose it is."""
    made, folder = Made({"train": SAMPLES, "heldout": [4]}, shard_tokens=100), tmp_path_factory.mktemp("made")
    made.documents["train"] = [
        Whole.of(torch.full_like(d.tokens, index), torch.ones_like(d.loss_mask), d.top1, d.all_aux, d.all_last)
        for index, d in enumerate(made.documents["train"])
    ]
    made.plan = plan_of(made.documents, made.shard_tokens, made.states)
    made.write(folder)
    with closing(Store(folder)) as store:
        yield store.split("train")


@pytest.fixture(scope="module")
def by_one(split):
    return load_on(split, 1)


def load_on(split, ranks, workers=1):
    """What ranks load together, step by step: its number, its samples, and N_k."""
    t, steps = TrainConfig(num_workers=workers, ttt_length=3), []
    for rank in range(ranks):
        loads = loads_of(rank, ranks, split, BATCHES, t, torch.arange(VOCAB) % 7 > 0)
        for place, batch in enumerate(loads):
            if not rank:
                steps.append((batch.step, [], torch.zeros_like(batch.totals.packed)))
            for micro in batch.micro_batches:
                steps[place][1].extend(micro.batch.ids.unique_consecutive().tolist() * micro.real)
            steps[place][2].add_(batch.totals.packed)
    return [(step, sorted(samples), counts.tolist()) for step, samples, counts in steps]


@pytest.mark.parametrize("workers", [0, 1, 4])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_any_number_of_ranks_and_workers_loads_the_same_batches_in_order(split, by_one, ranks, workers):
    """And norms its loss by the same counts. How a run goes on: test_survival.py and test_profiles.py."""
    loaded = load_on(split, ranks, workers)
    assert [found[:2] for found in loaded] == [(step, sorted(batch)) for step, batch in enumerate(BATCHES, 1)]
    assert loaded == by_one


def test_a_step_has_as_many_micro_batches_as_its_conversations_fill_and_the_shortest_stands_in(split):
    """Fewer would each be larger than what `train.gradient_accumulation_steps` was chosen for."""
    t, step = TrainConfig(num_workers=1, ttt_length=3, gradient_accumulation_steps=5), [0, 1, 2]
    loads = [next(loads_of(rank, 2, split, [step], t, torch.ones(VOCAB) > 0)).micro_batches for rank in range(2)]
    parts = [(micro.batch.ids.unique().tolist(), micro.real) for of_rank in loads for micro in of_rank]
    shortest = min(step, key=lambda i: SAMPLES[i])
    assert [real for _, real in parts] == [True, True, True, False]
    assert parts[-1][0] == [shortest]
    assert sorted(i for ids, real in parts if real for i in ids) == step


@pytest.mark.parametrize(("slow", "comes"), [("wait_for", None), ("wait_for", 8), ("read_all", 15)])
def test_a_run_that_is_told_to_stop_gives_up_shards_that_do_not_come_in_time_and_no_slow_read(
    split, monkeypatch, slow, comes
):
    clock, looks, began, arrived, ended = [0.0], count(1), Event(), Event(), Event()
    deadline = SimpleNamespace(reason=None, stopped=Stopped)
    monkeypatch.setattr(loader, "time", SimpleNamespace(monotonic=lambda: clock[0], perf_counter=lambda: clock[0]))

    @replaced(monkeypatch, split, slow)
    def held(right, samples):
        began.set()
        arrived.wait(20)
        ended.set()
        return right(samples)

    @replaced(monkeypatch, loader, "wait")
    def wait(right, readings, timeout):
        look = next(looks)
        began.wait(20)
        clock[0] += loader.GRACE / 4
        if look == 6:
            deadline.reason = "SIGTERM"
        if look == comes:
            arrived.set()
            return right(readings)
        return right(readings, 0 if look < 20 else timeout)

    t, every = TrainConfig(num_workers=0, ttt_length=3), torch.ones(VOCAB) > 0
    loads = loads_of(0, 1, split, [[0, 1]], t, every, deadline=deadline)
    if comes:
        assert next(loads).samples == [0, 1]
    else:
        with pytest.raises(Stopped):
            next(loads)
        assert next(looks) == 11, "four looks after the one at which it was told to"
        assert not ended.is_set(), "nor does it wait for the read to end"
        arrived.set()
