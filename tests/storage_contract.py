"""What every storage must do, wherever it lies. A subclass gives `storage`, and `again`: the same one, opened anew."""

import time

import pytest

from eagle31_train.errors import UserError

CACHE = 4096 * 16


def never(seconds):
    """Wait for another thread's fetch, but for nothing that failed."""
    assert seconds < 1, "nothing here fails"
    time.sleep(seconds)


def build(storage, name, content):
    """Build a file at the storage's scratch path, as a writer of shards does."""
    scratch = storage.scratch(name)
    scratch.write_bytes(content)
    return scratch


class StorageContract:
    def test_what_is_written_or_put_is_read_and_replaced(self, storage):
        for content in (b"one", b"", b"another"):
            storage.write("top.json", content)
            assert storage.read("top.json") == content
        for content in (bytes(range(256)) * 50, b"two", b"longer"):
            scratch = build(storage, "shards/a.safetensors", content)
            assert scratch.name == ".a.safetensors.tmp"
            storage.put(scratch, "shards/a.safetensors")
            assert not scratch.exists()
            assert storage.size("shards/a.safetensors") == len(content)
            assert storage.local("shards/a.safetensors").read_bytes() == content
        storage.write("shards/a.safetensors", b"longes")
        assert storage.opened("shards/a.safetensors", lambda path: path.read_bytes()) == b"longes"

    def test_sizes_are_those_of_the_visible_files_of_one_folder(self, storage):
        assert storage.sizes("") == storage.sizes("shards") == {}
        storage.put(build(storage, "shards/b", b"12345"), "shards/b")
        for name in ("shards/a", "shards/deeper/c", "shards/.hidden", "shards-not/d", "top"):
            storage.write(name, b"123")
        left = build(storage, "shards/e", b"half")
        assert storage.sizes("shards") == {"shards/a": 3, "shards/b": 5}
        assert storage.names("shards") == ["shards/a", "shards/b"]
        assert storage.sizes("") == {"top": 3}
        assert storage.sizes("shards/a") == {}  # a file is no folder
        storage.clean(["shards/a", "shards/e", "shards/f"])
        assert not left.exists()
        assert storage.read("shards/a") == b"123"

    def test_discarded_is_gone(self, storage, again):
        storage.discard()
        for name in ("manifest.json", "provenance.json", "shards/a", "shards/deeper/b"):
            storage.write(name, name.encode())
        local = storage.local("shards/a")
        storage.discard()
        for here in (storage, again()):
            assert here.names("") == here.names("shards") == here.names("shards/deeper") == []
            assert here.size("manifest.json") is None
        assert not local.exists()
        again().write("shards/a", b"something longer than before")
        assert storage.local("shards/a").read_bytes() == b"something longer than before"

    def test_a_failed_put_leaves_no_scratch_and_no_name(self, storage, refuse):
        scratch = build(storage, "shards/a", b"content")
        refuse(storage)
        with pytest.raises(UserError) as error:
            storage.put(scratch, "shards/a")
        assert "\n" not in str(error.value)
        assert "shards/a" in str(error.value)
        assert not scratch.exists()
        assert storage.names("shards") == []


class RemoteContract(StorageContract):
    @pytest.fixture
    def storage(self, again):
        storage = again()
        yield storage
        storage.close()

    @pytest.fixture
    def refuse(self, monkeypatch):
        def refused(*_, **__):
            raise PermissionError("Access Denied")

        return lambda storage: monkeypatch.setattr(storage.fs, "put_file", refused)
