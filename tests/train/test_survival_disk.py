"""A disk that is full while a run saves, and checkpoints that are not as they were written when it goes on."""

import json
import os
import random
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
from dying import Full
from launching import ROOT, environment
from pipeline import contents, flip_bit, message_of, options
from surviving import InSaves, calling, saves_on, tell
from watching import watched

from train import checkpoint
from train.metrics import Reporter

RECIPE = ["train.max_steps=12", "train.eval_every=5", "train.checkpoint_every=3"]
TENSORS = ("model.safetensors", "optimizer.safetensors", "rng.safetensors")
FILES = (*TENSORS, "drafter.json", "manifest.json")
NO_SPACE = "could not be written (No space left on device)"


def fit(run):
    with watched():
        return run.fit(*RECIPE)


def result(run):
    """Losses and rates, weights, moments and random states."""
    return [(run.train / "metrics.jsonl").read_bytes(), *((run.newest() / name).read_bytes() for name in TENSORS)]


@pytest.fixture(scope="module")
def whole(copy_of, tmp_path_factory):
    """A run that nothing happens to; and of each of its saves the operations that write files."""
    run = copy_of(tmp_path_factory.mktemp("whole"))
    with pytest.MonkeyPatch.context() as patch, saves_on(InSaves()) as machine:
        patch.setenv("ACCELERATE_USE_CPU", "true")
        fit(run)
    assert saved(run) == ["step-000009", "step-000012"]
    saves = [range(first, machine.names.index("os.rename", first)) for first in [0, *machine.counts[:-1]]]
    writing = [[at for at in save if machine.names[at] in ("open", "write", "fsync")] for save in saves]
    return SimpleNamespace(result=result(run), writing=writing)


def saved(run):
    return sorted(path.name for path in run.checkpoints.iterdir())


def some(items, number):
    return random.Random(0).sample(items, number)


# ---------------------------------------------------------------- the disk is full


def save_into_a_full_disk(run, whole, capsys, number, at):
    """No room for one operation of the save of that number: it is said, and that is all."""
    seen = []

    def look():
        seen.append(contents(run.checkpoints) if run.checkpoints.exists() else {})

    before, after = (calling("train.checkpoint.Saver._save", look, when, number) for when in ("before", "after"))
    with saves_on(InSaves(at, Full())), before, after:
        fit(run)
    lines = [line for line in capsys.readouterr().out.splitlines() if NO_SPACE in line]
    assert len(lines) == 1
    assert lines[0].startswith(f"checkpoint {run.checkpoints}/step-{3 * number:06d} {NO_SPACE}; it takes ")
    older = run.checkpoints / f"step-{3 * number - 3:06d}" if number > 1 else "the beginning"
    assert lines[0].endswith(f"the next checkpoint tries again; a stop now would go back to {older}")
    assert seen[0] == seen[1], "something of the older checkpoints changed, or something new stayed"
    assert saved(run) == [f"step-{3 * other:06d}" for other in (1, 2, 3, 4) if other != number][-2:]
    assert result(run) == whole.result


@pytest.mark.parametrize("number", [1, 2])
def test_a_run_goes_on_when_a_save_finds_the_disk_full(new_run, whole, capsys, number):
    for at in some(whole.writing[number - 1], 2):
        save_into_a_full_disk(new_run(), whole, capsys, number, at)


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_run_goes_on_wherever_in_a_save_the_disk_is_full(new_run, whole, capsys, number):
    for at in some(whole.writing[number - 1], 20):
        save_into_a_full_disk(new_run(), whole, capsys, number, at)


def end_in_a_full_disk(run, whole, at):
    """No room for one operation of the last save: one line says so, and the same command finishes the run."""
    with watched(), saves_on(InSaves(at, Full())):
        message = message_of(run, *RECIPE)
    assert message.startswith(f"{run.checkpoints / 'step-000012'} {NO_SPACE}; it takes ")
    assert message.endswith(f"the same command again, which goes on from {run.checkpoints / 'step-000009'}")
    assert saved(run) == ["step-000006", "step-000009"]
    assert not (run.train / "manifest.json").exists()
    assert result(fit(run)) == whole.result


def test_a_run_whose_last_save_finds_the_disk_full_is_finished_by_the_same_command(new_run, whole):
    for at in some(whole.writing[3], 2):
        end_in_a_full_disk(new_run(), whole, at)


@pytest.mark.slow
def test_a_run_is_finished_wherever_in_its_last_save_the_disk_was_full(new_run, whole):
    for at in some(whole.writing[3], 20):
        end_in_a_full_disk(new_run(), whole, at)


