"""Writing a store that was stopped, at any storage: it goes on, or is refused, or is replaced whole."""

import pytest
from made import Made, message_of, writes
from pipeline import contents, flip_bit

from eagle31_train.provenance import Provenance
from eagle31_train.store import Store, finished, stream
from eagle31_train.store.backends import LocalStorage

MADE = Made()
NAMES = [planned.name for planned in MADE.plan.shards]


@pytest.fixture
def store(tmp_path):
    MADE.write(tmp_path / "store")
    return tmp_path / "store"


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(stream, "POLL", 0.001)


def leave_torn_line(folder):
    (folder / "shards" / "train-00002.json").write_text('{"name": "shards/train-000')


def leave_temporaries(folder):
    (folder / "shards" / ".train-00001.safetensors.tmp").write_bytes(b"half a shard")
    (folder / "shards" / ".train-00001.json.tmp").write_bytes(b"half a line")
    (folder / ".target.safetensors.tmp").write_bytes(b"half a target")
    (folder / ".manifest.json.tmp").write_text("{")


def leave_shard_without_line(folder):
    (folder / NAMES[-1]).write_bytes(b"half a shard that a copy tool left")


def truncate_newest_shard(folder):
    newest = max(folder.glob("shards/*.safetensors"), key=lambda path: NAMES.index(f"shards/{path.name}"))
    newest.write_bytes(newest.read_bytes()[:-1])


def swap_line_files(folder):
    lines = sorted(folder.glob("shards/*.json"))
    for path, data in zip(lines, [path.read_bytes() for path in reversed(lines)], strict=True):
        path.write_bytes(data)


def lose_provenance(folder):
    (folder / "provenance.json").unlink()


def leave_nothing(folder):
    pass


@pytest.mark.parametrize("shards", [1, 4])
@pytest.mark.parametrize(
    "leave",
    [
        leave_nothing,
        leave_torn_line,
        leave_temporaries,
        leave_shard_without_line,
        truncate_newest_shard,
        lose_provenance,
        swap_line_files,
    ],
    ids=lambda f: f.__name__,
)
def test_a_store_stopped_after_any_shard_ends_with_the_same_bytes(tmp_path, store, shards, leave):
    folder = tmp_path / "stopped"
    MADE.write(folder, stop_after=shards)
    assert "run `python -m eagle31_train.extract` first, or give store.follow=true" in message_of(Store, folder)
    leave(folder)
    MADE.write(folder)
    assert contents(folder) == contents(store)


@pytest.mark.parametrize("missing", [True, False])
@pytest.mark.parametrize(
    "name", ["manifest.json", "plan.json", "provenance.json", "shards.jsonl", "target.safetensors", NAMES[3]]
)
def test_the_advice_to_extract_again_helps_and_costs_no_more_than_it_must(store, name, missing, monkeypatch):
    """`finished` sees every damage of a small file; a damaged shard of the right size only `verify` does."""
    whole, inputs = contents(store), MADE.provenance["inputs"]
    storage = LocalStorage("the store", store)
    if missing or name in NAMES:
        (store / name).unlink()
    else:
        flip_bit(store / name)
    assert finished(storage, Provenance(inputs), overwrite=False) is None
    written = writes(monkeypatch)
    MADE.write(store)
    assert contents(store) == whole
    assert finished(storage, Provenance(inputs), overwrite=False) is not None
    # shards.jsonl commits shards: without it, none is.
    most = {NAMES[3]: 1, "shards.jsonl": len(NAMES) if missing else 1}
    assert len(written) == most.get(name, 0)


def test_shards_without_provenance_and_lines_are_nobodys(tmp_path):
    """What a killed removal may leave must not be adopted by a store of another target."""
    folder = tmp_path / "store"
    MADE.write(folder, stop_after=2)
    (folder / "provenance.json").unlink()
    other = Made(fingerprint="e" * 16)
    assert "holds shards but no provenance.json: remove the store" in message_of(other.writer, folder)
    (folder / "provenance.json").write_text("{}")
    assert "holds shards but a damaged (" in message_of(other.writer, folder)
    assert not [name for name in contents(folder) if name.endswith(".tmp")]


def test_a_begun_store_of_another_provenance_is_refused_or_replaced_whole(tmp_path):
    folder = tmp_path / "store"
    MADE.write(folder, stop_after=2)
    other = Made(fingerprint="e" * 16)
    other.provenance["inputs"]["target"]["name"] = "elsewhere"
    before = contents(folder)
    message = message_of(other.writer, folder)
    assert "target.name: somewhere there, elsewhere here" in message
    assert "overwrite=true" in message
    assert contents(folder) == before
    begun = other.writer(folder, overwrite=True)
    assert not any(begun.has(planned) for planned in MADE.plan.shards)
    assert sorted(contents(folder)) == ["plan.json", "provenance.json", "stream.json"]
