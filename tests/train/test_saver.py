"""Checkpoints are written in the background, and on a disk that fails."""

import errno
import os
import shutil
import threading
import weakref
from collections import namedtuple
from concurrent.futures import Future
from dataclasses import replace

import pytest
import torch
from checkpointing import FILES, failing, names, newest, same, save, saver, snapshot, step
from pipeline import contents, flip_bit

from eagle31_train.store import tensors as store_tensors
from train import checkpoint


@pytest.fixture(autouse=True)
def no_power_is_lost(monkeypatch):
    """So that files need not reach the disk, which takes its time."""
    monkeypatch.setattr(os, "fsync", lambda _: None)
    monkeypatch.delattr(os, "posix_fadvise", raising=False)


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


def test_a_save_returns_at_once_and_the_next_one_waits_for_it(tmp_path, held):
    ours = saver(tmp_path)
    ours.save(snapshot(1))
    assert ours.committed is None
    assert not held.is_set()
    ours.save(snapshot(2))
    assert step(tmp_path, 1).is_dir()
    ours.wait()
    assert ours.committed == step(tmp_path, 2)
    ours.wait()
    ours.close()


def test_a_snapshot_is_let_go_once_written(tmp_path):
    ours, one = saver(tmp_path), snapshot(1)
    tensor = weakref.ref(one.weights["fc.weight"])
    ours.save(one)
    del one
    ours.wait()
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
    ours.save(replace(snapshot(3), weights={"a": torch.zeros(2, dtype=torch.complex64)}))
    with pytest.raises(KeyError):
        ours.close()
    assert ours.committed == step(tmp_path, 2)
    with pytest.raises(RuntimeError, match="after shutdown"):
        ours.save(snapshot(4))


# ---------------------------------------------------------------- a disk that fails


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS, errno.EACCES])
def test_an_error_of_the_disk_is_said_in_one_line_and_the_next_save_tries_again(tmp_path, monkeypatch, number):
    save(tmp_path, snapshot(1))
    before, said = contents(tmp_path), []
    ours = saver(tmp_path, say=said.append, committed=step(tmp_path, 1))
    with monkeypatch.context() as broken:
        broken.setattr(store_tensors, "_write_all", failing(number))
        ours.save(snapshot(2))
        ours.wait()
    what = f"{step(tmp_path, 2)} could not be written ({os.strerror(number)}); it takes {snapshot(2).bytes} bytes"
    assert said == [
        f"checkpoint {what}: training goes on, and the next checkpoint tries again; a stop now would go back to "
        f"{step(tmp_path, 1)}"
    ]
    assert str(ours.failed) == (
        f"{what}: mend that, then run the same command again, which goes on from {step(tmp_path, 1)}"
    )
    assert contents(tmp_path) == before
    assert names(tmp_path) == ["step-000001"]
    ours.save(snapshot(3))
    ours.close()
    assert (ours.failed, ours.committed, len(said)) == (None, step(tmp_path, 3), 1)


def test_a_checkpoint_that_has_no_room_is_not_begun(tmp_path, monkeypatch):
    said, usage = [], namedtuple("usage", "total used free")
    ours = saver(tmp_path / "checkpoints", say=said.append)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(1000, 900, 100))
    monkeypatch.setattr(checkpoint, "write_tensors", None)
    ours.save(snapshot(1))
    ours.wait()
    assert "(No space left on device: 100 bytes are free); it takes " in said[0]
    assert said[0].endswith("a stop now would go back to the beginning")
    monkeypatch.undo()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(0, 0, 0))  # a file system that does not know
    ours.save(snapshot(1))
    ours.close()
    assert ours.failed is None


def test_old_checkpoints_that_cannot_be_removed_do_not_fail_the_save(tmp_path, monkeypatch):
    said = []
    ours = saver(tmp_path, keep=1, say=said.append)
    ours.save(snapshot(1))
    ours.wait()
    with monkeypatch.context() as broken:
        broken.setattr(checkpoint.artifacts, "discard", failing(errno.EACCES))
        ours.save(snapshot(2))
        ours.wait()
    assert (ours.failed, ours.committed) == (None, step(tmp_path, 2))
    assert said == [
        f"old checkpoints in {tmp_path} could not be removed ([Errno 13] Permission denied): "
        "the next checkpoint tries again"
    ]
    ours.save(snapshot(3))
    ours.close()
    assert names(tmp_path) == ["step-000003"]


@pytest.mark.parametrize("file", FILES)
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
    assert f"in {file} did not read back as it was written" in str(ours.failed)
    assert len(said) == 1
    assert contents(tmp_path) == before
    ours.save(snapshot(2))
    ours.close()
    assert same(newest(tmp_path), snapshot(2))
