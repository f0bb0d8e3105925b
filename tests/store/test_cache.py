"""The bounded cache of a remote storage: never over its quota, never a wrong file, ahead of its reader."""

import fcntl
import os
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from made import memory, message_of
from planting import replaced

from eagle31_train.common.errors import UserError
from eagle31_train.store.backends import Use, remote
from eagle31_train.store.backends.cache import PART
from eagle31_train.store.backends.remote import RemoteStorage

LONG = 30  # seconds after which something that was to happen did not


class Gated(MemoryFileSystem):
    """Notes which files are fetched."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.fetched, self.finished = [], []
        self.changed = threading.Condition()
        self.watch = lambda: None  # called while a fetch is under way

    def get_file(self, path, target, **kwargs):
        name = path.removeprefix("/store/")
        self.note(self.fetched, name)
        self.watch()
        # Not MemoryFileSystem's own way: its open files share one position among all threads.
        Path(target).write_bytes(self.store[path].getvalue())
        self.watch()
        self.note(self.finished, name)

    def note(self, names, name):
        with self.changed:
            names.append(name)
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


@pytest.fixture
def fs():
    fs = memory(Gated)
    for name in "abcdefghijkl":
        fs.pipe_file(f"/store/{name}", name.encode() * 100)
    return fs


@pytest.fixture
def open_cache(fs, tmp_path):
    """`open_cache(bytes)`: another storage with the same cache folder."""
    with ExitStack() as opened:
        yield lambda limit: opened.enter_context(
            closing(RemoteStorage("gated://store", fs, "/store", tmp_path / "cache", limit))
        )


def test_the_longest_unused_leaves_first_whoever_fetched_it(fs, open_cache, tmp_path):
    one, two = open_cache(300), open_cache(300)
    one.local("a")
    two.local("b")
    one.local("c")
    two.local("a")
    one.local("d")
    assert copies(tmp_path) == ["a", "c", "d"]
    two.local("c")
    two.local("e")
    assert copies(tmp_path) == ["c", "d", "e"]
    assert fs.fetched == ["a", "b", "c", "d", "e"]


def test_a_file_that_was_long_in_coming_is_not_the_longest_unused(fs, open_cache, tmp_path):
    storage = open_cache(200)
    storage.local("a")
    fs.watch = lambda: storage.local("a")
    storage.local("b")
    fs.watch = lambda: None
    storage.local("c")
    assert copies(tmp_path) == ["b", "c"]


def test_what_is_built_for_upload_counts_and_what_a_kill_left_of_it_goes(fs, open_cache, tmp_path):
    storage = open_cache(300)
    left, built = storage.scratch("y"), storage.scratch("z")
    left.write_bytes(b"y" * 250)
    os.utime(left, (0, 0))
    built.write_bytes(b"z" * 150)
    storage.local("a")
    assert not left.exists()
    storage.local("b")
    assert (copies(tmp_path), held(tmp_path)) == (["b"], 250)
    built.write_bytes(b"z" * 250)
    assert "beside 250 bytes being built" in message_of(storage.local, "c")


def test_what_is_somebody_elses_in_the_folder_is_neither_counted_nor_removed(fs, open_cache, tmp_path):
    """store.cache_dir may be any folder, /data for one. Of stores elsewhere with the same path each has its own."""
    theirs = [tmp_path / "cache" / name for name in ("notes", "model/weights", "model/.hidden", "model/.x.100.part")]
    for path in theirs:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"t" * 250)
        os.utime(path, (0, 0))
    storage = open_cache(300)
    for name in "abcd":
        storage.local(name)
    assert copies(storage.folder) == ["b", "c", "d"]
    assert all(path.exists() for path in theirs)
    elsewhere = memory(type("Other", (MemoryFileSystem,), {"protocol": "other"}))
    elsewhere.pipe_file("/store/d", b"x" * 100)
    with closing(RemoteStorage("other://store", elsewhere, "/store", tmp_path / "cache", 300)) as other:
        assert other.local("d").read_bytes() == b"x" * 100
    assert storage.local("d").read_bytes() == b"d" * 100


def test_the_quota_holds_at_every_moment(fs, open_cache, tmp_path):
    sizes = random.Random(0)
    contents = {name: name.encode() * sizes.randint(0, 180) for name in "abcdefghijkl"}
    for name, content in contents.items():
        fs.pipe_file(f"/store/{name}", content)
    over = []
    fs.watch = lambda: over.append(now) if (now := held(tmp_path)) > 400 else None

    def read(storage, order):
        for start in range(0, len(order), 10):
            storage.prefetch(Use(i, name, len(contents[name])) for i, name in enumerate(order[start:]))
            for name in order[start : start + 10]:
                assert storage.opened(name, Path.read_bytes) == contents[name]
                fs.watch()

    orders = [random.Random(i).choices("abcdefghijkl", k=40) for i in range(2)]
    with ThreadPoolExecutor() as pool:
        list(pool.map(read, [open_cache(400) for _ in orders], orders))
    assert over == []


def test_what_another_process_fetches_is_waited_for_until_it_ends_or_dies(fs, open_cache, tmp_path, monkeypatch):
    storage = open_cache(300)
    monkeypatch.setattr(time, "sleep", lambda _: other.close())  # the other process failed, or was killed
    with (storage.scratch("z").parent / ".a.100.part").open("wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert storage.local("a").read_bytes() == b"a" * 100
        assert other.closed
    assert held(tmp_path) == 100
    assert fs.fetched == ["a"]


def test_what_another_process_begins_to_fetch_behind_a_finished_file_stays(open_cache, monkeypatch):
    storage = open_cache(300)
    locked, part = storage._locked, storage.scratch("a").parent / ".a.100.part"

    @contextmanager
    def and_then_another():
        with locked():
            yield
        if (storage.folder / "a").exists():  # it evicts the file, and fetches it again
            storage.forget("a")
            part.touch()

    monkeypatch.setattr(storage, "_locked", and_then_another)
    storage.local("a")
    assert part.exists()


def test_a_copy_that_is_not_the_file_is_fetched_again(fs, open_cache):
    storage = open_cache(300)
    path = storage.local("a")
    for other in (b"half", b"a" * 150):
        path.write_bytes(other)
        assert open_cache(300).local("a").read_bytes() == b"a" * 100
    path.write_bytes(b"x" * 100)
    assert storage.local("a").read_bytes() == b"x" * 100  # only a checksum could tell
    storage.forget("a")
    assert storage.local("a").read_bytes() == b"a" * 100
    assert fs.fetched == ["a"] * 4


def test_what_another_fetched_before_space_was_reserved_is_not_fetched_again(fs, open_cache, monkeypatch):
    storage, other = open_cache(300), open_cache(300)
    locked = storage._locked

    @contextmanager
    def after_another():
        other.local("a")
        with locked():
            yield

    monkeypatch.setattr(storage, "_locked", after_another)
    assert storage.local("a").read_bytes() == b"a" * 100
    assert fs.fetched == ["a"]


def test_a_file_that_was_made_again_is_fetched_as_it_is_now(fs, open_cache, monkeypatch):
    """Its size is known from before: after a copy was found damaged, or a fetch failed, it is asked for again."""
    monkeypatch.setattr(remote, "TRIES", 1)
    storage = open_cache(300)
    storage.local("a")
    fs.pipe_file("/store/a", b"x" * 50)
    storage.forget("a")
    assert storage.local("a").read_bytes() == b"x" * 50
    storage.local("b")
    fs.pipe_file("/store/b", b"y" * 50)
    (storage.folder / "b").unlink()  # evicted
    message_of(storage.local, "b")
    assert storage.local("b").read_bytes() == b"y" * 50


@pytest.mark.parametrize("processes", [1, 2])
def test_prefetch_keeps_order_and_bound(fs, open_cache, processes):
    """Each process reads one file of a turn; this is the first one."""
    storage, names = open_cache(600), list("abcdefghij")
    used, ahead = 0, []
    fs.watch = lambda: ahead.append(len(fs.fetched) - used)
    storage.prefetch(Use(i // processes, name, 100) for i, name in enumerate(names))
    for i in range(0, 10, processes):
        fs.wait(lambda fs, i=i: len(fs.finished) >= min(i + 3, 10))
        assert sorted(fs.finished) == names[: i + 3]  # in their order, but for the two that are fetched at a time
        assert max(ahead) <= 3  # half of the cache
        used += processes  # before the storage may know of it
        assert storage.local(names[i]).read_bytes() == names[i].encode() * 100
        storage.passed(i // processes)
    assert sorted(fs.fetched) == names  # each of them once


def test_what_had_its_turn_is_not_fetched_ahead_any_more(fs, open_cache):
    storage = open_cache(200)
    storage.prefetch(Use(i, name, 100) for i, name in enumerate("abcd"))
    fs.wait(lambda fs: fs.finished == ["a"])
    with storage._changed:  # steps that are read at once may be told of in another order
        storage.passed(2)
        storage.passed(0)
    fs.wait(lambda fs: "d" in fs.finished)
    assert fs.fetched in (["a", "d"], ["a", "b", "d"])  # another may have been under way


def test_a_file_that_was_read_makes_room_for_the_next_before_its_turn_has_passed(fs, open_cache):
    storage = open_cache(400)
    storage.prefetch(Use(0, name, 100) for name in "abc")
    fs.wait(lambda fs: sorted(fs.finished) == ["a", "b"])
    storage.local("a")
    fs.wait(lambda fs: "c" in fs.finished)


def test_one_file_is_fetched_ahead_however_large(fs, open_cache):
    storage = open_cache(150)
    storage.prefetch([Use(0, "a", 100)])
    fs.wait(lambda fs: fs.finished == ["a"])


def test_what_could_not_be_fetched_ahead_does_not_end_fetching_ahead(fs, open_cache, monkeypatch):
    storage, failed = open_cache(600), set()

    @replaced(monkeypatch, storage, "_download")
    def download(right, name, *rest):
        if name in "ab" and name not in failed:
            failed.add(name)
            raise UserError("not now")
        right(name, *rest)

    storage.prefetch(Use(i, name, 100) for i, name in enumerate("abcde"))
    fs.wait(lambda fs: {"c", "d", "e"} <= {*fs.finished})
    assert failed == {"a", "b"}
    assert storage.local("a").read_bytes() == b"a" * 100


def test_a_use_does_not_change_the_time_by_which_a_compared_copy_is_known(open_cache):
    storage = open_cache(300)
    before = storage.local("a").stat().st_mtime_ns
    assert storage.local("a").stat().st_mtime_ns == before
