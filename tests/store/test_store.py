"""The store: what is written is read back, the format is what it was, and damage is named."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from made import LENGTHS, Made, read_whole
from pipeline import flip_bit
from safetensors.torch import load_file

from eagle31_train.store import Store, make_plan, shape_of
from eagle31_train.store.backends import open_storage
from eagle31_train.store.sealed import DamagedError, seal, unseal
from eagle31_train.store.shard_plan import plan_shards

MADE = Made()
NAMES = [planned.name for planned in MADE.plan.shards]


@pytest.fixture
def store(tmp_path):
    MADE.write(tmp_path / "store")
    return tmp_path / "store"


# ---------------------------------------------------------------- plan


@given(st.lists(st.integers(1, 50), max_size=40), st.integers(1, 100), st.integers(1, 9))
def test_the_plan_keeps_order_and_bound_and_processes_share_it_evenly(lengths, bound, ranks):
    edges = plan_shards(lengths, bound)
    assert [i for first, end in edges for i in range(first, end)] == list(range(len(lengths)))
    assert all(sum(lengths[first:end]) <= bound or end == first + 1 for first, end in edges)
    for first, end in edges[:-1]:
        assert sum(lengths[first : end + 1]) > bound, f"shard {first}..{end} could have been filled further"
    plan = make_plan({"train": [[True] * length for length in lengths], "heldout": []}, bound, shape_of(MADE.states))
    shares = [plan.share(rank, ranks) for rank in range(ranks)]
    assert sorted((s for share in shares for s in share), key=lambda s: s.number) == plan.shards
    assert all(share == sorted(share, key=lambda s: s.number) for share in shares)
    loads = [sum(s.tokens for s in share) for share in shares]
    assert max(loads) - min(loads) <= max(bound, *lengths, 0)


# ---------------------------------------------------------------- seals


@given(st.dictionaries(st.text(), st.none() | st.floats() | st.text() | st.lists(st.integers())))
@settings(max_examples=15)
def test_what_is_sealed_is_unsealed_and_only_byte_for_byte(value):
    value.pop("check", None)
    for indent in (None, 2):
        data = seal(value, indent)
        assert repr(unseal(data)) == repr(value)
        for other in (data[:-1], data + b"\n", b" " + data, data.replace(b'": ', b'":', 1), data.replace(b"{", b"", 1)):
            with pytest.raises(DamagedError):
                unseal(other)


# ---------------------------------------------------------------- write and read


@pytest.mark.core
def test_ragged_samples_are_read_back_as_they_were_written(store):
    opened = Store(store)
    for name in ("train", "heldout"):
        split, documents = opened.split(name), MADE.documents[name]
        assert split.lengths == LENGTHS[name]
        assert len(split) == len(documents)
        for got, wanted in zip(split.read_all(range(len(split))), documents, strict=True):
            for field in ("tokens", "loss_mask", "top1"):
                assert torch.equal(getattr(got, field), getattr(wanted, field)), field
                assert getattr(got, field).dtype == getattr(wanted, field).dtype
            assert torch.equal(got.aux.decode(), wanted.aux[: wanted.attended].bfloat16())
            assert torch.equal(got.last.decode(), wanted.last[wanted.supervised].bfloat16())
    assert [len(d) for d in opened.split("train").read_all([4, 0, 4])] == [6, 9, 6]


def test_target_weights_keep_their_bits_and_a_tied_head_is_the_embedding(store, tmp_path):
    target = Store(store).target
    assert all(torch.equal(target[name], tensor) for name, tensor in MADE.weights.items())
    tied = Made()
    del tied.weights["lm_head"]
    tied.write(tmp_path / "tied")
    assert torch.equal(Store(tmp_path / "tied").target["lm_head"], MADE.weights["embed_tokens"])


def test_a_shard_holds_what_the_format_says(tmp_path):
    made = Made(aux_codec="fp8", last_codec="int4", hidden=130)
    made.write(tmp_path)
    planned = made.plan.of("train")[-1]
    attended, supervised = sum(d.attended for d in made.of(planned)), sum(len(d.supervised) for d in made.of(planned))
    assert attended > supervised > 0
    found = load_file(tmp_path / planned.name)
    assert {name: (tensor.dtype, list(tensor.shape)) for name, tensor in found.items()} == {
        "tokens": (torch.int32, [14]),
        "loss_mask": (torch.bool, [14]),
        "top1": (torch.int32, [14]),
        "aux.values": (torch.float8_e4m3fn, [attended, 2, 130]),
        "aux.scale": (torch.bfloat16, [attended, 2, 2]),
        "last.values": (torch.uint8, [supervised, 65]),
        "last.scale": (torch.bfloat16, [supervised, 5]),
    }


# ---------------------------------------------------------------- elsewhere


def test_a_copy_that_is_damaged_on_its_way_is_fetched_again_or_named(store, tmp_path, monkeypatch):
    storage = open_storage("memory://bucket/store", tmp_path / "cache", 100_000)
    try:
        MADE.write(storage)
        right, spoilt = storage.fs.get_file, []

        def get_file(remote, local, **options):
            right(remote, local, **options)
            if remote.endswith(NAMES[3]) and len(spoilt) < times:
                spoilt.append(remote)
                flip_bit(tmp_path.joinpath(local))

        monkeypatch.setattr(storage.fs, "get_file", get_file)
        times = 1
        assert read_whole(storage)[1] is None
        assert len(spoilt) == 1
        times, spoilt[:] = 9, []
        storage.forget(NAMES[3])
        found, message = read_whole(storage)
        assert "train-00001.safetensors (samples 3 to 3 of train) is not as it was written" in message
        assert len(found["train"]) == 3
    finally:
        storage.discard()
        storage.close()
