"""Outputs of an earlier version are still read, resumed and served: `fixtures/v68c343f`, made by that commit."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CHECK = ROOT / "tests" / "fixtures" / "v68c343f" / "check.py"
SLOW = ["readers", "stopped", "killed", "partial", "regenerate", "continued", "mla", "measured"]


@pytest.mark.parametrize("item", ["finished", *(pytest.param(item, marks=pytest.mark.slow) for item in SLOW)])
def test_an_old_output_is_taken_as_it_is(item):
    done = subprocess.run([sys.executable, str(CHECK), str(ROOT), item], capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
