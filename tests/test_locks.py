"""One process at a time, and no longer than it lives."""

import subprocess
import sys

import pytest

from eagle31_train.errors import UserError
from eagle31_train.locks import alone

OTHER = """
import sys, time
from pathlib import Path
from eagle31_train.locks import alone
with alone(Path(sys.argv[1]), "another"):
    print("held", flush=True)
    time.sleep(600)
"""


def test_a_lock_is_another_process_s_until_it_is_killed(tmp_path):
    path = tmp_path / "run" / ".lock"
    with subprocess.Popen([sys.executable, "-c", OTHER, str(path)], stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout.readline() == "held\n"
            for _ in range(2):  # and a refusal takes nothing from it
                with pytest.raises(UserError) as error, alone(path, "another process trains"):
                    pass
                assert str(error.value) == "another process trains: wait for it, or choose another name=… or run_dir=…"
        finally:
            other.kill()
    with alone(path, "nobody"):
        pass
