"""Children that begin with all that the tests import, which takes seconds: forked of a server, which is forked of the
process of tests once these are collected. In neither has torch worked, so they may use threads."""

import gc
import logging
import multiprocessing
import os
import signal
import sys
from contextlib import contextmanager, suppress
from multiprocessing import forkserver, resource_tracker, util
from pathlib import Path
from unittest.mock import patch


def start_server():
    with patch.dict(os.environ, PYTHONWARNINGS="ignore:resource_tracker"):  # children that are killed leave semaphores
        resource_tracker.ensure_running()
    with patch.object(util, "spawnv_passfds", _forked):
        forkserver.ensure_running()


def _forked(interpreter, arguments, kept):
    """What would start a new interpreter that runs the last argument; it has no other files than that one would."""
    if pid := os.fork():
        return pid
    try:
        for number in (int(file.name) for file in Path("/proc/self/fd").iterdir()):
            if number > 2 and number not in kept:
                with suppress(OSError):  # the folder's own
                    os.close(number)
        exec(arguments[-1])
    finally:
        os._exit(0)


@contextmanager
def served(function, *arguments):
    """A function in a child with a session of its own, nothing of which outlives the block; gives its process."""
    process = multiprocessing.get_context("forkserver").Process(target=_leading, args=(function, *arguments))
    process.start()
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.join()


def _leading(function, *arguments):
    os.setsid()
    gc.freeze()  # else it looks through all that its server imported, and so copies it
    function(*arguments)


def print_to(output):
    """Libraries log there too: what they were imported with is closed, and its number may be another file's by now."""
    sys.stdout = sys.stderr = Path(output).open("a", buffering=1)  # noqa: SIM115 (as long as the process lives)
    for number in (1, 2):
        os.dup2(sys.stdout.fileno(), number)
    for logger in map(logging.getLogger, [None, *logging.root.manager.loggerDict]):
        for handler in logger.handlers:
            if isinstance(handler, logging.StreamHandler):
                handler.setStream(sys.stderr)
