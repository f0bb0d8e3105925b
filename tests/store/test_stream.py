"""A store that is bounded, and followed while it is written: room, patience, what is used up, and kills between."""

import threading
from unittest.mock import patch

import pytest
import torch
from made import Made, message_of, read_whole
from pipeline import contents

from eagle31_train.provenance import Provenance
from eagle31_train.store import Store, finished, stream
from eagle31_train.store.backends import LocalStorage
from eagle31_train.store.sealed import seal
from eagle31_train.store.stream import consume

MADE = Made()
NAMES = [planned.name for planned in MADE.plan.shards]


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(stream, "POLL", 0.001)


@pytest.mark.core
def test_extraction_waits_for_room_and_training_makes_it(tmp_path):
    train = MADE.plan.of("train")
    bound = sum(planned.bytes for planned in MADE.plan.of("heldout")) + max(planned.bytes for planned in train)
    failures, largest = [], []

    def extract():
        try:
            MADE.write(tmp_path, max_bytes=bound, patience=30.0)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=extract)
    thread.start()
    reader = Store(tmp_path, follow=True, patience=30.0)
    assert reader.max_bytes == bound
    for planned in train:
        reader.wait_for([planned])
        documents = [reader.split("train").read(i) for i in range(planned.first, planned.end)]
        for got, wanted in zip(documents, MADE.of(planned), strict=True):
            assert torch.equal(got.aux.decode(), wanted.aux[: wanted.attended].bfloat16())
        largest.append(sum(path.stat().st_size for path in (tmp_path / "shards").glob("*.safetensors")))
        reader.release([planned])
        consume(reader.storage, [planned], "t" * 16, planned is train[-1])
    thread.join()
    assert not failures
    assert max(largest) <= bound
    assert sorted(path.name for path in (tmp_path / "shards").iterdir()) == [
        "heldout-00000.safetensors",
        "heldout-00001.safetensors",
    ]
    # Complete, though used up: extraction is done with it, and a training is told by whom.
    storage = LocalStorage("the store", tmp_path)
    assert finished(storage, Provenance(MADE.provenance["inputs"]), overwrite=False) is not None
    found, message = read_whole(tmp_path)
    assert len(found["heldout"]) == 3
    assert f"{train[0].name} ({train[0].samples()}) was used up and removed by the training {'t' * 16}" in message


def test_a_bound_that_no_training_could_live_with_is_refused(tmp_path):
    message = message_of(MADE.writer, tmp_path, max_bytes=9000)
    assert "store.max_bytes=9,000 cannot hold the held-out split and one shard" in message
    assert not contents(tmp_path)


def test_a_training_that_is_finished_wants_no_more(tmp_path):
    MADE.write(tmp_path, stop_after=2, max_bytes=30_000)
    consume(LocalStorage("the store", tmp_path), [], "t" * 16, finished=True)
    writer = MADE.writer(tmp_path, max_bytes=30_000)
    held, wanted = MADE.plan.of("heldout")[0], MADE.plan.of("train")[-1]
    assert writer.wait_for_quota(held)
    assert not writer.wait_for_quota(wanted)


def test_another_training_does_not_use_up_the_same_store(tmp_path):
    MADE.write(tmp_path, stop_after=3)
    storage = LocalStorage("the store", tmp_path)
    consume(storage, MADE.plan.shards[:1], "one", False)
    consume(storage, MADE.plan.shards[:1], "one", False)
    assert "used up and removed by another training (one, this is two)" in message_of(
        consume, storage, MADE.plan.shards[1:2], "two", False
    )
    assert (tmp_path / NAMES[1]).exists()


def test_a_store_that_was_lost_but_for_what_was_used_up_keeps_to_its_bound(tmp_path):
    """A RAM disk after a restart: training has recorded anew what it had used up, all lines are gone."""
    train, storage = MADE.plan.of("train"), LocalStorage("the store", tmp_path)
    bound = sum(planned.bytes for planned in MADE.plan.of("heldout")) + max(planned.bytes for planned in train)
    consume(storage, train[:-1], "one", False)
    writer = MADE.writer(tmp_path, max_bytes=bound, patience=0.0)
    most = 0
    for planned in writer.mine():
        assert not writer.has(planned)
        assert writer.wait_for_quota(planned)
        writer.write(planned, MADE.of(planned))
        most = max(most, sum(path.stat().st_size for path in (tmp_path / "shards").glob("*.safetensors")))
    assert most <= bound
    assert {name for name in storage.names("shards") if name.endswith(".safetensors")} == {
        *(planned.name for planned in MADE.plan.of("heldout")),
        train[-1].name,
    }


def test_what_a_killed_training_recorded_but_did_not_remove_makes_room_only_once_it_is_gone(tmp_path):
    train = MADE.plan.of("train")
    bound = sum(planned.bytes for planned in MADE.plan.of("heldout")) + max(planned.bytes for planned in train)
    MADE.write(tmp_path, stop_after=len(MADE.plan.of("heldout")) + 1)
    assert (tmp_path / train[0].name).exists()
    (tmp_path / "consumed.json").write_bytes(seal({"by": "t", "shards": [train[0].name], "finished": False}, indent=2))
    writer = MADE.writer(tmp_path, max_bytes=bound, patience=0.0)
    assert writer.wait_for_quota(train[1])
    assert not (tmp_path / train[0].name).exists()


@pytest.mark.core
def test_a_kill_between_a_new_file_and_its_line_does_not_leave_the_old_line(tmp_path):
    """A shard made again need not have the same bytes: a GPU rounds otherwise the second time."""
    MADE.write(tmp_path)
    planned = MADE.plan.of("train")[1]
    (tmp_path / planned.name).unlink()
    writer = MADE.writer(tmp_path)
    assert not writer.has(planned)
    other = MADE.of(planned)
    other[0].tokens[0] = (other[0].tokens[0] + 1) % 40
    right = writer.storage.write

    def killed(name, data):
        if name == planned.line:
            raise KeyboardInterrupt
        right(name, data)

    with patch.object(writer.storage, "write", killed), pytest.raises(KeyboardInterrupt):
        writer.write(planned, other)
    MADE.write(tmp_path)
    assert read_whole(tmp_path)[1] is None


def test_a_follower_waits_for_what_is_not_there_yet_and_gives_up_in_the_end(tmp_path):
    assert "to be begun by `python -m eagle31_train.extract`: nothing came" in message_of(
        Store, tmp_path, follow=True, patience=0.0
    )
    MADE.write(tmp_path, stop_after=3)
    reader = Store(tmp_path, follow=True, patience=0.0)
    assert f"train: waiting for {NAMES[4]}: nothing came for 0 s" in message_of(reader.wait_for, MADE.plan.shards[4:])
    MADE.write(tmp_path)  # whose lines are merged by now
    reader.wait_for(MADE.plan.shards)
    assert len(reader.split("train").read_all(range(6))) == 6
