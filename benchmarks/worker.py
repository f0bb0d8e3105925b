"""One contender, one case, one process: builds model and data, then steps on command.

Started by race.py as `python -m benchmarks.worker CONTENDER CASE BYTES`. It answers in JSON lines on the standard
output that it was started with; whatever the trainers print goes to the standard error.
"""

import ctypes
import gc
import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor

from benchmarks import contenders
from benchmarks.shapes import Case, make_material, turns


def status(field: str) -> int:
    """A field of /proc/self/status, in bytes: VmRSS, VmHWM (its high-water mark) or VmData."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise LookupError(field)


def trim() -> None:
    """Hand freed memory back to the system, so that what is resident is what is in use."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def guard(limit: int) -> None:
    """Fail with an error at `limit` bytes more than now, rather than bring the machine down."""
    data = status("VmData") + limit
    resource.setrlimit(resource.RLIMIT_DATA, (data, data))
    Path("/proc/self/oom_score_adj").write_text("1000")


def prime() -> None:
    """Load the compiler, for those that compile parts of their step: its memory belongs to no step."""

    def forward(x: Tensor) -> Tensor:
        return torch.compile(lambda y: y.sin() + 1)(x)

    if os.environ.get("TORCHDYNAMO_DISABLE") != "1":
        forward(torch.ones(8, requires_grad=True)).sum().backward()
        torch.compiler.reset()


def step(contender: contenders.Contender) -> dict[str, Any]:
    """A training step without its optimizer: forward, loss, backward, gradients dropped.

    Returns:
        seconds; cpu_seconds of all threads; peak: resident bytes at most during the step; loss.
    """
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
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


def serve(channel: TextIO, name: str, case: Case, limit: int) -> None:
    """Build, say so with the resident bytes, then a step for each line read; end with the input or at an error."""

    def answer(**reply: Any) -> None:
        channel.write(json.dumps(reply) + "\n")
        channel.flush()

    try:
        prime()
        guard(limit)
        material = make_material(case.drafter(), turns(case.length, case.share))
        contender = contenders.build(name, material, case.unroll)
        del material
        trim()
        answer(base=status("VmRSS"))
        for _ in sys.stdin:
            answer(**step(contender))
    except (MemoryError, RuntimeError) as error:
        full = isinstance(error, MemoryError) or "alloc" in str(error)
        first_line = str(error).strip().partition("\n")[0]
        answer(error="out of memory" if full else f"{type(error).__name__}: {first_line}"[:120])
        raise


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    serve(answers, sys.argv[1], Case.parse(sys.argv[2]), int(sys.argv[3]))
