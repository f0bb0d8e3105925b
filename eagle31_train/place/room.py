"""The bound of a cache folder: bytes that all processes together keep, and who fetches what.

    base/.lock                                                  held while room is made, or a file gets its name
    base/store-<hash>/shards/train-00000.safetensors
    base/store-<hash>/shards/.train-00000.safetensors.<bytes>.<pid>-<n>.part    room that is taken, being filled
    base/store-<hash>/shards/.train-00000.safetensors.tmp                       built for upload

A file counts, with its full size, from the moment that its part file exists: part files tell their
final sizes by name, and are made and renamed under the lock. Whoever fills a part holds a lock on
it; a part that nobody holds is what a kill left, and goes. Nobody waits for anything while holding
a part, so all that is waited for ends. Files leave in the order of their last use. That only
unlinks them: a mapping that is open stays valid.
"""

import fcntl
import itertools
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from eagle31_train.place.retries import FULL
from eagle31_train.schema import UserError

STORE = re.compile(r"store-[0-9a-f]{16}")  # nothing else in the folder is ever counted or removed
PART = re.compile(r"\.(?P<name>.+)\.(?P<bytes>\d+)\.\d+-\d+\.part")
SOON = 3600  # seconds by which the use of a prefetched file is taken to lie ahead, so that no process evicts it first
ABANDONED = 24 * 3600  # seconds after which a file built for upload is what a kill left
_numbers = itertools.count()


@dataclass(frozen=True)
class Part:
    """Room that is taken: the part file, and the descriptor whose lock says that somebody fills it."""

    path: Path
    descriptor: int


class Room:
    """Keeps the files under `base` within `limit` bytes, among all processes that use it.

    Args:
        base: the folder; several stores may share it.
        limit: bytes that all files of all stores under it may take.
        where: the address of the files' origin, for messages.
    """

    def __init__(self, base: Path, limit: int, where: str) -> None:
        self.base, self.limit, self.where = base, limit, where

    def take(self, path: Path, size: int, kept: Callable[[], set[Path]], must: bool = False) -> Part | None:
        """Room for a file that is absent; None if it is there by now, somebody fetches it, or there is no room.

        Args:
            path: where the file will be.
            size: its bytes.
            kept: files that are not to be evicted for it, asked for under the lock.
            must: with this, it is an error if there never will be room, because of files being built.

        Raises:
            UserError: see `must`; or the disk is full, or the folder cannot be used.
        """
        with self.explained(), self._locked():
            if _holds(path, size) or _is_fetched(path, size):
                return None
            spared = kept()
            under_way, building, files = self._scan()
            if must and building + size > self.limit:
                raise UserError(
                    f"{self.base} holds {building:,} bytes being built, too many beside {size:,} bytes of {path.name} "
                    f"under store.cache_bytes={self.limit}: raise store.cache_bytes"
                )
            excess = under_way + building + sum(held for _, held, _ in files) + size - self.limit
            candidates = [(held, file) for _, held, file in sorted(files) if file not in spared]
            if excess > sum(held for held, _ in candidates):
                return None
            for held, file in candidates:
                if excess <= 0:
                    break
                file.unlink(missing_ok=True)
                excess -= held
            self.make(path.parent)
            part = path.with_name(f".{path.name}.{size}.{os.getpid()}-{next(_numbers)}.part")
            descriptor = os.open(part, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o644)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            return Part(part, descriptor)

    def keep(self, part: Part, path: Path) -> None:
        """Give a filled part its name."""
        with self._locked():  # whoever counts sees the part or the file, never none or both
            part.path.replace(path)

    def release(self, part: Part) -> None:
        """Give the room back, unless the part has its name by now."""
        part.path.unlink(missing_ok=True)
        os.close(part.descriptor)

    def make(self, folder: Path) -> None:
        """Make a folder and those above it."""
        with self.explained():
            folder.mkdir(parents=True, exist_ok=True)

    @contextmanager
    def explained(self) -> Iterator[None]:
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
        self.make(self.base)
        descriptor = os.open(self.base / ".lock", os.O_CREAT | os.O_RDWR, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)


def touch(path: Path, size: int, used: bool) -> bool:
    """Whether the file is there with this size; then it is the last used one, or soon to be. Any other goes."""
    try:
        if path.stat().st_size != size:
            path.unlink()
            return False
        stamp(path, used)
    except FileNotFoundError:  # not there, or just evicted; removing what is absent would remove what has just come
        return False
    return True


def stamp(path: Path, used: bool) -> None:
    """Note the time of a file's use, which lies ahead for a prefetched one."""
    # Not utime's own "now": that is the kernel's coarse clock, too coarse to tell two uses apart.
    use = time.time_ns() + (0 if used else SOON * 10**9)
    os.utime(path, ns=(use, use))


def _holds(path: Path, size: int) -> bool:
    """Whether a file of this size is there."""
    try:
        return path.stat().st_size == size
    except FileNotFoundError:
        return False


def _is_fetched(path: Path, size: int) -> bool:
    """Whether anybody, in this process or another, fills a part for this file."""
    with suppress(FileNotFoundError), os.scandir(path.parent) as entries:
        for entry in entries:
            part = PART.fullmatch(entry.name)
            if part and (part["name"], int(part["bytes"])) == (path.name, size):
                with suppress(FileNotFoundError):
                    if not _abandoned(Path(entry.path)):
                        return True
    return False


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
