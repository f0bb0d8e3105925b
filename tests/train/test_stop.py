"""SIGTERM and time limits: a run saves, leaves with a status of its own, and goes on as if it had never left."""

import json
import os
import re
import signal
from itertools import product
from types import SimpleNamespace

import pytest
from launching import ROOT, TRAIN, arguments, command, environment, execute
from made import message_of
from pipeline import assert_close
from surviving import calling, launched, lines, tell, wait_until, working
from watching import updates_of

from eagle31_train import compose
from eagle31_train.common.console import STOPPED
from eagle31_train.common.errors import Interrupted, Stopped
from eagle31_train.extract import extract
from eagle31_train.store import Store
from eagle31_train.store.backends.base import LocalStorage
from eagle31_train.store.stream import read_consumed
from eagle31_train.store.writer import StoreWriter
from train import deadline

STEPS = 12
RECIPE = ["train.epochs=10000", "train.eval_every=1000000", "train.checkpoint_every=1000000"]
SHORT, ENDLESS = [f"train.max_steps={STEPS}", *RECIPE], ["train.max_steps=20000", *RECIPE]


def stopped_after(run, text, why):
    """The step after which it saved, said so in one line, and did nothing more."""
    (line,) = (line for line in text.splitlines() if "train: stopped" in line)
    said = r"train: stopped by (.+): saved after step (\d+) of \d+; run the same command again to resume$"
    match = re.search(said, line)
    assert match[1] == why
    step = int(match[2])
    assert run.saved() == [step]
    assert lines(run.train / "metrics.jsonl") == step
    assert not (run.train / "manifest.json").exists()
    return step


# ---------------------------------------------------------------- one process


def test_a_run_that_its_time_limit_stops_again_and_again_ends_the_same(new_run, by_one, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(deadline, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    run = new_run()

    def half_an_hour():
        clock[0] += 1800

    for step in (5, 10):
        half, whole_hour = (calling("train.trainer.accumulate", half_an_hour, "after", number) for number in (2, 4))
        text = f"stopped by train.time_limit: saved after step {step} of {STEPS};"
        with half, whole_hour, pytest.raises(Stopped, match=text):
            run.fit(*SHORT, "train.time_limit=1h")
    whole = by_one(*SHORT)
    assert_close(run.fit(*SHORT, "train.time_limit=1h").weights(), whole.weights(), 0)
    assert run.rows() == whole.rows()


def press():
    os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_ends_the_step_and_saves(new_run, by_one, capsys):
    """Twice at once, as a launcher's process gets it: from the terminal and from its launcher."""
    run = new_run()
    pressed = calling("train.trainer.accumulate", lambda: (press(), press()), "before", 5)
    with pressed, pytest.raises(Interrupted) as stopped:
        run.fit(*SHORT)
    assert stopped_after(run, str(stopped.value), "Ctrl-C") == 6
    assert capsys.readouterr().err.count("train: will save and stop after the next step; press Ctrl-C again") == 1
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert_close(run.fit(*SHORT).weights(), by_one(*SHORT).weights(), 0)


@pytest.mark.parametrize(("path", "call"), [("train.prepare.restore", 1), ("train.trainer.accumulate", 5)])
def test_ctrl_c_before_the_first_step_or_again_later_ends_training_at_once(new_run, monkeypatch, path, call):
    clock, run = [0.0], new_run()
    monkeypatch.setattr(deadline, "time", SimpleNamespace(monotonic=lambda: clock[0]))

    def press_again():
        press()
        clock[0] += deadline.SAME + 0.1
        press()

    with calling(path, press_again, "before", call), pytest.raises(KeyboardInterrupt):
        run.fit(*SHORT)
    assert run.saved() == []
    assert (clock[0] > 0) == (call > 1), "one was enough, or two were needed"


def test_a_stopped_run_ends_at_its_checkpoint_where_that_is_asked(new_run, by_one, capsys):
    """And is told of, also where it could have stopped early."""
    run, words, finish = new_run(), [*SHORT, "train.early_stop=99"], "train.finish=true"
    assert "needs a complete checkpoint" in message_of(run.fit, *words, finish)
    with calling("train.trainer.accumulate", tell, "before", 5), pytest.raises(Stopped):
        run.fit(*words)
    weights = run.fit(*words, finish).weights()
    assert (run.manifest()["steps"], run.manifest()["checkpoint"]) == (6, "checkpoints/step-000006")
    assert run.manifest()["planned"] > 6
    assert run.manifest()["heldout"]["conversations"] > 0
    assert lines(run.train / "metrics.jsonl") == 7, "six steps, and the evaluation of the last"
    assert_close(run.fit(*words).weights(), weights, 0)
    (run.train / "manifest.json").unlink()
    run.fit(*words, finish)
    assert lines(run.train / "metrics.jsonl") == 7, "it has been evaluated there"
    said = capsys.readouterr().out
    assert "train: up to date" in said
    assert "it was ended after step 6 of " in said
    run.fit(*words, finish)
    assert "it was ended" not in capsys.readouterr().out, "that is what was asked for"
    assert not compose.load_config([], run.train / "config.yaml").train.finish
    (run.train / "manifest.json").unlink()  # to train on after all
    assert_close(run.fit(*words).weights(), by_one(*SHORT).weights(), 0)


def test_extraction_waits_no_more_for_a_run_that_was_ended_at_its_checkpoint(new_run):
    run, options = new_run(), ["store.follow=true", "train.window_tokens=20", "train.epochs=1"]
    storage = run.unfinish(*options)
    run.stopped(3, *options)
    fingerprint = Store(storage, follow=True).fingerprint
    assert not read_consumed(storage, fingerprint).finished
    run.fit(*options, "train.finish=true")
    assert read_consumed(storage, fingerprint).finished


def test_a_run_that_ends_at_its_checkpoint_fetches_nothing(new_run, monkeypatch):
    run, uses = new_run().stopped(3, *SHORT), []
    monkeypatch.setattr(LocalStorage, "prefetch", lambda _, some: uses.extend(some))
    run.fit(*SHORT, "train.finish=true")
    assert uses == []


FOLLOW = ["store.follow=true", "train.window_tokens=40", "train.max_steps=20"]


THERE = {"the store": None, "its held-out split": [], "what first weights need": ["heldout"]}  # of which splits


@pytest.mark.parametrize("waits_for", THERE)
def test_sigterm_ends_a_run_that_waits_before_its_first_step(copy_of, new_run, tmp_path, monkeypatch, waits_for):
    run, splits, more = new_run(), THERE[waits_for], [*FOLLOW, "store.patience=1"]
    (run.folder / "run" / "store").rename(tmp_path / "store")
    if splits is not None:
        monkeypatch.setattr(StoreWriter, "wait_for_quota", lambda self, shard, _: shard.split in splits)
        extract(run.config())
    if waits_for == "what first weights need":  # from EAGLE 3 to 3.1, some of the training split
        eagle3 = copy_of(tmp_path / "eagle3").fit("drafter.fc_norm=false", "drafter.norm_output=false")
        more.append(f"train.init_from={eagle3.folder / 'run'}")
    told = calling("eagle31_train.store.reader.wait", tell, "before", 1)
    with told, pytest.raises(Stopped, match="stopped by SIGTERM while waiting for the store; run the same command"):
        run.fit(*more)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, STOPPED)])
