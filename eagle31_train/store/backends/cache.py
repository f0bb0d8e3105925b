"""A bounded folder of copies of remote files, fetched whole, ahead of their use, and shared by threads and processes.

    base/.lock                                                     held while space is reserved, or a file gets its name
    base/.store-<hash>.extracting-0                                held by a process that extracts into the store
    base/store-<hash>/shards/train-00000.safetensors
    base/store-<hash>/shards/.train-00000.safetensors.<bytes>.part    being fetched, by whoever holds a lock on it
    base/store-<hash>/shards/.train-00000.safetensors.tmp             being built for upload

All processes of a machine that use the folder share its bound and the work: one of them fetches a file; others that
need it wait, and fetch it themselves only if the first one failed or died. A file counts with its full size as soon as
its part file exists. A part that nobody locks was left by a kill, and is removed. Nobody waits for anything while
holding a part, so there is no deadlock. The least recently used files are evicted; an open mapping stays valid. A file
spoilt by a power cut has another size or checksum, which the reader compares; `forget` then lets it be fetched again.
"""

import fcntl
import os
import re
import threading
import time
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path

from eagle31_train.common import artifacts
from eagle31_train.common.errors import UserError
from eagle31_train.store.backends.base import Storage, Use

STORE = re.compile(r"store-[0-9a-f]{16}")  # nothing else in the folder is ever counted or removed
PART = re.compile(r"\.(?P<name>.+)\.(?P<bytes>\d+)\.part")
ABANDONED = 24 * 3600  # seconds after which a file built for upload counts as left by a kill
POLL = 0.05  # seconds between checks for files that others fetch, or space that they hold
THREADS = 2  # files fetched at a time in the background
GRACE = 5.0  # seconds that `close` waits for files being fetched


