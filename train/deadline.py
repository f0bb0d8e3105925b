"""When a run is told to stop: by SIGTERM, as a cluster does, by Ctrl-C, or by its own time limit."""

import math
import signal
import threading
import time
from typing import Any

from eagle31_train.common.console import say
from eagle31_train.common.errors import Interrupted, Stopped

CTRL_C = "Ctrl-C"
SAME = 1.0  # seconds: another interrupt within them is the same one, which a launcher has passed on, too


class Deadline:
    """`with Deadline(limit) as deadline:` notes a SIGTERM instead of dying of it; `limit`: seconds from now, if any.

    An interrupt is noted, too, once there are steps to save (`save_on_interrupt`). A second one ends the process at
    once.
    """

    def __init__(self, limit: float | None) -> None:
        self._end = math.inf if limit is None else time.monotonic() + limit
        self._signal: str | None = None
        self._interrupted_at: float | None = None
        self._saves = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Deadline":
        if threading.current_thread() is threading.main_thread():
            self._before[signal.SIGTERM] = signal.signal(signal.SIGTERM, self._note)
            if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a shell's background jobs ignore it
                self._before[signal.SIGINT] = signal.signal(signal.SIGINT, self._note_interrupt)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            if handler is not None:  # of C, which Python cannot give back
                signal.signal(number, handler)

    @property
    def reason(self) -> str | None:
        """Why this process is to stop; None if it is not."""
        return self._signal or ("train.time_limit" if time.monotonic() >= self._end else None)

    def save_on_interrupt(self) -> None:
        """Note interrupts from now on: the caller saves after each step where `reason` says so."""
        self._saves = True

    def stopped(self, text: str) -> Stopped:
        """What to raise with this text, by what the process was told."""
        return Interrupted(text) if self._signal == CTRL_C else Stopped(text)

    def pause(self, seconds: float) -> None:
        """Sleep, before the first step; Stopped if this process is to stop, which has nothing to save."""
        if self.reason is not None:
            raise Stopped(f"train: stopped by {self.reason} while it waited for the store; the same command goes on")
        time.sleep(seconds)

    def _note(self, *_: object) -> None:
        self._signal = "SIGTERM"

    def _note_interrupt(self, number: int, frame: Any) -> None:
        now, before = time.monotonic(), self._interrupted_at
        if before is not None and now - before <= SAME:
            return
        self._interrupted_at = now
        if before is not None or not self._saves:
            signal.default_int_handler(number, frame)
        self._signal = self._signal or CTRL_C
        # From a thread: what the signal has interrupted may be printing.
        text = "train: stops and saves after the next step; another Ctrl-C ends it at once, without saving"
        threading.Thread(target=say, args=(text, True)).start()
