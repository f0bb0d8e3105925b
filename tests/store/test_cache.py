"""The bounded cache of a remote storage: never over its quota, never a wrong file, ahead of its reader."""

import errno
import fcntl
import os
import random
import threading
import time
from pathlib import Path

import pytest
from caching import LONG, Gated, copies, under_way
from sharers import held

from eagle31_train.errors import UserError
from eagle31_train.store.backends.quota import ABANDONED
from eagle31_train.store.backends.remote import RemoteStorage

# ---------------------------------------------------------------- the quota


@pytest.mark.core
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


def test_other_stores_count_too_and_other_files_are_left_alone(fs, open_cache, tmp_path):
    (tmp_path / "cache" / "store-of-mine").mkdir(parents=True)
    (tmp_path / "cache" / "store-of-mine" / "mine").write_bytes(bytes(1000))
    first = open_cache(300)
    fs.pipe_file("/elsewhere/z", b"z" * 100)
    second = RemoteStorage("gated://elsewhere", fs, "/elsewhere", tmp_path / "cache", 300)
    for name in "ab":
        first.local(name)
    assert second.local("z").read_bytes() == b"z" * 100
    first.local("c")
    assert copies(tmp_path) == ["b", "c", "mine", "z"]


@pytest.mark.parametrize("seed", range(2))
def test_the_quota_holds_at_every_moment(fs, open_cache, tmp_path, seed):
    sizes = random.Random(seed)
    contents = {name: name.encode() * sizes.randint(0, 180) for name in "abcdefghijkl"}
    for name, content in contents.items():
        fs.pipe_file(f"/store/{name}", content)
    over, failures = [], []
    fs.watch = lambda: over.append(now) if (now := held(tmp_path)) > 400 else None

    def read(storage, order):
        try:
            for start in range(0, len(order), 10):
                storage.prefetch(order[start:])
                for name in order[start : start + 10]:
                    assert storage.opened(name, Path.read_bytes) == contents[name]
                    fs.watch()
        except BaseException as error:
            failures.append(error)

    orders = [random.Random(seed + i).choices("abcdefghijkl", k=40) for i in range(2)]
    readers = [threading.Thread(target=read, args=(open_cache(400, sharers=2), order)) for order in orders]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join(LONG)
    assert failures == []
    assert over == []


def test_a_file_larger_than_the_cache_is_refused(fs, open_cache, tmp_path):
    fs.pipe_file("/store/big", bytes(1234))
    storage = open_cache(300)
    storage.local("a")
    with pytest.raises(UserError, match=r"^gated://store/big has 1,234 bytes, more than store\.cache_bytes=300: raise"):
        storage.local("big")
    assert copies(tmp_path) == fs.fetched == ["a"]


def test_a_mapping_outlives_its_file_and_what_was_evicted_too_early_is_fetched_again(open_cache, tmp_path):
    storage, other = open_cache(100), open_cache(100)
    with storage.local("a").open("rb") as file:
        storage.local("b")
        assert copies(tmp_path) == ["b"]
        assert file.read() == b"a" * 100
    evicted = []

    def opener(path):
        if not evicted:
            evicted.append(other.local("b"))
        return path.read_bytes()

    assert storage.opened("a", opener) == b"a" * 100
    assert evicted


def test_files_being_built_count_and_are_never_evicted(open_cache, tmp_path):
    storage = open_cache(300)
    scratch = storage.scratch("shards/new")
    scratch.write_bytes(bytes(150))
    storage.local("a")
    storage.local("b")
    assert copies(tmp_path) == ["b"]
    assert scratch.exists()
    scratch.write_bytes(bytes(250))
    with pytest.raises(UserError, match=r"250 bytes being built.*raise store\.cache_bytes"):
        storage.local("c")
    os.utime(scratch, (0, scratch.stat().st_mtime - ABANDONED - 1))  # a killed run's
    storage.local("c")
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


def test_a_copy_that_is_not_the_file_is_fetched_again(fs, open_cache, monkeypatch):
    asked = []
    info = Gated.info
    monkeypatch.setattr(Gated, "info", lambda self, path, **kwargs: asked.append(path) or info(self, path, **kwargs))
    storage = open_cache(300)
    for _ in range(3):
        path = storage.local("a")
    assert asked == ["/store/a"], "one question per file and process"
    path.write_bytes(b"half")
    assert open_cache(300).local("a").read_bytes() == b"a" * 100
    path.write_bytes(b"x" * 100)
    assert storage.local("a").read_bytes() == b"x" * 100  # only a checksum could tell
    storage.forget("a")
    assert storage.local("a").read_bytes() == b"a" * 100
    assert fs.fetched == ["a"] * 3


