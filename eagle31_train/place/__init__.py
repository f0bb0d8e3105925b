"""Where a store lies: a local folder, or anywhere that fsspec reaches (`s3://bucket/x`).

What is atomic. A local file is built as a hidden `.NAME.tmp` beside its place, forced to the disk
and renamed, and its folder is forced to the disk too: after a kill or a power cut it is there
whole, or not at all, and an older one of its name is kept until then. An object store's PUT is
atomic in itself, a multipart upload at its completion (a killed one stays invisible, but may cost
money until the bucket's rules remove it). Other remote file systems (SFTP, HDFS, …) may show a
half-written file for a while, or for good after a kill. The store makes that harmless: a shard
counts only once its line is there, which is written after the shard is whole and carries its size
and checksum; lines and manifests carry checksums of their own.

What is not: `discard` on a remote place goes file by file, the manifest first, so that what a kill
leaves is never taken for a complete store.

All other machines are asked up to five times in all, with growing waits, where they fail for a passing reason.
"""

import os
import shutil
import stat
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from fsspec.implementations.local import LocalFileSystem

from eagle31_train import artifacts
from eagle31_train.place.retries import FULL
from eagle31_train.schema import UserError

T = TypeVar("T")


class Place(ABC):
    """Named files under one address. Names are relative and use `/`: "shards/train-00000.json".

    Every method raises UserError, in one line, for what the user can mend: no permission, no
    credentials, no bucket, a full disk, a place that cannot be reached.
    """

    location: str  # as the user wrote it, for messages
    remote: bool

    @abstractmethod
    def read(self, name: str) -> bytes:
        """A file's content; FileNotFoundError if it is absent."""

    @abstractmethod
    def write(self, name: str, data: bytes) -> None:
        """Write a small file, whole or not at all."""

    @abstractmethod
    def scratch(self, name: str) -> Path:
        """Where, on this machine, to build a big file that `put` then commits."""

    @abstractmethod
    def put(self, scratch: Path, name: str) -> None:
        """Commit the finished file `scratch` under its name; `scratch` is gone afterwards, also after a failure."""

    @abstractmethod
    def size(self, name: str) -> int | None:
        """A file's bytes; None if it is absent."""

    @abstractmethod
    def sizes(self, folder: str) -> dict[str, int]:
        """Every file directly in a folder ("" is the place itself) with its bytes, from one listing.

        Names are relative to the place, as everywhere; hidden files and folders are left out. A
        folder that is absent, or is a file, has none. Nothing is remembered from earlier listings.
        """

    def names(self, folder: str) -> list[str]:
        """The names in `sizes(folder)`, sorted."""
        return sorted(self.sizes(folder))

    @abstractmethod
    def remove(self, name: str) -> None:
        """Remove a file; an absent one is fine."""

    @abstractmethod
    def local(self, name: str) -> Path:
        """A file of this machine with the content of `name`: itself, or a copy in the bounded cache.

        Open it at once, or use `opened`: copies leave the cache while others are fetched.
        FileNotFoundError if it is absent.
        """

    @abstractmethod
    def discard(self) -> None:
        """Remove all files of this place."""

    def forget(self, name: str) -> None:  # noqa: B027
        """Drop the cached copy, so that `local` fetches it again."""

    def prefetch(self, names: Sequence[str]) -> None:  # noqa: B027
        """Fetch these in this order in the background, and no others any more; only as many as the cache holds."""

    def close(self) -> None:  # noqa: B027
        """Stop fetching in the background."""

    def clean(self, names: Sequence[str]) -> None:
        """Remove what killed writes of these names have left."""
        for name in names:
            self.scratch(name).unlink(missing_ok=True)

    def opened(self, name: str, opener: Callable[[Path], T]) -> T:
        """`opener(local(name))`, again where another fetch evicted the copy before it was open."""
        for _ in range(3):
            path = self.local(name)
            try:
                return opener(path)
            except FileNotFoundError:
                if path.exists():
                    raise
        return opener(self.local(name))