def test_a_run_that_waits_for_a_shard_is_ended_by_one_signal(new_run, tmp_path, monkeypatch, number, status):
    run, output = new_run(), tmp_path / "output"
    (run.folder / "run" / "store").rename(tmp_path / "store")
    monkeypatch.setattr(StoreWriter, "wait_for_quota", lambda self, shard, _: shard.number < 4)
    extract(run.config())
    with working("train", arguments(run, *FOLLOW, "store.patience=100000"), output, grace=0.0) as process:
        wait_until(lambda: "waiting for shards/train-" in output.read_text(), process.is_alive)
        os.kill(process.pid, number)
        process.join()
    assert process.exitcode == status
    if number == signal.SIGTERM:
        assert "train: stopped by SIGTERM while waiting for data after step " in output.read_text().splitlines()[-1]


# ---------------------------------------------------------------- two processes


@pytest.mark.slow
def test_a_rank_that_is_told_to_stop_stops_the_other_after_the_same_step(new_run, by_one):
    run = new_run()
    disturbance = {"ledger": str(run.folder / "ledger"), "tell_at": [1, 5]}
    words = [*command("ddp", 2, ROOT / "tests" / "surviving.py"), *arguments(run, *SHORT)]
    done = execute(words, "ddp", DISTURB=json.dumps(disturbance))
    assert done.returncode != 0
    assert stopped_after(run, done.stderr, "another rank") == 6
    assert {len(updates_of(run.folder / f"ledger.{rank}")) for rank in (0, 1)} == {6}
    # When the first is gone, the launcher sends a SIGTERM to the other, which is leaving as well.
    assert {"75"} <= set(re.findall(r"exitcode *: (-?\d+)", done.stderr)) <= {"75", "-15"}
    assert_close(run.fit(*SHORT).weights(), by_one(*SHORT).weights(), 1e-5)


OURS = "eagle31_train.launcher"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("profile", "processes", "launcher", "kill", "number", "status"),
    [
        *product(("ddp", "zero2"), [2], [[]], (os.kill, os.killpg), [signal.SIGTERM], [None]),
        *((profile, 2, [OURS], os.kill, signal.SIGTERM, STOPPED) for profile in ("ddp", "zero2")),
        ("cpu", 1, [OURS], os.kill, signal.SIGTERM, STOPPED),
        ("ddp", 2, [], os.killpg, signal.SIGINT, 1),
        *((profile, n, [OURS], os.killpg, signal.SIGINT, 130) for profile, n in (("ddp", 2), ("cpu", 1))),
    ],
)
def test_a_launch_that_is_sent_a_signal_saves_and_leaves_no_process(
    new_run, profile, processes, launcher, kill, number, status
):
    """The launcher alone is, as by Kubernetes, or every process, as by Slurm and the terminal, whose signal launchers
    pass on, too. Our launcher ends as the training does; others end with some status but 0."""
    run = new_run()
    words = [*command(profile, processes, TRAIN, *launcher), *arguments(run, *ENDLESS)]
    with launched(words, environment(profile)) as process:
        wait_until(lambda: lines(run.train / "metrics.jsonl") > 3, lambda: process.poll() is None)
        kill(process.pid, number)
        _, said = process.communicate()
        with pytest.raises(ProcessLookupError):
            os.killpg(process.pid, 0)
    assert stopped_after(run, said, "SIGTERM" if number == signal.SIGTERM else "Ctrl-C") > 3
    assert not launcher or ("Traceback" not in said and "exitcode" not in said)
    assert process.returncode == status if status else process.returncode != 0
