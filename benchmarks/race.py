"""Time contenders side by side: each in its own process, taking turns, A B C A B C, so that drift hits all alike.

Only one is alive at a time and has all of the memory. Running out of memory or time is reported as its result.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.shapes import Case

ROOT = Path(__file__).parent.parent
RESERVE = 0.9  # share of the available memory that workers may use


def race(case: Case, names: list[str], repeats: int, limit: float, memory: int | None = None) -> dict[str, Any]:
    """Race all contenders on one case, in turn, `repeats` times. Each turn builds one anew, warms it up by a step and
    times the next. limit: seconds for one step. memory: bytes that a worker may use beyond its imports; by default
    RESERVE of what is available. Return the case and, by contender, the fields of `worker.turn` as lists over its
    turns, or error."""
    started, memory = time.time(), memory or int(RESERVE * psutil.virtual_memory().available)
    results: dict[str, dict[str, Any]] = {name: {} for name in names}
    for _ in range(repeats):
        for name in names:
            if "error" in results[name]:
                continue
            turn = take_turn(name, case, memory, limit)
            if "error" in turn:
                results[name] = turn
            for field, value in turn.items() if "error" not in turn else ():
                results[name].setdefault(field, []).append(value)
    return {
        "case": str(case),
        "shape": case.shape,
        "length": case.length,
        "share": case.share,
        "unroll": case.unroll,
        "memory_limit": memory,
        "seconds": time.time() - started,
        "contenders": results,
    }


def take_turn(name: str, case: Case, memory: int, limit: float) -> dict[str, Any]:
    """Measure a contender in its own process; return {"error": why} if it could not do its step."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_WAIT_POLICY": "PASSIVE",
        "HF_HUB_OFFLINE": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",  # no pool of compiling processes beside the measured one
    }
    command = [sys.executable, "-m", "benchmarks.worker", name, str(case), str(memory), str(limit)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=ROOT)
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1])
    last = done.stderr.strip().rpartition("\n")[2]
    ended = {-signal.SIGALRM: f"over the limit of {limit:g} s", -signal.SIGKILL: "out of memory (killed)"}
    return {"error": ended.get(done.returncode, f"exit code {done.returncode}: {last}")}
