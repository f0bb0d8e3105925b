"""The bounded cache of a remote place: never over its bound, never a wrong file, and ahead of its reader."""

import errno
import fcntl
import os
import random
import threading
from pathlib import Path

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from sharers import held

from eagle31_train.place.remote import RemotePlace
from eagle31_train.place.room import ABANDONED
from eagle31_train.schema import UserError

LONG = 30  # seconds after which something that was to happen did not


class Gated(MemoryFileSystem):
    """Notes which files are fetched; those with a gate only once it is open; some are refused."""

    def __init__(self, **kwargs):
        super().__init__(global_store=False, **kwargs)
        self.fetched, self.finished = [], []
        self.gates, self.refused = {}, {}
        self.changed = threading.Condition()
        self.watch = lambda: None  # called while a fetch is under way

    def get_file(self, path, target, **kwargs):
        name = path.removeprefix("/store/")
        with self.changed:
            self.fetched.append(name)
            self.changed.notify_all()
        if name in self.gates:
            assert self.gates[name].wait(LONG)
        if name in self.refused:
            raise self.refused[name]
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

    def gate(self, *names):
        self.gates |= {name: threading.Event() for name in names}


@pytest.fixture
def fs():
    fs = Gated(skip_instance_cache=True)
    for name in "abcdefghijkl":
        fs.pipe_file(f"/store/{name}", name.encode() * 100)
    return fs


def no_sleep(seconds):
    raise AssertionError("nobody else holds room here")


@pytest.fixture
def open_cache(fs, tmp_path):
    """`open_cache(bytes)`: another place with the same cache folder."""
    places = []

    def open_cache(limit, location="gated://store", **options):
        options = {"sleep": no_sleep} | options
        places.append(RemotePlace(location, fs, "/store", tmp_path / "cache", limit, **options))
        return places[-1]

    yield open_cache
    for gate in fs.gates.values():
        gate.set()
    for place in places:
        place.close()


def copies(folder):
    """The whole files in a cache."""
    return sorted(path.name for path in folder.rglob("*") if path.is_file() and not path.name.startswith("."))


def settle(place, names):
    """Wait until what was fetched in the background has its name."""
    for name in names:
        with place._cache._lock(name):
            pass


# ---------------------------------------------------------------- the bound


def test_the_longest_unused_leaves_first(fs, open_cache, tmp_path):
    place = open_cache(300)
    for name in "abc":
        place.local(name)
    place.local("a")
    place.local("d")
    assert copies(tmp_path) == ["a", "c", "d"]
    place.local("c")
    place.local("e")
    assert copies(tmp_path) == ["c", "d", "e"]
    assert fs.fetched == ["a", "b", "c", "d", "e"]


def test_two_places_share_folder_and_bound(fs, open_cache, tmp_path):
    one, two = open_cache(300), open_cache(300)
    one.local("a")
    two.local("a")
    two.local("b")
    two.local("c")
    one.local("a")
    two.local("d")
    assert copies(tmp_path) == ["a", "c", "d"]
    assert fs.fetched == ["a", "b", "c", "d"]


def test_other_stores_count_too_and_other_files_are_left_alone(fs, open_cache, tmp_path):
    (tmp_path / "cache" / "store-of-mine").mkdir(parents=True)
    (tmp_path / "cache" / "store-of-mine" / "mine").write_bytes(bytes(1000))
    first = open_cache(300)
    fs.pipe_file("/elsewhere/z", b"z" * 100)
    second = RemotePlace("gated://elsewhere", fs, "/elsewhere", tmp_path / "cache", 300, sleep=no_sleep)
    for name in "ab":
        first.local(name)
    assert second.local("z").read_bytes() == b"z" * 100
    first.local("c")
    assert copies(tmp_path) == ["b", "c", "mine", "z"]


