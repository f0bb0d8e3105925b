"""A bounded folder of whole files fetched from elsewhere, shared by threads and processes.

    cache_dir/.lock                                   held while room is made
    cache_dir/store-<hash of location>/shards/train-00000.safetensors
    cache_dir/store-<hash of location>/shards/.train-00000.safetensors.<bytes>.<pid>-<n>.part    under way
    cache_dir/store-<hash of location>/shards/.train-00000.safetensors.tmp                       built for upload

A file appears under its name at once and whole. It counts, with its full size, from the moment
that its part file exists: part files tell their final sizes by name, and are made and renamed under
the lock, so that all processes together keep the bound. Whoever fetches holds a lock on the part; a part
that nobody holds is what a kill left, and goes. Files leave in the order of their last use. That
only unlinks them: a mapping that is open stays valid.

Nothing is forced to the disk here. What a power cut spoils has another size, or another checksum,
which the reader of the store compares; `forget` then lets it be fetched again.
"""

import fcntl
import itertools
import os
import re
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from eagle31_train.retries import FULL
from eagle31_train.schema import UserError

STORE = re.compile(r"store-[0-9a-f]{16}")  # nothing else in cache_dir is ever counted or removed
PART = re.compile(r"\..+\.(?P<bytes>\d+)\.\d+-\d+\.part")
SOON = 3600  # seconds by which the use of a prefetched file is taken to lie ahead, so that no process evicts it first
POLL = 0.05  # seconds between looks for the room that other fetches hold
ABANDONED = 24 * 3600  # seconds after which a file built for upload is what a kill left
_numbers = itertools.count()


@dataclass(frozen=True)
class _Part:
    """Room that is reserved: the part file, and the descriptor whose lock says that somebody fills it."""

    path: Path
    descriptor: int


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
        self.base = base
        self.folder = base / f"store-{key}"
        self.limit = limit
        self.where = where
        # The other half is for what is being read, and for files that are fetched on demand.
        self.ahead = limit // 2 // sharers
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
        self._make(self.folder)

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
        self._make(path.parent)
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
        size = self._size(name)
        path = self.folder / name
        if self._touch(path, size, urgent):
            return path
        if size > self.limit:
            raise UserError(
                f"{self.where}/{name} holds {size:,} bytes, more than store.cache_bytes={self.limit}: "
                "raise store.cache_bytes"
            )
        with self._explained():
            part = self._room(path, size, urgent)
            if part is None:
                return None
            try:
                self._fetch(name, part.path, size)
                _stamp(part.path, urgent)
                with self._locked():  # whoever counts sees the part or the file, never none or both
                    part.path.replace(path)
            except Exception:
                self._sizes.pop(name, None)  # it may have been replaced where it comes from
                raise
            finally:
                part.path.unlink(missing_ok=True)
                os.close(part.descriptor)
        return path

    def _touch(self, path: Path, size: int, used: bool) -> bool:
        """Whether the file is there with this size; then it is the last used one, or soon to be."""
        try:
            if path.stat().st_size != size:
                path.unlink(missing_ok=True)
                return False
            _stamp(path, used)
        except FileNotFoundError:  # another process has just evicted it
            return False
        return True

    # ---------------------------------------------------------------- room

    def _room(self, path: Path, size: int, urgent: bool) -> _Part | None:
        """Room for a file; None where there is none for a fetch that is not urgent."""
        while True:
            if (part := self._reserve(path, size)) or not urgent:
                return part
            # Better fetch a prefetched file twice than not get on. What else is in the way will be done soon.
            if part := self._reserve(path, size, must=True):
                return part
            self._sleep(POLL)

    def _reserve(self, path: Path, size: int, must: bool = False) -> _Part | None:
        """Evict the longest unused files (prefetched ones only if it `must`); none, for None, if that is not enough."""
        with self._locked():
            with self._changed:  # under the lock: all that have room by now are known
                keep = set() if must else {self.folder / name for name in self._ready}
            under_way, building, files = self._scan()
            if must and building + size > self.limit:
                raise UserError(
                    f"{self.base} holds {building:,} bytes being built, too many beside {size:,} bytes of {path.name} "
                    f"under store.cache_bytes={self.limit}: raise store.cache_bytes"
                )
            excess = under_way + building + sum(held for _, held, _ in files) + size - self.limit
            candidates = [(held, file) for _, held, file in sorted(files) if file not in keep]
            if excess > sum(held for held, _ in candidates):
                return None
            for held, file in candidates:
                if excess <= 0:
                    break
                file.unlink(missing_ok=True)
                excess -= held
            self._make(path.parent)
            part = path.with_name(f".{path.name}.{size}.{os.getpid()}-{next(_numbers)}.part")
            descriptor = os.open(part, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o644)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            return _Part(part, descriptor)

    def _scan(self) -> tuple[int, int, list[tuple[int, int, Path]]]:
        """Bytes under way, bytes being built, and the whole files as (last use, bytes, path)."""
        under_way, building, files = 0, 0, []
        for path in self._everything():
            try:
                status = path.stat()
                if part := PART.fullmatch(path.name):
                    if _abandoned(path):
                        path.unlink(missing_ok=True)
                    else:
                        under_way += int(part["bytes"])
                elif not path.name.startswith("."):
                    files.append((status.st_mtime_ns, status.st_size, path))
                elif time.time() - status.st_mtime > ABANDONED:
                    path.unlink(missing_ok=True)
                else:
                    building += status.st_size
            except FileNotFoundError:  # finished, or forgotten, between two lines
                continue
        return under_way, building, files

    def _everything(self) -> Iterator[Path]:
        for folder in self.base.iterdir():
            if STORE.fullmatch(folder.name):
                for parent, _, names in os.walk(folder):
                    yield from (Path(parent, name) for name in names)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        self._make(self.base)
        descriptor = os.open(self.base / ".lock", os.O_CREAT | os.O_RDWR, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _make(self, folder: Path) -> None:
        with self._explained():
            folder.mkdir(parents=True, exist_ok=True)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """What this machine's disk has against it. Other machines' errors come as UserError already."""
        try:
            yield
        except FileNotFoundError:
            raise
        except OSError as error:
            if error.errno in FULL:
                raise UserError(
                    f"no space left in {self.base} for copies of {self.where}: free some, lower store.cache_bytes, "
                    "or choose another store.cache_dir"
                ) from None
            raise UserError(
                f"{self.base} cannot be used for copies of {self.where} ({error.strerror}): "
                "choose another store.cache_dir"
            ) from None

    # ---------------------------------------------------------------- ahead of use

    def prefetch(self, names: Sequence[str]) -> None:
        """Fetch these in this order in the background, and no others any more.

        No more than `ahead` bytes are fetched and not yet used; those are not evicted for one
        another. A file larger than that is left to `get`. A failure ends the list; `get` raises it.
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


def _stamp(path: Path, used: bool) -> None:
    """Note the time of a file's use, which lies ahead for a prefetched one."""
    # Not utime's own "now": that is the kernel's coarse clock, too coarse to tell two uses apart.
    use = time.time_ns() + (0 if used else SOON * 10**9)
    os.utime(path, ns=(use, use))


def _abandoned(part: Path) -> bool:
    """Whether nobody holds the lock of a part file."""
    descriptor = os.open(part, os.O_RDWR)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True
