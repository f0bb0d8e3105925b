"""A store over its life: written and read; stopped, damaged, verified and made again; bounded, followed and used up."""

import shutil
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from made import Made, message_of, read_whole
from pipeline import contents, flip_bit
from planting import interrupt, watched
from safetensors.torch import load_file, save_file
from tqdm import tqdm

from eagle31_train.common import artifacts
from eagle31_train.provenance import Provenance
from eagle31_train.store import Store, finished, make_plan, reader, shape_of, shard, stream, writer
from eagle31_train.store.__main__ import _describe, check, main
from eagle31_train.store.backends import LocalStorage, open_storage
from eagle31_train.store.format import TARGET
from eagle31_train.store.shard_plan import plan_shards
from eagle31_train.store.stream import consume

MADE = Made()
NAMES = [planned.name for planned in MADE.plan.shards]
TRAIN = MADE.plan.of("train")


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(stream, "POLL", 0.001)


@pytest.fixture
def store(tmp_path):
    MADE.write(tmp_path / "store")
    return tmp_path / "store"


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


@pytest.mark.core
def test_target_weights_keep_their_bits(store):
    target = Store(store).target
    assert all(torch.equal(target[name], tensor) for name, tensor in MADE.weights.items())


@pytest.fixture
def bucket(tmp_path):
    """A whole store on another machine."""
    storage = open_storage("memory://bucket/store", tmp_path / "cache", 100_000)
    MADE.write(storage)
    yield storage
    storage.fs.rm("/bucket", recursive=True)
    storage.close()


def test_a_copy_that_is_damaged_on_its_way_is_fetched_again_or_named(bucket, monkeypatch):
    right, spoilt = bucket.fs.get_file, []

    def get_file(remote, local, **options):
        right(remote, local, **options)
        if remote.endswith(NAMES[3]) and len(spoilt) < times:
            spoilt.append(remote)
            flip_bit(Path(local))

    monkeypatch.setattr(bucket.fs, "get_file", get_file)
    times = 1
    assert read_whole(bucket)[1] is None
    assert len(spoilt) == 1
    times, spoilt[:] = 9, []
    bucket.forget(NAMES[3])
    found, message = read_whole(bucket)
    assert "train-00001.safetensors (samples 3 to 3 of train) has changed since it was written" in message
    assert len(found["train"]) == 3


def held(storage):
    return {name: storage.read(name) for folder in ("", "shards") for name in storage.sizes(folder)}


def lost(storage, name):
    storage.remove(name)


def shortened(storage, name):
    storage.write(name, storage.read(name)[:-1])


def flipped(storage, name):
    """Its size stays, and `finished` compares no more of big files: `verify` must take the file away."""
    content = bytearray(storage.read(name))
    content[-3] ^= 1
    storage.write(name, bytes(content))
    assert name not in (TARGET, *NAMES) or main(["verify", storage.location, "--remove"]) == 1


@pytest.mark.parametrize("spoil", [lost, shortened, flipped])
@pytest.mark.parametrize("name", ["plan.json", "provenance.json", "shards.jsonl", TARGET, "target.json", NAMES[3]])
@pytest.mark.parametrize("remote", [False, True])
def test_the_advice_to_extract_again_helps_and_costs_no_more_than_it_must(
    store, bucket, monkeypatch, remote, name, spoil
):
    storage, inputs = bucket if remote else LocalStorage(str(store), store), Provenance(MADE.provenance["inputs"])
    whole = held(storage)
    assert finished(storage, inputs, overwrite=False) is not None
    spoil(storage, name)
    assert finished(storage, inputs, overwrite=False) is None
    written = watched(monkeypatch, writer, "write_shard")
    MADE.write(storage)
    assert held(storage) == whole
    assert finished(storage, inputs, overwrite=False) is not None
    # shards.jsonl commits shards: without it, none is.
    assert len(written) == {NAMES[3]: 1, "shards.jsonl": len(NAMES) if spoil is lost else 1}.get(name, 0)


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


@pytest.mark.parametrize("remote", [False, True])
def test_a_store_with_what_is_somebody_elses_is_not_removed(store, bucket, remote):
    (store / "other").mkdir()
    (store / "other" / "mine.txt").write_text("mine")
    bucket.fs.pipe_file(f"{bucket.root}/other/mine.txt", b"mine")
    storage, other = bucket if remote else LocalStorage("the store", store), Made(fingerprint="e" * 16)
    said = message_of(other.writer, storage, overwrite=True)
    assert "also holds other, which is not part of a store" in said
    assert read_whole(storage)[1] is None


