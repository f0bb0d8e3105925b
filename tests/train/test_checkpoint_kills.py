"""A save that dies, or whose disk fails, at any operation: the checkpoint before it or the new one is there, whole."""

import errno
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from checkpointing import FINGERPRINT, names, newest, same, save, saver, snapshot
from dying import Full, Kill, Killed, Machine, running
from pipeline import flip_bit

from train import checkpoint

LATER = snapshot(2, seed=22)  # another one of the same step


class Broken:
    """The disk fails from some operation on, for good."""

    def __call__(self, machine):
        machine.at = range(machine.count, sys.maxsize)
        raise OSError(errno.EIO, os.strerror(errno.EIO))


def first(folder):
    folder.mkdir()
    return snapshot(2), None


def another(folder):
    save(folder, snapshot(1), snapshot(2))
    return snapshot(3), snapshot(2)


def over_a_damaged_one(folder):
    save(folder, snapshot(1), snapshot(2))
    flip_bit(folder / "step-000002" / "optimizer.safetensors")
    return LATER, snapshot(1)


def among_leftovers(folder):
    save(folder, snapshot(1), snapshot(2), snapshot(3), keep=3)
    (folder / "step-000001").rename(folder / ".step-000001.old")
    (folder / ".step-000001.old" / "manifest.json").unlink()
    shutil.copytree(folder / "step-000002", folder / ".step-000004.tmp")
    return snapshot(4), snapshot(3)


STATES = [first, another, over_a_damaged_one, among_leftovers]


@pytest.fixture(autouse=True)
def no_power_is_lost(monkeypatch):
    """So that files need not reach the disk, which takes its time."""
    monkeypatch.setattr(os, "fsync", lambda _: None)
    monkeypatch.delattr(os, "posix_fadvise", raising=False)


@pytest.fixture
def state(request, tmp_path):
    """(copies: a function that makes another copy of a folder before a save; what is saved; what is there before)."""
    meant, before = request.param(tmp_path / "before")
    numbers = iter(range(10**6))
    return lambda: shutil.copytree(tmp_path / "before", tmp_path / str(next(numbers))), meant, before


def go_on(folder, meant, machine, said=None):
    """What a run does: find the newest, save; returns the saver, or None if the process died."""
    try:
        with running(machine):
            found = checkpoint.newest(folder, FINGERPRINT, lambda _: None)
            ours = saver(folder, 2, [].append if said is None else said.append, found)
            ours.save(meant)
            ours.wait()
    except Killed:
        return None
    return ours


def assert_whole(folder, meant, before):
    """The new checkpoint is there, or the one before, and the next save of a run leaves nothing else behind."""
    said = []
    found = newest(folder, said)
    assert found is before is None or any(same(found, one) for one in (meant, before)), said
    assert go_on(folder, snapshot(9), Machine()) is not None
    assert same(newest(folder), snapshot(9))
    assert not hidden(folder)
    if found is not None:  # two whole ones are kept
        assert checkpoint.damage(folder / checkpoint.name_of(found.step), FINGERPRINT) is None
    return found


def hidden(folder):
    return [name for name in names(folder) if name.startswith(".")]


def operations(state):
    """The names of the operations of a save that nothing happens to."""
    copies, meant, _ = state
    ours = go_on(copies(), meant, machine := Machine())
    assert ours.committed.name == checkpoint.name_of(meant.step)
    assert machine.count > 20
    assert {"open", "write", "fsync", "os.rename", "os.mkdir"} <= set(machine.names)
    return machine.names


@pytest.mark.parametrize("state", STATES, indirect=True, ids=lambda state: state.__name__)
def test_a_save_that_dies_at_any_operation_loses_nothing(state):
    copies, meant, before = state
    outcomes = set()
    for at, _ in enumerate(operations(state)):
        folder = copies()
        assert go_on(folder, meant, Machine(at, Kill())) is None
        found = assert_whole(folder, meant, before)
        outcomes.add(found is not None and same(found, meant))
    assert outcomes == {True, False}


