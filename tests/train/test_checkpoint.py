"""What a checkpoint holds, which one counts, which are kept, what a failing disk does; and of a save that dies at any
operation: the checkpoint before it or the new one is there, whole."""

import errno
import os
import shutil
from contextlib import suppress
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
from conftest import make_shape
from dying import Killed, Machine, kill, running
from pipeline import contents, flip_bit
from safetensors.torch import save as serialized

from eagle31_train.common import artifacts
from eagle31_train.common.errors import UserError
from eagle31_train.store import tensors as store_tensors
from train import checkpoint
from train.checkpoint import Saver, Snapshot

pytestmark = pytest.mark.usefixtures("no_power_is_lost")

# ---------------------------------------------------------------- tiny snapshots, and what is asked of checkpoints

FINGERPRINT = "f" * 16
FILES = ["drafter.json", "manifest.json", "model.safetensors", "optimizer.safetensors"]
SHAPE = make_shape(rope_scaling={"rope_type": "linear", "factor": 2.0})


def snapshot(step, seed=None):
    """A snapshot of random values; those of other seeds are others, and the seed is the step unless said otherwise."""
    generator, sizes = torch.Generator().manual_seed(step if seed is None else seed), {"fc": (4, 12), "norm": (4,)}
    weights, average, square = (
        {f"{kind}{name}.weight": torch.randn(size, generator=generator) for name, size in sizes.items()}
        for kind in ("", "exp_avg.", "exp_avg_sq.")
    )
    extra = {"totals": {"tokens": step * 1000, "seconds": step / 3}, "tracker": {"wandb": "tiny-ä"}}
    return Snapshot(step, weights, average | square, SHAPE, extra)


def saver(folder, keep=2, say=None, after=0):
    return Saver(folder, FINGERPRINT, keep, say or refuse, after)


def save(folder, *snapshots, keep=2):
    """Save one after the other; returns the folder."""
    ours = saver(folder, keep)
    for one in snapshots:
        ours.save(one)
    ours.close()
    assert ours.committed == step(folder, snapshots[-1].step)
    return folder


def newest(folder, said=None):
    """The newest checkpoint as it is loaded; None if there is none. Lines go to `said`."""
    path = checkpoint.newest(folder, FINGERPRINT, refuse if said is None else said.append)
    return None if path is None else checkpoint.load(path)


def refuse(line):
    raise AssertionError(f"nothing was to be said, but: {line}")


def same(loaded, meant):
    """Whether two snapshots are equal, bit by bit."""

    def bits(one):
        tensors = [{name: tensor.contiguous() for name, tensor in some.items()} for some in (one.weights, one.moments)]
        return one.step, one.extra, *map(serialized, tensors)

    return loaded is not None and bits(loaded) == bits(meant)


def names(folder):
    """Everything in the folder of checkpoints, hidden leftovers too."""
    return sorted(path.name for path in folder.iterdir())


def step(folder, number):
    return folder / f"step-{number:06d}"


@pytest.mark.core
def test_a_snapshot_comes_back_bit_for_bit(tmp_path):
    odd = torch.tensor([float("nan"), float("inf"), -0.0, 1e-45])
    meant = replace(
        snapshot(100),
        weights={"b": odd, "a": torch.randn(3, 5).T, "one": torch.tensor(1.5), "none": torch.empty(0, 4)},
        moments={"exp_avg.b": odd.double(), "exp_avg_sq.b": odd.bfloat16()},
    )
    path = step(save(tmp_path, meant), 100)
    assert same(newest(tmp_path), meant)
    assert not same(newest(tmp_path), snapshot(100))
    assert names(path) == FILES
    assert "it belongs to a run with other inputs" in checkpoint.damage(path, "e" * 16)


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return save(tmp_path_factory.mktemp("two"), snapshot(1), snapshot(2))


