"""A writer that dies, or whose disk is full, at any operation: the next one ends with the same bytes."""

from collections import Counter

import pytest
from dying import Kill, Killed, Machine, running
from made import Made, read_whole, right_so_far
from pipeline import contents

from eagle31_train.errors import UserError
from eagle31_train.store.__main__ import check
from eagle31_train.store.backends import LocalStorage

MADE = Made({"train": [9, 4, 6], "heldout": [5, 3]}, 16, "fp8", "int8", 13)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The bytes of an uninterrupted store, what is read from it, and how many operations it takes."""
    folder = tmp_path_factory.mktemp("whole")
    with running(Machine()) as machine:
        MADE.write(folder / "store")
    documents, message = read_whole(folder / "store")
    assert message is None
    return contents(folder), documents, machine


def write(folder, machine=None, **options):
    """Write as one process does; returns whether it lived to the end."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with running(machine or Machine()):
            MADE.write(folder / "store", **options)
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
        damage = [problem.text for problem in check(LocalStorage("store", folder / "store"), Counter())]
    except UserError as error:
        damage = [str(error)]
    allowed = ("store/manifest.json is missing, though all shards were there", "there is no store in store")
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
