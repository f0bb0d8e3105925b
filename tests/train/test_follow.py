"""Training beside extraction, in a store that is never as large as its corpus: bounded, killed and gone on with."""

import json
import random
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import pairwise

import pytest
from pipeline import assert_equal, options, save_quietly, tiny_llama, write_data
from safetensors.torch import load_file
from surviving import lines, wait_until, working
from watching import updates_of

from eagle31_train.store import Store
from train import windows

# Long enough that a tenth of the corpus holds the held-out split and two windows.
LENGTHS = {"train": [9 + 7 * i % 23 for i in range(340)], "heldout": [10, 14]}
WINDOW = 70
MORE = (
    f"train.window_tokens={WINDOW}",
    "train.epochs=1",
    "train.eval_every=10",
    "train.checkpoint_every=7",
    "store.aux_codec=int8_channel",
    "store.patience=120",
)


def prepare(folder):
    """folder/target and folder/run/data, the same each time."""
    save_quietly(tiny_llama(), folder / "target")
    write_data(folder / "run", LENGTHS)
    return folder


def bound_of(corpus):
    """Held-out split and two windows, by the plan."""
    plan = Store(corpus / "run" / "store").plan
    kept = sum(shard.bytes for shard in plan.of("heldout"))
    cut = windows.cut(Store(corpus / "run" / "store").split("train"), WINDOW)
    sizes = [sum(shard.bytes for shard in window) for window in cut]
    return kept + max(map(sum, pairwise(sizes)))


def trained(folder):
    train = folder / "run" / "train"
    manifest = json.loads((train / "manifest.json").read_text())
    return (train / "metrics.jsonl").read_text(), load_file(train / manifest["checkpoint"] / "model.safetensors")


def assert_same_training(ours, theirs):
    rows, weights = trained(ours)
    wanted_rows, wanted = trained(theirs)
    assert rows == wanted_rows
    assert_equal(weights, wanted)


def consumed(folder):
    file = folder / "run" / "store" / "consumed.json"
    return json.loads(file.read_text())["shards"] if file.exists() else []


# What each side calls: often, in two or three steps or shards, but for the first ones.
CALLED = {
    "train": [
        "train.prepare.claim",
        "train.prepare.restore",
        "train.trainer.accumulate",
        "train.metrics.append",
        "train.trainer.take_snapshot",
        "train.windows.Usage.release",
        "train.windows.consume",
    ],
    "extract": [
        "eagle31_train.store.writer.StoreWriter._prepare",
        "eagle31_train.targets.extraction.run_shard",
        "eagle31_train.store.writer.StoreWriter.wait_for_quota",
        "eagle31_train.store.writer.write_shard",
        "eagle31_train.store.writer.StoreWriter._commit",
        "eagle31_train.artifacts.commit",
    ],
}
WAYS = {"train": ["call"] * 14 + ["save"] * 6 + ["outside"] * 5, "extract": ["call"] * 19 + ["outside"] * 6}


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_both_sides_of_a_store_a_tenth_of_its_corpus_are_killed_fifty_times(tmp_path):
    whole = prepare(tmp_path / "whole")
    for stage in ("extract", "train"):
        run_through(whole, stage)
    plan = Store(whole / "run" / "store").plan
    limit = sum(shard.bytes for shard in plan.shards) // 10
    assert limit >= bound_of(whole)
    folder, most = prepare(tmp_path / "followed"), 0
    more = {"extract": [f"store.max_bytes={limit}"], "train": ["store.follow=true"]}
    pause = threading.Event()
    with ThreadPoolExecutor(2) as pool:
        sides = [pool.submit(survive, folder, stage, more[stage]) for stage in more]
        while not all(side.done() for side in sides):
            most = max(most, min(bytes_of(folder), bytes_of(folder)))  # a look at many files is not one moment's
            pause.wait(0.01)
    for side in sides:
        side.result()
    assert limit // 2 < most <= limit
    assert_same_training(folder, whole)
    updates = updates_of(folder / "ledger")
    assert updates == updates_of(whole / "ledger")
    assert sorted(i for samples in updates for i in samples) == list(range(len(LENGTHS["train"])))
    assert sorted(consumed(folder)) == sorted(shard.name for shard in plan.of("train"))


def start(folder, stage, more=(), **disturbance):
    words = options(folder, *MORE, "train.checkpoint_every=2", *more)
    ledger = str(folder / "ledger") if stage == "train" else None
    return working(stage, words, folder / f"{stage}.log", ledger=ledger, **disturbance)


def run_through(folder, stage, more=()):
    with start(folder, stage, more) as process:
        process.join()
    assert process.exitcode == 0, (folder / f"{stage}.log").read_text()[-3000:]


def survive(folder, stage, more):
    """One side dies in all its ways, each time in another launch, and then ends well."""
    chosen, ways = random.Random(stage), list(WAYS[stage])
    chosen.shuffle(ways)
    for way in ways:
        killed_side(folder, stage, more, way, chosen)
    run_through(folder, stage, more)


def killed_side(folder, stage, more, way, chosen):
    disturbance = {"kill_in_save": chosen.randrange(40)} if way == "save" else {}
    if way == "call":
        path = chosen.choice(CALLED[stage])
        once = path in (*CALLED["train"][:2], CALLED["extract"][0])
        disturbance["kill_at"] = (path, chosen.choice(["before", "after"]), 1 if once else chosen.randint(1, 2))
    wanted = progress(folder, stage) + chosen.randint(1, 3)
    with start(folder, stage, more, **disturbance) as process:
        if way == "outside":
            wait_until(lambda: progress(folder, stage) >= wanted, process.is_alive)
            process.kill()
        process.join()
    assert process.exitcode == -signal.SIGKILL, (way, disturbance, (folder / f"{stage}.log").read_text()[-3000:])


def progress(folder, stage):
    """Updates, or shards that were ever committed."""
    if stage == "train":
        return lines(folder / "ledger")
    return len({*consumed(folder), *(f"shards/{file.name}" for file in shards_of(folder))})


def shards_of(folder):
    return (folder / "run" / "store" / "shards").glob("*.safetensors")


def bytes_of(folder):
    """Of all shards, and of what is to become one."""
    total = 0
    for file in [*shards_of(folder), *(folder / "run" / "store" / "shards").glob(".*.tmp")]:
        with suppress(FileNotFoundError):
            total += file.stat().st_size
    return total