def cut(file):
    os.truncate(file, file.stat().st_size // 2)


def test_a_checkpoint_that_cannot_be_read_is_passed_over_too(tmp_path, monkeypatch):
    save(tmp_path, snapshot(1), snapshot(2))
    right, fail, said = artifacts.checksum, Mock(side_effect=OSError(errno.EIO, "Input/output error")), []
    monkeypatch.setattr(artifacts, "checksum", lambda file: (fail if "000002" in str(file) else right)(file))
    assert same(newest(tmp_path, said), snapshot(1))
    assert ".safetensors cannot be read ([Errno 5] Input/output error)" in said[0]


@pytest.mark.parametrize("harm", [flip_bit, cut, os.remove])
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(two, tmp_path, harm, name):
    folder, said = shutil.copytree(two, tmp_path / "copy"), []
    file = step(folder, 2) / name
    harm(file)
    assert same(newest(folder, said), snapshot(1))
    (line,) = said
    assert line.startswith(f"skipping checkpoint {step(folder, 2)}: {file} ")


@pytest.mark.parametrize("name", FILES)
def test_a_checkpoint_that_a_disk_reads_wrongly_once_is_used(two, tmp_path, monkeypatch, name):
    """Until the kernel is told to forget its copy, a file has a wrong bit."""
    copy = shutil.copytree(two, tmp_path / "copy")
    flip_bit(step(copy, 2) / name)
    monkeypatch.setattr(artifacts, "forget_pages", lambda file: shutil.copy(two / file.relative_to(copy), file))
    assert same(newest(copy), snapshot(2))


def test_a_damaged_checkpoint_does_not_count_among_the_kept(tmp_path):
    """Passed over as a run goes on, it must not take the place of the one that the run goes on from."""
    save(tmp_path, snapshot(2), snapshot(6))
    flip_bit(step(tmp_path, 6) / "model.safetensors")
    found = checkpoint.newest(tmp_path, FINGERPRINT, lambda _: None)
    ours = saver(tmp_path, 2, after=checkpoint.step_of(found))
    ours.save(snapshot(4))
    ours.wait()
    assert names(tmp_path) == ["step-000002", "step-000004", "step-000006"]
    ours.save(snapshot(6))
    ours.save(snapshot(8))
    ours.close()
    assert names(tmp_path) == ["step-000006", "step-000008"]
    assert same(newest(tmp_path), snapshot(8))


def test_an_error_of_the_disk_is_said_in_one_line_and_the_next_save_tries_again(tmp_path, monkeypatch):
    save(tmp_path, snapshot(1))
    before, said = contents(tmp_path), []
    ours = saver(tmp_path, say=said.append, after=1)
    with monkeypatch.context() as broken:
        full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        broken.setattr(store_tensors, "_write_all", Mock(side_effect=full))
        ours.save(snapshot(2))
        ours.wait()
        with pytest.raises(UserError, match=r"could not be written .* resume from .*step-000001"):
            ours.save(snapshot(2), required=True)
    assert len(said) == 1, "the error says it"
    assert f"could not be written ({full.strerror})" in said[0]
    assert said[0].endswith(f"it resumes from {step(tmp_path, 1)}")
    assert contents(tmp_path) == before
    ours.save(snapshot(3), required=True)
    ours.close()
    assert ours.committed == step(tmp_path, 3)


# ---------------------------------------------------------------- a save that dies at any operation

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


# Each leaves a folder as it may be before a save; returns what is saved, and what is there before.
STATES = [first, another, over_a_damaged_one, among_leftovers]


def go_on(folder, meant, machine):
    """What a run does: find the newest, save; returns the saver, or None if the process died."""
    with suppress(Killed), running(machine):
        found = checkpoint.newest(folder, FINGERPRINT, lambda _: None)
        ours = saver(folder, 2, lambda _: None, checkpoint.step_of(found) if found else 0)
        ours.save(meant)
        ours.wait()
        return ours


@pytest.mark.parametrize("state", STATES)
def test_a_save_that_dies_at_any_operation_loses_nothing(state, tmp_path):
    meant, before = state(tmp_path / "before")
    folder = shutil.copytree(tmp_path / "before", tmp_path / "undisturbed")
    ours = go_on(folder, meant, undisturbed := Machine())
    assert ours.committed.name == checkpoint.name_of(meant.step)
    assert {"open", "write", "fsync", "os.rename", "os.mkdir"} <= set(undisturbed.names)
    outcomes = set()
    for at in range(undisturbed.count):
        folder = shutil.copytree(tmp_path / "before", tmp_path / str(at))
        assert go_on(folder, meant, Machine(at, kill)) is None
        # The new checkpoint is there, or the one before, and the next save of a run leaves nothing else behind.
        found = newest(folder, said := [])
        assert found is before is None or any(same(found, one) for one in (meant, before)), said
        assert go_on(folder, snapshot(9), Machine()) is not None
        assert same(newest(folder), snapshot(9))
        assert not [name for name in names(folder) if name.startswith(".")]
        if found is not None:  # two whole ones are kept
            assert checkpoint.damage(folder / checkpoint.name_of(found.step), FINGERPRINT) is None
        outcomes.add(found is not None and same(found, meant))
    assert outcomes == {True, False}
