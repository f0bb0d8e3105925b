"""Writing a store that was stopped, at any storage: it goes on, or is refused, or is replaced whole."""

import pytest
from made import Made, message_of, writes
from pipeline import contents, flip_bit

from eagle31_train.provenance import Provenance
from eagle31_train.store import finished
from eagle31_train.store.backends import LocalStorage

MADE = Made()
NAMES = [planned.name for planned in MADE.plan.shards]


@pytest.fixture
def store(tmp_path):
    MADE.write(tmp_path / "store")
    return tmp_path / "store"


@pytest.mark.parametrize("missing", [True, False])
@pytest.mark.parametrize("name", ["plan.json", "provenance.json", "shards.jsonl", NAMES[3]])
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