@pytest.mark.parametrize("folder", ["", "train", "data", "export", "evaluate"])
def test_a_folder_of_another_stage_is_no_damaged_store(capsys, folder):
    run = Path(__file__).parents[1] / "fixtures" / "v68c343f" / "run"
    assert main(["verify", str(run / folder)]) == 2
    said = f"there is no store in {run / folder}: use {run / 'store'}"
    assert capsys.readouterr().err == f"error: {said}\n"
    assert read_whole(run / folder)[1] == said


def test_what_is_removed_is_made_anew_and_nothing_else(store, capsys):
    whole = contents(store)
    flip_bit(store / NAMES[0])
    shutil.copy(store / NAMES[1], store / NAMES[2])
    (store / NAMES[4]).unlink()
    lines = (store / "shards.jsonl").read_bytes().splitlines(keepends=True)
    (store / "shards.jsonl").write_bytes(b"".join([lines[0], *lines[2:]]))
    assert main(["verify", str(store), "--remove"]) == 1
    assert "\nremoved: 2 files; " in capsys.readouterr().out
    assert main(["verify", str(store)]) == 1
    assert "--remove" not in capsys.readouterr().out  # what is missing need not be removed
    MADE.write(store)
    assert contents(store) == whole


def test_a_reader_compares_the_samples_that_it_reads_and_not_the_whole_store(store, monkeypatch):
    """Each process of a training reads a few samples of each shard."""
    compared = watched(monkeypatch, artifacts, "checksum")
    planned = TRAIN[0]
    fine, spoilt = planned.first, planned.first + 1
    assert [len(document.supervised) for document in MADE.of(planned)] == [4, 1, 0]
    tensors = load_file(store / planned.name)
    tensors["last.values"].view(torch.uint8)[-1] ^= 1
    save_file(tensors, store / planned.name)
    split = Store(store).split("train")
    for _ in range(2):
        split.read(fine)
        split.read(spoilt, states=False)
        split.store.release([planned])
    assert compared == []
    assert "has changed since it was written" in message_of(split.read, spoilt)
    file = split.store.open(planned)
    with patch.object(shard, "_of_states", lambda document: file._unread.pop(0)):  # as another thread's read may
        split.read(fine)
    other = TRAIN[1]
    split.store.open(other)._unread[0] = "0" * 16  # as if the disk had erred for once
    compared.clear()
    assert torch.equal(split.read(other.first).tokens, MADE.of(other)[0].tokens)
    assert len(compared) == 1


@pytest.mark.parametrize("codec", ["bf16", "int8_channel"])
def test_no_byte_of_a_shard_can_change_unseen_by_who_reads_its_samples(tmp_path, codec):
    Made(aux_codec=codec, last_codec=codec).write(tmp_path)
    file = tmp_path / NAMES[2]
    whole = file.read_bytes()
    for at in range(0, len(whole), 5):
        flip_bit(file, at)
        assert NAMES[2] in read_whole(tmp_path)[1], at
        file.write_bytes(whole)


def test_a_shard_of_an_earlier_version_is_compared_as_a_whole_once_and_again_when_it_is_replaced(store, monkeypatch):
    compared = watched(monkeypatch, artifacts, "checksum")
    reader, planned = Store(store), TRAIN[1]
    reader._lines = {name: replace(line, checksums=None) for name, line in reader._lines.items()}
    for _ in range(2):
        reader.split("train").read(planned.first)
        reader.release([planned])
    assert len(compared) == 1
    flip_bit(store / planned.name)
    assert "has changed since it was written" in message_of(reader.split("train").read, planned.first)


def test_extraction_waits_for_room_and_training_makes_it(tmp_path):
    bound = sum(planned.bytes for planned in MADE.plan.of("heldout")) + max(planned.bytes for planned in TRAIN)
    with ThreadPoolExecutor() as pool:
        extraction = pool.submit(MADE.write, tmp_path, max_bytes=bound, patience=30.0)
        reader = Store(tmp_path, follow=True, patience=30.0)
        assert reader.max_bytes == bound
        for planned in TRAIN:
            reader.wait_for([planned])
            documents = reader.split("train").read_all(range(planned.first, planned.end))
            for got, wanted in zip(documents, MADE.of(planned), strict=True):
                assert torch.equal(got.aux.decode(), wanted.aux.values.bfloat16())
            assert sum(path.stat().st_size for path in (tmp_path / "shards").glob("*.safetensors")) <= bound
            reader.release([planned])
            consume(reader.storage, reader.fingerprint, [planned], "t" * 16, planned is TRAIN[-1])
        extraction.result()
    assert reader.max_bytes == bound, "though extraction is over: the rest is used up as before"
    assert {f"shards/{path.name}" for path in (tmp_path / "shards").iterdir()} == {NAMES[0], NAMES[1]}
    # Complete, though used up: extraction is done with it, and a training is told by whom.
    storage = LocalStorage("the store", tmp_path)
    assert finished(storage, Provenance(MADE.provenance["inputs"]), overwrite=False) is not None
    found, message = read_whole(tmp_path)
    assert len(found["heldout"]) == 3
    assert f"{TRAIN[0].name} ({TRAIN[0].samples()}) was used up and removed by the training {'t' * 16}" in message


