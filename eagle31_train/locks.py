"""One process at a time, by locks of the file system: they go with the process that holds them, however it ends."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from eagle31_train.errors import UserError


def hold(file: IO[Any], who: str) -> None:
    """Lock an open file until it is closed; where the file system has no locks, nothing is locked.

    Args:
        who: what is said where another process holds it, such as "another process trains in runs/a now".

    Raises:
        UserError: another process holds it.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"{who}: wait for it, or choose another name=… or run_dir=…") from None
    except OSError:  # a file system without locks: go on as the only one, which most are
        pass


@contextmanager
def alone(path: Path, who: str) -> Iterator[None]:
    """While this lasts, no other process is within the same: `path` is a file for this alone, and stays.

    Raises:
        UserError: another one is, as `hold` says it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        hold(file, who)
        yield
