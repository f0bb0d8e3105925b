"""A remote place whose calls fail, end early, or tell of what is gone."""

import errno
import os

import fsspec
import pytest
from flaky import Flaky
from fsspec.implementations.memory import MemoryFileSystem
from place_contract import CACHE, build, never

from eagle31_train.place import open_place
from eagle31_train.place.remote import RemotePlace
from eagle31_train.schema import UserError

# ---------------------------------------------------------------- listed


def test_a_remote_folder_is_listed_once_and_no_file_asked_for(place, flaky):
    for number in range(5):
        place.write(f"shards/{number}", bytes(number))
    flaky.made.clear()
    assert place.sizes("shards") == {f"shards/{number}": number for number in range(5)}
    assert flaky.made == ["ls"]


def test_sizes_that_a_listing_lacks_are_asked_for(place, flaky):
    for name in ("top", "shards/a", "shards/gone"):
        place.write(name, b"123")
    whole = flaky.ls

    def ls(path, detail):
        entries = [entry | {"size": None} for entry in whole(path, detail=detail)]
        if place.size("shards/gone"):
            flaky.rm_file("/bucket/store/shards/gone")
        return entries

    flaky.ls = ls
    assert place.sizes("shards") == {"shards/a": 3}
    assert place.sizes("") == {"top": 3}


# ---------------------------------------------------------------- remote: tried again, or not


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
    OSError(errno.EIO, "unknown"),
    OSError(getattr(errno, "EREMOTEIO", errno.EIO), "InternalError"),
    OSError("no number"),
    TimeoutError("RequestTimeout"),
    ConnectionResetError("by peer"),
    fsspec.exceptions.FSTimeoutError(),
    ReadTimeoutError("Read timeout"),
    type("EndpointConnectionError", (type("ConnectionError", (Exception,), {}),), {})("Could not connect"),
    ResponseError(503),
    ResponseError(429),
]
LASTING = [
    (PermissionError("Access Denied"), "is not permitted (PermissionError: Access Denied): check the credentials"),
    (ResponseError(403), "is not permitted"),
    (NoCredentialsError("Unable to locate credentials"), "needs credentials"),
    (OSError(errno.EINVAL, "InvalidBucketName"), "correct the address"),
    (OSError(errno.ENOSYS, "NotImplemented"), "correct the address"),
    (ResponseError(400), "correct the address"),
    (ValueError("Invalid endpoint: x"), "correct the address"),
    (NotImplementedError(), "correct the address"),
    (caused(FileNotFoundError("gone"), ResponseError("NoSuchBucket")), "its bucket does not exist"),
    (FileNotFoundError("The specified bucket does not exist."), "its bucket does not exist"),
]
WAYS = {
    "cat_file": lambda place: place.read("a"),
    "get_file": lambda place: place.local("a").read_bytes(),
    "pipe_file": lambda place: place.write("a", b"content"),
    "put_file": lambda place: place.put(build(place, "a", b"content"), "a"),
    "info": lambda place: place.size("a"),
    "ls": lambda place: place.sizes(""),
}


@pytest.mark.parametrize("error", PASSING, ids=repr)
@pytest.mark.parametrize("call", WAYS)
def test_what_passes_is_tried_again(place, flaky, naps, capsys, call, error):
    place.write("a", b"content")
    expected = WAYS[call](place)
    place.forget("a")
    flaky.faults[call] = [error] * 4
    assert WAYS[call](place) == expected
    assert len(naps) == 4
    lines = capsys.readouterr().err.splitlines()
    assert [f"try {n} of 5" in line for n, line in enumerate(lines, 1)] == [True] * 4
    assert all(line.startswith("flaky://bucket/store/") and type(error).__name__ in line for line in lines)


@pytest.mark.parametrize("call", WAYS)
def test_what_does_not_pass_soon_ends_in_one_line(place, flaky, naps, call):
    place.write("a", b"content")
    flaky.faults[call] = [OSError("down\nfor long")] * 9
    with pytest.raises(UserError) as error:
        WAYS[call](place)
    assert "failed 5 times in all (OSError: down for long)" in str(error.value)
    assert str(error.value).endswith("run the same command again")
    assert "\n" not in str(error.value)
    assert (len(naps), len(flaky.faults[call])) == (4, 4)


def test_waits_grow_and_differ(place, flaky, naps):
    place.write("a", b"content")
    for _ in range(20):
        flaky.faults["cat_file"] = [OSError("down")] * 4
        place.read("a")
    assert len(set(naps)) > 60
    for n, most in enumerate((1, 2, 4, 8)):
        assert all(most / 2 <= nap <= most for nap in naps[n::4])


@pytest.mark.parametrize(("error", "words"), LASTING, ids=repr)
@pytest.mark.parametrize("call", WAYS)
def test_what_lasts_is_not_tried_again(place, flaky, naps, capsys, call, error, words):
    place.write("a", b"content")
    flaky.faults[call] = [error]
    with pytest.raises(UserError) as raised:
        WAYS[call](place)
    assert words in str(raised.value)
    assert "flaky://bucket/store/" in str(raised.value)
    assert "\n" not in str(raised.value)
    assert naps == []
    assert capsys.readouterr().err == ""


def test_mistakes_of_the_program_keep_their_face(place, flaky, naps):
    flaky.faults["ls"] = [AttributeError("no such method")]
    with pytest.raises(AttributeError):
        place.names("")
    assert naps == []


