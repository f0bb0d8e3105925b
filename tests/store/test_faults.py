"""Seeded faults, each found by `verify` and by readers; and a writer that dies at any operation, and is continued."""

import os
import random
import shutil
from functools import partial

import pytest
from dying import Kill, Killed, Machine, running
from made import Made, problems, read_whole, right_so_far
from pipeline import contents

from eagle31_train import artifacts
from eagle31_train.artifacts import MANIFEST
from eagle31_train.errors import UserError
from eagle31_train.store.format import PLAN, PROVENANCE, SHARDS, STREAM, TARGET, TARGET_LINE

MADE = Made({"train": [9, 4, 1, 12, 6, 8, 11], "heldout": [5, 7, 3]}, 64, "fp8", "int8")
SHARD_FILES = [shard.name for shard in MADE.plan.shards]
SMALL_FILES = [MANIFEST, PLAN, PROVENANCE, SHARDS, STREAM, TARGET, TARGET_LINE]


class Fault:
    """Harms a copy of a store.

    shards: in whose files or lines it did. files: in whose files.
    read: whether reading all samples must find it; stray files are read by nobody.
    """

    def __init__(self, folder, rng):
        self.folder, self.rng = folder, rng
        self.shards, self.files, self.read = [], [], True

    def content(self, name):
        return (self.folder / name).read_bytes()

    def change(self, name, data):
        """Give a file of the store another content, and note whose it was."""
        if name == SHARDS:  # which lines are not as they were, wherever they stand
            before, after = self.content(name).splitlines(True), data.splitlines(True)
            self.shards += [SHARD_FILES[i] for i, line in enumerate(before) if line not in after]
        self.shards += [shard.name for shard in MADE.plan.shards if name in (shard.name, shard.line)]
        self.files += [name] if name in SHARD_FILES else []
        assert self.content(name) != data, "a fault that is none"
        (self.folder / name).unlink()  # not its content, which the other copies of the store share
        (self.folder / name).write_bytes(data)

    def any_file(self):
        """Every kind as often as any other."""
        files = sorted(str(path.relative_to(self.folder)) for path in self.folder.rglob("*") if path.is_file())
        kinds = [SHARD_FILES, [name for name in files if name in SMALL_FILES]]
        kinds += [lines] if (lines := [name for name in files if name.endswith(".json") and "/" in name]) else []
        return self.rng.choice([name for name in self.rng.choice(kinds) if name in files])

    no_loss = (STREAM,)

    # ------------------------------------------------------------ kinds

    def flip_a_bit(self):
        name = self.any_file()
        data = bytearray(self.content(name))
        # Headers and JSON are small beside states, and as precious.
        at = self.rng.randrange(min(len(data), self.rng.choice([8, 200, len(data)])))
        data[at] ^= 1 << self.rng.randrange(8)
        self.change(name, bytes(data))

    def truncate(self):
        name = self.any_file()
        data = self.content(name)
        self.change(name, data[: -self.rng.choice([1, self.rng.randint(1, len(data)), len(data)])])

    def append(self):
        name = self.any_file()
        self.change(name, self.content(name) + self.rng.choice([b"\n", b"\0", self.rng.randbytes(16)]))

    def lose_a_file(self):
        name = self.any_file()
        # What has no line is not there yet, and without a bound nothing is removed: that is no fault.
        while name in self.no_loss or (name.endswith(".json") and "/" in name):
            name = self.any_file()
        self.shards += [name] if name in SHARD_FILES else []
        self.files += [name] if name in SHARD_FILES else []
        (self.folder / name).unlink()

    def swap(self, names):
        one, other = self.rng.sample(names, 2)
        contents = self.content(one), self.content(other)
        self.change(one, contents[1])
        self.change(other, contents[0])

    def swap_shards(self):
        self.swap(SHARD_FILES[: self.committed])

    def leave_a_stray(self):
        name = self.rng.choice(SHARD_FILES[: self.committed])
        stray = name.replace(".", self.rng.choice([".bak.", "-copy.", f"-{self.rng.randrange(9999)}."]))
        stray = self.rng.choice([stray, stray.removeprefix("shards/"), "shards/notes.txt"])
        (self.folder / stray).write_bytes(self.content(name))
        self.read = False

    def drop_a_line(self):
        lines = self.content(SHARDS).splitlines(True)
        del lines[self.rng.randrange(len(lines))]
        self.change(SHARDS, b"".join(lines))

    def swap_line_files(self):
        self.swap([name.replace(".safetensors", ".json") for name in SHARD_FILES[: self.committed]])

    committed = len(SHARD_FILES)


BOTH = [
    *[Fault.flip_a_bit] * 4, Fault.truncate, Fault.append, Fault.lose_a_file, Fault.swap_shards, Fault.leave_a_stray,
]  # fmt: skip
COMPLETE = [*BOTH, Fault.drop_a_line]
BEGUN = [*BOTH, Fault.swap_line_files]


class Begun(Fault):
    no_loss = (STREAM, TARGET_LINE)
    committed = len(SHARD_FILES) - 1


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """Folders of a complete and of a begun store, and what a whole one gives to its reader."""
    folder = tmp_path_factory.mktemp("stores")
    MADE.write(folder / "complete")
    MADE.write(folder / "begun", stop_after=Begun.committed)
    whole, error = read_whole(folder / "complete")
    assert error is None
    assert {split: len(documents) for split, documents in whole.items()} == {"train": 7, "heldout": 3}
    assert not problems(folder / "complete")
    assert not problems(folder / "begun")
    return folder, whole


