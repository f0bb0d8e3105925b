"""Where a store lies: a local folder, or anywhere that fsspec reaches (`s3://bucket/x`).

What is atomic. A local file is built as a hidden `.NAME.tmp` beside its final name, forced to the disk and renamed,
and its folder is forced to the disk too: after a kill or a power cut it is there whole, or not at all. An object
store's PUT is atomic in itself, a multipart upload at its completion (a killed one stays invisible, but may cost money
until the bucket's rules remove it). Other remote file systems (SFTP, HDFS, …) may show a half-written file. That is
harmless: a shard counts only once its line is there, which is written after the shard is whole and carries its size
and checksum; lines and manifests carry checksums of their own.
"""

from pathlib import Path

import fsspec
from fsspec.implementations.local import LocalFileSystem

from eagle31_train.common.errors import UserError
from eagle31_train.store.backends.base import LocalStorage, Storage, Use, at_once
from eagle31_train.store.backends.remote import RemoteStorage, describe

__all__ = ["LocalStorage", "RemoteStorage", "Storage", "Use", "at_once", "open_storage"]


def open_storage(location: str, cache_dir: Path, cache_bytes: int) -> Storage:
    """The storage at a local path, a `file://` URL, or any other URL that fsspec has a driver for; the other arguments
    are `RemoteStorage`'s. UserError for a driver that is not there, and an address that cannot be reached or listed."""
    protocol, separator, rest = location.partition("://")
    if not separator:
        return LocalStorage(location, Path(location))
    if protocol in ("file", "local"):
        return LocalStorage(location, Path(LocalFileSystem._strip_protocol(location)))
    if not rest.strip("/"):
        raise UserError(f"{location} names no folder: write {protocol}://bucket/folder")
    try:
        # An instance of our own: others of the process may use one with other settings.
        fs, root = fsspec.core.url_to_fs(location, skip_instance_cache=True)
    except (ImportError, OSError, ValueError, TypeError) as error:
        advice = f"correct the address, or install the package of fsspec's driver for {protocol}://"
        raise UserError(f"{location} cannot be opened ({describe(error)}): {advice}") from None
    storage = RemoteStorage(location, fs, str(root), Path(cache_dir).expanduser(), cache_bytes)
    storage.sizes("")  # what is wrong with credentials or bucket is said now, not after an hour's work
    return storage
