"""What a checkpoint holds, which one counts, how many are kept, and how they are written in the background."""

import errno
import os
import random
import shutil
import threading
import weakref
from collections import namedtuple
from concurrent.futures import Future
from dataclasses import replace

import pytest
import torch
from checkpointing import FILES, FINGERPRINT, SHAPE, failing, names, newest, same, save, saver, snapshot, step
from pipeline import contents, flip_bit
from safetensors.torch import save_file

from eagle31_train.errors import UserError
from eagle31_train.store import tensors as store_tensors
from eagle31_train.store.sealed import checksum, seal, unseal
from train import checkpoint


@pytest.fixture(autouse=True)
def no_power_is_lost(monkeypatch):
    """So that files need not reach the disk, which takes its time."""
    monkeypatch.setattr(os, "fsync", lambda _: None)
    monkeypatch.delattr(os, "posix_fadvise", raising=False)


# ---------------------------------------------------------------- what it holds


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
    assert unseal((path / "manifest.json").read_bytes())["files"] == {
        name: {"bytes": (path / name).stat().st_size, "checksum": checksum(path / name)}
        for name in FILES
        if name != "manifest.json"
    }


def test_a_drafter_of_another_shape_is_refused_with_the_difference(tmp_path):
    save(tmp_path, snapshot(100))
    with pytest.raises(UserError, match="drafter of another shape: intermediate_size: 6 there, 8 here; rope_scaling"):
        checkpoint.load(step(tmp_path, 100), replace(SHAPE, intermediate_size=8, rope_scaling=None))


def test_a_checkpoint_of_an_earlier_version_with_random_states_is_loaded(tmp_path):
    path = step(save(tmp_path, snapshot(1)), 1)
    save_file({"rank0.torch": torch.zeros(24, dtype=torch.uint8)}, path / "rng.safetensors")
    manifest = unseal((path / "manifest.json").read_bytes())
    file = path / "rng.safetensors"
    manifest["files"]["rng.safetensors"] = {"bytes": file.stat().st_size, "checksum": checksum(file)}
    (path / "manifest.json").write_bytes(seal(manifest))
    assert same(newest(tmp_path), snapshot(1))


# ---------------------------------------------------------------- which one counts


def test_the_newest_of_a_run_is_found_by_number(tmp_path):
    assert checkpoint.newest(tmp_path / "absent", FINGERPRINT, print) is None
    save(tmp_path, *(snapshot(number) for number in (9, 999_999, 1_000_000)), keep=3)
    for stray in ("step-", "step-9.bak", "step-000008 (copy)", "step-x", "notes"):
        (tmp_path / stray).mkdir()
    assert same(newest(tmp_path), snapshot(1_000_000))
    assert [path.name for path in checkpoint.in_order(tmp_path)] == ["step-000009", "step-999999", "step-1000000"]


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return save(tmp_path_factory.mktemp("two"), snapshot(1), snapshot(2))


