"""Processes of one machine that read a store through one cache folder; for `forkserver`, which imports them by name."""

import fcntl
import random
import threading
import time
from pathlib import Path

from fsspec.implementations.local import LocalFileSystem

from eagle31_train.store.backends.cache import PART
from eagle31_train.store.backends.remote import RemoteStorage

LONG = 60  # seconds after which something that was to happen did not
NAMES = "abcdefghijkl"


class Watched(LocalFileSystem):
    """Far away for the storage, but seen by every process; notes each download in a file beside it."""

    protocol = "watched"

    def get_file(self, path, target, **kwargs):
        with (Path(path).parent.parent / "downloads").open("a") as notes:
            notes.write(f"{Path(path).name}\n")
        content = Path(path).read_bytes()
        Path(target).write_bytes(content[: len(content) // 2])
        self.during()
        Path(target).write_bytes(content)


def content_of(name):
    return name.encode() * (60 + 10 * NAMES.index(name))


def lay(folder):
    """A store of files of 60 to 170 bytes, 1,380 together."""
    (folder / "far").mkdir()
    for name in NAMES:
        (folder / "far" / name).write_bytes(content_of(name))


def downloads(folder):
    return (folder / "downloads").read_text().split()


def shared(folder, limit, sharers=1, during=lambda: None, sleep=time.sleep):
    """That store, through the cache that all share; `during` is called in the middle of each download."""
    fs = Watched(skip_instance_cache=True)
    fs.during = during
    return RemoteStorage("watched://far", fs, f"{folder}/far", folder / "cache", limit, sharers=sharers, sleep=sleep)


def held(folder):
    """Bytes that a cache folder takes, or is about to take; counted while nobody renames."""
    with (folder / "cache" / ".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        files = [path for path in (folder / "cache").rglob("*") if path.is_file()]
        parts = [(PART.fullmatch(path.name), path) for path in files]
        return sum(int(part["bytes"]) if part else path.stat().st_size for part, path in parts)


# ---------------------------------------------------------------- what processes do; each puts its answer


def read_at_random(folder, limit, seed, answers):
    """Read files in an order of one's own; the answer is what the cache held at most."""
    most = [0]
    storage = shared(folder, limit, sharers=3, during=lambda: most.append(held(folder)))
    rng = random.Random(seed)
    for _ in range(6):
        order = rng.choices(NAMES, k=12)
        storage.prefetch(order)
        for name in order[:9]:
            assert storage.opened(name, Path.read_bytes) == content_of(name)
            most.append(held(folder))
    storage.close()
    answers.put(max(most))


def stall(folder, half):
    """Fetch a file, and never get further than its half."""

    def during():
        half.set()
        threading.Event().wait()

    shared(folder, 1000, during=during).local("a")
