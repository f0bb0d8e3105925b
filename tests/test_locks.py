"""Who holds a lock is named: whoever starts again after a launcher was killed learns what goes on without it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from eagle31_train.errors import UserError
from eagle31_train.locks import alone, users_of

ROOT = Path(__file__).resolve().parent.parent
HOLDER = """
import sys
from pathlib import Path
from eagle31_train.locks import alone
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
