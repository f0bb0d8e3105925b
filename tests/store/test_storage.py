"""Storage back ends: what all of them promise, here of local folders."""

import errno
import os
from pathlib import Path

import pytest
from storage_contract import CACHE, StorageContract

from eagle31_train import artifacts
from eagle31_train.store.backends import open_storage

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


# ---------------------------------------------------------------- local: whole or not at all


@pytest.fixture
def local(tmp_path):
    return open_storage(str(tmp_path / "store"), tmp_path, 1)


@pytest.mark.core
def test_nothing_has_its_name_before_it_and_its_folder_are_on_the_disk(local, monkeypatch):
    steps = []
    fsync, replace = artifacts.fsync_path, Path.replace
    monkeypatch.setattr(artifacts, "fsync_path", lambda path: (steps.append(path.name), fsync(path)))
    monkeypatch.setattr(Path, "replace", lambda a, b: (steps.append("replace"), replace(a, b)))
    local.write("shards/a", b"content")
    assert steps == [local.folder.parent.name, "store", ".a.tmp", "replace", "shards"]
