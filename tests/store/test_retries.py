"""A remote storage whose calls end early, or tell of what is gone."""

import os

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from storage_contract import CACHE, build, never

from eagle31_train.store.backends.remote import RemoteStorage

naps = []
WAYS = {
    "cat_file": lambda storage: storage.read("a"),
    "get_file": lambda storage: storage.local("a").read_bytes(),
    "pipe_file": lambda storage: storage.write("a", b"content"),
    "put_file": lambda storage: storage.put(build(storage, "a", b"content"), "a"),
}


@pytest.fixture
def fs():
    return MemoryFileSystem(global_store=False, skip_instance_cache=True)


@pytest.fixture
def storage(fs, tmp_path):
    storage = RemoteStorage("flaky://bucket/store", fs, "/bucket/store", tmp_path / "cache", 1000, sleep=naps.append)
    naps.clear()
    return storage


@pytest.mark.parametrize("call", WAYS)
def test_what_is_cut_short_is_seen_and_tried_again(storage, fs, monkeypatch, call):
    storage.write("a", b"content")
    whole = getattr(fs, call)
    lengths = [3, 0, None]

    def cut(path, *arguments, **kwargs):
        length = lengths.pop(0)
        result = whole(path, *arguments, **kwargs)
        if length is not None and call == "get_file":
            os.truncate(arguments[0], length)
        elif length is not None and call != "cat_file":
            MemoryFileSystem.pipe_file(fs, "/bucket/store/a", b"content"[:length])
        return result[:length] if call == "cat_file" else result

    monkeypatch.setattr(fs, call, cut)
    WAYS[call](storage)
    assert (len(naps), lengths) == (2, [])
    monkeypatch.undo()
    assert storage.read("a") == storage.local("a").read_bytes() == b"content"


class Listings(MemoryFileSystem):
    """Remembers listings in the way that fsspec provides for."""

    def ls(self, path, detail=True, **kwargs):
        entries = self._ls_from_cache(path) or super().ls(path, detail=True)
        self.dircache[self._strip_protocol(path)] = entries
        return entries

    def invalidate_cache(self, path=None):
        """Forgets nothing: the listings are to be switched off."""


def test_listings_are_never_stale(tmp_path):
    MemoryFileSystem.store.clear()
    plain = MemoryFileSystem()
    planted, fs = Listings(skip_instance_cache=True), Listings(skip_instance_cache=True)
    storage = RemoteStorage("stale://store", fs, "/store", tmp_path, CACHE, sleep=never)
    plain.pipe_file("/store/a", b"x")
    assert storage.names("") == ["a"]
    assert len(planted.ls("/store")) == 1
    plain.pipe_file("/store/b", b"x")
    assert storage.names("") == ["a", "b"]
    assert len(planted.ls("/store")) == 1  # the file system does what it is here to do


def test_a_discard_that_is_killed_leaves_nothing_that_looks_complete(storage, fs):
    for name in ("manifest.json", "provenance.json", "shards/a"):
        storage.write(name, b"x")
    left, whole = [], fs.rm_file
    fs.rm_file = lambda path: (whole(path), left.append(list(fs.store)))
    storage.discard()
    assert len(left) == 3
    assert "/bucket/store/manifest.json" not in left[0]
