"""Time contenders side by side: each in its own process, taking turns, A B C A B C, so that drift hits all alike.

Where all fit into memory at once, each is built once and warmed up by one step. Where they do not, only one is alive at
a time: every turn builds it anew, warms it up and times one step ("apart" in the results: same order, coarser grain).
A contender that runs out of memory or time is reported so, by name.
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
            ContenderError: it could not, and is gone.
        """
        assert self.process.stdin
        self.process.stdin.write("step\n")
        self.process.stdin.flush()
        try:
            return self._answer(self.limit)
        except ContenderError:
            self.stop()
            raise

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


class Race:
    """One case, all contenders.

    Args:
        case: what they step on.
        names: the contenders, in the order in which they take turns.
        repeats: timed steps each.
        limit: seconds for one step.
        memory: bytes that all workers together may use; by default RESERVE of what is available.
    """

    def __init__(self, case: Case, names: list[str], repeats: int, limit: float, memory: int | None = None) -> None:
        self.case, self.names, self.repeats, self.limit = case, names, repeats, limit
        self.memory = memory or int(RESERVE * available())
        self.results: dict[str, dict[str, Any]] = {}
        self.workers: dict[str, Worker] = {}

    def run(self) -> dict[str, Any]:
        """The case's result: contenders with lists (`_empty`), or error."""
        started = time.time()
        try:
            together = self._together()
            if not together:
                self._stop()
                self._apart()
        finally:
            self._stop()
        return {
            "case": str(self.case),
            "shape": self.case.shape,
            "length": self.case.length,
            "share": self.case.share,
            "unroll": self.case.unroll,
            "interleaved": "together" if together else "apart",
            "memory_limit": self.memory,
            "seconds": time.time() - started,
            "contenders": self.results,
        }

    def _together(self) -> bool:
        """Warm all up and let them take turns. False: they need each other's memory."""
        idle, need = 0, 0
        self.results = {name: _empty() for name in self.names}
        for name in self.names:
            try:
                warm = self._start(name, self.memory - idle)
            except ContenderError as error:
                if idle and "memory" in str(error):
                    return False
                self.results[name] = {"error": str(error)}
                continue
            idle += warm["idle"]
            need = max(need, warm["peak"] - warm["idle"])
            if idle + need > self.memory:
                return False
        for _ in range(self.repeats):
            for name in self.names:
                self._timed(name)
        return True

    def _apart(self) -> None:
        self.results = {name: _empty() for name in self.names}
        for _ in range(self.repeats):
            for name in self.names:
                if "error" not in self.results[name]:
                    try:
                        self._start(name, self.memory)
                    except ContenderError as error:
                        self.results[name] = {"error": str(error)}
                        continue
                    self._timed(name)
                    self._stop()

    def _start(self, name: str, memory: int) -> dict[str, Any]:
        worker = Worker(name, self.case, memory, self.limit)
        warm = worker.step()
        self.workers[name] = worker
        self.results[name]["warmup_seconds"].append(warm["seconds"])
        self.results[name]["base"].append(worker.base)
        return warm

    def _timed(self, name: str) -> None:
        if name not in self.workers:
            return
        try:
            done = self.workers[name].step()
        except ContenderError as error:
            del self.workers[name]
            self.results[name] = {"error": str(error)}
            return
        for field in ("seconds", "cpu_seconds", "peak", "loss"):
            self.results[name][field].append(done[field])

    def _stop(self) -> None:
        while self.workers:
            self.workers.popitem()[1].stop()


def _empty() -> dict[str, Any]:
    return {"seconds": [], "cpu_seconds": [], "warmup_seconds": [], "base": [], "peak": [], "loss": []}
