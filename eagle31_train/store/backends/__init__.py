"""Where a store lies: a local folder, or anywhere that fsspec reaches (`s3://bucket/x`).

What is atomic. A local file is built as a hidden `.NAME.tmp` beside its final name, synced to the disk and renamed;
then its folder is synced. After a kill or a power cut it is there whole, or not at all. In an object store, a PUT is
atomic, and so is the completion of a multipart upload (a killed one stays invisible, but may cost money until the
bucket's rules remove it). Other remote file systems (SFTP, HDFS, …) may show a half-written file. That is harmless: a
shard counts only once its line is there, which is written after it and has its size and checksum. Lines and manifests
carry checksums of their own.
"""

from pathlib import Path

import fsspec
from fsspec.implementations.local import LocalFileSystem

from eagle31_train.common.errors import UserError
from eagle31_train.store.backends.base import LocalStorage, Storage, Use, at_once
from eagle31_train.store.backends.remote import RemoteStorage, describe

__all__ = ["LocalStorage", "RemoteStorage", "Storage", "Use", "at_once", "open_storage"]


def open_storage(location: str, cache_dir: Path, cache_bytes: int) -> Storage:
    """Open the storage at a local path, a `file://` URL, or any other URL that fsspec has a driver for.

    The other arguments are `RemoteStorage`'s. UserError if the driver is missing or the address cannot be listed."""
    protocol, separator, rest = location.partition("://")
    if not separator:
        return LocalStorage(location, Path(location))
    if protocol in ("file", "local"):
        return LocalStorage(location, Path(LocalFileSystem._strip_protocol(location)))
    if not rest.strip("/"):
        raise UserError(f"{location} names no folder: write {protocol}://bucket/folder")
    try:
        # A separate instance: other code in this process may use one with other settings.
        fs, root = fsspec.core.url_to_fs(location, skip_instance_cache=True)
    except (ImportError, OSError, ValueError, TypeError) as error:
        advice = f"correct the address, or install the package with fsspec's driver for {protocol}://"
        raise UserError(f"{location} cannot be opened ({describe(error)}): {advice}") from None
    storage = RemoteStorage(location, fs, str(root), Path(cache_dir).expanduser(), cache_bytes)
    storage.sizes("")  # report wrong credentials or a wrong bucket now, not after an hour's work
    return storage