@pytest.mark.parametrize("seed", range(4))
def test_the_bound_holds_at_every_moment(fs, open_cache, tmp_path, seed):
    sizes = random.Random(seed)
    contents = {name: name.encode() * sizes.randint(0, 180) for name in "abcdefghijkl"}
    for name, content in contents.items():
        fs.pipe_file(f"/store/{name}", content)
    over = []
    fs.watch = lambda: over.append(now) if (now := held(tmp_path)) > 400 else None
    failures = []

    def read(place, order):
        try:
            for start in range(0, len(order), 10):
                place.prefetch(order[start:])
                for name in order[start : start + 10]:
                    assert place.opened(name, Path.read_bytes) == contents[name]
                    fs.watch()
        except BaseException as error:
            failures.append(error)

    pause = threading.Event()
    readers = [
        threading.Thread(
            target=read,
            args=(open_cache(400, sharers=2, sleep=pause.wait), random.Random(seed + i).choices("abcdefghijkl", k=40)),
        )
        for i in range(2)
    ]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join(LONG)
    assert failures == []
    assert over == []


def test_a_file_larger_than_the_cache_is_refused(fs, open_cache, tmp_path):
    fs.pipe_file("/store/big", bytes(1234))
    place = open_cache(300)
    place.local("a")
    with pytest.raises(
        UserError, match=r"^gated://store/big holds 1,234 bytes, more than store\.cache_bytes=300: raise"
    ):
        place.local("big")
    assert copies(tmp_path) == ["a"]
    assert fs.fetched == ["a"]


def test_an_open_mapping_outlives_its_file(open_cache, tmp_path):
    place = open_cache(100)
    with place.local("a").open("rb") as file:
        place.local("b")
        assert copies(tmp_path) == ["b"]
        assert file.read() == b"a" * 100


def test_a_copy_evicted_before_it_is_open_is_fetched_again(open_cache):
    place, other = open_cache(100), open_cache(100)
    evicted = []

    def opener(path):
        if not evicted:
            evicted.append(other.local("b"))
        return path.read_bytes()

    assert place.opened("a", opener) == b"a" * 100
    assert evicted


def test_files_being_built_count_and_are_never_evicted(open_cache, tmp_path):
    place = open_cache(300)
    scratch = place.scratch("shards/new")
    scratch.write_bytes(bytes(150))
    place.local("a")
    place.local("b")
    assert copies(tmp_path) == ["b"]
    assert scratch.exists()
    scratch.write_bytes(bytes(250))
    with pytest.raises(UserError, match=r"250 bytes being built.*raise store\.cache_bytes"):
        place.local("c")
    os.utime(scratch, (0, scratch.stat().st_mtime - ABANDONED - 1))  # a killed run's
    place.local("c")
    assert not scratch.exists()


def test_a_file_gets_its_name_while_nobody_counts(open_cache, tmp_path, monkeypatch):
    renamed = []
    replace = Path.replace

    def watched(self, target):
        with (tmp_path / "cache" / ".lock").open() as lock, pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        renamed.append(target.name)
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", watched)
    open_cache(300).local("a")
    assert renamed == ["a"]


# ---------------------------------------------------------------- no wrong files


def test_a_copy_of_another_size_is_not_trusted(fs, open_cache):
    path = open_cache(300).local("a")
    path.write_bytes(b"half")
    assert open_cache(300).local("a").read_bytes() == b"a" * 100
    assert fs.fetched == ["a", "a"]


def test_a_forgotten_copy_is_fetched_again(fs, open_cache):
    place = open_cache(300)
    place.local("a").write_bytes(b"x" * 100)
    assert place.local("a").read_bytes() == b"x" * 100  # only a checksum could tell
    place.forget("a")
    assert place.local("a").read_bytes() == b"a" * 100


def test_a_file_replaced_by_another_size_is_refused_then_known(fs, open_cache):
    place = open_cache(100, sleep=lambda seconds: None)
    place.local("a")
    place.local("b")
    fs.pipe_file("/store/a", b"longer" * 10)
    with pytest.raises(UserError, match="60 bytes came, not 100"):
        place.local("a")
    assert place.local("a").read_bytes() == b"longer" * 10


