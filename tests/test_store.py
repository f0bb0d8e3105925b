"""The store: what is written is read back, a stopped extraction is continued, and damage is named."""

import json
from itertools import pairwise

import pytest
import torch
from conftest import make_document, make_shape
from hypothesis import given
from hypothesis import strategies as st
from pipeline import contents
from safetensors.torch import load_file

from eagle31_train import artifacts
from eagle31_train.schema import UserError
from eagle31_train.store import REMAKE, Store, StoreWriter, plan_shards

SHAPE = make_shape(aux_layers=[1, 3])
LENGTHS = {"train": [9, 4, 1, 12, 6, 8], "heldout": [5, 7, 3]}
PROVENANCE = {
    "target": {"path": "somewhere", "aux_layers": [1, 3]},
    "norm": {"kind": "w", "eps": 1e-5},
    "vocab_size": 50,
}


def documents_of(split):
    generator = torch.Generator().manual_seed(len(split))
    return [make_document(SHAPE, length, generator) for length in LENGTHS[split]]


def target_weights():
    generator = torch.Generator().manual_seed(5)
    return {
        "embed_tokens": torch.randn(50, 16, generator=generator).bfloat16(),
        "norm": torch.randn(16, generator=generator),
        "lm_head": torch.randn(50, 16, generator=generator).bfloat16(),
    }


def write(folder, stop_after=None):
    """Write the store, or stop after so many new shards as a killed run does: without a word."""
    writer = StoreWriter(folder, PROVENANCE)
    writer.write_target(target_weights())
    written = 0
    for split in ("train", "heldout"):
        documents = documents_of(split)
        for number, (first, end) in enumerate(plan_shards(LENGTHS[split], 14)):
            name = f"shards/{split}-{number:05d}.safetensors"
            if writer.has(name):
                continue
            if written == stop_after:
                return writer
            writer.write_shard(name, split, first, documents[first:end])
            written += 1
    if written != stop_after:
        writer.finish({"fingerprint": "f" * 16})
    return writer


@pytest.fixture
def store(tmp_path):
    write(tmp_path / "store")
    return tmp_path / "store"


# ---------------------------------------------------------------- plan


@given(st.lists(st.integers(1, 50), max_size=40), st.integers(1, 100))
def test_the_plan_keeps_the_order_and_every_sample_and_the_bound(lengths, bound):
    plan = plan_shards(lengths, bound)
    assert [i for first, end in plan for i in range(first, end)] == list(range(len(lengths)))
    for first, end in plan:
        assert sum(lengths[first:end]) <= bound or end == first + 1
    for (first, end), (_, after) in pairwise(plan):
        assert sum(lengths[first : end + 1]) > bound, f"shards {first}..{end}..{after} could have been filled further"


def test_a_sample_longer_than_a_shard_has_its_own():
    assert plan_shards([3, 50, 3, 4], 10) == [(0, 1), (1, 2), (2, 4)]
    assert plan_shards([], 10) == []


# ---------------------------------------------------------------- write and read


def test_ragged_samples_are_read_back_as_they_were_written(store):
    opened = Store(store)
    for name in ("train", "heldout"):
        split, documents = opened.split(name), documents_of(name)
        assert split.lengths == LENGTHS[name]
        assert len(split) == len(documents)
        for got, wanted in zip(split.read_all(range(len(split))), documents, strict=True):
            for field in ("tokens", "loss_mask", "top1"):
                assert torch.equal(getattr(got, field), getattr(wanted, field)), field
                assert getattr(got, field).dtype == getattr(wanted, field).dtype
            assert torch.equal(got.aux, wanted.aux.bfloat16())
            assert torch.equal(got.last, wanted.last.bfloat16())
    assert [len(d) for d in opened.split("train").read_all([4, 0, 4])] == [6, 9, 6]


def test_target_weights_keep_their_bits_and_a_tied_head_is_the_embedding(store, tmp_path):
    for name, tensor in target_weights().items():
        assert torch.equal(Store(store).target[name], tensor)
        assert Store(store).target[name].dtype == tensor.dtype
    tied = StoreWriter(tmp_path / "tied", PROVENANCE)
    tied.write_target({name: t for name, t in target_weights().items() if name != "lm_head"})
    tied.finish({})
    assert torch.equal(Store(tmp_path / "tied").target["lm_head"], target_weights()["embed_tokens"])


def test_a_shard_holds_what_the_format_says(store):
    shard = load_file(store / "shards" / "train-00000.safetensors")
    dtypes = {name: (tensor.dtype, list(tensor.shape)) for name, tensor in shard.items()}
    assert dtypes == {
        "tokens": (torch.int32, [14]),
        "loss_mask": (torch.bool, [14]),
        "top1": (torch.int32, [14]),
        "aux": (torch.bfloat16, [14, 2, 16]),
        "last": (torch.bfloat16, [14, 16]),
        "offsets": (torch.int64, [4]),
    }
    assert shard["offsets"].tolist() == [0, 9, 13, 14]


# ---------------------------------------------------------------- stopped and continued


def leave_torn_line(folder):
    with (folder / "shards.jsonl").open("a") as file:
        file.write('{"file": "shards/heldout-000')


def leave_temporaries(folder):
    (folder / "shards" / ".train-00001.safetensors.tmp").write_bytes(b"half a shard")
    (folder / ".target.safetensors.tmp").write_bytes(b"half a target")
    (folder / ".manifest.json.tmp").write_text("{")