def test_another_training_does_not_use_up_the_same_store(tmp_path):
    MADE.write(tmp_path, stop_after=4)
    storage = LocalStorage("the store", tmp_path)
    store = MADE.provenance["fingerprint"]
    consume(storage, store, TRAIN[:1], "one", False)
    consume(storage, store, TRAIN[:1], "one", False)
    said = message_of(consume, storage, store, TRAIN[1:2], "two", False)
    assert "used up and removed by another training (one, this is two)" in said
    assert (tmp_path / TRAIN[1].name).exists()


def test_what_a_training_uses_up_meanwhile_is_not_missing(tmp_path):
    MADE.write(tmp_path)
    storage, checked = LocalStorage("the store", tmp_path), Counter()
    storage.prefetch = lambda _: consume(storage, MADE.fingerprint, TRAIN[:1], "one", False)
    assert not list(check(storage, checked))
    assert (checked["consumed"], checked["shards"]) == (1, len(NAMES) - 1)
    there = sum((tmp_path / name).stat().st_size for name in NAMES if (tmp_path / name).exists())
    assert f"{tqdm.format_sizeof(there, 'B')}, " in _describe(storage)


def test_a_kill_between_a_new_file_and_its_line_does_not_leave_the_old_line(tmp_path):
    """A shard made again need not have the same bytes, as on a GPU."""
    MADE.write(tmp_path)
    planned = TRAIN[1]
    (tmp_path / planned.name).unlink()
    writer = MADE.writer(tmp_path)
    assert not writer.has(planned)
    other = MADE.of(planned)
    other[0].tokens[0] = (other[0].tokens[0] + 1) % 40
    interrupt(writer.storage, "write", writer.write, planned, other, when=lambda name, _: name == planned.line)
    MADE.write(tmp_path)
    assert read_whole(tmp_path)[1] is None


def test_a_follower_waits_for_what_is_not_there_yet_and_gives_up_in_the_end(tmp_path):
    for begin in (lambda _: None, MADE.writer):  # a writer has prepared the store, without the target's weights
        begin(tmp_path)
        said = message_of(Store, tmp_path, follow=True, patience=0.0)
        assert f"waiting for `eagle31 extract` to begin {tmp_path}: nothing came" in said
    MADE.write(tmp_path, stop_after=3)
    storage, asked = LocalStorage(str(tmp_path), tmp_path), []
    storage.read = lambda name: (asked.append(name), LocalStorage.read(storage, name))[1]
    reader = Store(storage, follow=True, patience=0.0)
    assert not any(name.startswith("shards/") for name in asked), "there may be 10^5 of them"
    assert f"train: waiting for {NAMES[4]}: nothing came for 0 s" in message_of(reader.wait_for, MADE.plan.shards[4:])
    MADE.write(tmp_path)  # whose lines are merged by now
    reader.wait_for(MADE.plan.shards)
    assert [len(document) for document in reader.split("train").read_all([4, 0, 4])] == [6, 9, 6]


def test_a_follower_that_is_closed_waits_no_more_and_fetches_nothing_ahead(tmp_path):
    MADE.write(tmp_path, stop_after=3)
    storage, closed = LocalStorage(str(tmp_path), tmp_path), []
    storage.close = lambda: closed.append(True)
    reader = Store(storage, follow=True, patience=5.0)
    reader.close()
    with pytest.raises(RuntimeError, match=r"waiting for .*: stopped"):
        reader.wait_for(MADE.plan.shards[4:])
    assert closed == [True]


def test_a_follower_is_patient_while_other_shards_come(tmp_path):
    MADE.write(tmp_path, stop_after=3)
    reader, looks = Store(tmp_path, follow=True, patience=0.0), []

    def sizes(folder):
        looks.append(folder)
        if len(looks) == 4:
            MADE.write(tmp_path)
        return range(len(looks))  # of which there are ever more

    reader.storage.sizes = sizes
    reader.wait_for(MADE.plan.shards[4:])
    assert len(looks) == 4


def test_a_follower_does_not_wait_for_what_is_there_and_damaged(tmp_path):
    MADE.write(tmp_path, stop_after=4)
    flip_bit(tmp_path / TRAIN[1].line)
    reader = Store(tmp_path, follow=True, patience=0.0)
    reader.wait_for(TRAIN[:1])
    message = message_of(reader.wait_for, TRAIN[1:2])
    assert TRAIN[1].line in message
    assert "nothing came" not in message


