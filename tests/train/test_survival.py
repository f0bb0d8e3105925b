"""A run that is stopped, killed or short of disk ends with every bit of the run that nobody stopped."""

import random
import threading
from functools import cache, partial
from unittest.mock import Mock

import pytest
from launching import arguments
from surviving import calling, death, dies, differences, ends_well, lines, tell, working
from watching import noted

from eagle31_train.common.errors import Stopped

SHORT, STOPS, LONG = 18, (4, 9, 14), 200


def recipe(steps):
    return [f"train.max_steps={steps}", "train.epochs=1000", "train.eval_every=15"]


# Muon's moments, and AdamW's of what is no matrix.
MUON = ("train.optimizer=muon", "train.weight_decay=0.1", "drafter.share_embedding=false")


@pytest.fixture(scope="module")
def whole(copy_of, tmp_path_factory):
    """A function: the run of so many steps that nobody stops."""

    @cache
    def of(steps, *more):
        return go_on(copy_of(tmp_path_factory.mktemp("whole")), steps, "train.checkpoint_every=1000", *more)

    return of


def go_on(run, steps, *more):
    with noted(run.folder / "ledger"):
        return run.fit(*recipe(steps), *more)


@pytest.mark.parametrize("more", [(), MUON], ids=["AdamW", "Muon"])
def test_a_run_stopped_three_times_ends_bit_for_bit_the_same(new_run, whole, more):
    run = new_run()
    for begun, step in zip((0, *STOPS), STOPS, strict=False):
        told = calling("train.trainer.accumulate", tell, "after", step - begun - 1)
        with (
            told,
            pytest.raises(Stopped, match=f"stopped by SIGTERM: saved after step {step} of {SHORT}; run the same"),
        ):
            go_on(run, SHORT, *more)
        assert run.saved()[-1] == step
        assert not (run.train / "manifest.json").exists()
    assert not differences(go_on(run, SHORT, *more), whole(SHORT, *more))


# ---------------------------------------------------------------- killed

# What a run with a checkpoint every other step calls, at least so often in four steps; and what it calls at its start.
STEPS = (
    ("train.loader.build_batch", 4),  # in another thread, ahead
    ("train.trainer.accumulate", 4),
    ("train.parallel.Parallel.update", 4),
    ("train.metrics.append", 8),
    ("train.trainer.take_snapshot", 2),
    ("train.checkpoint.Saver.save", 2),
    ("train.windows.Usage.release", 3),
)
START = (("train.prepare.claim", 1), ("train.tracking.record_launch", 1), ("train.checkpoint.load", 1))
OPERATIONS = 132  # of the file system, in the first two saves of a run


KILLS = [
    (SHORT, 0, ["save", "step", "outside"]),  # in the middle of a row of metrics: test_metrics.py
    pytest.param(LONG, 1, ["save"] * 20 + ["step"] * 16 + ["start"] * 4 + ["outside"] * 10, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("steps", "seed", "ways"), KILLS, ids=["three times", "fifty times"])
def test_a_run_killed_again_and_again_ends_bit_for_bit_the_same(new_run, whole, tmp_path, steps, seed, ways):
    """In all these ways, in random order, to go on by the same command. No launch lives for more than four steps, so
    that there is something left to be killed."""
    assert 4 * len(ways) <= steps
    run, output, chosen, ways = new_run(), tmp_path / "output", random.Random(seed), list(ways)
    words, ledger = arguments(run, *recipe(steps), "train.checkpoint_every=2"), run.folder / "ledger"
    launch = partial(working, "train", words, output, ledger=str(ledger))
    chosen.shuffle(ways)
    for way in ways:
        calls = {"step": STEPS, "start": START if run.saved() else START[:-1]}  # the last finds a checkpoint
        dies(launch, partial(lines, ledger), chosen, output, **death(way, chosen, calls, OPERATIONS))
    ends_well(launch(), output)
    assert not differences(run, whole(steps))
    assert lines(ledger) > steps, "no step was done twice: nothing was lost by a kill"


@pytest.mark.parametrize("more", [(), MUON], ids=["AdamW", "Muon"])
def test_a_checkpoint_is_of_its_step_however_late_it_is_written(new_run, whole, more):
    """The save of step 8 waits until step 11 is done; in step 13 the run is interrupted."""
    run, done = new_run(), threading.Event()
    slow = calling("train.checkpoint._write", done.wait, "before", 1)
    pressed = calling("train.trainer.Trainer.log", Mock(side_effect=KeyboardInterrupt), "after", 13)
    with slow, calling("train.metrics.Reporter.log", done.set, "after", 11), pressed, pytest.raises(KeyboardInterrupt):
        go_on(run, SHORT, "train.checkpoint_every=8", *more)
    assert run.saved() == [8]
    assert not differences(go_on(run, SHORT, *more), whole(SHORT, *more))
