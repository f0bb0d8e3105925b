"""Who holds a lock is named: whoever starts again after a launcher was killed learns what goes on without it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from eagle31_train.common import locks
from eagle31_train.common.errors import UserError
from eagle31_train.common.locks import alone, users_of, writing

ROOT = Path(__file__).resolve().parent.parent
HOLDER = """
import sys
from pathlib import Path
from eagle31_train.common.locks import alone
lock = Path(sys.argv[1]) / ".training"
with alone(lock, "nobody") if sys.argv[2] == "0" else lock.open("a"):  # the first rank holds it, the others open it
    print(flush=True)
    sys.stdin.read()
"""
LAUNCHER = """
import subprocess, sys
for rank in range(2):
    child = subprocess.Popen([sys.executable, "-c", sys.argv[1], sys.argv[2], str(rank)], stdout=subprocess.PIPE)
    child.stdout.readline()
    print(child.pid, flush=True)
sys.stdin.read()
"""


def test_the_processes_that_a_killed_launcher_left_are_named(tmp_path):
    with (tmp_path / "lock").open("a") as file:
        assert users_of(file) == []
    words = [sys.executable, "-c", LAUNCHER, HOLDER, str(tmp_path)]
    launcher = subprocess.Popen(words, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    ranks = [int(launcher.stdout.readline()) for _ in range(2)]
    # They read the launcher's own standard input: it stays open for them, as a terminal's does.
    launcher.kill()
    launcher.wait()
    found = " ".join(map(str, sorted(ranks)))
    with pytest.raises(UserError) as error, alone(tmp_path / ".training", "another process trains in x now"):
        pass
    assert str(error.value).startswith(f"another process trains in x now (process {found}): wait for it, end it with")
    for rank in ranks:
        os.kill(rank, signal.SIGTERM)
    launcher.stdin.close()
    launcher.stdout.close()


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