@pytest.mark.parametrize(
    ("state", "what"),
    [(state, Full) for state in STATES] + [(among_leftovers, Broken)],
    indirect=["state"],
    ids=lambda value: value.__name__,
)
def test_a_disk_that_fails_at_any_operation_does_not_stop_the_run(state, what):
    copies, meant, before = state
    for at, name in enumerate(operations(state)):
        folder, said = copies(), []
        ours = go_on(folder, meant, Machine(at, what()), said)
        assert len(said) <= 1
        assert "\n" not in "".join(said)
        if not said or "could not be removed" in said[0]:
            assert same(newest(folder), meant)
        else:
            assert said[0].startswith(f"checkpoint {folder / checkpoint.name_of(meant.step)} could not be written (")
            assert "training goes on" in said[0]
        if what is Full and name not in ("os.remove", "os.rmdir"):
            assert f".{checkpoint.name_of(meant.step)}.tmp" not in hidden(folder)
            assert ours.committed is None or ours.committed.is_dir()
        if what is Broken:
            assert_whole(folder, meant, before)
            continue
        ours.save(snapshot(9))  # the same run, later
        ours.close()
        assert ours.committed == folder / "step-000009"
        assert same(newest(folder), snapshot(9))
        assert not hidden(folder)


# ---------------------------------------------------------------- in earnest

CHILD = """
import os, signal, sys, threading
sys.path[:0] = sys.argv[1:3]
from pathlib import Path
from checkpointing import saver, snapshot
from dying import Machine, Sigkill, running

class Interrupt:
    '''Ctrl-C while the thread is in the middle of a save; the main thread knows of it before the thread goes on.'''

    def __call__(self, machine):
        os.kill(os.getpid(), signal.SIGINT)
        interrupted.wait()

interrupted = threading.Event()
folder, kind, at = Path(sys.argv[3]), sys.argv[4], int(sys.argv[5])
machine = running(Machine(at, {"kill": Sigkill, "interrupt": Interrupt}[kind]()))
machine.__enter__()
ours = saver(folder, say=print, committed=folder / "step-000002")
try:
    ours.save(snapshot(3))
    ours.wait()
except KeyboardInterrupt:
    interrupted.set()
    raise
"""


def child(folder, kind, at):
    here = Path(__file__).resolve().parent.parent
    command = [sys.executable, "-c", CHILD, str(here), str(here.parent), str(folder), kind, str(at)]
    return subprocess.Popen(command, cwd=here.parent, stderr=subprocess.PIPE, text=True)


@pytest.fixture
def copies(tmp_path):
    """(a function that makes another folder of two checkpoints, the number of operations of a third save)."""
    save(tmp_path / "before", snapshot(1), snapshot(2))
    folder = shutil.copytree(tmp_path / "before", tmp_path / "dry")
    with running(Machine()) as machine:
        save(folder, snapshot(3))
    return lambda at: shutil.copytree(tmp_path / "before", tmp_path / str(at)), machine.count


def test_a_process_killed_by_a_signal_in_a_save_loses_nothing(copies):
    copy, count = copies
    instants = random.Random(2).sample(range(count), 1)
    for process in [child(copy(at), "kill", at) for at in instants]:
        process.communicate(timeout=600)
        assert process.returncode == -9
        assert_whole(Path(process.args[5]), snapshot(3), snapshot(2))


@pytest.mark.slow
def test_ctrl_c_in_a_save_ends_the_process_after_the_save(copies):
    copy, count = copies
    process = child(copy(count // 2), "interrupt", count // 2)
    _, errors = process.communicate(timeout=600)
    assert process.returncode == -2
    assert "KeyboardInterrupt" in errors
    folder = Path(process.args[5])
    assert names(folder) == ["step-000002", "step-000003"]
    assert same(newest(folder), snapshot(3))
