"""Faults of a store, found by `verify` and by readers; and a writer that dies at any operation, and is continued."""

import os
import shutil
from itertools import pairwise, zip_longest

import pytest
from dying import Killed, Machine, kill, running
from made import Made, problems, read_whole, right_so_far
from pipeline import contents, flip_bit

from eagle31_train.common import artifacts
from eagle31_train.common.errors import UserError
from eagle31_train.store.format import SHARDS, STREAM, TARGET_LINE

MADE = Made({"train": [9, 4, 1, 12, 6, 8, 11], "heldout": [5, 7, 3]}, 64, "fp8", "int8")
SHARD_FILES = [shard.name for shard in MADE.plan.shards]
COMMITTED = {"complete": len(SHARD_FILES), "begun": len(SHARD_FILES) - 1}
READING = {"complete": {}, "begun": {"shards": COMMITTED["begun"], "follow": True, "patience": 0.0}}


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """Folders of a complete and of a begun store, and what a whole one gives to its reader."""
    folder = tmp_path_factory.mktemp("stores")
    MADE.write(folder / "complete")
    MADE.write(folder / "begun", stop_after=COMMITTED["begun"])
    whole, error = read_whole(folder / "complete")
    assert error is None
    assert {split: len(documents) for split, documents in whole.items()} == {"train": 7, "heldout": 3}
    assert not problems(folder / "complete")
    assert not problems(folder / "begun")
    return folder, whole


def flipped(data, at, bit):
    return data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]


# Headers and JSON are small beside states, and as precious.
CHANGES = {
    "its first byte": lambda data: flipped(data, 0, 0),
    "its seventh byte": lambda data: flipped(data, 6, 7),
    "a byte of its head": lambda data: flipped(data, 20, 3),
    "a byte in its middle": lambda data: flipped(data, len(data) // 2, 5),
    "its last byte": lambda data: flipped(data, len(data) - 1, 1),
    "one byte less": lambda data: data[:-1],
    "half of it": lambda data: data[: len(data) // 2],
    "nothing left": lambda data: b"",
    "a line break more": lambda data: data + b"\n",
    "zeros more": lambda data: data + bytes(16),
}


def faults(kind, files):
    """(what, {name of a file: its content now, None without it}) of each fault; files: of the whole store."""
    for name, data in files.items():
        for change, harmed in CHANGES.items():
            yield f"{name}: {change}", {name: harmed(data)}
        # What has no line is not there yet, and without a bound nothing is removed: that is no fault.
        if name != STREAM and not (kind == "begun" and name.endswith(".json") and ("/" in name or name == TARGET_LINE)):
            yield f"{name}: lost", {name: None}
    committed = MADE.plan.shards[: COMMITTED[kind]]
    for one, other in pairwise(committed):
        yield f"{one.name}: the next one's", {one.name: files[other.name], other.name: files[one.name]}
        if kind == "begun":
            yield f"{one.line}: the next one's", {one.line: files[other.line], other.line: files[one.line]}
    lines = files.get(SHARDS, b"").splitlines(True)
    for at in range(len(lines)):
        yield f"{SHARDS}: without line {at}", {SHARDS: b"".join(lines[:at] + lines[at + 1 :])}


def assert_found(what, files, harmed, folder, whole, reading):
    """`verify` names every shard whose file or line is harmed; whoever reads is given no wrong sample, and told."""
    found = problems(folder)
    assert found, what
    assert not any("\n" in text for text in found), (what, found)
    left = (harmed.get(SHARDS) or b"").splitlines(True)
    lines = files[SHARDS].splitlines(True) if harmed.get(SHARDS) is not None else left
    for shard, line in zip_longest(MADE.plan.shards, lines):
        names = {shard.name, shard.line}
        if names & harmed.keys() or (line and line not in left):
            assert any(shard.samples() in text and any(n in text for n in names) for text in found), (what, found)
    documents, message = read_whole(folder, **reading)
    assert right_so_far(documents, whole), what
    assert message is not None, what
    assert "\n" not in (message or ""), what
    if shards := [shard for shard in MADE.plan.shards if shard.name in harmed]:
        assert any(shard.name in message and shard.samples() in message for shard in shards), (what, message)


@pytest.mark.parametrize("kind", COMMITTED)
def test_faults_are_found(stores, tmp_path, kind):
    files, folder = contents(stores[0] / kind), tmp_path / "copy"
    for what, harmed in faults(kind, files):
        shutil.copytree(stores[0] / kind, folder, copy_function=os.link)
        for name, data in harmed.items():
            (folder / name).unlink(missing_ok=True)  # not its content, which the other copies of the store share
            if data is not None:
                (folder / name).write_bytes(data)
        assert_found(what, files, harmed, folder, stores[1], READING[kind])
        shutil.rmtree(folder)


@pytest.mark.parametrize("kind", COMMITTED)
def test_what_a_disk_reads_wrongly_once_is_read_again(stores, tmp_path, monkeypatch, kind):
    """Until the kernel is told to forget its copy, a file has a wrong bit."""
    wrong, right = tmp_path / "store", stores[0] / kind
    shutil.copytree(right, wrong)
    expected, _ = read_whole(right, **READING[kind])
    monkeypatch.setattr(artifacts, "forget_pages", lambda file: shutil.copy(right / file.relative_to(wrong), file))
    for path in [path for path in wrong.rglob("*") if path.is_file()]:
        flip_bit(path)
        assert problems(wrong) == [], path.name
        flip_bit(path)
        found, message = read_whole(wrong, **READING[kind])
        assert right_so_far(found, expected)
        assert list(map(len, found.values())) == list(map(len, expected.values())), (path.name, message)
        shutil.copy(right / path.relative_to(wrong), path)


TINY = Made({"train": [9, 4, 6], "heldout": [5, 3]}, 16, "fp8", "int8", 13)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The bytes of an uninterrupted store, what is read from it, and how many operations it takes."""
    folder = tmp_path_factory.mktemp("whole")
    with running(Machine()) as machine:
        TINY.write(folder / "store")
    documents, message = read_whole(folder / "store")
    assert message is None
    return contents(folder), documents, machine


def test_a_writer_that_dies_at_any_operation_is_continued_to_the_same_bytes(whole, tmp_path):
    expected, documents, machine = whole
    assert machine.count > 60
    assert {"open", "write", "fsync", "os.rename", "os.mkdir"} <= set(machine.names)
    allowed = ("the store/manifest.json is missing, though all shards were there", "there is no store in the store")
    for at in range(machine.count):
        (folder := tmp_path / str(at)).mkdir()
        with pytest.raises(Killed), running(Machine(at, kill)):
            TINY.write(folder / "store")
        # Whoever looks now: no wrong sample, and nothing damaged that no extraction would find.
        for following, missing in (
            ({}, "manifest.json is missing"),
            ({"follow": True, "patience": 0.0}, "waiting for"),
        ):
            found, message = read_whole(folder / "store", **following)
            assert right_so_far(found, documents)
            assert message is None or missing in message
        try:
            damage = problems(folder / "store")
        except UserError as error:
            damage = [str(error)]
        assert all(text.startswith(allowed) for text in damage), damage
        with running(Machine()):
            TINY.write(folder / "store")
        assert contents(folder) == expected, (at, machine.names[at])
