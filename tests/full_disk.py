"""Runs `eagle31` in forks of a process that has imported everything, on a disk that is full from an operation on.

One JSON object a line on standard input: words, folder, at (see full_disk.c) and log, a file beside the folder; one a
line on standard output: status, and how many operations there were. full_disk.so is preloaded.
"""

import ctypes
import gc
import json
import os
import sys
import traceback
from pathlib import Path

import accelerate  # noqa: F401 (all that takes seconds is imported before the first fork)
import datasets  # noqa: F401
import matplotlib.figure  # noqa: F401
import transformers  # noqa: F401

import data_prep.stage  # noqa: F401
import train.loop  # noqa: F401
from eagle31_train import __main__, cli, compare, evaluate, export, extract, plan, report  # noqa: F401

DISK = ctypes.CDLL(None)


def run(words: list[str], folder: str, at: int, log: str) -> None:
    """In a fork: does not return."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.chdir(folder)
    sys.argv = ["eagle31", *words]
    DISK.full_disk(folder.encode(), at)
    try:
        __main__.main()
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


def main() -> None:
    cli.load_config([cli.ANY, "target.path=any"])  # what is composed once
    gc.freeze()  # else every fork looks through all imports, and so copies them
    for line in sys.stdin:
        job = json.loads(line)
        pid = os.fork()
        if not pid:
            run(**job)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        count = int(Path(job["log"]).read_text(encoding="utf-8").rpartition("operations ")[2])
        print(json.dumps({"status": status, "operations": count}), flush=True)


if __name__ == "__main__":
    main()
