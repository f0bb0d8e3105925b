"""A shard is written while the target runs over the next one, and its states are looked at only once they are here."""

import threading
from itertools import count

import pytest
import torch
from made import Made, message_of
from pipeline import timeless, tiny_config
from planting import replaced

from eagle31_train.common.errors import UserError
from eagle31_train.extract import extract
from eagle31_train.store import StoreWriter
from eagle31_train.targets import extraction as stage
from eagle31_train.targets.extraction import Arriving
from eagle31_train.targets.hf import HiddenStateTarget, TransformersEngine

PATIENCE = 60.0  # seconds after which a test that would wait for ever fails


def test_the_target_runs_on_while_a_shard_is_written_and_is_one_shard_ahead_at_most(run, extracted, monkeypatch):
    began, written, numbers = [threading.Event() for _ in range(20)], [], count()

    @replaced(monkeypatch, TransformersEngine, "run")
    def samples(right, *given):
        began[number := next(numbers)].set()
        assert number - len(written) <= 1
        yield from right(*given)

    @replaced(monkeypatch, StoreWriter, "write")
    def write(right, writer, shard, *rest):
        if shard.number + 1 < len(writer.plan.shards):
            assert began[shard.number + 1].wait(PATIENCE), "the target waits for the writer"
        right(writer, shard, *rest)
        written.append(shard.number)

    extract(tiny_config(run))
    assert len(written) > 4
    assert timeless(run / "run" / "store") == timeless(extracted / "run" / "store")


def test_an_error_of_the_writer_ends_the_wait_for_free_bytes(tmp_path):
    made, looks = Made(), []
    bound = sum(s.bytes for s in made.plan.of("heldout")) + max(s.bytes for s in made.plan.of("train"))
    writer = made.writer(tmp_path, max_bytes=bound, patience=PATIENCE)

    def check():
        looks.append(1)
        if len(looks) == 2:
            raise UserError("the disk is full")

    assert message_of(writer.wait_for_quota, made.plan.shards[-1], check) == "the disk is full"


def test_a_state_that_is_no_number_is_named_by_its_sample(run, monkeypatch):
    @replaced(monkeypatch, HiddenStateTarget, "states")
    def spoilt(right, target, tokens, mask):
        aux, last = right(target, tokens, mask)
        if tokens.shape[1] == 30:  # sample 6 of train is the only one so long
            aux[0, 2] = float("inf")
        return aux, last

    message = message_of(extract, tiny_config(run))
    assert message.startswith("shards/train-00003.safetensors: sample 6: the target's hidden states are not finite")


# ---------------------------------------------------------------- imitating a GPU


@pytest.fixture
def late(monkeypatch):
    """Copies that arrive only once they are waited for; the list of those under way."""
    queued = []

    def to_host(x):
        there = torch.full_like(x, 7)
        queued.append((there, x.clone()))
        return there

    class Event:
        def synchronize(self):
            for there, x in queued:
                there.copy_(x)
            queued.clear()

    @replaced(monkeypatch, Arriving, "add")
    def add(right, shard, index, document):
        right(shard, index, document)
        shard._queued[torch.device("cuda")] = Event()

    monkeypatch.setattr(stage, "to_host", to_host)
    return queued


def test_nothing_is_looked_at_before_it_is_here(run, extracted, late, capsys):
    extract(tiny_config(run))
    assert not late
    assert timeless(run / "run" / "store") == timeless(extracted / "run" / "store")
    assert "the target would itself write" in capsys.readouterr().out


@pytest.mark.parametrize("who", ["the gate", "the writer"])
def test_planted_who_does_not_wait_is_found(run, extracted, late, monkeypatch, who):
    gated = [False]

    @replaced(monkeypatch, Arriving, "wait")
    def wait(right, shard):
        if gated[0] == (who == "the gate"):
            shard._queued.clear()
            shard._documents = {index: (document, []) for index, (document, _) in shard._documents.items()}
        return right(shard)

    @replaced(monkeypatch, stage, "run_shard")
    def run_shard(right, *arguments):
        gated[0] = True
        try:
            return right(*arguments)
        finally:
            gated[0] = False

    if who == "the gate":
        assert message_of(extract, tiny_config(run)).startswith("fidelity gate: ")
        return
    extract(tiny_config(run))
    assert timeless(run / "run" / "store") != timeless(extracted / "run" / "store")
