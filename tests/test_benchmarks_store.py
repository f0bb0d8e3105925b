"""The store's benchmarks, but for their clock: what is timed gives the states back, and how numbers add up."""

import statistics

import pytest
from pipeline import contents, make_run, tiny_config

from benchmarks import extraction, storage, turns
from benchmarks.formats import Ours, Safetensors, TorchSave, usage
from benchmarks.storage import Case
from eagle31_train.extract import extract

# ---------------------------------------------------------------- shared


def test_everyone_has_every_turn_and_the_first_place_goes_round():
    order = []
    found = turns.in_turns({n: lambda n=n: order.append(n) or len(order) for n in "abc"}, 2, "x", warm=1, first=1)
    assert "".join(order) == "bcacababc"
    assert found == {"a": [5, 7], "b": [6, 8], "c": [4, 9]}


# ---------------------------------------------------------------- storage


def test_lengths_and_batches_are_the_same_every_time():
    lengths = storage.draw_lengths(100_000)
    assert lengths == storage.draw_lengths(100_000)
    assert sum(lengths) - lengths[-1] < 100_000 <= sum(lengths)
    assert statistics.median(lengths) == pytest.approx(240, rel=0.1)
    batches = storage.make_batches(lengths, 4096)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    assert max(sum(lengths[i] for i in batch) for batch in batches) <= 4096
    assert storage.make_batches([5000, 10], 4096) in ([[0], [1]], [[1], [0]])


@pytest.mark.parametrize("kept", [Ours("bf16", "bf16", 128), Ours("int8", "int8", 128), TorchSave(True), Safetensors()])
def test_what_is_timed_gives_the_states_back(kept, tmp_path):
    documents = storage.make_documents(Case(40, 0.5), [60, 33, 90, 17])
    measured = storage.write_once(kept, documents, tmp_path / "kept")
    files, size = usage(tmp_path / "kept")
    assert files == (4 if not isinstance(kept, Ours) else 6 + 2)  # the small ones; shards
    assert size > 0
    kept.open(tmp_path / "kept")
    storage.check(kept, documents, [2, 0])
    with pytest.raises(AssertionError):
        storage.check(kept, [documents[3], *documents[1:]], [2, 0])
    read = storage.read_once(kept, tmp_path / "kept", [[2, 0], [1, 3]])
    assert (read["decode"] > 0) == isinstance(kept, Ours)
    parts = {name: seconds for name, seconds in measured.items() if name != "total"}
    assert sum(parts.values()) < measured["total"]
    assert set(parts) == (set(storage.PARTS) if isinstance(kept, Ours) else set())
    assert min(parts.values(), default=1) > 0  # whatever the writer calls by other names would be missing here


def test_rates_are_ratios_to_memcpy():
    read = {"open": 1.0, "first": 2.0, "again": 1.0, "decode": 0.5}
    ours = {"files": 6, "bytes": 1000, "batch_bytes": 800, "write": [{"total": 4.0, "encode": 1.0}], "read": [read]}
    slow = {"files": 9, "bytes": 2000, "batch_bytes": 0, "write": [{"total": 8.0}, {"total": 2.0}], "read": []}
    result = {"tokens": 100, "memcpy": {"fresh": 500.0, "warm": 1600.0}, "formats": {"ours": ours, "theirs": slow}}
    first, second = storage.numbers(result)
    assert first["bytes_per_token"] == 10
    assert first["write"] == 25
    assert first["write_parts"] == {"encode": 0.25}
    assert first["read"] == 50
    shares = {"first, fresh": 0.8, "again, fresh": 1.6, "first, warm": 0.25, "again, warm": 0.5}
    assert first["of_memcpy"] == shares
    assert first["decode"] == 200
    assert second["write"] == 20
    assert "read" not in second


# ---------------------------------------------------------------- extraction


def test_extraction_is_timed_by_its_own_parts(tmp_path):
    make_run(tmp_path)
    config = tiny_config(tmp_path)
    result = extraction.measure(config, ["bf16:bf16", "int8:int8"], 60, tmp_path / "stores")
    assert result["shards"] == [19, 34, 21]
    assert sum(result["shards"]) >= 60
    assert result["padded"] >= sum(result["shards"])
    rows = {row["name"]: row for row in extraction.numbers(result)}
    assert list(rows) == ["bare", "no mask", "states", "bf16:bf16", "int8:int8"]
    assert rows["bare"]["of_bare"] == 1.0
    for name in ("bf16:bf16", "int8:int8"):
        parts = rows[name]["parts"]
        assert sum(parts.values()) == pytest.approx(1)
        assert all(share > 0 for share in parts.values()), parts  # a part that the stage calls by another name is 0
    # What was timed is what an extraction writes.
    extract(tiny_config(tmp_path, "store.aux_codec=int8", "store.last_codec=int8"))
    whole = contents(tmp_path / "run" / "store" / "shards")
    timed = contents(tmp_path / "stores" / "int8-int8" / "shards")
    shards = [name for name in timed if name.endswith(".safetensors")]
    assert len(shards) == 3
    assert all(timed[name] == whole[name] for name in shards)
