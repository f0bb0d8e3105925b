"""Places of a store: what all of them promise, how one is opened, and local folders."""

import errno
import os

import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import known_implementations
from place_contract import CACHE, PlaceContract, build, never

from eagle31_train import artifacts
from eagle31_train.place import LocalPlace, open_place
from eagle31_train.place.remote import RemotePlace
from eagle31_train.schema import UserError

# ---------------------------------------------------------------- the contract


class TestLocal(PlaceContract):
    @pytest.fixture
    def again(self, tmp_path):
        return lambda: open_place(str(tmp_path / "deep" / "store"), tmp_path / "cache", CACHE)

    @pytest.fixture
    def place(self, again):
        return again()

    @pytest.fixture
    def refuse(self, monkeypatch):
        def full(*_):
            raise OSError(errno.ENOSPC, "No space left on device")

        return lambda place: monkeypatch.setattr(os, "fsync", full)


class TestFileUrl(TestLocal):
    @pytest.fixture
    def again(self, tmp_path):
        return lambda: open_place(f"file://{tmp_path}/store", tmp_path / "cache", CACHE)


class RemoteContract(PlaceContract):
    @pytest.fixture
    def place(self, again):
        place = again()
        yield place
        place.close()

    @pytest.fixture
    def refuse(self, monkeypatch):
        def refused(*_, **__):
            raise PermissionError("Access Denied")

        return lambda place: monkeypatch.setattr(place.fs, "put_file", refused)


class TestMemory(RemoteContract):
    @pytest.fixture
    def again(self, tmp_path):
        MemoryFileSystem.store.clear()
        return lambda: open_place("memory://bucket/store/", tmp_path / "cache", CACHE, sleep=never)


class Folders(LocalFileSystem):
    """A remote file system with real folders, which are not made by themselves."""

    protocol = "folders"

    def put_file(self, path1, path2, **kwargs):
        with open(path1, "rb") as source, open(self._strip_protocol(path2), "wb") as target:  # noqa: PTH123
            target.write(source.read())


class TestFolders(RemoteContract):
    @pytest.fixture
    def again(self, tmp_path):
        (tmp_path / "there").mkdir()

        def again():
            fs = Folders(skip_instance_cache=True)
            return RemotePlace("folders://a", fs, f"{tmp_path}/there/a/store", tmp_path / "cache", CACHE, sleep=never)

        return again


# ---------------------------------------------------------------- opening


def test_which_places_are_local(tmp_path):
    plain, url = open_place("runs/x/store", tmp_path, 1), open_place("file:///data/store", tmp_path, 1)
    assert isinstance(plain, LocalPlace)
    assert isinstance(url, LocalPlace)
    assert (plain.remote, plain.location, str(plain.folder)) == (False, "runs/x/store", "runs/x/store")
    assert (url.remote, url.location, str(url.folder)) == (False, "file:///data/store", "/data/store")


def test_an_unknown_protocol_is_named(tmp_path):
    with pytest.raises(UserError, match=r"^s4://bucket/x: fsspec knows no s4://, but s3://.*pip install"):
        open_place("s4://bucket/x", tmp_path, CACHE)


def test_an_address_without_a_place_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"s3:// names no place: write s3://bucket/folder"):
        open_place("s3://", tmp_path, CACHE)


@pytest.mark.parametrize(
    ("class_path", "package"),
    [("absentfs.FileSystem", "absentfs"), ("fsspec.implementations.absent.FS", "fsspec[far]")],
)
def test_a_driver_that_is_not_installed_is_named(tmp_path, monkeypatch, class_path, package):
    entry = {"class": class_path, "err": "Install it\nto go far"}
    monkeypatch.setitem(known_implementations, "far", entry)
    with pytest.raises(UserError) as error:
        open_place("far://bucket/x", tmp_path, CACHE)
    assert str(error.value).endswith(f"pip install '{package}'")
    assert "\n" not in str(error.value)


def test_a_cache_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"file/cache cannot be used .*choose another store\.cache_dir"):
        open_place("memory://bucket/store", tmp_path / "file" / "cache", CACHE)


# ---------------------------------------------------------------- local: whole or not at all


