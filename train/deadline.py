"""Requests to stop a run: SIGTERM, as clusters send it, Ctrl-C, or its own time limit."""

import math
import signal
import threading
import time
from typing import Any

from eagle31_train.common.console import say
from eagle31_train.common.errors import Interrupted, Stopped

CTRL_C = "Ctrl-C"
SAME = 1.0  # seconds within which a second interrupt is the first one, which a launcher has also passed on


class Deadline:
    """`with Deadline(limit) as deadline:` records a SIGTERM instead of exiting; `limit`: seconds from now, if any.

    Once there are steps to save (`save_on_interrupt`), an interrupt is recorded, too. A second one ends the process at
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
            if handler is not None:  # None: a handler in C, which Python cannot restore
                signal.signal(number, handler)

    @property
    def reason(self) -> str | None:
        """Why this process should stop; None if it should not."""
        return self._signal or ("train.time_limit" if time.monotonic() >= self._end else None)

    def save_on_interrupt(self) -> None:
        """Record interrupts from now on: the caller saves and stops after the step at which `reason` is set."""
        self._saves = True

    def stopped(self, text: str) -> Stopped:
        """Return the exception to raise with this text: Interrupted after Ctrl-C, otherwise Stopped."""
        return Interrupted(text) if self._signal == CTRL_C else Stopped(text)

    def pause(self, seconds: float) -> None:
        """Sleep, before the first step. Raise Stopped if this process should stop: it has nothing to save yet."""
        if self.reason is not None:
            raise Stopped(
                f"train: stopped by {self.reason} while waiting for the store; run the same command again to resume"
            )
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
        # In a thread, since the code that the signal interrupted may be printing.
        text = "train: will save and stop after the next step; press Ctrl-C again to end at once, without saving"
        threading.Thread(target=say, args=(text, True)).start()
