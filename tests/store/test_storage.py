"""Storage back ends, in a local folder and on an S3 server on loopback: what both promise, and calls that fail."""

import os
import socket
import time
from pathlib import Path
from unittest.mock import patch

import pytest
import s3fs
from botocore.exceptions import ClientError
from fsspec.implementations.memory import MemoryFileSystem
from made import memory
from s3fs.errors import translate_boto_error

from eagle31_train.common import artifacts
from eagle31_train.common.errors import UserError
from eagle31_train.common.locks import alone
from eagle31_train.store.backends import RemoteStorage, open_storage

CACHE = 4096 * 16


def build(storage, name, content):
    """Build a file at the storage's scratch path, as a writer of shards does."""
    scratch = storage.scratch(name)
    scratch.write_bytes(content)
    return scratch


@pytest.fixture
def naps(monkeypatch):
    """Seconds that calls have waited before they were tried again; none is waited for."""
    naps, sleep = [], time.sleep
    monkeypatch.setattr(time, "sleep", lambda seconds: sleep(seconds) if seconds < 0.1 else naps.append(seconds))
    return naps


@pytest.fixture(params=["local", "s3"])
def again(request, tmp_path, naps):
    """Opens the same storage anew; nothing here fails."""
    if request.param == "s3":
        request.getfixturevalue("s3")
    location = "s3://bucket/runs/store" if request.param == "s3" else str(tmp_path / "deep" / "store")
    yield lambda: open_storage(location, tmp_path / "cache", CACHE)
    assert naps == []


@pytest.fixture
def storage(again):
    storage = again()
    yield storage
    storage.close()


def test_what_is_written_or_put_is_read_and_replaced(storage):
    for content in (b"one", b"", b"another"):
        storage.write("top.json", content)
        assert storage.read("top.json") == content
    for content in (bytes(range(256)) * 50, b"two", b"longer"):
        scratch = build(storage, "shards/a.safetensors", content)
        assert scratch.name == ".a.safetensors.tmp"
        storage.put(scratch, "shards/a.safetensors")
        assert storage.size("shards/a.safetensors") == len(content)
        assert storage.local("shards/a.safetensors").read_bytes() == content
    storage.write("shards/a.safetensors", b"longes")
    assert storage.opened("shards/a.safetensors", lambda path: path.read_bytes()) == b"longes"


def test_sizes_are_those_of_the_visible_files_of_one_folder_as_they_are_now(storage, again):
    assert storage.sizes("") == storage.sizes("shards") == {}
    storage.put(build(storage, "shards/b", b"12345"), "shards/b")
    for name in ("shards/a", "shards/deeper/c", "shards/.hidden", "shards-not/d", "top"):
        storage.write(name, b"123")
    left = build(storage, "shards/e", b"half")
    assert storage.sizes("shards") == {"shards/a": 3, "shards/b": 5}
    assert sorted(storage.sizes("shards")) == ["shards/a", "shards/b"]
    assert storage.sizes("") == {"top": 3}
    again().write("top", b"longer")  # s3fs would remember what was listed
    assert storage.size("top") == 6
    again().write("new", b"1")
    assert storage.sizes("") == {"top": 6, "new": 1}
    assert storage.sizes("shards/a") == {}  # a file is no folder
    storage.clean(["shards/a", "shards/e", "shards/f"])
    assert not left.exists()
    assert storage.read("shards/a") == b"123"


def test_discarded_is_gone(storage, again):
    storage.discard()
    for name in ("manifest.json", "provenance.json", "shards/a", "shards/deeper/b"):
        storage.write(name, name.encode())
    local = storage.local("shards/a")
    storage.discard()
    for here in (storage, again()):
        assert here.sizes("") == here.sizes("shards") == here.sizes("shards/deeper") == {}
        assert here.size("manifest.json") is None
    assert not local.exists()
    again().write("shards/a", b"something longer than before")
    assert storage.local("shards/a").read_bytes() == b"something longer than before"


def test_who_holds_a_storage_is_alone_there_also_when_it_is_discarded(storage, again, tmp_path):
    with alone(storage.lock("writing"), "another"):
        storage.write("shards/a", b"a")
        storage.discard()
        with pytest.raises(UserError, match="another: wait for it"), alone(again().lock("writing"), "another"):
            pass
    elsewhere = open_storage(f"{storage.location}-2", tmp_path / "cache", CACHE)
    with alone(again().lock("writing"), ""), alone(storage.lock("reading"), ""), alone(elsewhere.lock("writing"), ""):
        assert storage.sizes("") == {}


def test_where_nothing_can_be_made_beside_a_folder_it_holds_its_lock(tmp_path, monkeypatch):
    local = open_storage(str(tmp_path / "mount"), tmp_path, 1)
    assert local.lock("writing").parent == tmp_path
    monkeypatch.setattr(os, "access", lambda path, _: Path(path) != tmp_path)  # root may do anything
    assert local.lock("writing").parent == local.folder
    local.write("a", b"a")
    with alone(local.lock("writing"), ""):
        assert sorted(local.sizes("")) == ["a"]