def cut(file):
    os.truncate(file, file.stat().st_size // 2)


def grow(file):
    file.write_bytes(file.read_bytes() + b" ")


def remove(file):
    file.unlink()


def to_folder(file):
    file.unlink()
    file.mkdir()


@pytest.mark.parametrize("harm", [flip_bit, cut, grow, remove, to_folder])
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(two, tmp_path, harm, name):
    folder, said = shutil.copytree(two, tmp_path / "copy"), []
    file = step(folder, 2) / name
    harm(file)
    assert same(newest(folder, said), snapshot(1))
    (line,) = said
    assert line.startswith(f"checkpoint {step(folder, 2)} is not used: {file} ")
    assert "\n" not in line


@pytest.mark.parametrize(
    ("harm", "cause"),
    [
        (lambda path: (path / "model-copy.safetensors").touch(), "does not belong to it"),
        (lambda path: (shutil.rmtree(path), path.touch()), "is missing"),
        (lambda path: (path / "manifest.json").write_text('{"step": 2, "files": {}}'), "no checksum of itself"),
        (lambda path: (shutil.rmtree(path), shutil.copytree(step(path.parent, 1), path)), "is of step 1"),
    ],
)
def test_what_is_no_checkpoint_of_its_step_is_passed_over(two, tmp_path, harm, cause):
    folder, said = shutil.copytree(two, tmp_path / "copy"), []
    harm(step(folder, 2))
    assert same(newest(folder, said), snapshot(1))
    assert cause in said[0]


def test_a_checkpoint_of_another_run_is_passed_over(two):
    assert "it is of a run of other inputs" in checkpoint.damage(step(two, 2), "e" * 16)


def test_any_bit_of_any_file_counts(two, tmp_path):
    folder = shutil.copytree(two, tmp_path / "copy")
    chosen = random.Random(1)
    for name in FILES:
        file = step(folder, 2) / name
        whole = file.read_bytes()
        for place in chosen.sample(range(len(whole)), 60):
            damaged = bytearray(whole)
            damaged[place] ^= 1 << chosen.randrange(8)
            file.write_bytes(damaged)
            assert checkpoint.damage(step(folder, 2), FINGERPRINT) is not None, (name, place)
        file.write_bytes(whole)
    assert checkpoint.damage(step(folder, 2), FINGERPRINT) is None


# ---------------------------------------------------------------- how many are kept


def test_the_newest_are_kept_and_leftovers_go(tmp_path):
    for leftover in (".step-000007.tmp", ".step-000001.tmp", ".step-000001.old", "step-000001"):
        (tmp_path / leftover).mkdir()
        (tmp_path / leftover / "model.safetensors").write_text("half")
    save(tmp_path, *(snapshot(number) for number in range(2, 7)), keep=3)
    assert names(tmp_path) == ["step-000004", "step-000005", "step-000006"]


def test_a_damaged_checkpoint_does_not_count_among_the_kept(tmp_path):
    """Passed over as a run goes on, it must not take the place of the one that the run goes on from."""
    save(tmp_path, snapshot(2), snapshot(6))
    flip_bit(step(tmp_path, 6) / "model.safetensors")
    ours = saver(tmp_path, 2, committed=checkpoint.newest(tmp_path, FINGERPRINT, lambda _: None))
    ours.save(snapshot(4))
    ours.wait()
    assert names(tmp_path) == ["step-000002", "step-000004", "step-000006"]
    ours.save(snapshot(6))
    ours.save(snapshot(8))
    ours.close()
    assert names(tmp_path) == ["step-000006", "step-000008"]
    assert same(newest(tmp_path), snapshot(8))


# ---------------------------------------------------------------- in the background


@pytest.fixture
def held(monkeypatch):
    """Savers write only once this event is set, or somebody waits for them."""
    event, write, exception = threading.Event(), checkpoint._write, Future.exception

    def held_write(*arguments):
        event.wait()
        write(*arguments)

    def waited(self, timeout=None):
        event.set()
        return exception(self, timeout)

    monkeypatch.setattr(checkpoint, "_write", held_write)
    monkeypatch.setattr(Future, "exception", waited)
    yield event
    event.set()


def test_a_save_returns_at_once_the_next_one_waits_for_it_and_snapshots_are_let_go(tmp_path, held):
    ours, one = saver(tmp_path), snapshot(1)
    tensor = weakref.ref(one.weights["fc.weight"])
    ours.save(one)
    del one
    assert ours.committed is None
    assert not held.is_set()
    ours.save(snapshot(2))
    assert step(tmp_path, 1).is_dir()
    ours.wait()
    assert ours.committed == step(tmp_path, 2)
    assert tensor() is None
    ours.close()


def test_a_bug_in_the_thread_is_raised_at_the_next_call_once(tmp_path):
    save(tmp_path, snapshot(1))
    ours = saver(tmp_path)
    for call in (ours.wait, lambda: ours.save(snapshot(2))):
        ours.save(replace(snapshot(2), extra={"unfit": object()}))
        with pytest.raises(TypeError, match="not JSON serializable"):
            call()
        assert names(tmp_path) == ["step-000001"]
    ours.save(snapshot(2))
    ours.close()
    assert ours.committed == step(tmp_path, 2)


# ---------------------------------------------------------------- a disk that fails


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_an_error_of_the_disk_is_said_in_one_line_and_the_next_save_tries_again(tmp_path, monkeypatch, number):
    save(tmp_path, snapshot(1))
    before, said = contents(tmp_path), []
    ours = saver(tmp_path, say=said.append, committed=step(tmp_path, 1))
    with monkeypatch.context() as broken:
        broken.setattr(store_tensors, "_write_all", failing(number))
        ours.save(snapshot(2))
        ours.wait()
        with pytest.raises(UserError, match=r"could not be written .* goes on from .*step-000001"):
            ours.save(snapshot(2), required=True)
    assert len(said) == 2
    assert f"could not be written ({os.strerror(number)}); it takes {snapshot(2).bytes} bytes" in said[0]
    assert said[0].endswith(f"a stop now would go back to {step(tmp_path, 1)}")
    assert contents(tmp_path) == before
    ours.save(snapshot(3), required=True)
    ours.close()
    assert ours.committed == step(tmp_path, 3)


def test_a_checkpoint_that_the_disk_cannot_hold_is_not_begun(tmp_path, monkeypatch):
    said, usage = [], namedtuple("usage", "total used free")
    ours = saver(tmp_path / "checkpoints", say=said.append)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: usage(1000, 900, 100))
        patch.setattr(checkpoint, "save_file", None)
        ours.save(snapshot(1))
        ours.wait()
        assert "(No space left on device: 100 bytes are free); it takes " in said[0]
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(0, 0, 0))  # a file system that does not know
    ours.save(snapshot(1), required=True)
    ours.close()


def test_old_checkpoints_that_cannot_be_removed_do_not_fail_the_save(tmp_path, monkeypatch):
    said = []
    ours = saver(tmp_path, keep=1, say=said.append)
    ours.save(snapshot(1))
    ours.wait()
    with monkeypatch.context() as broken:
        broken.setattr(checkpoint.artifacts, "discard", failing(errno.EACCES))
        ours.save(snapshot(2), required=True)
    assert ours.committed == step(tmp_path, 2)
    assert "could not be removed" in said[0]
    ours.save(snapshot(3))
    ours.close()
    assert names(tmp_path) == ["step-000003"]


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors"])
def test_a_disk_that_does_not_keep_what_is_written_is_found_out(tmp_path, monkeypatch, file):
    """The checksum alone would be of the wrong bytes, and match."""
    save(tmp_path, snapshot(1))
    before, said, fsync_path = contents(tmp_path), [], checkpoint.artifacts.fsync_path

    def forced(path):
        if path.name == file:
            flip_bit(path)
        fsync_path(path)

    ours = saver(tmp_path, say=said.append)
    with monkeypatch.context() as broken:
        broken.setattr(checkpoint.artifacts, "fsync_path", forced)
        ours.save(snapshot(2))
        ours.wait()
    assert f"{file} did not read back as it was written" in said[0]
    assert contents(tmp_path) == before
    ours.save(snapshot(2))
    ours.close()
    assert same(newest(tmp_path), snapshot(2))
