"""When a run is told to stop: by SIGTERM, as a cluster does, or by its own time limit."""

import math
import signal
import threading
import time
from typing import Any

from eagle31_train.common.errors import Stopped


class Deadline:
    """`with Deadline(limit) as deadline:` notes a SIGTERM instead of dying of it. `limit`: seconds from now, if any."""

    def __init__(self, limit: float | None) -> None:
        self._end = math.inf if limit is None else time.monotonic() + limit
        self._signalled = False
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
        if self._signalled:
            return "SIGTERM"
        return "train.time_limit" if time.monotonic() >= self._end else None

    def pause(self, seconds: float) -> None:
        """Sleep, before the first step; Stopped if this process is to stop, which has nothing to save."""
        if self.reason is not None:
            raise Stopped(f"train: stopped by {self.reason} while it waited for the store; the same command goes on")
        time.sleep(seconds)

    def _note(self, *_: object) -> None:
        self._signalled = True
