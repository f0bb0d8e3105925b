"""When a run is told to stop: by SIGTERM, as a cluster does, or by its own time limit."""

import os
import re
import signal
import threading
import time
from typing import Any

from eagle31_train.cli import STOPPED
from eagle31_train.errors import UserError

UNITS = {"d": 86400, "h": 3600, "m": 60, "s": 1}
ONCE = 5.0  # seconds: a scheduler tells every process to stop, and a launcher among them tells its processes again
AT_ONCE = "train: stopped at once by a second SIGTERM; the same command goes on from the last checkpoint"


def parse_limit(text: str | None) -> float | None:
    """Seconds from "3h50m", "90m", "30s" or "2d"; None for no limit.

    Raises:
        UserError: it is no such time.
    """
    if text is None:
        return None
    parts = re.fullmatch(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?", text.replace(" ", ""))
    seconds = (
        sum(int(part or 0) * unit for part, unit in zip(parts.groups(), UNITS.values(), strict=True)) if parts else 0
    )
    if seconds <= 0:
        raise UserError(f"train.time_limit={text} is no time: write it like 3h50m, 90m or 30s")
    return float(seconds)


class Deadline:
    """`with Deadline(limit) as deadline:` notes a SIGTERM instead of dying of it; a later one ends the run at once.

    Args:
        limit: seconds from now after which `reason` says so; None for none.
    """

    def __init__(self, limit: float | None) -> None:
        self._end = None if limit is None else time.monotonic() + limit
        self._signalled: float | None = None
        self._before: Any = None

    def __enter__(self) -> "Deadline":
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)

    @property
    def reason(self) -> str | None:
        """Why this process is to stop; None if it is not."""
        if self._signalled is not None:
            return "SIGTERM"
        return "train.time_limit" if self._end is not None and time.monotonic() >= self._end else None

    def _note(self, *_: object) -> None:
        if self._signalled is None:
            self._signalled = time.monotonic()
        elif time.monotonic() - self._signalled > ONCE:
            # No exception: whatever the run waits for, a slow disk or data that does not come, would be waited for.
            os.write(2, f"\n{AT_ONCE}\n".encode())
            os._exit(STOPPED)
