"""The bounded cache of a remote place: never over its bound, never a wrong file."""

import errno
import fcntl
import os
import random
import threading
from pathlib import Path

import pytest
from caching import LONG, Gated, copies, no_sleep, settle, under_way
from sharers import held

from eagle31_train.place.remote import RemotePlace
from eagle31_train.place.room import ABANDONED
from eagle31_train.schema import UserError

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