def test_the_size_is_asked_for_once(fs, open_cache, monkeypatch):
    asked = []
    info = Gated.info
    monkeypatch.setattr(Gated, "info", lambda self, path, **kwargs: asked.append(path) or info(self, path, **kwargs))
    place = open_cache(300)
    for _ in range(3):
        place.local("a")
    assert asked.count("/store/a") == 1


def test_one_fetch_at_a_time_per_name(fs, open_cache):
    place = open_cache(300)
    fs.gate("a")
    found = []
    readers = [threading.Thread(target=lambda: found.append(place.local("a").read_bytes())) for _ in range(4)]
    for reader in readers:
        reader.start()
    fs.wait(lambda fs: fs.fetched)
    fs.gates["a"].set()
    for reader in readers:
        reader.join(LONG)
    assert found == [b"a" * 100] * 4
    assert fs.fetched == ["a"]


def under_way(place, name):
    """A part file that another process fills, with the lock that says so."""
    file = (place.scratch("z").parent / f".{name}.1-1.part").open("wb")
    fcntl.flock(file, fcntl.LOCK_EX)
    return file


@pytest.mark.parametrize("way", ["local", "prefetch"])
def test_what_another_process_fetches_is_waited_for_and_taken(fs, open_cache, tmp_path, way):
    fs.gate("a")
    first = open_cache(300)
    found, naps = [], []

    def read():
        found.append(first.local("a").read_bytes())

    other = threading.Thread(target=read)

    def sleep(seconds):
        naps.append(held(tmp_path))
        fs.gates["a"].set()
        other.join(LONG)

    if way == "prefetch":
        first.prefetch("a")
        fs.wait(lambda fs: fs.fetched)
    other.start()
    fs.wait(lambda fs: fs.fetched)
    assert open_cache(300, sleep=sleep).local("a").read_bytes() == b"a" * 100
    assert found == [b"a" * 100]
    assert (fs.fetched, naps) == (["a"], [100])  # one of them fetches, and has room
    assert (copies(tmp_path), held(tmp_path)) == (["a"], 100)


def test_what_another_process_failed_to_fetch_is_fetched_here(fs, open_cache, tmp_path):
    def sleep(seconds):
        assert not other.closed, "nobody fetches it any more"
        other.close()  # the other process failed, or died

    place = open_cache(300, sleep=sleep)
    other = under_way(place, "a.100")
    assert place.local("a").read_bytes() == b"a" * 100
    assert other.closed
    assert held(tmp_path) == 100


@pytest.mark.parametrize("part", ["a.99", "a.5.100", "aa.100", "b.100"])
def test_other_files_under_way_are_not_waited_for(fs, open_cache, part):
    place = open_cache(300)
    with under_way(place, part):
        assert place.local("a").read_bytes() == b"a" * 100


def test_a_file_that_came_while_the_lock_was_waited_for_is_taken(fs, open_cache, monkeypatch):
    place, other = open_cache(300), open_cache(300)
    take = place._cache._room.take

    def late(*args, **kwargs):
        other.local("a")
        return take(*args, **kwargs)

    monkeypatch.setattr(place._cache._room, "take", late)
    place._cache._sleep = lambda seconds: None
    assert place.local("a").read_bytes() == b"a" * 100
    assert fs.fetched == ["a"]


def test_prefetch_leaves_to_others_what_they_fetch(fs, open_cache):
    place = open_cache(400)  # two files ahead
    with under_way(place, "a.100"), under_way(place, "c.100"):
        place.prefetch("abcde")
        fs.wait(lambda fs: len(fs.finished) == 2)
        settle(place, "bd")
        assert place._cache._ready.keys() == {"b", "d"}  # what others fetch takes none of the look-ahead
    assert sorted(fs.fetched) == ["b", "d"]
    assert place.local("a").read_bytes() == b"a" * 100  # they died


def test_what_a_kill_left_is_removed_and_what_others_fetch_is_not(open_cache, tmp_path):
    place = open_cache(300)
    folder = place.local("a").parent
    dead, alive = folder / ".x.150.1-0.part", folder / ".y.150.1-1.part"
    dead.write_bytes(b"half")
    with alive.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        place.local("b")
        assert not dead.exists()
        assert alive.exists()
        assert copies(tmp_path) == ["b"]  # "a" made room: the other fetch counts in full
    place.local("c")
    assert not alive.exists()


