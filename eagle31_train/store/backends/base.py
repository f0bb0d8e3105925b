"""What every storage back end offers."""

import errno
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
FULL = frozenset({errno.ENOSPC, errno.EDQUOT})  # this machine's disk, or a quota on it


class Storage(ABC):
    """Named files under one address. Names are relative and use `/`: "shards/train-00000.json". Every method raises
    UserError for what the user can mend: no permission, credentials or bucket, a full disk, a host that cannot be
    reached."""

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
    def lock(self, name: str) -> Path:
        """A file of this machine for `locks.alone`, the same for all who write here; `discard` leaves it."""

    @abstractmethod
    def put(self, scratch: Path, name: str) -> None:
        """Commit the finished file `scratch` under its name; what is left of `scratch` is its builder's to remove."""

    @abstractmethod
    def size(self, name: str) -> int | None:
        """A file's bytes; None if it is absent."""

    @abstractmethod
    def sizes(self, folder: str) -> dict[str, int]:
        """Every visible file directly in a folder ("" is the storage itself) with its bytes, from one fresh listing, by
        names relative to the storage. A folder that is absent, or is a file, has none."""

    def names(self, folder: str) -> list[str]:
        return sorted(self.sizes(folder))

    @abstractmethod
    def remove(self, name: str) -> None:
        """Remove a file; an absent one is fine."""

    @abstractmethod
    def discard(self) -> None:
        """Remove all files."""

    @abstractmethod
    def local(self, name: str) -> Path:
        """A file of this machine with the content of `name`: itself, or a copy in the bounded cache. Use `opened`:
        copies leave the cache while others are fetched. FileNotFoundError if it is absent."""

    def opened(self, name: str, opener: Callable[[Path], T]) -> T:
        """`opener(local(name))`, again where another fetch evicted the copy before it was open."""
        while True:
            path = self.local(name)
            try:
                return opener(path)
            except FileNotFoundError:
                if path.exists():
                    raise

    def forget(self, name: str) -> None:  # noqa: B027
        """Drop the copy of a file in a cache, or in the kernel's memory, so that it is read where it lies."""

    def prefetch(self, sizes: Mapping[str, int]) -> None:  # noqa: B027
        """Fetch these, given with their bytes, in this order in the background; and no others any more."""

    def close(self) -> None:  # noqa: B027
        """Stop fetching in the background."""

    def clean(self, names: Sequence[str]) -> None:
        """Remove what killed writes of these names have left."""
        for name in names:
            self.scratch(name).unlink(missing_ok=True)


def visible(folder: str, sizes: Mapping[str, int]) -> dict[str, int]:
    """The entries of a folder as `Storage.sizes` gives them."""
    prefix = f"{folder}/" if folder else ""
    return {prefix + name: size for name, size in sizes.items() if name and not name.startswith(".")}
