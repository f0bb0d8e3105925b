"""A process that measures one thing after another, so that what fails is reported and the others go on."""

import gc
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import torch

Task = Callable[..., dict[str, Any]]


class Worker:
    """Does tasks in a process of its own, which is replaced when a task breaks it.

    Full memory breaks nothing; after any other error of CUDA, no later call of that process would succeed.
    """

    def __init__(self) -> None:
        self._pool: ProcessPoolExecutor | None = None

    def do(self, task: Task, *words: Any) -> dict[str, Any]:
        """What `task(*words)` returns, or {"error": one line}."""
        if self._pool is None:
            context = multiprocessing.get_context("spawn")  # a forked process cannot use CUDA
            self._pool = ProcessPoolExecutor(1, mp_context=context)
        try:
            answer = self._pool.submit(guarded, task, *words).result()
        except BrokenProcessPool:
            answer = {"error": "the process that measured it was killed or crashed", "broken": True}
        if answer.pop("broken", False):
            self.close()
        return answer

    def close(self) -> None:
        """End the process."""
        if self._pool is not None:
            self._pool.shutdown()
        self._pool = None


def guarded(task: Task, *words: Any) -> dict[str, Any]:
    """`task(*words)`, its failures as answers."""
    try:
        answer = task(*words)
    except torch.OutOfMemoryError:
        answer = {"error": "out of memory"}
    except Exception as error:
        line = " ".join(str(error).split())[:200]
        answer = {"error": f"{type(error).__name__}: {line}", "broken": True}
    free()  # here, where the exception is gone, and with it the tensors of the frames that it went through
    return answer


def free() -> None:
    """Give unused device memory back."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