def test_waits_for_room_that_another_fetch_holds(open_cache, tmp_path):
    naps = []

    def sleep(seconds):
        naps.append(seconds)
        other.close()  # the other process is done, or dead

    place = open_cache(300, sleep=sleep)
    other = (place.scratch("z").parent / ".y.250.1-1.part").open("wb")
    fcntl.flock(other, fcntl.LOCK_EX)
    assert place.local("a").read_bytes() == b"a" * 100
    assert len(naps) == 1


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_one_line_and_leaves_nothing(fs, open_cache, tmp_path, number):
    place = open_cache(300)
    fs.refused["a"] = OSError(number, os.strerror(number))
    with pytest.raises(UserError) as error:
        place.local("a")
    assert str(error.value).startswith(f"no space left in {tmp_path / 'cache'} for copies of gated://store: free some")
    assert [path for path in (tmp_path / "cache").rglob("*") if path.is_file()] == [tmp_path / "cache" / ".lock"]
    del fs.refused["a"]
    assert place.local("a").read_bytes() == b"a" * 100


def test_a_stop_in_the_middle_leaves_nothing(fs, open_cache, tmp_path):
    place = open_cache(300)
    fs.refused["a"] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        place.local("a")
    assert held(tmp_path) == 0
    del fs.refused["a"]
    assert place.local("a").read_bytes() == b"a" * 100


# ---------------------------------------------------------------- ahead of its reader


def test_prefetch_keeps_order_and_bound(fs, open_cache):
    place = open_cache(600)
    names = list("abcdefghij")
    used = 0
    ahead = []
    fs.watch = lambda: ahead.append(len(fs.fetched) - used)
    place.prefetch(names)
    for i, name in enumerate(names):
        fs.wait(lambda fs, i=i: len(fs.finished) >= min(i + 3, 10))
        assert sorted(fs.finished) == names[: i + 3]  # in their order, but for the two that are fetched at a time
        assert max(ahead) <= 3  # half of the cache
        used += 1  # before the place may know of it
        assert place.local(name).read_bytes() == name.encode() * 100
    assert sorted(fs.fetched) == names  # each of them once


def test_the_bound_of_prefetch_is_what_keeps_it(fs, open_cache):
    place = open_cache(600)
    place._cache.ahead = 600  # a planted mistake
    place.prefetch("abcdef")
    fs.wait(lambda fs: len(fs.finished) == 6)


def test_processes_that_share_a_cache_share_the_look_ahead(open_cache):
    assert open_cache(600, sharers=3)._cache.ahead == 100


def test_prefetched_files_are_not_evicted_before_use(fs, open_cache, tmp_path):
    place, other = open_cache(400), open_cache(400)
    place.prefetch("ab")
    fs.wait(lambda fs: len(fs.finished) == 2)
    settle(place, "ab")
    for name in "cdefg":
        place.local(name)
        assert {"a", "b"} <= set(copies(tmp_path))
    for name in "hij":
        other.local(name)  # another process knows them by their use, which lies ahead
        assert {"a", "b"} <= set(copies(tmp_path))
    place.local("a")
    place.local("b")
    assert sorted(fs.fetched) == list("abcdefghij")
    for name in "cdef":
        place.local(name)
    assert copies(tmp_path) == list("cdef")  # used, they leave like others


def test_one_prefetched_file_makes_no_room_for_the_next(fs, open_cache):
    place = open_cache(400)
    place.local("a")
    place.scratch("new").write_bytes(bytes(250))
    place.prefetch("ab")
    cache = place._cache
    with cache._changed:
        assert cache._changed.wait_for(lambda: not cache._queue and cache._ready.keys() == {"a"}, LONG)
    place.local("a")
    assert fs.fetched == ["a"]
    place.local("b")
    assert fs.fetched == ["a", "b"]


