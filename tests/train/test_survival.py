"""A run that is stopped, killed or short of disk ends with every bit of the run that nobody stopped."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import torch
from dying import Full
from launching import ROOT, environment, launch
from pipeline import LENGTHS, flip_bit, message_of, options
from safetensors.torch import load_file
from surviving import START, STEPS, InSaves, calling, saves_on, tell, training, wait_until
from watching import noted, updates_of

from eagle31_train.errors import Stopped
from eagle31_train.store.sealed import unseal
from train import checkpoint, jsonl, parallel, trainer
from train.metrics import Reporter

SHORT, STOPS = 40, (7, 20, 33)
LONG, LONG_STOPS = 200, (37, 100, 163)
TIMED = ("seconds", "waited", "files")  # a checkpoint's own manifest, which is listed, says seconds too
TENSORS = ("model.safetensors", "optimizer.safetensors")
NO_SPACE = "could not be written (No space left on device)"


def recipe(steps):
    return [f"train.max_steps={steps}", "train.epochs=1000", "train.eval_every=15"]


@pytest.fixture(scope="module")
def whole(copy_of, tmp_path_factory):
    """The run of so many steps that nobody stops."""
    done = {}

    def of(steps):
        if steps not in done:
            run = copy_of(tmp_path_factory.mktemp("whole"))
            done[steps] = go_on(run, steps, "train.checkpoint_every=1000")
        return done[steps]

    return of


def go_on(run, steps, *more):
    with noted(run.folder / "ledger"):
        return run.fit(*recipe(steps), *more)


def result(run):
    """All that must not depend on stops: what was trained, losses, rates, weights, moments, totals."""
    files = {path.name: path.read_bytes() for path in run.newest().iterdir()}
    assert len(files) == 4
    manifest = unseal(files.pop("manifest.json"))
    return {
        "updates": updates_of(run.folder / "ledger"),
        "rows": (run.train / "metrics.jsonl").read_bytes(),
        "state": timeless(manifest["extra"]["state"]),
        "manifest": timeless(run.manifest()),
        **files,
    }


def timeless(facts):
    return {name: value for name, value in facts.items() if name not in TIMED}


def differences(run, whole):
    ours, theirs = result(run), result(whole)
    return {name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)}


def saved(run):
    return [checkpoint.step_of(path) for path in checkpoint.in_order(run.checkpoints)]


def test_the_run_that_nobody_stops_trains_every_sample_once_per_epoch(whole):
    """What the others are compared with."""
    trained, size = updates_of(whole(SHORT).folder / "ledger"), len(LENGTHS["train"])
    assert len(trained) == SHORT
    order = [i for samples in trained for i in samples]
    for first in range(0, len(order) // size * size, size):
        assert sorted(order[first : first + size]) == list(range(size))
    assert order[:size] != order[size : 2 * size]


# ---------------------------------------------------------------- stopped


def stop_after(run, steps, step, begun):
    """Train until a SIGTERM that comes in time to stop after `step`; `begun` steps were done before."""
    told = calling("train.trainer.accumulate", tell, "after", step - begun - 1)
    with told, pytest.raises(Stopped, match=f"stopped by SIGTERM: saved after step {step} of {steps}; the same"):
        go_on(run, steps)
    assert saved(run)[-1] == step
    assert not (run.train / "manifest.json").exists()


def stop_at(run, whole, steps, stops):
    for begun, step in zip((0, *stops), stops, strict=False):
        stop_after(run, steps, step, begun)
    assert not differences(go_on(run, steps), whole(steps))


def test_a_run_stopped_three_times_ends_bit_for_bit_the_same(new_run, whole):
    stop_at(new_run(), whole, SHORT, STOPS)


@pytest.mark.slow
@pytest.mark.parametrize("stops", [*((step,) for step in LONG_STOPS), LONG_STOPS], ids=str)
def test_200_steps_that_are_stopped_end_bit_for_bit_the_same(new_run, whole, stops):
    stop_at(new_run(), whole, LONG, stops)


def test_no_step_draws_from_a_global_generator(new_run, monkeypatch):
    """Why no checkpoint holds random states."""
    accumulate, states = trainer.accumulate, []

    def watched(*arguments):
        states.append((random.getstate(), torch.get_rng_state().tolist(), np.random.get_state()[1].tolist()))
        return accumulate(*arguments)

    monkeypatch.setattr(trainer, "accumulate", watched)
    new_run().fit("train.eval_every=2", "train.checkpoint_every=2", "train.slots_per_batch=12", "train.precision=bf16")
    assert len(states) == 12
    assert all(state == states[0] for state in states)


# ---------------------------------------------------------------- killed


def start(run, steps, output, *more, **disturbance):
    """The run in a process of its own."""
    arguments = options(run.folder, f"target.path={run.extracted / 'target'}", *recipe(steps), *more)
    return training(arguments, output, ledger=str(run.folder / "ledger"), **disturbance)


@pytest.fixture(scope="module")
def operations(copy_of, tmp_path_factory):
    """What the first two saves of a run do to the file system, as a number."""
    run = copy_of(tmp_path_factory.mktemp("operations"))
    with patch.dict(os.environ, ACCELERATE_USE_CPU="true"), saves_on(InSaves()) as machine:
        run.fit("train.max_steps=4", "train.checkpoint_every=2")
    assert len(machine.counts) == 2
    return machine.counts[1]


def survive(run, whole, steps, ways, seed, operations, output):
    """Kill a run in all these ways, in random order, and go on by the same command; then let it end.

    No launch lives for more than four steps, so that there is something left to be killed.
    """
    assert 4 * len(ways) <= steps
    chosen, ledger = random.Random(seed), run.folder / "ledger"
    chosen.shuffle(ways)
    for way in ways:
        disturbance = choose(way, chosen, operations, begun=bool(saved(run)))
        wanted = lines(ledger) + chosen.randint(1, 3)
        with start(run, steps, output, "train.checkpoint_every=2", **disturbance) as process:
            if way == "outside":
                wait_until(lambda wanted=wanted: lines(ledger) >= wanted, process.is_alive)
                process.kill()
            process.join()
        assert process.exitcode == -signal.SIGKILL, (way, disturbance, output.read_text()[-3000:])
    with start(run, steps, output, "train.checkpoint_every=2") as process:
        process.join()
    assert process.exitcode == 0, output.read_text()[-3000:]
    assert not differences(run, whole(steps))
    assert lines(ledger) > steps, "no step was done twice: nothing was lost by a kill"


def choose(way, chosen, operations, begun):
    """How a launch dies by itself; `begun`: it finds a checkpoint."""
    match way:
        case "save":
            return {"kill_in_save": chosen.randrange(operations)}
        case "row":
            return {"kill_in_row": chosen.randint(1, 7)}
        case "step":
            path, most = chosen.choice(STEPS)
            return {"kill_at": (path, chosen.choice(["before", "after"]), chosen.randint(1, most))}
        case "start":
            path = chosen.choice(START if begun else START[:-1])
            return {"kill_at": (path, chosen.choice(["before", "after"]), 1)}
    return {}


def lines(file):
    return file.read_bytes().count(b"\n") if file.exists() else 0


def test_a_run_killed_in_a_save_in_a_row_and_from_outside_ends_bit_for_bit_the_same(
    new_run, whole, operations, tmp_path
):
    survive(new_run(), whole, SHORT, ["save", "row", "outside"], 0, operations, tmp_path / "output")


@pytest.mark.slow
def test_a_run_killed_fifty_times_ends_bit_for_bit_the_same(new_run, whole, operations, tmp_path):
    ways = ["save"] * 20 + ["step"] * 12 + ["row"] * 4 + ["start"] * 4 + ["outside"] * 10
    survive(new_run(), whole, LONG, ways, 1, operations, tmp_path / "output")


def of_ranks(run):
    """Rows, tensors, and the samples of each update of each of two ranks."""
    tensors = {f"{name} {key}": value for name in TENSORS for key, value in load_file(run.newest() / name).items()}
    return run.rows(), tensors, [updates_of(run.folder / f"ledger.{rank}") for rank in (0, 1)]


@pytest.mark.slow
@pytest.mark.parametrize("profile", ["ddp", "fsdp2", "zero2", "zero3"])
def test_two_processes_stopped_at_37_and_100_and_killed_after_163_end_the_same(new_run, profile):
    def launched(run, *more, **disturbance):
        script, how = ROOT / "tests" / "surviving.py", {"ledger": str(run.folder / "ledger"), **disturbance}
        return launch(profile, run, *recipe(LONG), *more, script=script, DISTURB=json.dumps(how))

    whole, run = new_run(), new_run()
    assert launched(whole).returncode == 0
    for begun, step, rank in ((0, 37, 0), (37, 100, 1)):
        done = launched(run, tell_at=[rank, step - begun - 1])
        assert f"saved after step {step} of {LONG}; the same command goes on" in done.stderr, done.stderr[-3000:]
        assert saved(run)[-1] == step
    death = ("train.checkpoint.Saver._save", "after", 1)  # which the main process alone has
    done = launched(run, "train.checkpoint_every=163", kill_at=death)
    assert f"exitcode  : {-signal.SIGKILL}" in done.stderr, done.stderr[-3000:]
    done = launched(run)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "train: going on after step 163 " in done.stdout
    (rows, tensors, updates), (their_rows, their_tensors, their_updates) = of_ranks(run), of_ranks(whole)
    assert updates == their_updates
    assert [row.keys() for row in rows] == [row.keys() for row in their_rows]
    for ours, theirs in zip(rows, their_rows, strict=True):
        for name in theirs:
            assert ours[name] == pytest.approx(theirs[name], rel=1e-6, abs=1e-6), (theirs["step"], name)
    assert tensors.keys() == their_tensors.keys()
    for name, tensor in their_tensors.items():
        torch.testing.assert_close(tensors[name], tensor, rtol=0, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


# ---------------------------------------------------------------- saved in the background


def stop_after_a_slow_save(run):
    """The save of step 10 waits until step 14 is done; in step 16 the run is stopped."""
    log, done = Reporter.log, threading.Event()

    def logged(self, step, values):
        log(self, step, values)
        if step == 14:
            done.set()
        if step == 16:
            raise KeyboardInterrupt

    slow = calling("train.checkpoint._write", done.wait, "before", 1)
    with slow, patch.object(Reporter, "log", logged), pytest.raises(KeyboardInterrupt):
        go_on(run, SHORT, "train.checkpoint_every=10")
    assert saved(run) == [10]
    return run


def test_a_checkpoint_is_of_its_step_however_late_it_is_written(new_run, whole):
    assert not differences(go_on(stop_after_a_slow_save(new_run()), SHORT), whole(SHORT))


@pytest.mark.slow
def test_a_checkpoint_that_saw_later_weights_would_be_found(new_run, whole):
    to = torch.Tensor.to
    with patch.object(torch.Tensor, "to", lambda self, *rest, copy=False, **how: to(self, *rest, **how)):
        run = stop_after_a_slow_save(new_run())
    assert differences(go_on(run, SHORT), whole(SHORT)) > {*TENSORS, "rows"}


# ---------------------------------------------------------------- stopped behind a checkpoint, for copying


@pytest.fixture(scope="module")
def stopped(copy_of, tmp_path_factory):
    """A run with checkpoints after steps 20 and 30 of 40, stopped after step 35."""
    run, log = copy_of(tmp_path_factory.mktemp("stopped")), Reporter.log

    def stop(self, step, values):
        log(self, step, values)
        if step == 35:
            raise KeyboardInterrupt

    alone, stopping = patch.dict(os.environ, ACCELERATE_USE_CPU="true"), patch.object(Reporter, "log", stop)
    with alone, stopping, pytest.raises(KeyboardInterrupt):
        go_on(run, SHORT, "train.checkpoint_every=10")
    assert saved(run) == [20, 30]
    return run


@pytest.fixture
def copy(stopped, new_run):
    run = new_run()
    shutil.rmtree(run.folder)
    shutil.copytree(stopped.folder, run.folder)
    return run


def one_step_late(split, batches, done, *rest):
    return LOAD(split, [*batches[:done], *batches[done + 1 :], batches[-1]], done, *rest)


def one_step_early(split, batches, done, *rest):
    return LOAD(split, [*batches[:done], *batches[done - 1 : -1]], done, *rest)


def no_moments(self, moments, updates):
    self.updates = updates


LOAD, RATE = trainer.load, trainer.learning_rate
LEARNT = {"rows", *TENSORS}
MISTAKES = {
    "none": (jsonl, "math", jsonl.math, set()),
    "moments are forgotten": (parallel.Parallel, "set_moments", no_moments, LEARNT),
    "AdamW counts anew": (parallel.Parallel, "_count", lambda *_: torch.tensor(0.0), LEARNT),
    "the data goes on one step late": (trainer, "load", one_step_late, {*LEARNT, "updates"}),
    "the data goes on one step early": (trainer, "load", one_step_early, {*LEARNT, "updates"}),
    "the schedule is one step late": (trainer, "learning_rate", lambda step, *rest: RATE(step - 1, *rest), LEARNT),
    "rows past the checkpoint stay": (jsonl.Rows, "cut", lambda self, step, *_: step, {"rows"}),
}


@pytest.mark.parametrize(("owner", "name", "mistake", "found"), MISTAKES.values(), ids=MISTAKES.keys())
def test_a_mistake_in_resuming_is_found(copy, whole, monkeypatch, owner, name, mistake, found):
    monkeypatch.setattr(owner, name, mistake)
    different = differences(go_on(copy, SHORT), whole(SHORT))
    assert different >= found
    assert bool(different) == bool(found), different


@pytest.mark.parametrize("name", ["model.safetensors", "manifest.json"])
def test_a_run_goes_on_from_the_checkpoint_before_a_damaged_one(copy, whole, capsys, name):
    damaged = copy.checkpoints / "step-000030"
    flip_bit(damaged / name)
    go_on(copy, SHORT)
    printed = capsys.readouterr().out
    (said,) = (line for line in printed.splitlines() if " is not used: " in line)
    assert said.startswith(f"checkpoint {damaged} is not used: {damaged / name} ")
    assert f"train: going on after step 20 ({copy.checkpoints / 'step-000020'})" in printed
    assert not differences(copy, whole(SHORT))


@pytest.mark.slow
@pytest.mark.parametrize("name", TENSORS)
def test_a_damaged_checkpoint_that_were_used_would_be_seen(copy, whole, monkeypatch, name):
    """What stands above would fail if damage were not looked for."""
    flip_bit(copy.checkpoints / "step-000030" / name)
    monkeypatch.setattr(checkpoint, "damage", lambda *_: None)
    assert differences(go_on(copy, SHORT), whole(SHORT)) >= {name}


# ---------------------------------------------------------------- a full disk

FULL = ["train.max_steps=12", "train.eval_every=5", "train.checkpoint_every=3"]


@pytest.fixture(scope="module")
def twelve(copy_of, tmp_path_factory):
    """A run of four saves that nothing happens to; and of each of its saves the operations that write files."""
    run = copy_of(tmp_path_factory.mktemp("twelve"))
    with patch.dict(os.environ, ACCELERATE_USE_CPU="true"), saves_on(InSaves()) as machine:
        run.fit(*FULL)
    assert saved(run) == [9, 12]
    saves = [range(first, machine.names.index("os.rename", first)) for first in [0, *machine.counts[:-1]]]
    writing = [[at for at in save if machine.names[at] in ("open", "write", "fsync")] for save in saves]
    return SimpleNamespace(bits=bits(run), writing=writing)


def bits(run):
    return [(run.train / "metrics.jsonl").read_bytes(), *((run.newest() / name).read_bytes() for name in TENSORS)]


def save_into_a_full_disk(run, twelve, capsys, number, at):
    """No room for one operation of the save of that number: it is said, and that is all."""
    with saves_on(InSaves(at, Full())):
        run.fit(*FULL)
    (line,) = (line for line in capsys.readouterr().out.splitlines() if NO_SPACE in line)
    assert line.startswith(f"checkpoint {run.checkpoints}/step-{3 * number:06d} {NO_SPACE}; it takes ")
    older = run.checkpoints / f"step-{3 * number - 3:06d}" if number > 1 else "the beginning"
    assert line.endswith(f"the next checkpoint tries again; a stop now would go back to {older}")
    assert saved(run) == [3 * other for other in (1, 2, 3, 4) if other != number][-2:]
    assert bits(run) == twelve.bits


def end_in_a_full_disk(run, twelve, at):
    """No room for one operation of the last save: one line says so, and the same command finishes the run."""
    with saves_on(InSaves(at, Full())):
        message = message_of(run, *FULL)
    assert message.startswith(f"{run.checkpoints / 'step-000012'} {NO_SPACE}; it takes ")
    assert message.endswith(f"the same command again, which goes on from {run.checkpoints / 'step-000009'}")
    assert saved(run) == [6, 9]
    assert not (run.train / "manifest.json").exists()
    assert bits(run.fit(*FULL)) == twelve.bits


def some(items, number):
    return random.Random(0).sample(items, number)


def test_a_run_goes_on_when_a_save_finds_the_disk_full_and_ends_where_it_must_be_saved(new_run, twelve, capsys):
    save_into_a_full_disk(new_run(), twelve, capsys, 2, *some(twelve.writing[1], 1))
    end_in_a_full_disk(new_run(), twelve, *some(twelve.writing[3], 1))


@pytest.mark.slow
def test_so_wherever_in_a_save_the_disk_is_full(new_run, twelve, capsys):
    for number in (1, 2, 3):
        for at in some(twelve.writing[number - 1], 10):
            save_into_a_full_disk(new_run(), twelve, capsys, number, at)
    for at in some(twelve.writing[3], 10):
        end_in_a_full_disk(new_run(), twelve, at)


SMALL_DISK = """
mount -t tmpfs -o size={size} none {train} || exit 99
head -c {ballast} /dev/zero > {train}/ballast
$TRAIN; echo "status $?"
ls -A {train}/checkpoints
rm {train}/ballast
$TRAIN; echo "status $?"
cp -r {train}/. {copy}
"""


@pytest.mark.slow
def test_a_disk_that_is_really_full_ends_with_status_2_and_later_with_0(new_run, twelve, tmp_path):
    """On a disk in memory that holds one checkpoint and a half."""
    run, copy = new_run(), new_run().train
    size = sum(len(content) for content in twelve.bits[1:])
    for folder in (run.train, copy):
        folder.mkdir()
    script = SMALL_DISK.format(size=8 * size, ballast=6 * size + size // 2, train=run.train, copy=copy)
    arguments = options(run.folder, f"target.path={run.extracted / 'target'}", *FULL)
    train = " ".join([sys.executable, str(ROOT / "train.py"), *arguments])
    done = subprocess.run(
        ["unshare", "--map-root-user", "--mount", "sh", "-c", script],
        cwd=ROOT,
        env=environment("one", TRAIN=train),
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    if done.returncode == 99 or "unshare" in done.stderr:
        pytest.skip(f"nobody but root may mount here: {done.stderr}")
    lines = done.stdout.splitlines()
    assert [line for line in lines if line.startswith("status ")] == ["status 2", "status 0"], done.stderr
    assert lines[lines.index("status 2") + 1] == "step-000003"
    assert "going on after step 3 " in done.stdout
    shutil.rmtree(run.train)
    copy.rename(run.train)
    assert bits(run) == twelve.bits


# ---------------------------------------------------------------- for long


def soak(run, output, steps, every, *more, **disturbance):
    """What a run holds, every so many steps: bytes of memory, open files, threads."""
    held = output.with_name("held")
    more = [f"train.max_steps={steps}", "train.epochs=1000000", "train.num_workers=2", *more]
    arguments = options(run.folder, f"target.path={run.extracted / 'target'}", *more)
    with training(arguments, output, measure=[str(held), every], **disturbance) as process:
        process.join()
    assert process.exitcode == 0, output.read_text()[-3000:]
    return [json.loads(line) for line in held.read_text().splitlines()]


def grows(rows, what, slack=1.0):
    """Whether the last tenth of a run never holds as little as its second tenth held at the least."""
    tenth = len(rows) // 10
    early, late = (min(what(row) for row in part) for part in (rows[tenth : 2 * tenth], rows[-tenth:]))
    return late > slack * early


@pytest.mark.slow
@pytest.mark.parametrize("leak", [False, True])
def test_files_and_threads_do_not_grow_and_a_leak_is_found(new_run, tmp_path, leak):
    disturbance = {"leak_at": "train.checkpoint.Saver._save"} if leak else {}
    options = ["train.checkpoint_every=5", "train.eval_every=10"]
    rows = soak(new_run(), tmp_path / "output", 130, 1, *options, **disturbance)
    assert grows(rows, lambda row: len(row["files"])) == leak
    assert not grows(rows, lambda row: row["threads"])


@pytest.mark.slow
def test_memory_files_and_threads_of_10000_steps(new_run, tmp_path):
    rows = soak(new_run(), tmp_path / "output", 10_000, 10, "train.checkpoint_every=500", "train.eval_every=1000")
    assert not grows(rows, lambda row: len(row["files"]))
    assert not grows(rows, lambda row: row["threads"])
    assert not grows(rows, lambda row: row["bytes"], slack=1.01)