def test_an_absent_file_is_not_asked_for_again(place, flaky, naps):
    with pytest.raises(FileNotFoundError):
        place.read("a")
    assert place.size("a") is None
    assert naps == []
    assert flaky.made.count("cat_file") == 1


def test_a_place_that_cannot_be_listed_is_not_opened(tmp_path, monkeypatch):
    def refused(*_, **__):
        raise PermissionError("Access Denied")

    monkeypatch.setattr(MemoryFileSystem, "ls", refused)
    with pytest.raises(UserError, match=r"^memory://bucket/store/: listing is not permitted"):
        open_place("memory://bucket/store", tmp_path, CACHE)


# ---------------------------------------------------------------- remote: cut short, stale, half-removed


def test_a_short_read_is_seen_and_tried_again(place, flaky, naps):
    place.write("a", b"content")
    flaky.faults["cat_file"] = [lambda path: b"con"]
    assert place.read("a") == b"content"
    assert len(naps) == 1


def test_a_short_download_is_seen_and_tried_again(place, flaky, naps, monkeypatch):
    place.write("a", b"content")
    whole = Flaky.get_file
    cut = [3, 0, None]

    def get_file(self, path, target, **kwargs):
        whole(self, path, target, **kwargs)
        if (length := cut.pop(0)) is not None:
            os.truncate(target, length)

    monkeypatch.setattr(Flaky, "get_file", get_file)
    assert place.local("a").read_bytes() == b"content"
    assert (len(naps), cut) == (2, [])


@pytest.mark.parametrize("call", ["pipe_file", "put_file"])
def test_a_short_upload_is_seen_and_tried_again(place, flaky, naps, call):
    flaky.faults[call] = [lambda path: flaky.store.update({"/bucket/store/a": half()}) or True]

    def half():
        scrap = MemoryFileSystem(global_store=False, skip_instance_cache=True)
        scrap.pipe_file("/a", b"con")
        return scrap.store["/a"]

    WAYS[call](place)
    assert place.read("a") == b"content"
    assert len(naps) == 1


class Listings(MemoryFileSystem):
    """Remembers listings in the way that fsspec provides for."""

    def ls(self, path, detail=True, **kwargs):
        entries = self._ls_from_cache(path) or super().ls(path, detail=True)
        self.dircache[self._strip_protocol(path)] = entries
        return entries

    def invalidate_cache(self, path=None):
        """Forgets nothing: the listings are to be switched off."""


class OwnMemory(MemoryFileSystem):
    """Remembers listings by itself until it is told to forget them."""

    remembered = None

    def ls(self, path, detail=True, **kwargs):
        self.remembered = self.remembered or super().ls(path, detail=True)
        return self.remembered

    def invalidate_cache(self, path=None):
        self.remembered = None


@pytest.mark.parametrize("kind", [Listings, OwnMemory])
def test_listings_are_never_stale(tmp_path, kind):
    MemoryFileSystem.store.clear()
    plain = MemoryFileSystem()
    planted, fs = kind(skip_instance_cache=True), kind(skip_instance_cache=True)
    place = RemotePlace("stale://store", fs, "/store", tmp_path, CACHE, sleep=never)
    plain.pipe_file("/store/a", b"x")
    assert place.names("") == ["a"]
    assert len(planted.ls("/store")) == 1
    plain.pipe_file("/store/b", b"x")
    assert place.names("") == ["a", "b"]
    assert len(planted.ls("/store")) == 1  # the file system does what it is here to do


def test_a_discard_that_is_killed_leaves_nothing_that_looks_complete(place, flaky):
    for name in ("manifest.json", "provenance.json", "shards.jsonl", "target.safetensors", "shards/a", "shards/b"):
        place.write(name, b"x")
    left = []
    whole = Flaky.rm_file

    def rm_file(self, path):
        whole(self, path)
        left.append(sorted(name.removeprefix("/bucket/store/") for name in self.store))

    flaky.rm_file = rm_file.__get__(flaky)
    place.discard()
    assert "manifest.json" not in left[0]
    assert len(left) == 6
    top = {"provenance.json", "shards.jsonl", "target.safetensors"}
    assert all(top <= set(names) for names in left if any(name.startswith("shards/") for name in names))


def test_a_discard_that_removes_only_some_says_so(place, flaky, naps, monkeypatch):
    place.write("shards/a", b"x")
    monkeypatch.setattr(flaky, "rm", lambda paths: None, raising=False)
    with pytest.raises(UserError, match="1 files are still there"):
        place.discard()
    assert len(naps) == 4


def test_other_stores_nearby_are_left_alone(place, flaky):
    flaky.pipe_file("/bucket/store-2/a", b"x")
    flaky.pipe_file("/bucket/a", b"x")
    place.write("a", b"x")
    place.discard()
    assert sorted(flaky.store) == ["/bucket/a", "/bucket/store-2/a"]


def test_folders_are_made_where_they_are_wanted_but_never_a_bucket(place, flaky, monkeypatch):
    made = []
    monkeypatch.setattr(flaky, "mkdir", lambda path, create_parents: made.append((path, create_parents)), raising=False)
    flaky.faults["pipe_file"] = [FileNotFoundError("no such folder")]
    place.write("shards/a", b"x")
    assert made == [("/bucket/store", False), ("/bucket/store/shards", False)]
    assert place.read("shards/a") == b"x"
    flaky.faults["pipe_file"] = [FileNotFoundError("no such folder")] * 2
    with pytest.raises(UserError, match=r"shards/b: writing failed \(FileNotFoundError: no such folder\)"):
        place.write("shards/b", b"x")
