"""The interface of storage back ends, and the back end for a local folder."""

import errno
import os
import stat
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import NamedTuple, TypeVar

from eagle31_train.common import artifacts, foreign
from eagle31_train.common.errors import UserError

T = TypeVar("T")
S = TypeVar("S")
AT_ONCE = 32  # concurrent requests: over a network each takes some 30 ms, and a large store has 20,000 shards
MOST = 1 << 32  # bytes of a small file: the plan of a hundred million samples
FULL = frozenset({errno.ENOSPC, errno.EDQUOT})  # this machine's disk, or a quota on it


def at_once(call: Callable[[S], T], items: Sequence[S]) -> list[T]:
    """Call `call` on every item, AT_ONCE at a time, and return the results in order."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(call, items))


class Use(NamedTuple):
    """A file that is going to be read."""

    turn: int  # when, counting upwards
    name: str
    bytes: int  # at most


class Storage(ABC):
    """Named files under one address. Names are relative and use `/`: "shards/train-00000.json".

    Every method raises UserError for what the user can mend: permissions, credentials, a full disk, a host that cannot
    be reached."""

    location: str  # as the user wrote it, for messages
    folder: Path  # on this machine: has the files, or copies of them
    remote: bool

    @abstractmethod
    def read(self, name: str) -> bytes:
        """Return a file's content. FileNotFoundError if it is absent."""

    @abstractmethod
    def write(self, name: str, data: bytes) -> None:
        """Write a small file, whole or not at all."""

    def scratch(self, name: str) -> Path:
        """Return where, on this machine, to build a big file for `put` to commit."""
        path = self.folder / name
        with self._explained("write", name):
            artifacts.make_folder(path.parent)
        return path.with_name(f".{path.name}.tmp")

    @abstractmethod
    def _explained(self, what: str, name: str) -> AbstractContextManager[None]:
        """Context manager that turns errors of this machine's disk, used for a file, into UserError."""

    @abstractmethod
    def lock(self, name: str) -> Path:
        """Return a local file for `locks.alone`, the same for all who write here. `discard` leaves it alone."""

    @abstractmethod
    def put(self, scratch: Path, name: str) -> None:
        """Commit the finished file `scratch` under its name. The caller removes `scratch` if it is left."""

    @abstractmethod
    def size(self, name: str) -> int | None:
        """Return a file's size in bytes, or None if it is absent."""

    @abstractmethod
    def listing(self, folder: str) -> dict[str, int | None]:
        """List everything that is now directly in a folder ("" is the storage itself), whoever wrote it.

        Return the size in bytes by name, None for a folder; {} if the folder is absent or is a file."""

    def sizes(self, folder: str) -> dict[str, int]:
        """Return the sizes of the visible files directly in a folder, by names relative to the storage."""
        there = {name: size for name, size in self.listing(folder).items() if not name.startswith(".")}
        prefix = f"{folder}/" if folder else ""
        return {prefix + name: size for name, size in there.items() if size is not None}

    @abstractmethod
    def remove(self, name: str) -> None:
        """Remove a file; an absent one is fine."""

    @abstractmethod
    def discard(self) -> None:
        """Remove all files."""

    @abstractmethod
    def local(self, name: str) -> Path:
        """Return a local file with the content of `name`: the file itself, or a copy in the bounded cache.

        FileNotFoundError if it is absent. Prefer `opened`: copies are evicted while others are fetched."""

    def opened(self, name: str, opener: Callable[[Path], T]) -> T:
        """Return `opener(local(name))`; try again if the copy was evicted before it was open."""
        while True:
            path = self.local(name)
            try:
                return opener(path)
            except FileNotFoundError:
                if path.exists():
                    raise

    def forget(self, name: str) -> None:  # noqa: B027
        """Drop copies of a file in a cache, or in the kernel's memory, so that it is read from its source."""

    def prefetch(self, uses: Iterable[Use]) -> None:  # noqa: B027
        """Fetch these, and no longer any others, in the background: in this order, ahead of their turns."""

    def passed(self, turn: int) -> None:  # noqa: B027
        """Note that everything due up to this turn has been read, here or by others: do not prefetch it."""

    def close(self) -> None:  # noqa: B027
        """Stop fetching in the background."""

    def clean(self, names: Sequence[str]) -> None:
        """Remove what killed writes of these files have left."""
        for name in names:
            self.scratch(name).unlink(missing_ok=True)


class LocalStorage(Storage):
    """A folder of this machine, or of a file system that it has mounted."""

    remote = False

    def __init__(self, location: str, folder: Path) -> None:
        self.location = location
        self.folder = folder

    def read(self, name: str) -> bytes:
        with self._explained("read", name):
            try:
                foreign.check_file(self.folder / name, MOST)
            except ValueError as error:
                raise UserError(f"{self.folder / name} cannot be read ({error}): remove it") from None
            return (self.folder / name).read_bytes()

    def write(self, name: str, data: bytes) -> None:
        with self._explained("write", name):
            artifacts.write_bytes(self.folder / name, data)

    def lock(self, name: str) -> Path:
        artifacts.refuse_dead_link(self.folder)  # before anything is made where it leads
        folder = Path(os.path.realpath(self.folder))
        beside = folder.with_name(f".{folder.name}.{name}")
        with self._explained("write", ""):
            artifacts.make_folder(beside.parent)
        # Where nothing can be made beside the folder, as beside a mount, `discard` cannot rename it either.
        return beside if os.access(beside.parent, os.W_OK) else self.folder / beside.name

    def put(self, scratch: Path, name: str) -> None:
        with self._explained("write", name):
            artifacts.commit(scratch, self.folder / name)

    def size(self, name: str) -> int | None:
        with self._explained("read", name), suppress(FileNotFoundError, NotADirectoryError):
            status = (self.folder / name).stat()  # one call: another process may remove the file between two
            return status.st_size if stat.S_ISREG(status.st_mode) else None
        return None

    def listing(self, folder: str) -> dict[str, int | None]:
        found = {}
        with self._explained("list", folder), suppress(FileNotFoundError, NotADirectoryError):
            for entry in os.scandir(self.folder / folder):
                with suppress(FileNotFoundError):  # listed, then removed by another process
                    found[entry.name] = entry.stat().st_size if entry.is_file() else None
        return found

    def remove(self, name: str) -> None:
        with self._explained("remove", name):
            (self.folder / name).unlink(missing_ok=True)

    def local(self, name: str) -> Path:
        if self.size(name) is None:
            raise FileNotFoundError(f"{self.folder / name} is missing")
        return self.folder / name

    def forget(self, name: str) -> None:
        artifacts.forget_pages(self.folder / name)

    def discard(self) -> None:
        with self._explained("remove", ""):
            if self.folder.is_dir():
                artifacts.discard(self.folder)

    def clean(self, names: Sequence[str]) -> None:
        super().clean(names)
        artifacts.remove_backup(self.folder)  # left by a killed `discard`

    def _explained(self, what: str, name: str) -> AbstractContextManager[None]:
        remedy = "fix that or choose another store_dir, then run the same command again"
        return artifacts.explained(f"{what} {self.folder / name}", remedy)
