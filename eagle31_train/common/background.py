"""A background thread that runs one call at a time."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any


class Background:
    """Runs calls in a thread, one at a time: `start` waits for the previous call, and raises its error.

    Python does not exit before the thread is done, whatever ends the main thread."""

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, name)
        self._call: Future[None] | None = None

    def __enter__(self) -> "Background":
        return self

    def __exit__(self, error: object, *_: object) -> None:
        try:
            if error is None:  # the block's own error takes precedence
                self.wait()
        finally:
            self._thread.shutdown()

    def start(self, call: Callable[..., None], *arguments: Any) -> None:
        self.wait()
        self._call = self._thread.submit(call, *arguments)

    def check(self) -> None:
        """Raise the call's error if it has failed, without waiting for it."""
        if self._call is not None and self._call.done():
            self.wait()

    def wait(self) -> None:
        """Wait until no call is running, and raise its error."""
        if self._call is None:
            return
        error = self._call.exception()  # after Ctrl-C here, the call can be waited for again
        self._call = None
        if error is not None:
            raise error

    def close(self) -> None:
        self.__exit__(None)