def test_a_complete_store_of_other_inputs_is_refused_and_with_overwrite_it_is_as_none(store):
    storage, other = LocalStorage("the store", store), Provenance({**MADE.provenance["inputs"], "data": "e" * 16})
    assert "data: dddddddddddddddd there, eeeeeeeeeeeeeeee here" in message_of(finished, storage, other, False)
    assert finished(storage, other, overwrite=True) is None


def test_a_complete_store_keeps_its_manifest_though_the_record_of_what_was_used_up_is_damaged(store):
    """Extraction cannot make that again: it says what to do, and so does a reader."""
    reader = Store(store)
    consume(reader.storage, reader.fingerprint, [], "a" * 16, finished=False)
    flip_bit(store / "consumed.json", 12)
    record = Provenance(reader.inputs)
    for call in (lambda: Store(store), lambda: finished(reader.storage, record, overwrite=False)):
        message = message_of(call)
        assert "consumed.json is damaged" in message
        assert message.endswith(": remove the store and extract again")
    assert (store / artifacts.MANIFEST).is_file()


def test_of_more_shards_than_may_be_open_the_one_that_is_read_is(tmp_path, monkeypatch):
    MADE.write(tmp_path)
    monkeypatch.setattr(reader, "OPEN", {"local": 1, "remote": 1})
    assert read_whole(tmp_path)[1] is None


def test_copies_of_a_store_on_another_machine_stay_mapped_only_a_few_at_a_time(tmp_path):
    """What is evicted from the cache, or removed, frees no byte of the disk before it is unmapped."""
    many, copies = Made({"train": [14] * 12, "heldout": [5]}), open_storage("memory://many", tmp_path / "copies", 10**6)
    mapped = {}
    for name, storage in {"remote": copies, "local": LocalStorage("here", tmp_path / "here")}.items():
        many.write(storage)
        split = Store(storage).split("train")
        split.read_all(range(12))
        lines = Path("/proc/self/maps").read_text().splitlines()
        mapped[name] = {line.split()[-1] for line in lines if str(tmp_path) in line and "/shards/" in line}
    copies.fs.rm("/many", recursive=True)
    copies.close()
    assert 1 < len(mapped["remote"]) <= 8
    assert len(mapped["local"]) == 12


def test_a_bound_is_for_the_held_out_split_and_a_shard_together(tmp_path):
    sizes = {split: [shard.bytes for shard in MADE.plan.of(split)] for split in ("heldout", "train")}
    least = sum(sizes["heldout"]) + max(sizes["train"])
    assert "raise it, or lower extract.shard_tokens" in message_of(MADE.writer, tmp_path, max_bytes=least - 1)
    assert MADE.writer(tmp_path, max_bytes=least).max_bytes == least


def test_a_shard_waits_until_it_fits_itself_and_held_out_ones_are_always_wanted(tmp_path):
    held, (first, second, *_) = MADE.plan.of("heldout"), MADE.plan.of("train")
    bound = sum(shard.bytes for shard in [*held, first, second]) - 1
    writer = MADE.writer(tmp_path, max_bytes=bound, patience=0.0)
    assert all(writer.wait_for_quota(shard) for shard in [*held, first])
    assert "is at store.max_bytes until training uses up a shard" in message_of(writer.wait_for_quota, second)
    consume(writer.storage, writer.id, [first], "t" * 16, False)
    (tmp_path / first.name).touch()  # as if the training had been killed before it removed this
    assert writer.wait_for_quota(second)
    assert not (tmp_path / first.name).exists(), "it would lie beside what comes"
    consume(writer.storage, writer.id, [], "t" * 16, True)  # the training has ended
    assert [writer.wait_for_quota(shard) for shard in (held[0], second)] == [True, False]


def test_a_process_waits_until_the_first_has_prepared_the_store_for_as_many(tmp_path):
    """Else shards would be nobody's, or two's."""
    first = MADE.writer(tmp_path, ranks=2)
    assert "2 share it so far" in message_of(MADE.writer, tmp_path, rank=1, ranks=3, patience=0.0)
    second = MADE.writer(tmp_path, rank=1, ranks=2, patience=0.0)
    assert sorted(shard.number for one in (first, second) for shard in one.mine()) == list(range(len(NAMES)))


def test_a_store_that_is_made_again_is_not_complete_meanwhile(tmp_path):
    MADE.write(tmp_path)
    (tmp_path / MADE.plan.shards[-1].name).unlink()
    MADE.writer(tmp_path)
    assert "manifest.json is missing" in message_of(Store, tmp_path)
