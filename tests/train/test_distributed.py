"""Whole runs by real launches, as a user starts them, each against the same run by one process: on the CPU."""

import re

import pytest
from launching import finish
from pipeline import assert_close

# Batches of one to four samples in four parts: empty parts, and a sample that trains nothing (LENGTHS has one).
RECIPE = ["train.batch_tokens=40", "train.epochs=2", "train.eval_every=5"]
LONG = ["train.max_steps=100", "train.epochs=25", "train.eval_every=50"]
OURS = re.compile(r"train: |step \d+: held-out loss |$")  # how the lines begin that a user is to see
BAR = re.compile(r"\s*$|train: +\d+%\|.*\| \d+/\d+ \[")


def assert_same_run(run, one, near):
    """Every row, every number of it to `near`, and those of the first step to 1e-6."""
    assert [row.keys() for row in run.rows()] == [row.keys() for row in one.rows()]
    for ours, theirs in zip(run.rows(), one.rows(), strict=True):
        tolerance = 1e-6 if theirs["step"] == 1 else near
        for name in theirs:
            assert ours[name] == pytest.approx(theirs[name], rel=tolerance, abs=1e-9), (theirs["step"], name)


def assert_quiet(done):
    """A user sees the bar and our lines, each once, and nothing that libraries tell one another.

    But for what DeepSpeed says as accelerate's launcher imports it, before any process of ours is there.
    """
    said = [line for line in done.stdout.splitlines() if "real_accelerator.py" not in line]
    assert [line for line in said if not OURS.match(line)] == []
    assert len([line for line in said if " steps, " in line]) == 1
    assert [line for line in re.split(r"[\r\n]+", done.stderr) if not BAR.match(line)] == []


def test_two_processes_train_what_one_trains_and_say_so_once(new_run):
    run, one = new_run(), new_run().fit(*RECIPE)
    done = finish(
        "zero2", run, *RECIPE, "train.gradient_accumulation_steps=2", "train.activation_checkpointing=true"
    )  # which changes no bit
    assert_same_run(run, one, 2e-6)
    assert_close(run.weights(), one.weights(), 5e-6)
    assert_quiet(done)


# ---------------------------------------------------------------- slow
