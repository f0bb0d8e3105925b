"""A store anywhere that fsspec reaches: every call is tried up to eight times, every transfer checked by its size."""

import random
import re
import shutil
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from eagle31_train.common import artifacts
from eagle31_train.common.console import note
from eagle31_train.common.errors import UserError
from eagle31_train.store.backends.base import FULL
from eagle31_train.store.backends.cache import CachedStorage

T = TypeVar("T")
TRIES = 8  # in all: two minutes of waits, and one call in 15,000 lost where 30 % fail
FIRST_WAIT = 1.0  # seconds; doubled after every try
LASTING = (PermissionError, FileExistsError, IsADirectoryError, NotADirectoryError)
NO_BUCKET = re.compile(r"NoSuchBucket|bucket does not exist", re.IGNORECASE)


class RemoteStorage(CachedStorage):
    """A folder `root` of any fsspec file system (an instance that nothing else uses), with a bounded local cache."""

    def __init__(self, location: str, fs: Any, root: str, cache_dir: Path, cache_bytes: int) -> None:
        # fsspec caches listings, which would lack what another process has just written.
        fs.dircache.use_listings_cache = False
        self.location, self.fs, self.root = location.rstrip("/"), fs, root.rstrip("/")
        key = artifacts.fingerprint(fs.unstrip_protocol(self.root))
        super().__init__(cache_dir, key, cache_bytes)
        self._reached = False  # whether there was a call before: the first one finds a wrong address

    def read(self, name: str) -> bytes:
        def call() -> bytes:
            data: bytes = self.fs.cat_file(self._path(name))
            self._compare(len(data), self.size(name))  # which has tries of its own
            return data

        return self._call("reading", name, call)

    def write(self, name: str, data: bytes) -> None:
        path = self._path(name)
        self._send("writing", name, lambda: self.fs.pipe_file(path, data), len(data))

    def put(self, scratch: Path, name: str) -> None:
        path = self._path(name)
        self._send("uploading", name, lambda: self.fs.put_file(str(scratch), path), scratch.stat().st_size)

    def size(self, name: str) -> int | None:
        try:
            info = self._call("getting the size", name, lambda: self.fs.info(self._path(name)))
        except FileNotFoundError:
            return None
        return int(info["size"]) if info["type"] == "file" else None

    def listing(self, folder: str) -> dict[str, int | None]:
        def call() -> list[dict[str, Any]]:
            self.fs.invalidate_cache()  # some drivers have caches of their own
            entries: list[dict[str, Any]] = self.fs.ls(self._path(folder), detail=True)
            return entries

        found: dict[str, int | None] = {}
        with suppress(FileNotFoundError):
            for entry in self._call("listing", folder, call):
                one = PurePosixPath(entry["name"].strip("/"))
                # Given a file, drivers list the file itself. Some list a folder within itself, too.
                if one.parent == PurePosixPath(self._path(folder).strip("/")):
                    # A web server's listing has no sizes.
                    found[one.name] = int(entry["size"] or 0) if entry["type"] == "file" else None
        return found

    def remove(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self._call("removing", name, lambda: self.fs.rm_file(self._path(name)))
        self.forget(name)

    def discard(self) -> None:
        """Remove every file: the manifest first, and last the files beside the shards, which say whose they are.

        What a kill leaves is then never taken for complete, and the same command can go on."""
        self.remove(artifacts.MANIFEST)

        def call() -> None:
            self.fs.invalidate_cache()
            files = self.fs.find(self.root)
            top = [path for path in files if str(PurePosixPath(path).parent).strip("/") == self.root.strip("/")]
            for some in ([path for path in files if path not in top], top):
                if some:
                    self.fs.rm(some)
            self.fs.invalidate_cache()
            if left := self.fs.find(self.root):  # S3's bulk delete does not report what it could not delete
                raise OSError(f"{len(left)} files are still there")

        self._call("removing", "", call)
        self._sizes.clear()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _path(self, name: str) -> str:
        return f"{self.root}/{name}".rstrip("/")

    def _call(self, what: str, name: str, call: Callable[[], T]) -> T:
        """Return `call()`, trying up to TRIES times if it fails for a transient reason.

        FileNotFoundError if nothing is there; OSError with an errno of FULL if a disk is full, as only the caller knows
        which disk; UserError for any other failure that lasts. If nothing answers the very first call, the endpoint is
        taken to be wrong, not down.
        """
        where = f"{self.location}/{name}"
        reached, self._reached = self._reached, True
        for number in range(1, TRIES + 1):
            try:
                return call()
            except Exception as error:
                if lacks_bucket(error):
                    raise UserError(f"{where}: {what} failed, as its bucket does not exist: create it") from error
                full = isinstance(error, OSError) and error.errno in FULL
                if full or isinstance(error, UserError | FileNotFoundError):
                    raise
                # Built-in exceptions are bugs of this program, except those by which drivers reject arguments.
                builtin = type(error).__module__ == "builtins" and not isinstance(error, OSError | EOFError)
                if builtin and not isinstance(error, ValueError | NotImplementedError):
                    raise
                lasting = builtin or isinstance(error, LASTING) or (not reached and unreachable(error))
                if number == TRIES or lasting:
                    advice = "check the address, the network and the credentials, then run the same command again"
                    raise UserError(f"{where}: {what} failed ({describe(error)}): {advice}") from error
                # Half of the wait is random, so that ranks that failed together do not come back together.
                wait = FIRST_WAIT * 2 ** (number - 1) * random.uniform(0.5, 1.0)
                said = f"{where}: {what} failed ({describe(error)}), try {number} of {TRIES}, next in {wait:.1f} s"
                note(said, error=True)
            time.sleep(wait)
        raise AssertionError("at least one try")

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
            self._compare(self.size(name), size)

        self.forget(name)
        try:
            self._call(what, name, call)
        except OSError as error:  # anything else is a UserError by now
            why = "no space left there: free some" if error.errno in FULL else f"{describe(error)}: correct the address"
            raise UserError(f"{self.location}/{name}: {what} failed, {why}") from error

    def _make_folders(self, path: str) -> None:
        """Make a file's folders, for file systems that need them; never the first part, which may be a bucket."""
        for parent in map(str, reversed(PurePosixPath(path).parents[:-2])):
            if not self.fs.isdir(parent):
                self.fs.mkdir(parent, create_parents=False)

    @staticmethod
    def _compare(came: int | None, expected: int | None) -> None:
        """Raise OSError if a file was cut short, which most drivers do not notice."""
        if came != expected:
            raise OSError(f"{came} bytes arrived, not {expected}")


# ---------------------------------------------------------------- what is tried again
#
# fsspec's drivers raise all kinds of exceptions: Python's own OSErrors, those of HTTP libraries and of vendors' SDKs.
# An exception whose class says that the failure lasts is raised at once. After any other, a later try may succeed.


def lacks_bucket(error: Exception) -> bool:
    """Return whether the bucket is missing, not a file in it."""
    return isinstance(error, FileNotFoundError) and bool(NO_BUCKET.search(f"{error} {error.__cause__!r}"))


def describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def unreachable(error: BaseException | None) -> bool:
    """Return whether an exception comes from an unknown host, a refused connection or missing credentials."""
    while error is not None:
        unknown = isinstance(error, socket.gaierror) and error.errno != socket.EAI_AGAIN
        if unknown or isinstance(error, ConnectionRefusedError) or type(error).__name__ == "NoCredentialsError":
            return True
        error = error.__cause__ or error.__context__
    return False
