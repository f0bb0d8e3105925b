"""A file system whose downloads are watched, for tests of the bounded cache."""

import fcntl
import threading
from pathlib import Path

from fsspec.implementations.memory import MemoryFileSystem

from eagle31_train.store.backends.cache import PART

LONG = 30  # seconds after which something that was to happen did not


class Gated(MemoryFileSystem):
    """Notes which files are fetched."""

    def __init__(self, **kwargs):
        super().__init__(global_store=False, **kwargs)
        self.fetched, self.finished = [], []
        self.changed = threading.Condition()
        self.watch = lambda: None  # called while a fetch is under way

    def get_file(self, path, target, **kwargs):
        name = path.removeprefix("/store/")
        with self.changed:
            self.fetched.append(name)
            self.changed.notify_all()
        self.watch()
        # Not MemoryFileSystem's own way: its open files share one position among all threads.
        Path(target).write_bytes(self.store[path].getvalue())
        self.watch()
        with self.changed:
            self.finished.append(name)
            self.changed.notify_all()

    def wait(self, condition):
        with self.changed:
            assert self.changed.wait_for(lambda: condition(self), LONG)


def copies(folder):
    """The whole files in a cache."""
    return sorted(path.name for path in folder.rglob("*") if path.is_file() and not path.name.startswith("."))


def held(folder):
    """Bytes that a cache folder takes, or is about to take; counted while nobody renames."""
    with (folder / "cache" / ".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        files = [path for path in (folder / "cache").rglob("*") if path.is_file()]
        parts = [(PART.fullmatch(path.name), path) for path in files]
        return sum(int(part["bytes"]) if part else path.stat().st_size for part, path in parts)
