"""A store anywhere that fsspec reaches: every call tried five times in all, every transfer compared with its size."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from eagle31_train import artifacts
from eagle31_train.errors import UserError
from eagle31_train.store.backends.base import FULL, Storage, visible
from eagle31_train.store.backends.cache import Cache
from eagle31_train.store.backends.retries import describe, lacks_bucket, retry

T = TypeVar("T")


class RemoteStorage(Storage):
    """A folder of any fsspec file system, with a bounded cache of its files on this machine.

    Args:
        location: the address.
        fs: the file system, an instance of our own.
        root: the address within it.
        cache_dir, cache_bytes: the cache's folder, and what it may take; see `Cache`.
        sharers: how many processes of this machine read through `cache_dir`.
        sleep: waits the given seconds.
    """

    remote = True

    def __init__(
        self,
        location: str,
        fs: Any,
        root: str,
        cache_dir: Path,
        cache_bytes: int,
        sharers: int = 1,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        # fsspec remembers listings; what another process has just written would be missing from them.
        fs.dircache.use_listings_cache = False
        self.location, self.fs, self.root = location.rstrip("/"), fs, root.rstrip("/")
        self._sleep = sleep
        key = artifacts.fingerprint(fs.unstrip_protocol(self.root))
        self._cache = Cache(cache_dir, key, cache_bytes, self.size, self._download, self.location, sharers, sleep)

    def read(self, name: str) -> bytes:
        def call() -> bytes:
            data: bytes = self.fs.cat_file(self._path(name))
            self._compare(len(data), self._size(name))
            return data

        return self._call("reading", name, call)

    def write(self, name: str, data: bytes) -> None:
        path = self._path(name)
        self._send("writing", name, lambda: self.fs.pipe_file(path, data), len(data))

    def scratch(self, name: str) -> Path:
        return self._cache.scratch(name)

    def put(self, scratch: Path, name: str) -> None:
        path = self._path(name)
        try:
            self._send("uploading", name, lambda: self.fs.put_file(str(scratch), path), scratch.stat().st_size)
        finally:
            scratch.unlink(missing_ok=True)

    def size(self, name: str) -> int | None:
        return self._call("asking for the size", name, lambda: self._size(name))

    def sizes(self, folder: str) -> dict[str, int]:
        path = self._path(folder)

        def call() -> dict[str, int]:
            self.fs.invalidate_cache()  # drivers with a memory of their own
            try:
                entries = self.fs.ls(path, detail=True)
            except FileNotFoundError as error:
                if lacks_bucket(error):
                    raise
                return {}
            found = {}
            for entry in entries:
                file = PurePosixPath(entry["name"].lstrip("/"))
                # Asked for a file, drivers list the file itself.
                if entry["type"] == "file" and str(file.parent) == path.lstrip("/"):
                    found[file.name] = int(entry["size"] or 0)  # a web server's listing knows no sizes
            return found

        try:
            return visible(folder, self._call("listing", folder, call))
        except FileNotFoundError:
            return {}

    def remove(self, name: str) -> None:
        try:
            self._call("removing", name, lambda: self.fs.rm_file(self._path(name)))
        except FileNotFoundError:
            pass
        finally:
            self._cache.forget(name)

    def local(self, name: str) -> Path:
        return self._cache.get(name)

    def discard(self) -> None:
        """Remove every file, the manifest first. Empty folders stay, where the file system knows such a thing."""
        self.remove(artifacts.MANIFEST)

        def call() -> None:
            self.fs.invalidate_cache()
            files = [str(path) for path in self.fs.find(self.root)]
            depth = {path: path.count("/") for path in files}
            # What stands at the top says what the rest is: it goes last.
            for top in (False, True):
                some = [path for path in files if (depth[path] == min(depth.values())) == top]
                if some:
                    self.fs.rm(some)
            self.fs.invalidate_cache()
            if left := self.fs.find(self.root):  # S3's bulk delete keeps quiet about what it could not delete
                raise OSError(f"{len(left)} files are still there")

        self._call("removing", "", call)
        self._cache.clear()

    def forget(self, name: str) -> None:
        self._cache.forget(name)

    def prefetch(self, sizes: Mapping[str, int]) -> None:
        self._cache.prefetch(sizes)

    def close(self) -> None:
        self._cache.close()

    def _path(self, name: str) -> str:
        return f"{self.root}/{name}".rstrip("/")

    def _call(self, what: str, name: str, call: Callable[[], T]) -> T:
        return retry(what, f"{self.location}/{name}", call, self._sleep)

    def _size(self, name: str) -> int | None:
        try:
            info = self.fs.info(self._path(name))
        except FileNotFoundError as error:
            if lacks_bucket(error):
                raise
            return None
        return int(info["size"]) if info["type"] == "file" else None

    def _download(self, name: str, path: Path, size: int) -> None:
        def call() -> None:
            self.fs.get_file(self._path(name), str(path))
            self._compare(path.stat().st_size, size)

        self._call("downloading", name, call)

    def _send(self, what: str, name: str, send: Callable[[], object], size: int) -> None:
        def call() -> None:
            try:
                send()
            except FileNotFoundError as error:
                if lacks_bucket(error):
                    raise
                self._make_folders(self._path(name))
                send()
            self._compare(self._size(name), size)

        self._cache.forget(name)
        try:
            self._call(what, name, call)
        except OSError as error:  # all others are UserError by now
            why = "no space left there: free some" if error.errno in FULL else f"{describe(error)}: correct the address"
            raise UserError(f"{self.location}/{name}: {what} failed, {why}") from error

    def _make_folders(self, path: str) -> None:
        """Folders, for file systems that want them. Never the first part of an address, which may be a bucket."""
        for parent in map(str, reversed(PurePosixPath(path).parents[:-2])):
            if not self.fs.isdir(parent):
                self.fs.mkdir(parent, create_parents=False)

    @staticmethod
    def _compare(found: int | None, expected: int | None) -> None:
        """A file cut short looks like any other to most drivers."""
        if found != expected:
            raise OSError(f"{found} bytes came, not {expected}")