def leave_shard_without_line(folder):
    (folder / "shards" / "heldout-00001.safetensors").write_bytes(b"half a shard that a copy tool left")


def truncate_newest_shard(folder):
    last = json.loads((folder / "shards.jsonl").read_text().splitlines()[-1])["file"]
    (folder / last).write_bytes((folder / last).read_bytes()[:-1])


def leave_nothing(folder):
    pass


@pytest.mark.parametrize("shards", range(1, 6))
@pytest.mark.parametrize(
    "leave",
    [leave_nothing, leave_torn_line, leave_temporaries, leave_shard_without_line, truncate_newest_shard],
    ids=lambda f: f.__name__,
)
def test_a_store_stopped_after_any_shard_ends_with_the_same_bytes(tmp_path, store, shards, leave):
    folder = tmp_path / "stopped"
    write(folder, stop_after=shards)
    with pytest.raises(UserError, match=r"manifest\.json is missing: run `python -m eagle31_train\.extract` first"):
        Store(folder)
    leave(folder)
    write(folder)
    assert contents(folder) == contents(store)


def test_committed_shards_are_not_written_again(tmp_path, monkeypatch):
    write(tmp_path / "store", stop_after=3)
    written = []
    original = StoreWriter.write_shard
    monkeypatch.setattr(
        StoreWriter, "write_shard", lambda self, name, *rest: written.append(name) or original(self, name, *rest)
    )
    write(tmp_path / "store")
    assert written == ["shards/heldout-00000.safetensors", "shards/heldout-00001.safetensors"]


def test_shards_without_provenance_are_nobodys(tmp_path):
    """What a killed removal may leave must not be adopted by a store of another target."""
    folder = tmp_path / "store"
    write(folder, stop_after=2)
    (folder / "provenance.json").unlink()
    with pytest.raises(UserError, match=r"holds shards but no provenance.json: remove it"):
        StoreWriter(folder, PROVENANCE)


def test_a_begun_store_of_another_provenance_is_refused_or_replaced_whole(tmp_path):
    folder = tmp_path / "store"
    write(folder, stop_after=2)
    other = {**PROVENANCE, "target": {"path": "elsewhere", "aux_layers": [1, 3]}}
    before = contents(folder)
    with pytest.raises(UserError) as refused:
        StoreWriter(folder, other)
    assert "target.path: somewhere there, elsewhere here" in str(refused.value)
    assert "overwrite=true" in str(refused.value)
    assert contents(folder) == before
    writer = StoreWriter(folder, other, overwrite=True)
    assert not any(writer.has(name) for name in before)
    assert sorted(contents(folder)) == ["provenance.json", "shards.jsonl"]


# ---------------------------------------------------------------- damage


def shard_file(store):
    return store / "shards" / "train-00001.safetensors"


def truncate(path):
    path.write_bytes(path.read_bytes()[:-7])


def flip_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def remove(path):
    path.unlink()


def read_everything(folder):
    store = Store(folder)
    for split in ("train", "heldout"):
        store.split(split).read_all(range(len(LENGTHS[split])))
    return store.target


@pytest.mark.parametrize(
    "name", ["shards/train-00001.safetensors", "target.safetensors", "shards.jsonl", "provenance.json"]
)
@pytest.mark.parametrize(("harm", "words"), [(truncate, "truncated"), (flip_bit, "checksum"), (remove, "is missing")])
def test_damage_is_named_with_what_to_do(store, name, harm, words):
    read_everything(store)
    harm(store / name)
    with pytest.raises(UserError) as error:
        read_everything(store)
    message = str(error.value)
    assert str(store / name) in message
    assert words in message
    assert REMAKE in message
    assert "\n" not in message


def test_a_damaged_manifest_is_named(store):
    (store / "manifest.json").write_text('{"files": {')
    with pytest.raises(UserError, match=r"manifest\.json is damaged .* run `python -m eagle31_train\.extract` again"):
        Store(store)
    artifacts.write_json(store / "manifest.json", {"files": {}})
    with pytest.raises(UserError, match=r"manifest\.json does not list provenance\.json"):
        Store(store)


@pytest.mark.parametrize("line", [b"{}", b'["a list"]', b'{"file": "x"', b"\xff\xfe", b'{"file": "a", "unknown": 1}'])
def test_a_damaged_line_that_a_kill_cannot_leave_stops_a_continued_run(tmp_path, line):
    write(tmp_path, stop_after=3)
    lines = (tmp_path / "shards.jsonl").read_bytes().splitlines()
    (tmp_path / "shards.jsonl").write_bytes(b"\n".join([lines[0], line, lines[2]]) + b"\n")
    with pytest.raises(UserError) as error:
        write(tmp_path)
    assert f"{tmp_path / 'shards.jsonl'}:2 is damaged" in str(error.value)
    assert REMAKE in str(error.value)
    assert "\n" not in str(error.value)


def test_every_shard_is_verified_once(store, monkeypatch):
    hashed = []
    original = artifacts.file_sha256
    monkeypatch.setattr(artifacts, "file_sha256", lambda path: hashed.append(path.name) or original(path))
    split = Store(store).split("train")
    hashed.clear()
    split.read(0)
    assert hashed == ["train-00000.safetensors"]
    for _ in range(3):
        split.read_all(range(len(split)))
    assert hashed == [f"train-{i:05d}.safetensors" for i in range(3)]
