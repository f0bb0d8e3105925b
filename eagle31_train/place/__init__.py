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

import time
from collections.abc import Callable
from pathlib import Path

from fsspec.implementations.local import LocalFileSystem

from eagle31_train.place.base import Place
from eagle31_train.place.local import LocalPlace
from eagle31_train.place.remote import RemotePlace, connect
from eagle31_train.schema import UserError

__all__ = ["LocalPlace", "Place", "RemotePlace", "open_place"]


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
    if not rest.strip("/"):
        raise UserError(f"{location} names no place: write {protocol}://bucket/folder")
    fs, root = connect(protocol, location)
    place = RemotePlace(location, fs, root, Path(cache_dir).expanduser(), cache_bytes, sharers, sleep)
    place.names("")  # what is wrong with credentials or bucket is said now, not after an hour's work
    return place
