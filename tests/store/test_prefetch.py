"""The cache of a remote place, ahead of its reader and never over its bound."""

import threading

import pytest
from caching import LONG, copies, settle

from eagle31_train.schema import UserError


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