@pytest.mark.core
def test_nothing_has_its_name_before_it_and_its_folder_are_on_the_disk(tmp_path, monkeypatch):
    local, steps = open_storage(str(tmp_path / "store"), tmp_path, 1), []
    fsync, replace = artifacts.fsync_path, Path.replace
    monkeypatch.setattr(artifacts, "fsync_path", lambda path: (steps.append(path.name), fsync(path)))
    monkeypatch.setattr(Path, "replace", lambda a, b: (steps.append("replace"), replace(a, b)))
    local.write("shards/a", b"content")
    assert steps == [local.folder.parent.name, "store", ".a.tmp", "replace", "shards"]


def test_a_server_in_trouble_is_tried_again_and_other_stores_are_left_alone(s3, tmp_path, monkeypatch, naps):
    """What s3fs makes of the server's own words, not of ours."""
    calls = []
    storage = open_storage("s3://bucket/runs/store", tmp_path, CACHE)
    storage.write("shards/a.json", b"{}")
    whole = storage.fs._call_s3.__func__

    async def call(self, method, *args, **kwargs):
        calls.append(method)
        if len(calls) <= 3:
            code = ("InternalError", "ServiceUnavailable", "RequestTimeout")[len(calls) - 1]
            raise translate_boto_error(ClientError({"Error": {"Code": code, "Message": "again later"}}, method))
        return await whole(self, method, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(s3fs.S3FileSystem, "_call_s3", call)
        assert storage.read("shards/a.json") == b"{}"
    assert len(calls) > 3
    assert len(naps) in (2, 3)  # s3fs 2024.6 itself tries again after a timeout
    s3.pipe_file("bucket/runs/store-2/a", b"x")
    s3.pipe_file("bucket/a", b"x")
    assert "bucket/runs/store/shards/a.json" in s3.find("bucket")
    storage.discard()
    assert s3.find("bucket") == ["bucket/a", "bucket/runs/store-2/a"]


@pytest.fixture
def flaky(tmp_path):
    """A remote storage in memory."""
    return RemoteStorage("flaky://bucket/store", memory(), "/bucket/store", tmp_path / "cache", 1000)


WAYS = {
    "cat_file": lambda storage: storage.read("a"),
    "get_file": lambda storage: storage.local("a").read_bytes(),
    "pipe_file": lambda storage: storage.write("a", b"content"),
    "put_file": lambda storage: storage.put(build(storage, "a", b"content"), "a"),
}


@pytest.mark.parametrize("call", WAYS)
def test_what_is_cut_short_is_seen_and_tried_again(flaky, monkeypatch, naps, call):
    flaky.write("a", b"content")
    whole, lengths = getattr(flaky.fs, call), [3, 0, None]

    def cut(path, *arguments, **kwargs):
        length = lengths.pop(0)
        result = whole(path, *arguments, **kwargs)
        if length is not None and call == "get_file":
            os.truncate(arguments[0], length)
        elif length is not None and call != "cat_file":
            MemoryFileSystem.pipe_file(flaky.fs, "/bucket/store/a", b"content"[:length])
        return result[:length] if call == "cat_file" else result

    monkeypatch.setattr(flaky.fs, call, cut)
    WAYS[call](flaky)
    assert (len(naps), lengths) == (2, [])
    monkeypatch.setattr(flaky.fs, call, whole)
    assert flaky.read("a") == flaky.local("a").read_bytes() == b"content"


@pytest.mark.parametrize(
    ("cause", "waits"),
    [
        (ConnectionRefusedError(), 0),
        (socket.gaierror(socket.EAI_NONAME, "Name or service not known"), 0),
        (type("NoCredentialsError", (Exception,), {})("Unable to locate credentials"), 0),
        (socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution"), 7),
        (ConnectionResetError(), 7),
    ],
)
def test_an_endpoint_where_nobody_answers_is_refused_at_once_unless_it_ever_did(flaky, naps, cause, waits):
    def nobody(*_, **__):
        raise OSError("of a library") from cause

    def refused():
        advice = r"listing failed .*: check the address, the network and the credentials"
        with patch.object(flaky.fs, "ls", nobody), pytest.raises(UserError, match=advice):
            flaky.sizes("")
        return len(naps)

    assert refused() == waits
    assert flaky.sizes("") == {}
    assert refused() == waits + 7


def test_a_discard_that_is_killed_leaves_nothing_that_looks_complete(flaky):
    for name in ("manifest.json", "plan.json", "provenance.json", "shards/a", "shards/b"):
        flaky.write(name, b"x")
    left, whole = [], flaky.fs.rm_file
    flaky.fs.rm_file = lambda path: (whole(path), left.append(" ".join(flaky.fs.store)))
    flaky.discard()
    assert len(left) == 5
    assert "manifest.json" not in left[0]
    assert all("provenance.json" in names for names in left if "shards" in names), "whose shards are these?"
