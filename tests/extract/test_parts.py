"""A store shared among commands (`extract.part` of `extract.parts`) and processes: the bytes of one, also resumed."""

import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

import pytest
from made import message_of
from pipeline import make_run, options, timeless
from planting import interrupt, replaced, watched

from eagle31_train.compose import load_config
from eagle31_train.extract import extract
from eagle31_train.store import StoreWriter, shard, stream, writer
from eagle31_train.store.backends import LocalStorage
from eagle31_train.store.sealed import seal
from eagle31_train.targets import extraction as stage
from eagle31_train.targets.hf import HiddenStateTarget

AT_ONCE = "store.patience=0.01"  # who would wait gives up


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """What waits looks often; and transformers loads one model at a time: commands are threads here."""
    lock = threading.Lock()

    @replaced(monkeypatch, stage, "make_engine")
    def make_engine(right, config):
        with lock:
            return right(config)

    monkeypatch.setattr(stream, "POLL", 0.01)


@pytest.fixture
def command(extracted, tmp_path):
    """`command(part, parts, …)`: the configuration of one of several commands with the target of `extracted`."""
    make_run(tmp_path)

    def config(part, parts, *more):
        shared = [f"target.path={extracted / 'target'}", f"extract.part={part}", f"extract.parts={parts}"]
        return load_config(options(tmp_path, *shared, *more))

    return config


def at_once(*configs):
    """Run commands together; what each raised, or None."""
    with ThreadPoolExecutor(len(configs)) as pool:
        return [done.exception() for done in [pool.submit(extract, config) for config in configs]]


@pytest.mark.parametrize("parts", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 3))])
def test_stopped_parts_are_carried_on_by_any_number(extracted, tmp_path, command, parts):
    for part in range(2):
        writes = count()
        interrupt(StoreWriter, "write", extract, command(part, 2), when=lambda *_, writes=writes: next(writes) == 1)
    shards = tmp_path / "run" / "store" / "shards"
    committed = {file: file.stat().st_mtime_ns for file in shards.glob("*.safetensors")}
    assert len(committed) == 2
    assert at_once(*[command(part, parts) for part in range(parts)]) == [None] * parts
    assert timeless(tmp_path / "run" / "store") == timeless(extracted / "run" / "store")
    assert all(file.stat().st_mtime_ns == at for file, at in committed.items()), "made again"


@pytest.mark.parametrize("harmed", ["line", "name"], ids=["its line", "itself"])
def test_who_gathers_waits_for_a_shard_that_is_damaged(extracted, tmp_path, command, monkeypatch, harmed):
    """It is its own process's to make anew, which takes its time."""
    message_of(extract, command(0, 2, AT_ONCE))
    theirs = watched(monkeypatch, StoreWriter, "write")
    extract(command(1, 2))
    file = tmp_path / "run" / "store" / getattr(theirs[-1][1], harmed)
    file.write_bytes(file.read_bytes()[:-1])
    gathers, looks = threading.Event(), threading.Semaphore(0)

    @replaced(monkeypatch, StoreWriter, "gather")
    def gather(right, self):
        gathers.set()
        return right(self)

    @replaced(monkeypatch, writer, "read_lines")
    def read_lines(right, *given):
        found = right(*given)
        if gathers.is_set():
            looks.release()
        return found

    @replaced(monkeypatch, StoreWriter, "write")
    def write(right, self, shard, *rest):
        assert all(looks.acquire(timeout=60) for _ in range(2)), "it looked once, and went on"
        right(self, shard, *rest)

    assert at_once(command(0, 2), command(1, 2)) == [None, None]
    assert timeless(tmp_path / "run" / "store") == timeless(extracted / "run" / "store")


def test_one_store_is_extracted_by_one_command_whatever_their_runs(extracted, tmp_path, monkeypatch):
    """The other begins while the first builds a shard, and when it has discarded what another run had begun."""
    store, link = tmp_path / "there" / "store", tmp_path / "link"
    LocalStorage("", store).write("provenance.json", seal({"fingerprint": "another's"}))
    link.symlink_to(store)
    shared = [f"target.path={extracted / 'target'}", f"data_dir={extracted / 'run' / 'data'}", "overwrite=true"]
    second = load_config(options(tmp_path, *shared, f"store_dir={link}", f"run_dir={tmp_path / 'other'}"))
    refused = []

    @replaced(monkeypatch, shard, "save_file")
    def save_file(right, tensors, path):
        right(tensors, path)
        refused.append(message_of(extract, second))

    extract(load_config(options(tmp_path, *shared, f"store_dir={store}")))
    assert timeless(store) == timeless(extracted / "run" / "store")
    assert len(refused) == len(list((store / "shards").iterdir()))
    words = f"another process is extracting the same shards of {link}: wait for it, or choose another store_dir=…"
    assert set(refused) == {words}


def test_the_gate_looks_at_every_part(command, monkeypatch):
    """Though the one shard that the store records a comparison of is part 0's, and right."""
    message_of(extract, command(0, 2, AT_ONCE, "extract.gate_batches=1"))

    @replaced(monkeypatch, HiddenStateTarget, "states")
    def after_the_norm(right, self, tokens, mask):
        aux, last = right(self, tokens, mask)
        return aux, self.final_norm(last)

    theirs = watched(monkeypatch, StoreWriter, "write")
    message = message_of(extract, command(1, 2, "extract.gate_batches=1"))
    assert message.startswith("fidelity gate: top-1 tokens agree in ")
    assert theirs == []
    assert not (Path(command(1, 2).run_dir) / "store" / "manifest.json").exists()
