"""Whole files fetched from elsewhere into a bounded folder, ahead of their use, shared by threads and processes.

A file appears under its name at once and whole. All processes of a machine that use the folder keep its quota together
(see `quota`) and share the work: one of them fetches a file, the others that want it now wait for it, and fetch it
only if the first one failed or died.

Nothing is forced to the disk here. What a power cut spoils has another size, or another checksum, which the reader of
the store compares; `forget` then lets it be fetched again.
"""

import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from eagle31_train.errors import UserError
from eagle31_train.store.backends.quota import Quota, holds, stamp

POLL = 0.05  # seconds between looks for what others fetch, or for the space that they hold
THREADS = 2  # files fetched at a time in the background


class Cache:
    """Fetches files into a folder of bounded size, in the background too.

    Args:
        base: the folder that the quota holds for; several stores may share it.
        key: 16 hex digits that stand for the store.
        limit: bytes that all files of all stores under `base` may take.
        size_of: the size of a file where it comes from; None if it is absent.
        fetch: `fetch(name, path, size)` puts the file's content at `path`, or raises.
        where: the store's address, for messages.
        sharers: how many processes of this machine prefetch into `base`; each takes its part of the look-ahead.
        sleep: waits the given seconds.

    Raises:
        UserError: the folder cannot be made.
    """

    def __init__(
        self,
        base: Path,
        key: str,
        limit: int,
        size_of: Callable[[str], int | None],
        fetch: Callable[[str, Path, int], None],
        where: str,
        sharers: int = 1,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self.folder, self.where = base / f"store-{key}", where
        # The other half is for what is being read, and for files that are fetched on demand.
        self.ahead = limit // 2 // sharers
        self._quota = Quota(base, limit, where)
        self._size_of, self._fetch, self._sleep = size_of, fetch, sleep
        self._sizes: dict[str, int] = {}
        # `_changed` guards what follows; `_ready` are the files prefetched, or under way, and not yet used.
        self._changed = threading.Condition()
        self._queue: deque[str] = deque()
        self._ready: dict[str, int] = {}
        self._stopped = False
        self._admission = threading.Lock()
        self._workers = [threading.Thread(target=self._work, daemon=True) for _ in range(THREADS)]
        with self._quota.explained():
            self.folder.mkdir(parents=True, exist_ok=True)

    def get(self, name: str) -> Path:
        """The file on this machine, fetched if it is not there with its right size.

        Raises:
            FileNotFoundError: it is absent where it comes from.
            UserError: it does not fit, the disk is full, or fetching failed.
        """
        with self._changed, suppress(ValueError):  # sooner here than there
            self._queue.remove(name)
            self._changed.notify_all()
        try:
            while not self._obtain(name, urgent=True):
                self._sleep(POLL)  # another thread or process fetches it, or what is in the way will be done soon
        finally:
            self._used(name)
        return self.folder / name

    def forget(self, name: str) -> None:
        """Drop the copy, and what is known of the file."""
        self._sizes.pop(name, None)
        (self.folder / name).unlink(missing_ok=True)
        self._used(name)

    def clear(self) -> None:
        """Drop every copy of this store's files."""
        self._sizes.clear()
        shutil.rmtree(self.folder, ignore_errors=True)

    def scratch(self, name: str) -> Path:
        """Where to build a file that is then sent away; it counts with the size that it has."""
        path = self.folder / name
        with self._quota.explained():
            path.parent.mkdir(parents=True, exist_ok=True)
        return path.with_name(f".{path.name}.tmp")

    def _size(self, name: str) -> int:
        if name not in self._sizes:  # files of a store are written once: one question per file and process
            size = self._size_of(name)
            if size is None:
                raise FileNotFoundError(f"{self.where}/{name}")
            self._sizes[name] = size
        return self._sizes[name]

    def _obtain(self, name: str, urgent: bool) -> bool:
        """Whether the file is there now, if need be because it was fetched here."""
        size, path = self._size(name), self.folder / name
        if holds(path, size):
            with suppress(FileNotFoundError):  # just evicted
                stamp(path, urgent)
                return True
        if size > self._quota.limit:
            raise UserError(
                f"{self.where}/{name} has {size:,} bytes, more than store.cache_bytes={self._quota.limit}: "
                "raise store.cache_bytes"
            )
        part = self._quota.reserve(path, size, urgent)
        if part is None:
            return False
        try:
            with self._quota.explained():
                self._fetch(name, part.path, size)
                self._quota.keep(part, path, urgent)
        except Exception:
            self._sizes.pop(name, None)  # it may have been replaced where it comes from
            raise
        finally:
            self._quota.release(part)
        return True

    # ---------------------------------------------------------------- ahead of use

    def prefetch(self, names: Sequence[str]) -> None:
        """Fetch these in this order in the background, and no others any more.

        No more than `ahead` bytes are fetched and not yet used. What is larger, absent, fetched by another process
        just now, or fails, is left to `get`.
        """
        with self._changed:
            if self._stopped:
                return
            self._queue = deque(dict.fromkeys(names))
            self._ready.clear()
            self._changed.notify_all()
            for worker in self._workers:
                if worker.ident is None:
                    worker.start()

    def close(self, grace: float = 5.0) -> None:
        """Fetch nothing more in the background; wait up to `grace` seconds for what is under way."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        for worker in self._workers:
            if worker.ident is not None:
                worker.join(grace)

    def _used(self, name: str) -> None:
        with self._changed:
            self._ready.pop(name, None)
            self._changed.notify_all()

    def _work(self) -> None:
        while (name := self._admitted()) is not None:
            try:
                obtained = name in self._ready and self._obtain(name, urgent=False)
            except Exception:  # `get` tries again, and raises it
                obtained = False
            if not obtained:
                self._used(name)

    def _admitted(self) -> str | None:
        """Wait for the head of the queue to fit into the look-ahead, and take it; None: closed."""
        while True:
            with self._admission:  # one thread at a time, or a later name could slip in before an earlier one
                with self._changed:
                    self._changed.wait_for(lambda: self._stopped or bool(self._queue))
                    if self._stopped:
                        return None
                    name = self._queue[0]
                try:
                    size = self._size(name)  # may ask another machine: not under the lock
                except Exception:  # left to `get`
                    size = 0
                with self._changed:
                    while self._leads(name) and sum(self._ready.values()) + size > self.ahead:
                        self._changed.wait()
                    if self._leads(name):
                        self._ready[self._queue.popleft()] = size
                        return name

    def _leads(self, name: str) -> bool:
        """Whether the name is still the next one; `get` and `prefetch` change the queue at any time."""
        return not self._stopped and bool(self._queue) and self._queue[0] == name
