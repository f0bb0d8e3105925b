"""A remote place whose calls fail, end early, or tell of what is gone."""

import errno
import os

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from storage_contract import CACHE, build, never

from eagle31_train.errors import UserError
from eagle31_train.store.backends.remote import RemoteStorage


@pytest.fixture
def fs():
    return MemoryFileSystem(global_store=False, skip_instance_cache=True)


@pytest.fixture
def naps():
    return []


@pytest.fixture
def storage(fs, naps, tmp_path):
    return RemoteStorage("flaky://bucket/store", fs, "/bucket/store", tmp_path / "cache", 1000, sleep=naps.append)


def fail(fs, call, errors):
    """The next calls of a kind raise these."""
    right = getattr(fs, call)

    def run(*args, **kwargs):
        if errors:
            raise errors.pop(0)
        return right(*args, **kwargs)

    setattr(fs, call, run)


class HTTPClientError(Exception):
    """Like botocore's: no OSError, known by its name or that of a base."""


class ReadTimeoutError(HTTPClientError):
    pass


class NoCredentialsError(Exception):
    pass


class ResponseError(Exception):
    def __init__(self, status):
        super().__init__(f"HTTP {status}")
        self.status = status


def caused(error, cause):
    error.__cause__ = cause
    return error


PASSING = [
    OSError(errno.EBUSY, "SlowDown"),
    TimeoutError("RequestTimeout"),
    fsspec.exceptions.FSTimeoutError(),
    ReadTimeoutError("Read timeout"),
    ResponseError(503),
    ResponseError(429),
]
LASTING = [
    (PermissionError("Access Denied"), "(PermissionError: Access Denied): check the credentials"),
    (ResponseError(403), "check the credentials"),
    (NoCredentialsError("Unable to locate credentials"), "check the credentials"),
    (OSError(errno.EINVAL, "InvalidBucketName"), "correct the address"),
    (ResponseError(400), "correct the address"),
    (ValueError("Invalid endpoint: x"), "correct the address"),
    (caused(FileNotFoundError("gone"), ResponseError("NoSuchBucket")), "its bucket does not exist"),
]
WAYS = {
    "cat_file": lambda storage: storage.read("a"),
    "get_file": lambda storage: storage.local("a").read_bytes(),
    "pipe_file": lambda storage: storage.write("a", b"content"),
    "put_file": lambda storage: storage.put(build(storage, "a", b"content"), "a"),
    "info": lambda storage: storage.size("a"),
    "ls": lambda storage: storage.sizes(""),
}


def every_way_and_every(errors):
    """Every error at one of the calls, every call with one of the errors."""
    return [(list(WAYS)[number % len(WAYS)], error) for number, error in enumerate(errors)]


@pytest.mark.parametrize(("call", "error"), every_way_and_every(PASSING), ids=repr)
def test_what_passes_is_tried_again(storage, fs, naps, capsys, call, error):
    storage.write("a", b"content")
    expected = WAYS[call](storage)
    storage.forget("a")
    fail(fs, call, [error] * 4)
    assert WAYS[call](storage) == expected
    assert len(naps) == 4
    assert capsys.readouterr().err.count("flaky://bucket/store/") == 4


def test_what_does_not_pass_soon_ends_in_one_line(storage, fs, naps):
    fail(fs, "ls", [OSError("down\nfor long")] * 9)
    with pytest.raises(UserError, match=r"OSError: down for long\): it was tried 5 times; .* run the same command"):
        storage.sizes("")
    assert len(naps) == 4


@pytest.mark.parametrize(("call", "case"), every_way_and_every(LASTING), ids=repr)
def test_what_lasts_is_not_tried_again(storage, fs, naps, call, case):
    error, words = case
    storage.write("a", b"content")
    fail(fs, call, [error])
    with pytest.raises(UserError) as raised:
        WAYS[call](storage)
    assert words in str(raised.value)
    assert naps == []


# ---------------------------------------------------------------- remote: cut short, stale, half-removed


@pytest.mark.parametrize("call", ["cat_file", "get_file", "pipe_file", "put_file"])
def test_what_is_cut_short_is_seen_and_tried_again(storage, fs, naps, monkeypatch, call):
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
    for name in ("manifest.json", "provenance.json", "shards.jsonl", "target.safetensors", "shards/a", "shards/b"):
        storage.write(name, b"x")
    left = []
    whole = fs.rm_file

    def rm_file(path):
        whole(path)
        left.append(sorted(name.removeprefix("/bucket/store/") for name in fs.store))

    fs.rm_file = rm_file
    storage.discard()
    assert "manifest.json" not in left[0]
    assert len(left) == 6
    top = {"provenance.json", "shards.jsonl", "target.safetensors"}
    assert all(top <= set(names) for names in left if any(name.startswith("shards/") for name in names))
