"""Time contenders side by side: each in its own process, taking turns, A B C A B C, so that drift hits all alike.

Only one is alive at a time, so that all of the memory is its own. One that runs out of memory or time is reported so.
"""

import json
import os
import select
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.shapes import Case

ROOT = Path(__file__).parent.parent
RESERVE = 0.9  # share of the available memory that workers may use


class ContenderError(Exception):
    """Why a contender could not do its step: "out of memory", "over the limit of N s", or the error it died of."""


class Worker:
    """A contender's process.

    Args:
        name: the contender.
        case: what it steps on.
        memory: bytes that it may use beyond its imports.
        limit: seconds for one step; building may take ten minutes more.
    """

    def __init__(self, name: str, case: Case, memory: int, limit: float) -> None:
        self.limit = limit
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (as long as the process)
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_WAIT_POLICY": "PASSIVE",
            "HF_HUB_OFFLINE": "1",
            "TORCHINDUCTOR_COMPILE_THREADS": "1",  # no pool of compiling processes beside the measured one
        }
        command = [sys.executable, "-m", "benchmarks.worker", name, str(case), str(memory)]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            env=environment,
            cwd=ROOT,
        )
        try:
            self.base: int = self._answer(limit + 600)["base"]
        except ContenderError:
            self.stop()
            raise

    def step(self) -> dict[str, Any]:
        """One training step (worker.step).

        Raises:
            ContenderError: it could not.
        """
        assert self.process.stdin
        self.process.stdin.write("step\n")
        self.process.stdin.flush()
        return self._answer(self.limit)

    def stop(self) -> None:
        """End the process and wait for it."""
        self.process.kill()
        self.process.communicate()
        self.log.close()

    def _answer(self, limit: float) -> dict[str, Any]:
        assert self.process.stdout
        ready, _, _ = select.select([self.process.stdout], [], [], limit)
        if not ready:
            raise ContenderError(f"over the limit of {limit:g} s")
        line = self.process.stdout.readline()
        if not line:  # died without a word
            code = self.process.wait()
            self.log.seek(0)
            last = self.log.read().strip().rpartition("\n")[2]
            raise ContenderError("out of memory (killed)" if code == -9 else f"exit code {code}: {last}")
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise ContenderError(reply["error"])
        return reply


def available() -> int:
    """Bytes of memory that could be had now."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise LookupError("MemAvailable")


def race(case: Case, names: list[str], repeats: int, limit: float, memory: int | None = None) -> dict[str, Any]:
    """One case, all contenders: each turn builds one anew, warms it up by a step and times the next.

    Args:
        case: what they step on.
        names: the contenders, in the order in which they take turns.
        repeats: turns of each.
        limit: seconds for one step.
        memory: bytes that a worker may use; by default RESERVE of what is available.

    Returns:
        The case and, by contender, lists over its turns (`_empty`), or error.
    """
    started, memory = time.time(), memory or int(RESERVE * available())
    results = {name: _empty() for name in names}
    for _ in range(repeats):
        for name in names:
            if "error" in results[name]:
                continue
            try:
                turn = _turn(name, case, memory, limit)
            except ContenderError as error:
                results[name] = {"error": str(error)}
                continue
            for field, value in turn.items():
                results[name][field].append(value)
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


def _turn(name: str, case: Case, memory: int, limit: float) -> dict[str, Any]:
    worker = Worker(name, case, memory, limit)
    try:
        warm, done = worker.step(), worker.step()
    finally:
        worker.stop()
    measured = {field: done[field] for field in ("seconds", "cpu_seconds", "peak", "loss")}
    return {**measured, "warmup_seconds": warm["seconds"], "base": worker.base}


def _empty() -> dict[str, Any]:
    return {"seconds": [], "cpu_seconds": [], "warmup_seconds": [], "base": [], "peak": [], "loss": []}
