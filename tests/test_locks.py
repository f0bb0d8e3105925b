"""Who holds a lock is named: whoever starts again after a launcher was killed learns what goes on without it."""

import errno
import fcntl
import os
import subprocess
import sys
from unittest.mock import Mock

import pytest

from eagle31_train.common import locks
from eagle31_train.common.errors import UserError
from eagle31_train.common.locks import writing


def test_a_folder_is_written_by_one_process_and_the_lock_leaves_with_it(tmp_path):
    folder = tmp_path / "out"
    with writing(folder):
        with pytest.raises(UserError, match=rf"another process is writing {folder}"), writing(folder):
            pass
        with writing(tmp_path / "other"):  # another folder is another's
            assert len(list(tmp_path.iterdir())) == 2
    assert list(tmp_path.iterdir()) == []
    with writing(folder):
        pass


def test_a_lock_that_was_removed_as_it_was_opened_is_made_again(tmp_path, monkeypatch):
    right, lock, opened = locks.hold, tmp_path / ".out.lock", []

    def late(file, *rest):
        if not opened:
            lock.unlink()  # by whoever held it until now
        opened.append(file)
        right(file, *rest)

    monkeypatch.setattr(locks, "hold", late)
    with writing(tmp_path / "out"):
        assert len(opened) == 2
        assert os.path.samestat(lock.stat(), os.fstat(opened[1].fileno()))


def test_where_the_file_system_has_no_locks_a_folder_is_written_all_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(errno.ENOLCK, "No locks available")))
    with writing(tmp_path / "out"):
        pass


def test_others_that_have_a_lock_open_are_named_and_not_this_process(tmp_path):
    with (tmp_path / "lock").open("a") as file:
        assert locks.users_of(file) == []
        wait = [sys.executable, "-c", "input()"]
        with subprocess.Popen(wait, stdin=subprocess.PIPE, pass_fds=[file.fileno()]) as other:
            assert locks.users_of(file) == [other.pid]
            other.communicate(b"\n")
