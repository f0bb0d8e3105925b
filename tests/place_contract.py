"""What every place must do, wherever it lies. A subclass gives `place`, and `again`: the same place, opened anew."""

import pytest

from eagle31_train.schema import UserError

CACHE = 4096 * 16


def never(seconds):
    raise AssertionError("nothing here is worth a wait")


def build(place, name, content):
    """Build a file at the place's scratch path, as a writer of shards does."""
    scratch = place.scratch(name)
    scratch.write_bytes(content)
    return scratch


class PlaceContract:
    def test_what_is_written_is_read(self, place):
        place.write("shards/a.json", b"one")
        place.write("top.json", b"")
        assert place.read("shards/a.json") == b"one"
        assert place.read("top.json") == b""
        place.write("shards/a.json", b"another")
        assert place.read("shards/a.json") == b"another"

    def test_what_is_absent_is_said_to_be(self, place):
        for _ in range(2):  # in a place without any file, and with one
            with pytest.raises(FileNotFoundError):
                place.read("shards/a.json")
            with pytest.raises(FileNotFoundError):
                place.local("shards/a.json")
            assert place.size("shards/a.json") is None
            assert place.names("nowhere") == []
            assert place.sizes("nowhere") == {}
            place.remove("shards/a.json")
            place.forget("shards/a.json")
            place.write("shards/b.json", b"x")
        assert place.size("shards") is None  # a folder is no file

    def test_a_built_file_is_put_under_its_name(self, place):
        content = bytes(range(256)) * 50
        scratch = build(place, "shards/a.safetensors", content)
        assert scratch.name == ".a.safetensors.tmp"
        assert place.size("shards/a.safetensors") is None
        place.put(scratch, "shards/a.safetensors")
        assert not scratch.exists()
        assert place.size("shards/a.safetensors") == len(content)
        assert place.local("shards/a.safetensors").read_bytes() == content
        assert place.opened("shards/a.safetensors", lambda path: path.read_bytes()) == content

    def test_a_file_put_again_replaces_the_copy_too(self, place):
        for content in (b"one", b"two", b"longer"):
            place.put(build(place, "a", content), "a")
            assert place.local("a").read_bytes() == content
        place.write("a", b"longes")
        assert place.local("a").read_bytes() == b"longes"

    def test_names_are_sorted_relative_and_visible(self, place):
        assert place.names("") == []
        for name in ("shards/b", "shards/a", "shards/deeper/c", "shards/.hidden", "top", "shards-not/d"):
            place.write(name, b"x")
        build(place, "shards/e", b"half")
        assert place.names("shards") == ["shards/a", "shards/b"]
        assert place.names("") == ["top"]
        assert place.names("shards/deeper") == ["shards/deeper/c"]
        assert place.names("shards/a") == []  # a file is no folder

    def test_sizes_are_those_of_the_visible_files_of_one_folder(self, place):
        assert place.sizes("") == place.sizes("shards") == {}
        place.write("shards/a", b"")
        place.put(build(place, "shards/b", b"12345"), "shards/b")
        for name in ("shards/deeper/c", "shards/.hidden", "shards-not/d", "top"):
            place.write(name, b"123")
        build(place, "shards/e", b"half")
        assert place.sizes("shards") == {"shards/a": 0, "shards/b": 5}
        assert place.sizes("") == {"top": 3}
        assert place.sizes("shards/a") == {}  # a file is no folder
        assert all(place.size(name) == size for name, size in place.sizes("shards").items())

    def test_what_another_has_just_written_is_seen(self, place, again):
        other = again()
        assert place.names("shards") == other.names("shards") == []
        assert place.size("shards/a") is None
        other.write("shards/a", b"123")
        assert place.names("shards") == ["shards/a"]
        assert place.size("shards/a") == 3
        assert place.sizes("shards") == {"shards/a": 3}
        other.write("shards/a", b"12345")
        assert place.sizes("shards") == {"shards/a": 5}
        other.put(build(other, "shards/b", b"1"), "shards/b")
        assert place.names("shards") == ["shards/a", "shards/b"]
        other.remove("shards/a")
        assert place.names("shards") == ["shards/b"]
        assert place.size("shards/a") is None
        with pytest.raises(FileNotFoundError):
            place.read("shards/a")

    def test_removed_is_gone_from_here_too(self, place):
        place.write("a", b"x")
        place.local("a")
        place.remove("a")
        assert place.size("a") is None
        with pytest.raises(FileNotFoundError):
            place.local("a")

    def test_prefetched_files_are_all_right(self, place):
        names = [f"shards/{i}" for i in range(6)]
        for i, name in enumerate(names):
            place.write(name, bytes([i]) * 100)
        place.prefetch(names)
        assert [place.local(name).read_bytes() for name in names] == [bytes([i]) * 100 for i in range(6)]
        place.close()
        assert place.local(names[0]).read_bytes() == bytes(100)

    def test_clean_removes_what_a_kill_left(self, place):
        left = build(place, "shards/a", b"half")
        place.write("shards/b", b"whole")
        place.clean(["shards/a", "shards/b", "shards/c"])
        assert not left.exists()
        assert place.read("shards/b") == b"whole"

    def test_discarded_is_gone(self, place, again):
        place.discard()
        for name in ("manifest.json", "provenance.json", "shards/a", "shards/deeper/b"):
            place.write(name, name.encode())
        local = place.local("shards/a")
        place.discard()
        for here in (place, again()):
            assert here.names("") == here.names("shards") == here.names("shards/deeper") == []
            assert here.size("manifest.json") is None
        assert not local.exists()
        again().write("shards/a", b"something longer than before")
        assert place.local("shards/a").read_bytes() == b"something longer than before"

    def test_a_failed_put_leaves_no_scratch_and_no_name(self, place, refuse):
        scratch = build(place, "shards/a", b"content")
        refuse(place)
        with pytest.raises(UserError) as error:
            place.put(scratch, "shards/a")
        assert "\n" not in str(error.value)
        assert "shards/a" in str(error.value)
        assert not scratch.exists()
        assert place.names("shards") == []
