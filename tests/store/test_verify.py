"""`python -m eagle31_train.store`: what it says of whole, begun and damaged stores, and what --remove makes of them."""

import shutil

import fsspec
import pytest
from made import Made
from pipeline import contents, flip_bit

from eagle31_train.store.__main__ import main
from eagle31_train.store.backends import open_storage

MADE = Made(aux_codec="fp8", last_codec="int8")
NAMES = [planned.name for planned in MADE.plan.shards]
SAMPLES = [planned.samples() for planned in MADE.plan.shards]


@pytest.fixture
def store(tmp_path):
    MADE.write(tmp_path / "store")
    return tmp_path / "store"


@pytest.fixture
def said(capsys):
    """said(*arguments): (exit status, lines on stdout, lines on stderr)."""

    def run(*arguments):
        status = main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return status, out.splitlines(), err.splitlines()

    return run


# ---------------------------------------------------------------- whole


# ---------------------------------------------------------------- damaged


def spoil(store):
    """Several faults at once; what each must be called, in order."""
    flip_bit(store / NAMES[0])
    contents = [(store / name).read_bytes() for name in NAMES[2:4]]
    for name, data in zip(NAMES[2:4], reversed(contents), strict=True):
        (store / name).write_bytes(data)
    shutil.copy(store / NAMES[1], store / "shards" / "train-00099.safetensors")
    (store / NAMES[4]).unlink()
    lines = (store / "shards.jsonl").read_bytes().splitlines(keepends=True)
    (store / "shards.jsonl").write_bytes(b"".join([lines[0], lines[2], lines[3], lines[4]]))
    return [
        f"{store}/shards.jsonl has ",
        f"{store}/shards.jsonl has no line for {NAMES[1]} ({SAMPLES[1]})",
        f"{store}/{NAMES[0]} ({SAMPLES[0]}) is not as it was written (its checksum differs)",
        f"{store}/{NAMES[2]} ({SAMPLES[2]}) has ",
        f"{store}/{NAMES[3]} ({SAMPLES[3]}) has ",
        f"{store}/{NAMES[4]} ({SAMPLES[4]}) is missing",
        f"{store}/shards/train-00099.safetensors is no file of this store",
        f"{store}: problems: 7; ",
    ]


@pytest.mark.core
def test_everything_wrong_is_a_line_of_its_own(store, said):
    expected = spoil(store)
    before = contents(store)
    status, out, err = said("verify", store)
    assert (status, err) == (1, [])
    for line, start in zip(out, expected, strict=False):
        assert line.startswith(start)
    assert "--remove` takes away what is damaged" in out[-1]
    assert len(out) == len(expected) + 1
    assert contents(store) == before


def test_what_is_removed_is_made_anew_and_nothing_else(store, said):
    whole = contents(store)
    spoil(store)
    status, out, _ = said("verify", store, "--remove")
    assert status == 1
    assert out[-1].startswith("removed: 4 files; ")
    MADE.write(store)
    assert contents(store) == whole


# ---------------------------------------------------------------- what is no store


# ---------------------------------------------------------------- elsewhere


@pytest.fixture
def bucket(tmp_path):
    """The URL of a store in memory, and the folder of its files here."""
    storage = open_storage("memory://verified/store", tmp_path / "cache", 100_000)
    MADE.write(storage)
    yield storage
    storage.discard()
    storage.close()


def test_a_remote_store_is_checked_where_it_lies(bucket, tmp_path, said):
    assert said("verify", bucket.location, "--cache-dir", tmp_path)[0] == 0
    files = fsspec.filesystem("memory")
    path = f"/verified/store/{NAMES[3]}"
    data = bytearray(files.cat_file(path))
    data[-1] ^= 1
    files.pipe_file(path, bytes(data))
    status, out, _ = said("verify", bucket.location, "--remove")
    assert status == 1
    assert out[0] == f"{bucket.location}/{NAMES[3]} ({SAMPLES[3]}) is not as it was written (its checksum differs)"
    MADE.write(bucket)
    assert said("verify", bucket.location)[0] == 0
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("eagle31-")], "copies go again"


# ---------------------------------------------------------------- info


def test_info_says_what_is_inside(store, said):
    status, out, err = said("info", store)
    assert (status, err) == (0, [])
    rows = dict(line.split(maxsplit=1) for line in out)
    assert rows["store"].startswith(str(store))
    assert rows["shards"].startswith("5 of 5 committed")
    assert rows["train"].startswith("6 samples, 40 tokens; of a sample: ")
    assert rows["aux_layers"] == "[1, 3]"
    assert rows["aux_codec"] == "fp8"
    (store / "shards.jsonl").unlink()
    assert "damaged" in said("info", store)[1][-1]
