"""Who holds a lock is named: whoever starts again after a launcher was killed learns what goes on without it."""

import os
import subprocess
import sys

import pytest

from eagle31_train.common import locks
from eagle31_train.common.errors import UserError
from eagle31_train.common.locks import alone, users_of, writing

HOLDER = """
import fcntl, sys
lock = open(sys.argv[1], "a")
if sys.argv[2] == "0":  # the first rank holds it, the others open it
    fcntl.flock(lock, fcntl.LOCK_EX)
print(flush=True)
sys.stdin.read()
"""


def test_the_processes_that_have_a_lock_are_named(tmp_path):
    lock, ranks = tmp_path / ".training", []
    with lock.open("a") as file:
        assert users_of(file) == []
    for rank in range(2):
        words = [sys.executable, "-c", HOLDER, str(lock), str(rank)]
        ranks.append(subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        ranks[-1].stdout.readline()
    found = " ".join(map(str, sorted(rank.pid for rank in ranks)))
    with pytest.raises(UserError) as error, alone(lock, "another process trains in x now"):
        pass
    assert str(error.value).startswith(f"another process trains in x now (process {found}): wait for it, end it with")
    for rank in ranks:
        rank.communicate()


def test_a_folder_is_written_by_one_process_and_the_lock_leaves_with_it(tmp_path):
    folder = tmp_path / "out"
    with writing(folder):
        with pytest.raises(UserError, match=rf"another process writes {folder} now"), writing(folder):
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
