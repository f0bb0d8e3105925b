"""SIGTERM and time limits: a run saves, leaves with a status of its own, and goes on as if it had never left."""

import json
import os
import re
from types import SimpleNamespace
from unittest.mock import patch

import pytest
from launching import ROOT, arguments, launch
from pipeline import assert_close
from surviving import calling, training, wait_until
from watching import updates_of

from eagle31_train.cli import STOPPED
from eagle31_train.errors import Stopped
from train import checkpoint, deadline

STEPS = 24
RECIPE = ["train.epochs=10000", "train.eval_every=1000000", "train.checkpoint_every=1000000"]
SHORT, ENDLESS = [f"train.max_steps={STEPS}", *RECIPE], ["train.max_steps=20000", *RECIPE]


def saved(run):
    return [checkpoint.step_of(path) for path in checkpoint.in_order(run.checkpoints)]


def rows(run):
    file = run.train / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


@pytest.fixture(scope="module")
def whole(copy_of, tmp_path_factory):
    with patch.dict(os.environ, ACCELERATE_USE_CPU="true"):
        return copy_of(tmp_path_factory.mktemp("whole")).fit(*SHORT)


def stopped_after(run, text, why):
    """The step after which it saved, said so in one line, and did nothing more."""
    (line,) = (line for line in text.splitlines() if "train: stopped" in line)
    match = re.search(r"train: stopped by (.+): saved after step (\d+) of \d+; the same command goes on$", line)
    assert match[1] == why
    step = int(match[2])
    assert saved(run) == [step]
    assert rows(run) == step
    assert not (run.train / "manifest.json").exists()
    return step


# ---------------------------------------------------------------- one process


def test_sigterm_saves_and_leaves_with_status_75(new_run, tmp_path):
    run, output = new_run(), tmp_path / "output"
    with training(arguments(run, *ENDLESS), output) as process:
        wait_until(lambda: rows(run) > 3, process.is_alive)
        process.terminate()
        process.join()
    assert process.exitcode == STOPPED == 75
    assert stopped_after(run, output.read_text(), "SIGTERM") > 3


def test_a_run_that_its_time_limit_stops_again_and_again_ends_the_same(new_run, whole, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(deadline, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    run = new_run()

    def half_an_hour():
        clock[0] += 1800

    for step in (9, 18):
        half, whole_hour = (calling("train.trainer.accumulate", half_an_hour, "after", number) for number in (4, 8))
        text = f"stopped by train.time_limit: saved after step {step} of {STEPS};"
        with half, whole_hour, pytest.raises(Stopped, match=text):
            run.fit(*SHORT, "train.time_limit=1h")
    assert_close(run.fit(*SHORT, "train.time_limit=1h").weights(), whole.weights(), 0)
    assert run.rows() == whole.rows()


# ---------------------------------------------------------------- two processes


@pytest.mark.slow
def test_a_rank_that_is_told_to_stop_stops_the_other_after_the_same_step(new_run, whole):
    run = new_run()
    disturbance = {"ledger": str(run.folder / "ledger"), "tell_at": [1, 5]}
    done = launch("ddp", run, *SHORT, script=ROOT / "tests" / "surviving.py", DISTURB=json.dumps(disturbance))
    assert done.returncode != 0
    assert stopped_after(run, done.stderr, "another rank") == 6
    assert {len(updates_of(run.folder / f"ledger.{rank}")) for rank in (0, 1)} == {6}
    # When the first is gone, the launcher sends a SIGTERM to the other, which is leaving as well.
    assert {"75"} <= set(re.findall(r"exitcode *: (-?\d+)", done.stderr)) <= {"75", "-15"}
    assert_close(run.fit(*SHORT).weights(), whole.weights(), 1e-5)