FOLLOWING = {"shards": Begun.committed, "follow": True, "patience": 0.0}


def one(kinds, Kind, source, folder, whole, seed, **reading):
    """Make one fault and find it, in both ways."""
    rng = random.Random(seed)
    fault = Kind(shutil.copytree(source, folder, copy_function=os.link), rng)
    kind = rng.choice(kinds)
    kind(fault)
    where = f"{kind.__name__}, seed {seed}"
    found = problems(folder)
    assert found, where
    assert not any("\n" in text for text in found), (where, found)
    samples = {shard.name: shard.samples() for shard in MADE.plan.shards}
    for name in fault.shards:
        names = (name, name.replace(".safetensors", ".json"))
        assert any(samples[name] in text and any(n in text for n in names) for text in found), (where, name, found)
    documents, message = read_whole(folder, **reading)
    assert right_so_far(documents, whole), where
    assert message is not None or not fault.read, where
    assert "\n" not in (message or ""), where
    if fault.files:
        assert any(name in message and samples[name] in message for name in fault.files), (where, message)
    shutil.rmtree(folder)
    return kind.__name__


@pytest.mark.parametrize("seeds", [range(60), pytest.param(range(60, 1000), marks=pytest.mark.slow)], ids=len)
def test_faults_of_a_complete_store_are_found(stores, tmp_path, seeds):
    folder, whole = stores
    for seed in seeds:
        one(COMPLETE, Fault, folder / "complete", tmp_path / "copy", whole, seed)


@pytest.mark.parametrize("seeds", [range(40), pytest.param(range(40, 400), marks=pytest.mark.slow)], ids=len)
def test_faults_of_a_begun_store_are_found(stores, tmp_path, seeds):
    folder, whole = stores
    for seed in seeds:
        one(BEGUN, Begun, folder / "begun", tmp_path / "copy", whole, seed, **FOLLOWING)


# ---------------------------------------------------------------- a disk that errs


@pytest.mark.parametrize(("kind", "reading"), [("complete", {}), ("begun", FOLLOWING)], ids=["complete", "begun"])
def test_what_a_disk_reads_wrongly_once_is_read_again_and_what_it_always_does_is_named(
    stores, tmp_path, monkeypatch, kind, reading
):
    """Until the kernel is told to forget its copy, a file has a wrong bit."""
    wrong, right = tmp_path / "store", stores[0] / kind
    shutil.copytree(right, wrong)
    expected, _ = read_whole(right, **reading)
    whole = {split: len(documents) for split, documents in expected.items()}
    for path in [path for path in wrong.rglob("*") if path.is_file()]:
        name = path.relative_to(wrong)
        for look in (problems, partial(read_whole, **reading)):
            bits = bytearray((right / name).read_bytes())
            bits[len(bits) // 2] ^= 4
            path.write_bytes(bits)
            always = look(wrong)
            with monkeypatch.context() as patch:
                patch.setattr(
                    artifacts, "forget_pages", lambda file: shutil.copy(right / file.relative_to(wrong), file)
                )
                once = look(wrong)
            if look is problems:
                assert any(str(name) in text for text in always), name
                assert once == [], name
            else:
                assert {split: len(documents) for split, documents in once[0].items()} == whole, (name, once[1])
                assert right_so_far(once[0], expected)
            shutil.copy(right / name, path)


# ---------------------------------------------------------------- a writer that dies

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


def write(folder, machine=None, **options):
    """Write as one process does; returns whether it lived to the end."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with running(machine or Machine()):
            TINY.write(folder / "store", **options)
    except Killed:
        return False
    return True


def assert_refused_or_right(folder, documents):
    """Whoever looks now: no wrong sample, and nothing damaged that no extraction would find."""
    found, message = read_whole(folder / "store")
    assert right_so_far(found, documents)
    assert message is None or "manifest.json is missing" in message
    followed, message = read_whole(folder / "store", follow=True, patience=0.0)
    assert right_so_far(followed, documents)
    assert message is None or "waiting for" in message
    try:
        damage = problems(folder / "store")
    except UserError as error:
        damage = [str(error)]
    allowed = ("the store/manifest.json is missing, though all shards were there", "there is no store in the store")
    assert all(text.startswith(allowed) for text in damage), damage


def instants(machine, every):
    """All operations of a machine, or some of each kind, the last one among them."""
    return range(machine.count) if every else sorted({*range(0, machine.count, 7), machine.count - 1})


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_writer_that_dies_at_any_operation_is_continued_to_the_same_bytes(whole, tmp_path, every):
    expected, documents, machine = whole
    assert machine.count > 60
    assert {"open", "write", "fsync", "os.rename", "os.mkdir"} <= set(machine.names)
    for at in instants(machine, every):
        folder = tmp_path / str(at)
        assert not write(folder, Machine(at, Kill()))
        assert_refused_or_right(folder, documents)
        assert write(folder)
        assert contents(folder) == expected, (at, machine.names[at])
