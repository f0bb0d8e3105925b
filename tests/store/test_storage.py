"""Storage back ends: what all of them promise, how one is opened, and local folders."""

import errno
import os
from pathlib import Path

import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import known_implementations
from pipeline import contents
from storage_contract import CACHE, RemoteContract, StorageContract, build, never

from eagle31_train import artifacts
from eagle31_train.errors import UserError
from eagle31_train.store.backends import open_storage
from eagle31_train.store.backends.remote import RemoteStorage

# ---------------------------------------------------------------- the contract


class TestLocal(StorageContract):
    @pytest.fixture
    def again(self, tmp_path):
        return lambda: open_storage(str(tmp_path / "deep" / "store"), tmp_path / "cache", CACHE)

    @pytest.fixture
    def storage(self, again):
        return again()

    @pytest.fixture
    def refuse(self, monkeypatch):
        def full(*_):
            raise OSError(errno.ENOSPC, "No space left on device")

        return lambda storage: monkeypatch.setattr(os, "fsync", full)


class TestMemory(RemoteContract):
    @pytest.fixture
    def again(self, tmp_path):
        MemoryFileSystem.store.clear()
        return lambda: open_storage("memory://bucket/store/", tmp_path / "cache", CACHE, sleep=never)


class Folders(LocalFileSystem):
    """A remote file system with real folders, which are not made by themselves."""

    protocol = "folders"

    def put_file(self, path1, path2, **kwargs):
        Path(self._strip_protocol(path2)).write_bytes(Path(path1).read_bytes())


class TestFolders(RemoteContract):
    @pytest.fixture
    def again(self, tmp_path):
        (tmp_path / "there").mkdir()

        def again():
            fs = Folders(skip_instance_cache=True)
            root = f"{tmp_path}/there/a/store"
            return RemoteStorage("folders://a", fs, root, tmp_path / "cache", CACHE, sleep=never)

        return again


# ---------------------------------------------------------------- opening


@pytest.mark.parametrize(
    ("location", "words"),
    [
        ("s4://bucket/x", r"^s4://bucket/x cannot be opened \(.*s4.*\): correct the address, or install"),
        ("far://bucket/x", r"cannot be opened \(ImportError: Install it to go far\): .* driver for far://$"),
        ("s3://", r"s3:// names no folder: write s3://bucket/folder"),
        ("memory://bucket/store", r"file/cache cannot be used .*choose another store\.cache_dir"),
        ("{folder}/file", r"cannot write .*file/shards/a \(.*\): mend that, or choose another store_dir"),
    ],
)
def test_an_address_that_is_none_is_named(tmp_path, monkeypatch, location, words):
    absent = {"class": "absentfs.FileSystem", "err": "Install it\nto go far"}
    monkeypatch.setitem(known_implementations, "far", absent)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UserError, match=words) as error:
        open_storage(location.format(folder=tmp_path), tmp_path / "file" / "cache", CACHE).write("shards/a", b"x")
    assert "\n" not in str(error.value)
    assert (tmp_path / "file").read_text() == "mine"


# ---------------------------------------------------------------- local: whole or not at all


@pytest.fixture
def local(tmp_path):
    return open_storage(str(tmp_path / "store"), tmp_path, 1)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.ENOSPC, "full")], ids=repr)
@pytest.mark.parametrize("moment", ["replace", "fsync"])
def test_a_stop_or_a_full_disk_in_the_middle_leaves_the_old_content(local, monkeypatch, moment, error):
    local.write("shards/old", b"old")

    def stopped(*_):
        raise error

    scratches = {name: build(local, name, b"new") for name in ("shards/old", "shards/new")}
    monkeypatch.setattr(os, moment, stopped)
    for name in ("shards/old", "shards/new"):
        with pytest.raises((KeyboardInterrupt, UserError), match=r"^$|^no space left to write .*: free some, then run"):
            local.put(scratches[name], name)
        with pytest.raises((KeyboardInterrupt, UserError)):
            local.write(name, b"new")
    assert contents(local.folder) == {"shards/old": b"old"}


@pytest.mark.core
def test_nothing_has_its_name_before_it_and_its_folder_are_on_the_disk(local, monkeypatch):
    steps = []
    fsync, replace = artifacts.fsync_path, os.replace
    monkeypatch.setattr(artifacts, "fsync_path", lambda path: (steps.append(path.name), fsync(path)))
    monkeypatch.setattr(os, "replace", lambda a, b: (steps.append("replace"), replace(a, b)))
    local.write("shards/a", b"content")
    assert steps == [local.folder.parent.name, "store", ".a.tmp", "replace", "shards"]
