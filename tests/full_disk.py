"""Runs `eagle31` in forks of a process that has imported everything, on a disk that is full from an operation on.

A JSON list a line on standard input, of commands that are started together: words, folder, where they are run; place,
at and error (see full_disk.c); log, a file beside the folder. Of each, in a list on standard output: status, and how
many operations there were, and what it said. full_disk.so is preloaded. What takes more than SECONDS or ROOM is killed.
"""

import ctypes
import gc
import json
import os
import resource
import signal
import sys
import traceback
from pathlib import Path

import accelerate  # noqa: F401 (all that takes seconds is imported before the first fork)
import datasets  # noqa: F401
import transformers  # noqa: F401

import data_prep.stage  # noqa: F401
import train.prepare  # noqa: F401
from eagle31_train import __main__, compare, compose, evaluate, export, extract, plan, report  # noqa: F401
from eagle31_train.reporting.figures import Picture
from eagle31_train.targets import toy

DISK = ctypes.CDLL(None)
# Commands that are modules of their own: `python -m eagle31_train.targets.toy`.
MODULES = {"toy": toy.main}
SECONDS, ROOM = 60, 8 << 30  # of processor time; and of memory, most of which torch only reserves


def run(words: list[str], folder: str, place: str, at: int, error: int, log: str) -> None:
    """In a fork: does not return."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.chdir(folder)
    sys.argv = ["eagle31", *words]
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    signal.alarm(10 * SECONDS)  # where it waits for something
    there = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (there + ROOM, there + ROOM))
    DISK.full_disk(place.encode(), at, error)
    try:
        MODULES[words[0]](words[1:]) if words[0] in MODULES else __main__.main()
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os.write(file, f"\noperations {DISK.full_disk_count()}".encode())
    os._exit(status)


def started(job: dict) -> int:
    pid = os.fork()
    if not pid:
        run(**job)
    return pid


def main() -> None:
    compose.load_config([compose.ANY, "target.path=any"])  # what is composed once
    Picture.png = lambda picture: picture.name.encode()  # to draw takes most of a command's time, and writes nothing
    gc.freeze()  # else every fork looks through all imports, and so copies them
    for line in sys.stdin:
        jobs = json.loads(line)
        pids, answers = [started(job) for job in jobs], []
        for job, pid in zip(jobs, pids, strict=True):
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            said, end, count = Path(job["log"]).read_text(encoding="utf-8").rpartition("\noperations ")
            answers.append({"status": status, "operations": int(count) if end else -1, "said": said or count})
        print(json.dumps(answers), flush=True)


if __name__ == "__main__":
    main()