@pytest.fixture
def local(tmp_path):
    return open_place(str(tmp_path / "store"), tmp_path, 1)


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("moment", ["replace", "fsync"])
@pytest.mark.parametrize("way", ["write", "put"])
def test_a_stop_in_the_middle_leaves_the_old_content(local, monkeypatch, moment, way):
    local.write("shards/old", b"old")

    def stopped(*_):
        raise KeyboardInterrupt

    scratches = {name: build(local, name, b"new") for name in ("shards/old", "shards/new")} if way == "put" else {}
    monkeypatch.setattr(os, moment, stopped)
    for name in ("shards/old", "shards/new"):
        with pytest.raises(KeyboardInterrupt):
            local.put(scratches[name], name) if way == "put" else local.write(name, b"new")
    assert contents(local.folder) == {"shards/old": b"old"}


def test_nothing_has_its_name_before_it_is_on_the_disk(local, monkeypatch):
    local.write("shards/first", b"x")
    steps = []
    fsync, replace = artifacts.fsync_path, os.replace
    monkeypatch.setattr(artifacts, "fsync_path", lambda path: (steps.append(path.name), fsync(path)))
    monkeypatch.setattr(os, "replace", lambda a, b: (steps.append("replace"), replace(a, b)))
    local.write("shards/a", b"content")
    assert steps == [".a.tmp", "replace", "shards"]


def test_new_folders_are_on_the_disk_before_their_files(local, monkeypatch):
    synced = []
    fsync = artifacts.fsync_path
    monkeypatch.setattr(artifacts, "fsync_path", lambda path: (synced.append(path.name), fsync(path)))
    local.write("shards/a", b"content")
    assert synced[:2] == [local.folder.parent.name, "store"]


def test_a_full_disk_is_one_line_and_leaves_nothing(local, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    local.write("shards/old", b"old")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match=r"^no space left to write .*shards/new: free some, then run .* again$"):
        local.write("shards/new", b"new")
    assert contents(local.folder) == {"shards/old": b"old"}


def test_a_place_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "store").write_text("mine")
    with pytest.raises(
        UserError, match=r"cannot write .*store/shards/a \(.*\): mend that, or choose another store_dir"
    ):
        open_place(str(tmp_path / "store"), tmp_path, 1).write("shards/a", b"x")
    assert (tmp_path / "store").read_text() == "mine"


@pytest.fixture
def vanishing(local, monkeypatch):
    """`vanishing(name)`: that file is removed by another process just before anybody asks for its status again."""

    def vanishing(name):
        gone = local.folder / name
        whole = os.stat

        def removed(path, *args, **kwargs):
            status = whole(path, *args, **kwargs)
            if not isinstance(path, int) and os.fspath(path) == str(gone):
                gone.unlink(missing_ok=True)
            return status

        monkeypatch.setattr(os, "stat", removed)

    return vanishing


def test_the_size_of_a_file_that_vanishes_is_no_error(local, vanishing):
    local.write("shards/a", b"x")
    vanishing("shards/a")
    assert local.size("shards/a") == 1
    assert local.size("shards/a") is None


def test_the_size_below_a_file_is_none(local):
    local.write("a", b"x")
    assert local.size("a/b") is None


def test_files_that_vanish_while_listed_are_left_out(local, monkeypatch):
    for name in ("a", "b", "c"):
        local.write(f"shards/{name}", b"xy")
    whole = os.scandir
    listed = []

    class Scan:
        def __init__(self, path):
            listed.append(path)
            self.entries = list(whole(path))
            (local.folder / "shards" / "b").unlink(missing_ok=True)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def __iter__(self):
            return iter(self.entries)

    monkeypatch.setattr(os, "scandir", Scan)
    assert local.sizes("shards") == {"shards/a": 2, "shards/c": 2}
    assert len(listed) == 1


def test_what_is_opened_may_be_missing_for_other_reasons(local):
    local.write("a", b"x")

    tried = []

    def opener(path):
        tried.append(path)
        raise FileNotFoundError("a library that cannot find its own file")

    with pytest.raises(FileNotFoundError, match="its own file"):
        local.opened("a", opener)
    assert len(tried) == 1
