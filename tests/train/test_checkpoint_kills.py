"""A save that dies, or whose disk fails, at any operation: the checkpoint before it or the new one is there, whole."""

import shutil

import pytest
from checkpointing import FINGERPRINT, names, newest, same, save, saver, snapshot
from dying import Kill, Killed, Machine, running
from pipeline import flip_bit

from train import checkpoint

pytestmark = pytest.mark.usefixtures("no_power_is_lost")
LATER = snapshot(2, seed=22)  # another one of the same step


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