def test_a_file_replaced_by_another_size_is_refused_then_known(fs, open_cache):
    storage = open_cache(100, sleep=lambda seconds: None)
    storage.local("a")
    storage.local("b")
    fs.pipe_file("/store/a", b"longer" * 10)
    with pytest.raises(UserError, match="60 bytes came, not 100"):
        storage.local("a")
    assert storage.local("a").read_bytes() == b"longer" * 10


@pytest.mark.parametrize("way", ["threads", "storages", "prefetch"])
def test_whoever_wants_a_file_that_is_being_fetched_waits_for_it(fs, open_cache, tmp_path, way):
    fs.gate("a")
    storages = [open_cache(300)] * 4 if way == "threads" else [open_cache(300) for _ in range(4)]
    if way == "prefetch":
        storages[0].prefetch("a")
        fs.wait(lambda fs: fs.fetched)
    results = []
    readers = [
        threading.Thread(target=lambda storage=storage: results.append(storage.local("a").read_bytes()))
        for storage in storages
    ]
    for reader in readers:
        reader.start()
    fs.wait(lambda fs: fs.fetched)
    assert held(tmp_path) == 100
    fs.gates["a"].set()
    for reader in readers:
        reader.join(LONG)
    assert results == [b"a" * 100] * 4
    assert fs.fetched == ["a"]
    assert (copies(tmp_path), held(tmp_path)) == (["a"], 100)


@pytest.mark.parametrize("part", ["a.100", "y.250"])
def test_what_another_process_fetches_or_holds_is_waited_for_until_it_ends(fs, open_cache, tmp_path, part):
    def sleep(seconds):
        assert not other.closed, "nobody fetches it any more"
        other.close()  # the other process failed, or died

    storage = open_cache(300, sleep=sleep)
    other = under_way(storage, part)
    assert storage.local("a").read_bytes() == b"a" * 100
    assert other.closed
    assert held(tmp_path) == 100


@pytest.mark.parametrize("part", ["a.5.100", "aa.100", "b.100"])
def test_other_files_under_way_are_not_waited_for_and_a_kills_are_removed(open_cache, part):
    storage = open_cache(300)
    dead = storage.scratch("z").parent / ".x.250.part"
    dead.write_bytes(b"half")
    with under_way(storage, part) as alive:
        assert storage.local("a").read_bytes() == b"a" * 100
        assert not dead.exists()
        assert Path(alive.name).exists()
    storage.local("c")
    assert not Path(alive.name).exists()


def test_a_file_that_came_while_the_lock_was_waited_for_is_taken(fs, open_cache, monkeypatch):
    storage, other = open_cache(300), open_cache(300)
    quota = storage._cache._quota
    reserve = quota.reserve

    def late(*args, **kwargs):
        other.local("a")
        return reserve(*args, **kwargs)

    monkeypatch.setattr(quota, "reserve", late)
    assert storage.local("a").read_bytes() == b"a" * 100
    assert fs.fetched == ["a"]


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (OSError(errno.ENOSPC, "full"), UserError),
        (OSError(errno.EDQUOT, "full"), UserError),
        (KeyboardInterrupt(), KeyboardInterrupt),
    ],
    ids=repr,
)
def test_a_full_disk_or_a_stop_in_the_middle_leaves_nothing(fs, open_cache, tmp_path, error, raised):
    storage = open_cache(300)
    fs.refused["a"] = error
    with pytest.raises(raised) as caught:
        storage.local("a")
    if raised is UserError:
        assert str(caught.value).startswith(f"no space left in {tmp_path / 'cache'} for copies of gated://store: free")
    assert held(tmp_path) == 0
    del fs.refused["a"]
    assert storage.local("a").read_bytes() == b"a" * 100


# ---------------------------------------------------------------- ahead of its reader


@pytest.mark.core
def test_prefetch_keeps_order_and_bound(fs, open_cache):
    storage = open_cache(600)
    names = list("abcdefghij")
    used = 0
    ahead = []
    fs.watch = lambda: ahead.append(len(fs.fetched) - used)
    storage.prefetch(names)
    for i, name in enumerate(names):
        fs.wait(lambda fs, i=i: len(fs.finished) >= min(i + 3, 10))
        assert sorted(fs.finished) == names[: i + 3]  # in their order, but for the two that are fetched at a time
        assert max(ahead) <= 3  # half of the cache
        used += 1  # before the storage may know of it
        assert storage.local(name).read_bytes() == name.encode() * 100
    assert sorted(fs.fetched) == names  # each of them once
    assert open_cache(600, sharers=3)._cache.ahead == 100


