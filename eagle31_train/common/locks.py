"""One process at a time, by locks of the file system: they go with the process that holds them, however it ends."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from eagle31_train.common.artifacts import make_folder
from eagle31_train.common.errors import UserError


def hold(file: IO[Any], who: str, instead: str = "name=… or run_dir=…") -> None:
    """Lock an open file until it is closed; where the file system has no locks, nothing is locked. UserError if another
    process holds it: says `who` ("another process trains in runs/a now"), and its number if it is ours and here;
    `instead`: the options that choose another output."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        # Processes go on when their launcher is killed, and nobody notices: so they are named.
        pids = " ".join(map(str, users_of(file)))
        which, end = (f" (process {pids})", f", end it with `kill {pids}`") if pids else ("", "")
        raise UserError(f"{who}{which}: wait for it{end}, or choose another {instead}") from None
    except OSError:  # a file system without locks: nearly every process is the only one, so it goes on
        pass


def users_of(file: IO[Any]) -> list[int]:
    """The other processes of this machine that have an open file open too, as far as /proc shows us."""
    wanted, pids = os.fstat(file.fileno()), set()
    for entry in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):  # ended meanwhile, or somebody else's
            if os.path.samestat(entry.stat(), wanted):
                pids.add(int(entry.parts[2]))
    return sorted(pids - {os.getpid()})


@contextmanager
def alone(path: Path, who: str, instead: str = "name=… or run_dir=…") -> Iterator[None]:
    """While this lasts, no other process holds `path`, a file for this alone, gone afterwards; UserError as `hold`."""
    make_folder(path.parent)
    mine = False
    while not mine:
        with path.open("a") as file:
            hold(file, who, instead)
            # Else whoever had it has removed it since it was opened, and the next would make another.
            if mine := path.exists() and os.path.samestat(path.stat(), os.fstat(file.fileno())):
                try:
                    yield
                finally:
                    path.unlink(missing_ok=True)


def writing(folder: Path, instead: str = "name=… or run_dir=…") -> AbstractContextManager[None]:
    """`alone` in writing this folder: two would build it in one temporary folder, each removing the other's files."""
    whole = folder.absolute()  # `.` has no name
    return alone(whole.with_name(f".{whole.name}.lock"), f"another process writes {folder} now", instead)