def test_what_is_no_longer_wanted_is_not_fetched(fs, open_cache):
    place = open_cache(400)
    cache = place._cache
    with cache._lock("a"):
        place.prefetch("a")
        with cache._changed:
            assert cache._changed.wait_for(lambda: "a" in cache._ready, LONG)
        place.prefetch([])
    place.close()
    assert fs.fetched == []


def test_what_is_under_way_is_waited_for(fs, open_cache):
    place = open_cache(600)
    fs.gate("a")
    place.prefetch("a")
    fs.wait(lambda fs: fs.fetched)
    found = []
    reader = threading.Thread(target=lambda: found.append(place.local("a").read_bytes()))
    reader.start()
    assert found == []
    fs.gates["a"].set()
    reader.join(LONG)
    assert found == [b"a" * 100]
    assert fs.fetched == ["a"]


def test_prefetch_replaces_the_list(fs, open_cache):
    place = open_cache(600)
    fs.gate("a", "b")
    place.prefetch("abcd")
    fs.wait(lambda fs: len(fs.fetched) == 2)
    place.prefetch("efg")
    for name in "ab":
        fs.gates[name].set()
    fs.wait(lambda fs: {"e", "f", "g"} <= set(fs.finished))
    assert not {"c", "d"} & set(fs.fetched)


def test_what_is_read_out_of_turn_leaves_the_list(fs, open_cache):
    place = open_cache(200)  # one file ahead
    place.prefetch("abcd")
    fs.wait(lambda fs: fs.finished == ["a"])
    place.local("b")
    place.local("a")
    fs.wait(lambda fs: "c" in fs.finished)
    assert fs.fetched == ["a", "b", "c"]


def test_a_file_too_large_to_be_ahead_is_left_to_its_reader(fs, open_cache):
    fs.pipe_file("/store/big", bytes(250))
    place = open_cache(400)
    place.prefetch(["a", "big", "b"])
    assert place.local("a").read_bytes() == b"a" * 100
    assert len(place.local("big").read_bytes()) == 250
    assert place.local("b").read_bytes() == b"b" * 100
    assert sorted(fs.fetched) == ["a", "b", "big"]


@pytest.mark.parametrize("way", ["get_file", "info"])
def test_a_failure_in_the_background_surfaces(fs, open_cache, monkeypatch, way):
    place = open_cache(600)
    failed = threading.Event()

    def refuse(*_, **__):
        failed.set()
        raise PermissionError("Access Denied")

    with monkeypatch.context() as patch:
        patch.setattr(fs, way, refuse)
        place.prefetch("abc")
        assert failed.wait(LONG)
        with place._cache._changed:
            assert place._cache._changed.wait_for(lambda: place._cache._errors, LONG)
    (name,) = place._cache._errors.keys() & set("abc") if len(place._cache._errors) == 1 else ["a"]
    with pytest.raises(UserError, match=f"gated://store/{name}: .* is not permitted"):
        place.local(name)  # though the place is well again
    assert place.local(name).read_bytes() == name.encode() * 100
    place.prefetch("ghi")
    fs.wait(lambda fs: {"g", "h", "i"} <= set(fs.finished))


def test_what_was_absent_may_come(fs, open_cache):
    place = open_cache(600)
    place.prefetch(["later", "a"])
    fs.wait(lambda fs: "a" in fs.finished)
    with pytest.raises(FileNotFoundError):
        place.local("later")
    fs.pipe_file("/store/later", b"now")
    assert place.local("later").read_bytes() == b"now"


def test_closed_is_closed(fs, open_cache):
    place = open_cache(600)
    place.prefetch("abc")
    workers = list(place._cache._workers)
    assert all(worker.daemon for worker in workers)
    place.close()
    assert not any(worker.is_alive() for worker in workers)
    count = len(fs.fetched)
    place.prefetch("def")
    assert place.local("l").read_bytes() == b"l" * 100
    assert len(fs.fetched) == count + 1


def test_a_place_that_only_reads_what_it_is_asked_for_starts_no_threads(open_cache):
    place = open_cache(600)
    place.local("a")
    assert all(worker.ident is None for worker in place._cache._workers)