def test_the_bound_of_prefetch_is_what_keeps_it(fs, open_cache):
    storage = open_cache(600)
    storage._cache.ahead = 600  # a planted mistake
    storage.prefetch("abcdef")
    fs.wait(lambda fs: len(fs.finished) == 6)


def settle(storage, *names):
    """Wait until nothing is fetched ahead but these, which have their names."""
    cache = storage._cache
    deadline = time.monotonic() + LONG
    while cache._queue or set(cache._ready) != set(names) or not all((cache.folder / name).exists() for name in names):
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_prefetched_files_are_not_evicted_before_use(fs, open_cache, tmp_path):
    storage, other = open_cache(400), open_cache(400)
    storage.prefetch("ab")
    settle(storage, "a", "b")
    for reader, names in ((storage, "cdefg"), (other, "hij")):  # another process knows them by their use, ahead
        for name in names:
            reader.local(name)
            assert {"a", "b"} <= set(copies(tmp_path))
    storage.local("a")
    storage.local("b")
    assert sorted(fs.fetched) == list("abcdefghij")
    for name in "cdef":
        storage.local(name)
    assert copies(tmp_path) == list("cdef")  # used, they leave like others


def test_one_prefetched_file_is_not_evicted_for_the_next(fs, open_cache):
    storage = open_cache(400)
    storage.local("a")
    storage.scratch("new").write_bytes(bytes(250))
    storage.prefetch("ab")
    settle(storage, "a")
    storage.local("a")
    assert fs.fetched == ["a"]
    storage.local("b")
    assert fs.fetched == ["a", "b"]


def test_prefetch_leaves_to_others_what_they_fetch(fs, open_cache):
    storage = open_cache(400)  # two files ahead
    with under_way(storage, "a.100"), under_way(storage, "c.100"):
        storage.prefetch("abcde")
        fs.wait(lambda fs: len(fs.finished) == 2)
    assert sorted(fs.fetched) == ["b", "d"]
    assert storage.local("a").read_bytes() == b"a" * 100  # they died


def test_prefetch_replaces_the_list(fs, open_cache):
    storage = open_cache(600)
    fs.gate("a", "b")
    storage.prefetch("abcd")
    fs.wait(lambda fs: len(fs.fetched) == 2)
    storage.prefetch("efg")
    for name in "ab":
        fs.gates[name].set()
    fs.wait(lambda fs: {"e", "f", "g"} <= set(fs.finished))
    assert not {"c", "d"} & set(fs.fetched)


def test_what_is_read_out_of_turn_or_too_large_is_left_to_its_reader(fs, open_cache):
    fs.pipe_file("/store/big", bytes(250))
    storage = open_cache(400)
    storage._cache.ahead = 100  # one file
    storage.prefetch(["a", "b", "big", "c"])
    fs.wait(lambda fs: fs.finished == ["a"])
    for name in ("b", "a"):
        storage.local(name)
    assert len(storage.local("big").read_bytes()) == 250
    fs.wait(lambda fs: "c" in fs.finished)
    assert fs.fetched[:2] == ["a", "b"]
    assert sorted(fs.fetched[2:]) == ["big", "c"]


@pytest.mark.parametrize("way", ["get_file", "info"])
def test_what_fails_in_the_background_is_raised_to_its_reader(fs, open_cache, monkeypatch, way):
    storage = open_cache(600)

    def refuse(*_, **__):
        raise PermissionError("Access Denied")

    with monkeypatch.context() as patch:
        patch.setattr(fs, way, refuse)
        storage.prefetch("abc")
        settle(storage)
        with pytest.raises(UserError, match=r"gated://store/a: .* is not permitted"):
            storage.local("a")
    assert storage.local("a").read_bytes() == b"a" * 100
    storage.prefetch(["later", *"ghi"])  # what is absent holds nobody up
    fs.wait(lambda fs: {"g", "h", "i"} <= set(fs.finished))
    with pytest.raises(FileNotFoundError):
        storage.local("later")
    fs.pipe_file("/store/later", b"now")
    assert storage.local("later").read_bytes() == b"now"


def test_closed_is_closed_and_without_prefetch_no_thread_starts(fs, open_cache):
    storage = open_cache(600)
    storage.local("l")
    workers = storage._cache._workers
    assert all(worker.daemon and worker.ident is None for worker in workers)
    storage.prefetch("abc")
    storage.close()
    assert not any(worker.is_alive() for worker in workers)
    count = len(fs.fetched)
    storage.prefetch("def")
    assert storage.local("k").read_bytes() == b"k" * 100
    assert len(fs.fetched) == count + 1
