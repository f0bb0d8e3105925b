"""The quota of a cache folder: bytes that all processes of a machine keep together, and who fetches what.

    base/.lock                                                     held while space is reserved, or a file gets its name
    base/store-<hash>/shards/train-00000.safetensors
    base/store-<hash>/shards/.train-00000.safetensors.<bytes>.part    being fetched, by whoever holds a lock on it
    base/store-<hash>/shards/.train-00000.safetensors.tmp             being built for upload

A file counts with its full size from the moment that its part file exists: space is reserved first, and filled then.
A part that nobody holds is what a kill left, and goes. Nobody waits for anything while holding a part, so all waiting
ends. Files leave in the order of their last use; a mapping that is open stays valid.
"""

import fcntl
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from eagle31_train.errors import UserError
from eagle31_train.store.backends.base import FULL

STORE = re.compile(r"store-[0-9a-f]{16}")  # nothing else in the folder is ever counted or removed
PART = re.compile(r"\.(?P<name>.+)\.(?P<bytes>\d+)\.part")
SOON = 3600  # seconds by which the use of a prefetched file is taken to lie ahead, so that no process evicts it first
ABANDONED = 24 * 3600  # seconds after which a file built for upload is what a kill left


@dataclass(frozen=True)
class Part:
    """Reserved space: the part file, and the descriptor whose lock says that somebody fills it."""

    path: Path
    descriptor: int


class Quota:
    """Keeps the files under `base` within `limit` bytes, among all processes that use it.

    Args:
        base: the folder; several stores may share it.
        limit: bytes that all files of all stores under it may take.
        where: the address of the files' origin, for messages.
    """

    def __init__(self, base: Path, limit: int, where: str) -> None:
        self.base, self.limit, self.where = base, limit, where

    def reserve(self, path: Path, size: int, urgent: bool) -> Part | None:
        """Space for a file that is absent; None if it is there by now, somebody fetches it, or there is none now.

        Args:
            path: where the file will be.
            size: its bytes.
            urgent: evict even prefetched files, of which `keep` says that they will be used soon.

        Raises:
            UserError: there never will be space; the disk is full; the folder cannot be used.
        """
        with self.explained(), self._locked():
            files, parts, building = self._scan()
            if path in parts or holds(path, size):
                return None
            if urgent and building + size > self.limit:
                raise UserError(
                    f"{self.base} holds {building:,} bytes being built, too many beside {size:,} bytes of {path.name} "
                    f"under store.cache_bytes={self.limit}: raise store.cache_bytes"
                )
            excess = sum(bytes for _, bytes, _ in files) + sum(parts.values()) + building + size - self.limit
            now = time.time_ns()
            candidates = [(bytes, file) for used, bytes, file in sorted(files) if urgent or used <= now]
            if excess > sum(bytes for bytes, _ in candidates):
                return None
            for bytes, file in candidates:
                if excess <= 0:
                    break
                file.unlink(missing_ok=True)
                excess -= bytes
            path.parent.mkdir(parents=True, exist_ok=True)
            part = path.with_name(f".{path.name}.{size}.part")
            descriptor = os.open(part, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o644)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            return Part(part, descriptor)

    def keep(self, part: Part, path: Path, used: bool) -> None:
        """Give a filled part its name; `used` says whether it was fetched for now, or for soon."""
        stamp(part.path, used)
        with self._locked():  # whoever counts sees the part or the file, never none or both
            part.path.replace(path)

    def release(self, part: Part) -> None:
        """Give the space back, unless the part has its name by now."""
        part.path.unlink(missing_ok=True)
        os.close(part.descriptor)

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Turn errors of this machine's disk into UserError. Other machines' errors are that already."""
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

    def _scan(self) -> tuple[list[tuple[int, int, Path]], dict[Path, int], int]:
        """Whole files as (last use, bytes, path), bytes of the files being fetched, and bytes being built."""
        files, parts, building = [], {}, 0
        paths = [path for store in self.base.iterdir() if STORE.fullmatch(store.name) for path in store.rglob("*")]
        for path in paths:
            try:
                status = path.stat()
                if path.is_dir():
                    continue
                if part := PART.fullmatch(path.name):
                    if _abandoned(path):
                        path.unlink(missing_ok=True)
                    else:
                        parts[path.with_name(part["name"])] = int(part["bytes"])
                elif not path.name.startswith("."):
                    files.append((status.st_mtime_ns, status.st_size, path))
                elif time.time() - status.st_mtime > ABANDONED:
                    path.unlink(missing_ok=True)
                else:
                    building += status.st_size
            except FileNotFoundError:  # finished, or forgotten, between two lines
                continue
        return files, parts, building

    @contextmanager
    def _locked(self) -> Iterator[None]:
        self.base.mkdir(parents=True, exist_ok=True)
        with (self.base / ".lock").open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def holds(path: Path, size: int) -> bool:
    """Whether a file of this size is there; one of another size is damaged or outdated, and goes."""
    try:
        if path.stat().st_size == size:
            return True
        path.unlink()
    except FileNotFoundError:
        pass
    return False


def stamp(path: Path, used: bool) -> None:
    """Note the time of a file's use, which lies ahead for a prefetched one."""
    # Not utime's own "now": that is the kernel's coarse clock, too coarse to tell two uses apart.
    use = time.time_ns() + (0 if used else SOON * 10**9)
    os.utime(path, ns=(use, use))


def _abandoned(part: Path) -> bool:
    """Whether nobody holds the lock of a part file."""
    with part.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True
