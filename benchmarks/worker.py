"""One contender, one case, one process: builds model and data, and times a step.

Started by race.py as `python -m benchmarks.worker CONTENDER CASE BYTES SECONDS`. The last line of its standard output
is its answer, in JSON.
"""

import ctypes
import gc
import json
import os
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import contenders
from benchmarks.shapes import Case, make_material, turns


def status(field: str) -> int:
    """Return a field of /proc/self/status in bytes: VmRSS, VmHWM (its high-water mark) or VmData."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise LookupError(field)


def trim() -> None:
    """Return freed memory to the system, so that resident memory is memory in use."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def guard(limit: int) -> None:
    """Fail with an error at `limit` bytes more than now, rather than bring the machine down."""
    data = status("VmData") + limit
    resource.setrlimit(resource.RLIMIT_DATA, (data, data))
    Path("/proc/self/oom_score_adj").write_text("1000")


def prime() -> None:
    """Load the compiler, with which some contenders compile parts of their step: its memory belongs to no step."""

    def forward(x: Tensor) -> Tensor:
        return torch.compile(lambda y: y.sin() + 1)(x)

    if os.environ.get("TORCHDYNAMO_DISABLE") != "1":
        forward(torch.ones(8, requires_grad=True)).sum().backward()
        torch.compiler.reset()


def step(contender: contenders.Contender) -> dict[str, Any]:
    """Run a training step without its optimizer. Return seconds; cpu_seconds of all threads; peak: the most resident
    bytes during the step; loss."""
    Path("/proc/self/clear_refs").write_text("5")  # reset the high-water mark
    start, cpu = time.perf_counter(), time.process_time()
    loss = contender.loss()
    loss.backward()
    contenders.drop_gradients(contender)
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    value = float(loss.detach())
    del loss
    peak = status("VmHWM")
    trim()
    return {"seconds": seconds, "cpu_seconds": cpu, "peak": peak, "loss": value}


def turn(name: str, case: Case, memory: int, limit: float) -> dict[str, Any]:
    """Build a contender and time its second step. SIGALRM ends it after `limit` seconds in a step, or ten minutes more
    for building. Return the fields of `step`, warmup_seconds of the first step, and base: resident bytes before; or
    error."""
    try:
        signal.setitimer(signal.ITIMER_REAL, limit + 600)
        prime()
        guard(memory)
        contender = contenders.build(name, make_material(case.drafter(), turns(case.length, case.share)), case.unroll)
        trim()
        base, seconds = status("VmRSS"), []
        for _ in range(2):
            signal.setitimer(signal.ITIMER_REAL, limit)
            done = step(contender)
            seconds.append(done["seconds"])
    except (MemoryError, RuntimeError) as error:
        full = isinstance(error, MemoryError) or "alloc" in str(error)
        first_line = str(error).strip().partition("\n")[0]
        return {"error": "out of memory" if full else f"{type(error).__name__}: {first_line}"[:120]}
    return {**done, "warmup_seconds": seconds[0], "base": base}


if __name__ == "__main__":
    name, case, memory, limit = sys.argv[1:]
    print(json.dumps(turn(name, Case.parse(case), int(memory), float(limit))))
