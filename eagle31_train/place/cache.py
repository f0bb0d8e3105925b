"""Whole files fetched from elsewhere into a bounded folder, ahead of their use, shared by threads and processes.

    cache_dir/store-<hash of location>/shards/train-00000.safetensors

A file appears under its name at once and whole. All processes of a machine that use the folder keep
its bound together (see `room`), and share the work: a file is fetched by one of them, and that one
alone. Another that wants it now waits for it, and fetches it itself only if the first one failed or
died; another that fetches ahead goes on to the next.

Nothing is forced to the disk here. What a power cut spoils has another size, or another checksum,
which the reader of the store compares; `forget` then lets it be fetched again.
"""

import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from eagle31_train.place.room import Part, Room, stamp, touch
from eagle31_train.schema import UserError

POLL = 0.05  # seconds between looks for what other processes fetch, or for the room that they hold


class Cache:
    """Fetches files into a folder of bounded size, in the background too.

    Args:
        base: the folder that the bound holds for; several stores may share it.
        key: 16 hex digits that stand for the store.
        limit: bytes that all files of all stores under `base` may take.
        size_of: the size of a file where it comes from; None if it is absent.
        fetch: `fetch(name, path, size)` puts the file's content at `path`, or raises.
        where: the store's address, for messages.
        sharers: how many processes of this machine prefetch into `base`; each takes its part of the look-ahead.
        threads: how many files are fetched at a time in the background.
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
        *,
        where: str,
        sharers: int = 1,
        threads: int = 2,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self.folder = base / f"store-{key}"
        self.limit = limit
        self.where = where
        # The other half is for what is being read, and for files that are fetched on demand.
        self.ahead = limit // 2 // sharers
        self._room = Room(base, limit, where)
        self._size_of, self._fetch, self._sleep = size_of, fetch, sleep
        self._sizes: dict[str, int] = {}
        self._locks: dict[str, threading.Lock] = {}  # one fetch per name at a time
        # `_changed` guards what follows; `_ready` are the files prefetched, or under way, and not yet used.
        self._changed = threading.Condition()
        self._queue: deque[str] = deque()
        self._ready: dict[str, int] = {}
        self._errors: dict[str, Exception] = {}
        self._stopped = False
        self._admission = threading.Lock()
        self._workers = [threading.Thread(target=self._work, daemon=True) for _ in range(threads)]
        self._room.make(self.folder)

    # ---------------------------------------------------------------- one file

    def get(self, name: str) -> Path:
        """The file on this machine, fetched if it is not there with its right size.

        Raises:
            FileNotFoundError: it is absent where it comes from.
            UserError: it does not fit, the disk is full, or fetching failed, now or in the background.
        """
        with self._changed:
            if name in self._queue:  # sooner here than there
                self._queue.remove(name)
                self._changed.notify_all()
        with self._lock(name):
            try:
                if error := self._errors.pop(name, None):
                    raise error
                path = self._obtain(name, urgent=True)
                assert path is not None
                return path
            finally:
                self._used(name)

    def forget(self, name: str) -> None:
        """Drop the copy, and what is known of the file."""
        with self._lock(name):
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
        self._room.make(path.parent)
        return path.with_name(f".{path.name}.tmp")

    def _lock(self, name: str) -> threading.Lock:
        with self._changed:
            return self._locks.setdefault(name, threading.Lock())

    def _size(self, name: str) -> int:
        if name not in self._sizes:  # files of a store are written once: one question per file and process
            size = self._size_of(name)
            if size is None:
                raise FileNotFoundError(f"{self.where}/{name}")
            self._sizes[name] = size
        return self._sizes[name]

    def _obtain(self, name: str, urgent: bool) -> Path | None:
        """The file; None where a fetch that is not urgent is left to another process, or finds no room."""
        size = self._size(name)
        path = self.folder / name
        while not touch(path, size, urgent):
            if size > self.limit:
                raise UserError(
                    f"{self.where}/{name} holds {size:,} bytes, more than store.cache_bytes={self.limit}: "
                    "raise store.cache_bytes"
                )
            if part := self._take(path, size, urgent):
                self._fill(part, name, size, urgent)
                return path
            if not urgent:
                return None
            self._sleep(POLL)  # another process fetches it, or what is in the way will be done soon
        return path

    def _take(self, path: Path, size: int, urgent: bool) -> Part | None:
        def prefetched() -> set[Path]:
            with self._changed:  # under the lock of the room: all that have room by now are known
                return {self.folder / name for name in self._ready}

        part = self._room.take(path, size, kept=prefetched)
        if part is None and urgent:  # better fetch a prefetched file twice than not get on
            part = self._room.take(path, size, kept=set, must=True)
        return part

    def _fill(self, part: Part, name: str, size: int, urgent: bool) -> None:
        with self._room.explained():
            try:
                self._fetch(name, part.path, size)
                stamp(part.path, urgent)
                self._room.keep(part, self.folder / name)
            except Exception:
                self._sizes.pop(name, None)  # it may have been replaced where it comes from
                raise
            finally:
                self._room.release(part)

    # ---------------------------------------------------------------- ahead of use

    def prefetch(self, names: Sequence[str]) -> None:
        """Fetch these in this order in the background, and no others any more.

        No more than `ahead` bytes are fetched and not yet used; those are not evicted for one
        another. A file larger than that is left to `get`; so is one that another process fetches
        just now, and one that finds no room. A failure ends the list; `get` raises it.
        """
        with self._changed:
            if self._stopped:
                return
            self._queue = deque(dict.fromkeys(names))
            self._ready.clear()
            for name in self._queue:
                self._errors.pop(name, None)
            self._changed.notify_all()
            for worker in self._workers:
                if worker.ident is None:
                    worker.start()

    def close(self, grace: float = 5.0) -> None:
        """Fetch nothing more in the background; wait up to `grace` seconds for what is under way."""
        with self._changed:
            self._stopped = True
            self._queue.clear()
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
            with self._lock(name):
                if name not in self._ready:  # used, or no longer wanted
                    continue
                try:
                    if self._obtain(name, urgent=False) is None:
                        self._used(name)
                except Exception as error:
                    self._failed(name, error)

    def _admitted(self) -> str | None:
        """Wait for the head of the queue to fit into the look-ahead, and take it; None: closed."""
        # One thread at a time, or a later name could slip in before an earlier one.
        with self._admission:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._stopped or bool(self._queue))
                    if self._stopped:
                        return None
                    name = self._queue[0]
                try:
                    size = self._size(name)  # may ask another machine: not under the lock
                except Exception as error:
                    self._failed(name, error)
                    continue
                with self._changed:
                    while self._leads(name) and sum(self._ready.values()) + size > self.ahead:
                        self._changed.wait()
                    if self._leads(name):
                        self._ready[self._queue.popleft()] = size
                        self._changed.notify_all()
                        return name

    def _leads(self, name: str) -> bool:
        """Whether the name is still the next one; `get` and `prefetch` change the queue at any time."""
        return not self._stopped and bool(self._queue) and self._queue[0] == name

    def _failed(self, name: str, error: Exception) -> None:
        with self._changed:
            wanted = self._ready.pop(name, None) is not None
            with suppress(ValueError):
                self._queue.remove(name)
                wanted = True
            # What is absent may have come when `get` looks for itself.
            if wanted and not isinstance(error, FileNotFoundError):
                self._errors[name] = error
                self._queue.clear()
            self._changed.notify_all()
