"""Training beside extraction, in a store that is never as large as its corpus: bounded, killed and gone on with."""

import json
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import pairwise

import pytest
from launching import arguments
from pipeline import save_quietly, tiny_llama, write_data
from surviving import death, dies, differences, ends_well, lines, working
from watching import updates_of

from eagle31_train.store import Store
from train import windows

# Long enough that a tenth of the corpus holds the held-out split and two windows.
LENGTHS = {"train": [9 + 7 * i % 23 for i in range(340)], "heldout": [10, 14]}
WINDOW = 70
MORE = [f"train.window_tokens={WINDOW}", "train.epochs=1", "train.eval_every=10", "train.checkpoint_every=2"]
MORE += ["store.aux_codec=int8_channel", "store.patience=120"]

# What each side calls, at least so often in two or three steps or shards.
CALLED = {
    "train": (
        ("train.prepare.claim", 1),
        ("train.prepare.restore", 1),
        ("train.trainer.accumulate", 2),
        ("train.metrics.append", 2),
        ("train.trainer.take_snapshot", 2),
        ("train.windows.Usage.release", 2),
        ("train.windows.consume", 2),
    ),
    "extract": (
        ("eagle31_train.store.writer.StoreWriter._prepare", 1),
        ("eagle31_train.targets.extraction.run_shard", 2),
        ("eagle31_train.store.writer.StoreWriter.wait_for_quota", 2),
        ("eagle31_train.store.writer.write_shard", 2),
        ("eagle31_train.store.writer.StoreWriter._commit", 2),
        ("eagle31_train.common.artifacts.commit", 2),
    ),
}
WAYS = {"train": ["call"] * 14 + ["save"] * 6 + ["outside"] * 5, "extract": ["call"] * 19 + ["outside"] * 6}


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_both_sides_of_a_store_a_tenth_of_its_corpus_are_killed_fifty_times(copy_of, tmp_path):
    save_quietly(tiny_llama(), tmp_path / "target")
    write_data(tmp_path / "run", LENGTHS)
    whole, run = (copy_of(tmp_path / name, tmp_path) for name in ("whole", "followed"))
    for stage in ("extract", "train"):
        ends_well(start(whole, stage), whole.folder / f"{stage}.log")
    store = Store(whole.folder / "run" / "store")
    heldout, two_windows = store.plan.of("heldout"), pairwise(windows.cut(store.split("train"), WINDOW))
    limit, most = bytes_in(store.plan.shards) // 10, 0
    assert limit >= bytes_in(heldout) + max(bytes_in([*first, *second]) for first, second in two_windows)
    more = {"extract": [f"store.max_bytes={limit}"], "train": ["store.follow=true"]}
    pause = threading.Event()
    with ThreadPoolExecutor(2) as pool:
        sides = [pool.submit(survive, run, stage, more[stage]) for stage in more]
        while not all(side.done() for side in sides):
            most = max(most, min(bytes_of(run), bytes_of(run)))  # a look at many files is not one moment's
            pause.wait(0.01)
    for side in sides:
        side.result()
    assert limit // 2 < most <= limit
    assert not differences(run, whole)
    trained = [i for samples in updates_of(run.folder / "ledger") for i in samples]
    assert sorted(trained) == list(range(len(LENGTHS["train"])))
    assert sorted(consumed(run)) == sorted(shard.name for shard in store.plan.of("train"))


def bytes_in(shards):
    return sum(shard.bytes for shard in shards)


def start(run, stage, more=(), **disturbance):
    ledger = str(run.folder / "ledger") if stage == "train" else None
    return working(stage, arguments(run, *MORE, *more), run.folder / f"{stage}.log", ledger=ledger, **disturbance)


def survive(run, stage, more):
    """One side dies in all its ways, each time in another launch, and then ends well."""
    chosen, ways, output = random.Random(stage), list(WAYS[stage]), run.folder / f"{stage}.log"
    chosen.shuffle(ways)
    for way in ways:
        disturbance = death(way, chosen, {"call": CALLED[stage]})
        dies(partial(start, run, stage, more), partial(progress, run, stage), chosen, output, **disturbance)
    ends_well(start(run, stage, more), output)


def progress(run, stage):
    """Updates, or shards that were ever committed."""
    if stage == "train":
        return lines(run.folder / "ledger")
    return len({*consumed(run), *(f"shards/{file.name}" for file in shards_of(run))})


def consumed(run):
    file = run.folder / "run" / "store" / "consumed.json"
    return json.loads(file.read_text())["shards"] if file.exists() else []


def shards_of(run, names="*.safetensors"):
    return (run.folder / "run" / "store" / "shards").glob(names)


def bytes_of(run):
    """Of all shards, and of what is to become one."""
    total = 0
    for file in [*shards_of(run), *shards_of(run, ".*.tmp")]:
        with suppress(FileNotFoundError):
            total += file.stat().st_size
    return total