class LocalPlace(Place):
    """A folder of this machine, or of a file system that it has mounted."""

    remote = False

    def __init__(self, location: str, folder: Path) -> None:
        self.location = location
        self.folder = folder

    def read(self, name: str) -> bytes:
        with self._explained("read", name):
            return (self.folder / name).read_bytes()

    def write(self, name: str, data: bytes) -> None:
        scratch = self.scratch(name)
        try:
            with self._explained("write", name):
                scratch.write_bytes(data)
        except BaseException:
            scratch.unlink(missing_ok=True)
            raise
        self.put(scratch, name)

    def scratch(self, name: str) -> Path:
        path = self.folder / name
        with self._explained("write", name):
            self._make(path.parent)
        return path.with_name(f".{path.name}.tmp")

    def put(self, scratch: Path, name: str) -> None:
        try:
            with self._explained("write", name):
                artifacts.commit(scratch, self.folder / name)
        except BaseException:  # a full disk, Ctrl-C: nothing half-written stays
            scratch.unlink(missing_ok=True)
            raise

    def size(self, name: str) -> int | None:
        with self._explained("read", name):
            try:  # one question: another process may remove the file between two
                status = (self.folder / name).stat()
            except (FileNotFoundError, NotADirectoryError):
                return None
        return status.st_size if stat.S_ISREG(status.st_mode) else None

    def sizes(self, folder: str) -> dict[str, int]:
        found = {}
        with self._explained("list", folder):
            try:
                entries = os.scandir(self.folder / folder)
            except (FileNotFoundError, NotADirectoryError):
                return {}
            with entries:
                for entry in entries:
                    with suppress(FileNotFoundError):  # listed, then removed by another process
                        if entry.is_file():
                            found[entry.name] = entry.stat().st_size
        return visible(folder, found)

    def remove(self, name: str) -> None:
        with self._explained("remove", name):
            (self.folder / name).unlink(missing_ok=True)

    def local(self, name: str) -> Path:
        if self.size(name) is None:
            raise FileNotFoundError(f"{self.folder / name} is missing")
        return self.folder / name

    def discard(self) -> None:
        with self._explained("remove", ""):
            if self.folder.is_dir():
                artifacts.discard(self.folder)

    def clean(self, names: Sequence[str]) -> None:
        super().clean(names)
        shutil.rmtree(self.folder.with_name(f".{self.folder.name}.old"), ignore_errors=True)  # of a killed `discard`

    def _make(self, folder: Path) -> None:
        """A folder whose own name survives a power cut, like the files in it."""
        if not folder.is_dir():
            self._make(folder.parent)
            folder.mkdir(exist_ok=True)
            artifacts.fsync_path(folder.parent)

    @contextmanager
    def _explained(self, what: str, name: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise
        except OSError as error:
            if error.errno in FULL:
                raise UserError(
                    f"no space left to {what} {self.folder / name}: free some, then run the same command again"
                ) from None
            raise UserError(
                f"cannot {what} {self.folder / name} ({error.strerror}): mend that, or choose another store_dir"
            ) from None


def visible(folder: str, sizes: Mapping[str, int]) -> dict[str, int]:
    """The entries of a folder as `Place.sizes` gives them."""
    prefix = f"{folder.strip('/')}/" if folder.strip("/") else ""
    return {prefix + name: size for name, size in sizes.items() if name and not name.startswith(".")}


def open_place(
    location: str,
    cache_dir: Path,
    cache_bytes: int,
    sharers: int = 1,
    sleep: Callable[[float], object] = time.sleep,
) -> Place:
    """The place at a local path, a `file://` URL, or any other URL that fsspec has a driver for.

    Args:
        location: as the user wrote it.
        cache_dir, cache_bytes, sharers, sleep: see `RemotePlace`; a local place needs none of them.

    Raises:
        UserError: no such driver, or one that is not installed; a place that cannot be reached or listed.
    """
    protocol, separator, rest = location.partition("://")
    if not separator:
        return LocalPlace(location, Path(location))
    if protocol in ("file", "local"):
        return LocalPlace(location, Path(LocalFileSystem._strip_protocol(location)))
    from eagle31_train.place.remote import RemotePlace, connect  # a RemotePlace is a Place, so that way round

    if not rest.strip("/"):
        raise UserError(f"{location} names no place: write {protocol}://bucket/folder")
    fs, root = connect(protocol, location)
    place = RemotePlace(location, fs, root, Path(cache_dir).expanduser(), cache_bytes, sharers, sleep)
    place.names("")  # what is wrong with credentials or bucket is said now, not after an hour's work
    return place