def test_a_stop_whose_save_finds_the_disk_full_says_from_where_the_run_goes_on(new_run, whole):
    run = new_run()
    told = calling("train.loop.accumulate", tell, "after", 3)
    with watched(), told, saves_on(InSaves(whole.writing[1][0], Full())):
        message = message_of(run, *RECIPE)
    assert message.startswith(f"{run.checkpoints / 'step-000004'} {NO_SPACE}; it takes ")
    assert message.endswith(f"the same command again, which goes on from {run.checkpoints / 'step-000003'}")
    assert result(fit(run)) == whole.result


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
def test_a_disk_that_is_really_full_ends_with_status_2_and_later_with_0(new_run, whole, tmp_path):
    """On a disk in memory with room for one checkpoint and a half."""
    run, copy = new_run(), new_run().train
    size = sum(len(content) for content in whole.result[1:])
    for folder in (run.train, copy):
        folder.mkdir()
    script = SMALL_DISK.format(size=8 * size, ballast=6 * size + size // 2, train=run.train, copy=copy)
    arguments = options(run.folder, f"target.path={run.extracted / 'target'}", *RECIPE)
    train = " ".join([sys.executable, str(ROOT / "tests" / "surviving.py"), *arguments])
    done = subprocess.run(
        ["unshare", "--map-root-user", "--mount", "sh", "-c", script],
        cwd=ROOT,
        env=environment("one", DISTURB=json.dumps({}), TRAIN=train),
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    if done.returncode == 99 or "unshare" in done.stderr:
        pytest.skip(f"nobody but root may mount here: {done.stderr}")
    lines = done.stdout.splitlines()
    statuses = [line for line in lines if line.startswith("status ")]
    assert statuses == ["status 2", "status 0"], done.stderr
    assert lines[lines.index("status 2") + 1] == "step-000003"
    assert "going on after step 3 " in done.stdout
    errors = [line for line in done.stderr.splitlines() if "error" in line or "Error" in line]
    assert len(errors) == 1
    assert errors[0].startswith(f"error: {run.checkpoints}/step-000012 could not be written (No space left on device: ")
    shutil.rmtree(run.train)
    copy.rename(run.train)
    assert result(run) == whole.result


# ---------------------------------------------------------------- damaged checkpoints


@pytest.fixture(scope="module")
def stopped(copy_of, tmp_path_factory):
    """A run with checkpoints after steps 3 and 6, stopped after step 8; to be copied."""
    run, log = copy_of(tmp_path_factory.mktemp("stopped")), Reporter.log

    def stop(self, step, values):
        log(self, step, values)
        if step == 8:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCELERATE_USE_CPU", "true")
        patch.setattr(Reporter, "log", stop)
        with pytest.raises(KeyboardInterrupt):
            fit(run)
    assert saved(run) == ["step-000003", "step-000006"]
    assert all(sorted(os.listdir(path)) == sorted(FILES) for path in run.checkpoints.iterdir())  # noqa: PTH208
    return run


@pytest.fixture
def copies(stopped, new_run):
    """A function that makes another copy of the stopped run."""

    def copy():
        run = new_run()
        shutil.rmtree(run.folder)
        shutil.copytree(stopped.folder, run.folder)
        return run

    return copy


def truncate(path, share):
    os.truncate(path, int(share * path.stat().st_size))


def flip(path, share):
    content = bytearray(path.read_bytes())
    content[int(share * len(content))] ^= 1 << random.Random(share).randrange(8)
    path.write_bytes(content)


def go_on_from_the_one_before(run, whole, capsys, name, harm, share):
    damaged = run.checkpoints / "step-000006"
    harm(damaged / name, share)
    capsys.readouterr()
    fit(run)
    printed = capsys.readouterr().out
    said = [line for line in printed.splitlines() if " is not used: " in line]
    assert len(said) == 1
    assert said[0].startswith(f"checkpoint {damaged} is not used: {damaged / name} ")
    assert f"train: going on after step 3 ({run.checkpoints / 'step-000003'})" in printed
    assert saved(run) == ["step-000009", "step-000012"]
    assert result(run) == whole.result


@pytest.mark.parametrize("harm", [truncate, flip])
@pytest.mark.parametrize("name", FILES)
def test_a_run_goes_on_from_the_checkpoint_before_a_damaged_one(copies, whole, capsys, name, harm):
    share = random.Random(name).random()
    go_on_from_the_one_before(copies(), whole, capsys, name, harm, share)


@pytest.mark.slow
@pytest.mark.parametrize("harm", [truncate, flip])
@pytest.mark.parametrize("name", FILES)
def test_a_run_goes_on_wherever_the_newest_checkpoint_is_damaged(copies, whole, capsys, name, harm):
    for share in (0, 0.999999, *(random.Random(seed).random() for seed in range(8))):
        go_on_from_the_one_before(copies(), whole, capsys, name, harm, share)


def test_a_run_without_a_whole_checkpoint_begins_again(copies, whole, capsys):
    run = copies()
    for path in run.checkpoints.iterdir():
        flip_bit(path / "optimizer.safetensors")
    fit(run)
    printed = capsys.readouterr().out
    assert printed.count(" is not used: ") == 2
    assert "going on after" not in printed
    assert result(run) == whole.result


@pytest.mark.parametrize("name", TENSORS)
def test_a_damaged_checkpoint_that_were_used_would_be_seen(copies, whole, monkeypatch, name):
    """What stands above would fail if damage were not looked for."""
    run = copies()
    flip_bit(run.checkpoints / "step-000006" / name)
    monkeypatch.setattr(checkpoint, "damage", lambda *_: None)
    assert result(fit(run)) != whole.result
