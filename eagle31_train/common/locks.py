"""One process at a time, by locks of the file system, which end with the process that holds them, however it ends."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from eagle31_train.common.artifacts import make_folder
from eagle31_train.common.errors import UserError


def hold(file: IO[Any], who: str, instead: str = "name=… or run_dir=…") -> None:
    """Lock an open file until it is closed. Where the file system has no locks, nothing is locked.

    UserError if another process holds the lock. The text has `who` ("another process trains in runs/a now"), the number
    of that process if it is ours and on this machine, and `instead`, the options that choose another output."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        # Name the processes: they go on, unnoticed, when their launcher is killed.
        pids = " ".join(map(str, users_of(file)))
        which, end = (f" (process {pids})", f", stop it with `kill {pids}`") if pids else ("", "")
        raise UserError(f"{who}{which}: wait for it{end}, or choose another {instead}") from None
    except OSError:  # the file system has no locks: go on, since nearly every process is the only one
        pass


def users_of(file: IO[Any]) -> list[int]:
    """Return the numbers of other processes of this machine that have the file open, as far as /proc shows them."""
    wanted, pids = os.fstat(file.fileno()), set()
    for entry in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):  # the process has ended, or is another user's
            if os.path.samestat(entry.stat(), wanted):
                pids.add(int(entry.parts[2]))
    return sorted(pids - {os.getpid()})


@contextmanager
def alone(path: Path, who: str, instead: str = "name=… or run_dir=…") -> Iterator[None]:
    """Context manager that keeps out other processes by the lock file `path`, removed at its end. Errors as `hold`."""
    make_folder(path.parent)
    mine = False
    while not mine:
        with path.open("a") as file:
            hold(file, who, instead)
            # Otherwise its last holder removed the file after we opened it, and the next process would make another.
            if mine := path.exists() and os.path.samestat(path.stat(), os.fstat(file.fileno())):
                try:
                    yield
                finally:
                    path.unlink(missing_ok=True)


def writing(folder: Path, instead: str = "name=… or run_dir=…") -> AbstractContextManager[None]:
    """Write a folder `alone`: two writers would build it in one temporary folder, and remove each other's files."""
    whole = folder.absolute()  # `.` has no name
    return alone(whole.with_name(f".{whole.name}.lock"), f"another process is writing {folder}", instead)