class CachedStorage(Storage):
    """A storage whose files are fetched into a folder of bounded size, on demand or in the background.

    Args:
        base: the folder with the bound; several stores may share it.
        key: 16 hex digits that identify the store.
        limit: bytes that all files of all stores under `base` may take.
    """

    remote = True

    def __init__(self, base: Path, key: str, limit: int) -> None:
        self.base, self.folder, self.limit = base, base / f"store-{key}", limit
        # The other half is for files being read, and for files fetched on demand. Processes that train together
        # prefetch the same files, and each counts those that others fetch.
        self.ahead = limit // 2
        self._sizes: dict[str, int] = {}
        # `_changed` guards the following. `_head` is prefetched next, then `_uses`. Files in `_ready` are prefetched,
        # or being fetched, and not yet used. All that is due up to `_turn` has been read.
        self._changed = threading.Condition()
        self._uses: Iterator[Use] = iter(())
        self._head: Use | None = None
        self._ready: dict[str, Use] = {}
        self._turn = -1
        self._stopped = False
        self._workers = [threading.Thread(target=self._work, daemon=True) for _ in range(THREADS)]
        with self._explained():
            artifacts.make_folder(self.folder)

    @abstractmethod
    def _download(self, name: str, path: Path, size: int) -> None:
        """Download a file's content to `path`, or raise."""

    def local(self, name: str) -> Path:
        """Return the local copy of a file, fetching it if there is none of the right size.

        FileNotFoundError if the file is absent at its source; UserError if it does not fit, or if fetching failed."""
        try:
            while not self._obtain(name):
                time.sleep(POLL)  # another thread or process is fetching it, or needs its space for a moment
        finally:
            self._used(name)
        return self.folder / name

    def forget(self, name: str) -> None:
        self._sizes.pop(name, None)
        (self.folder / name).unlink(missing_ok=True)
        self._used(name)

    def lock(self, name: str) -> Path:
        return self.base / f".{self.folder.name}.{name}"

    def _obtain(self, name: str) -> bool:
        """Return whether the file is local, fetching it if needed; False if the caller must try again later."""
        if name not in self._sizes:  # files of a store are written once: ask once per file and process
            if (size := self.size(name)) is None:
                raise FileNotFoundError(f"{self.location}/{name}")
            self._sizes[name] = size
        size, path = self._sizes[name], self.folder / name
        if _holds(path, size):
            with suppress(FileNotFoundError):  # it was just evicted
                _touch(path)
                return True
        part = path.with_name(f".{path.name}.{size}.part")
        try:
            with self._explained(), ExitStack() as held:
                with self._locked():
                    if not self._make_room(path, size):
                        return False
                    fcntl.flock(held.enter_context(part.open("xb")), fcntl.LOCK_EX)
                    held.callback(part.unlink, missing_ok=True)  # before the lock is released
                self._download(name, part, size)
                _touch(part)
                with self._locked():  # others count either the part or the file, never none or both
                    part.replace(path)
                    held.close()  # not later: by then another fetch may have a part of this name
        except Exception:
            self._sizes.pop(name, None)  # the source may have replaced it
            raise
        return True

    # ---------------------------------------------------------------- the bound

    def _make_room(self, path: Path, size: int) -> bool:
        """Evict the least recently used files until this one fits.

        Return False if it cannot fit now; UserError if it never will."""
        files, parts, building = self._scan()
        path.parent.mkdir(parents=True, exist_ok=True)
        if path in parts or _holds(path, size):
            return False
        if building + size > self.limit:
            room = f"store.cache_bytes={self.limit:,}, beside {building:,} bytes being built"
            raise UserError(f"{self.location}: {path.name} ({size:,} bytes) does not fit in {room}: raise that")
        evictable = sum(held for _, held, _ in files)
        excess = evictable + sum(parts.values()) + building + size - self.limit
        if excess > evictable:
            return False
        for _, held, file in sorted(files):
            if excess <= 0:
                break
            file.unlink(missing_ok=True)
            excess -= held
        return True

    def _scan(self) -> tuple[list[tuple[int, int, Path]], dict[Path, int], int]:
        """Return whole files as (last use, bytes, path), the bytes of files being fetched, and bytes being built."""
        files, parts, building = [], {}, 0
        stores = [folder for folder in self.base.iterdir() if STORE.fullmatch(folder.name)]
        for path in [path for folder in stores for path in folder.rglob("*")]:
            part = PART.fullmatch(path.name)
            with suppress(FileNotFoundError):  # it was renamed or removed meanwhile
                if part and _abandoned(path):
                    path.unlink()
                elif part:
                    parts[path.with_name(part["name"])] = int(part["bytes"])
                elif path.is_file():
                    status = path.stat()
                    if not path.name.startswith("."):
                        files.append((status.st_atime_ns, status.st_size, path))
                    elif time.time() - status.st_mtime > ABANDONED:
                        path.unlink()
                    else:
                        building += status.st_size
        return files, parts, building

    @contextmanager
    def _locked(self) -> Iterator[None]:
        self.base.mkdir(parents=True, exist_ok=True)
        with (self.base / ".lock").open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _explained(self, *_: str) -> AbstractContextManager[None]:
        remedy = "free space there, lower store.cache_bytes, or choose another store.cache_dir"
        return artifacts.explained(f"use {self.base} for copies of {self.location}", remedy)

    # ---------------------------------------------------------------- ahead of use

    def prefetch(self, uses: Iterable[Use]) -> None:
        """See `Storage.prefetch`. At most `ahead` bytes, or one file, are prefetched and not yet used.

        A file that cannot be fetched is left to `local`."""
        with self._changed:
            self._uses, self._ready, self._turn = iter(uses), {}, -1
            self._head = next(self._uses, None)
            self._changed.notify_all()
            for worker in self._workers:
                if worker.ident is None:
                    worker.start()

    def passed(self, turn: int) -> None:
        with self._changed:
            self._turn = max(self._turn, turn)
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        for worker in self._workers:
            if worker.ident is not None:
                worker.join(GRACE)

    def _used(self, name: str) -> None:
        with self._changed:
            self._ready.pop(name, None)
            self._changed.notify_all()

    def _work(self) -> None:
        while (name := self._next()) is not None:
            try:
                self._obtain(name)  # if another process is fetching it, that will do
            except Exception:  # `local` tries again, and raises it
                self._used(name)

    def _next(self) -> str | None:
        """Wait until the next file fits into the look-ahead, then take it. Return None once closed."""
        with self._changed:
            while not self._stopped:
                self._ready = {name: use for name, use in self._ready.items() if use.turn > self._turn}
                while self._head is not None and self._head.turn <= self._turn:
                    self._head = next(self._uses, None)
                free = self.ahead - sum(use.bytes for use in self._ready.values())
                if self._head is not None and (not self._ready or self._head.bytes <= free):
                    use = self._ready[self._head.name] = self._head
                    self._head = next(self._uses, None)
                    return use.name
                self._changed.wait()
        return None


def _holds(path: Path, size: int) -> bool:
    """Return whether a file of this size is there. Remove one of another size: it is damaged or outdated."""
    with suppress(FileNotFoundError):
        if path.stat().st_size == size:
            return True
        path.unlink()
    return False


def _touch(path: Path) -> None:
    """Record that a file is used. Its time of change stays: it tells readers a copy that they have compared."""
    # Not utime's own "now": the kernel's coarse clock cannot tell two uses apart.
    os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))


def _abandoned(part: Path) -> bool:
    with part.open("rb+") as file:  # NFS has exclusive locks only for files open for writing
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True
