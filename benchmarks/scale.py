"""What a very large store costs before and between steps, without its states: `python -m benchmarks.scale`.

10^7 samples in 10^5 shards are some 6·10^9 tokens, whose states no machine here could hold. Lengths are drawn, and
everything that looks at all samples or shards runs on them, as the stages do it: extraction begins and finishes the
store, of which a training reads the small files, puts its steps in order and learns when shards are used up. 1,024
processes share the shards, and 1,024 ranks the samples of a step.
"""

import argparse
import time
from array import array
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import numpy as np
import torch
from datasets import Dataset

from benchmarks import machine, run_main
from benchmarks.worker import status
from eagle31_train.common import artifacts, order
from eagle31_train.config import TrainConfig
from eagle31_train.rows import samples
from eagle31_train.store import Store, StoreSplit, StoreWriter, shard_plan
from eagle31_train.store.backends import LocalStorage
from eagle31_train.store.format import PLAN, TARGET, Line
from eagle31_train.store.shard_plan import HEADER, Plan, PlannedShard, Shape, plan_shards
from train import inputs, windows

RANKS = 1024
BATCH_TOKENS = 2**22  # 4,096 tokens for each rank
LONGEST = 4096
MASKS = 10**5  # samples whose loss masks are drawn
STEPS = 20  # whose samples are shared among the ranks
STATES = {"aux_layers": [1], "hidden_size": 8, "vocab_size": 8, "aux_codec": "fp8", "last_codec": "fp8"}
STATES["norm"] = {"kind": "rms", "eps": 1e-5}
PROVENANCE = {"fingerprint": "f" * 16, "inputs": {"data": "d" * 16, "target": {}}, "states": STATES}

Result = TypeVar("Result")


def draw_lengths(samples: int, seed: int = 0) -> list[int]:
    drawn = np.random.default_rng(seed).lognormal(np.log(500), 0.7, samples)
    return np.clip(drawn, 16, LONGEST).astype(int).tolist()


def make_plan(lengths: list[int], shards: int) -> Plan:
    """Plan a store of these training samples in about `shards` shards."""
    planned = []
    for number, (first, end) in enumerate(plan_shards(lengths, sum(lengths) // shards)):
        tokens = sum(lengths[first:end])
        name = f"shards/train-{number:05d}.safetensors"
        planned.append(PlannedShard(name, "train", number, first, end, tokens, HEADER + tokens * 14_000))
    supervised = {"heldout": array("q"), "train": array("q", (length // 2 for length in lengths))}
    return Plan({"heldout": [], "train": lengths}, planned, supervised)


class Stopwatch:
    """Prints seconds of each piece of work, and the most memory that the process held during it."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def __call__(self, what: str, work: Callable[[], Result]) -> Result:
        with suppress(OSError):  # otherwise VmHWM is the most of all pieces so far
            Path("/proc/self/clear_refs").write_text("5")
        began, busy = time.perf_counter(), time.process_time()
        result = work()
        row = {"what": what, "seconds": time.perf_counter() - began, "cpu_seconds": time.process_time() - busy}
        self.rows.append({**row, "most_mib": status("VmHWM") / 2**20, "mib": status("VmRSS") / 2**20})
        print(f"{what:<58} {row['cpu_seconds']:9.3f} s of a core {self.rows[-1]['most_mib']:7,.0f} MiB", flush=True)
        return result


def share_steps(schedule: list[list[int]], split: StoreSplit) -> None:
    """Share the first steps among RANKS; every sample goes to exactly one rank."""
    for batch in schedule[:STEPS]:
        costs = order.costs(*split.sizes(batch), TrainConfig().ttt_length)
        shares = order.share(batch, costs, RANKS)
        assert sorted(i for share in shares for i in share) == sorted(batch), "a sample is lost or there twice"


def plan_from_masks(watch: Stopwatch, lengths: list[int], folder: Path) -> None:
    """Plan a store of MASKS samples, as extraction does, from a data set on disk."""
    some, random = lengths[:: max(1, len(lengths) // MASKS)], np.random.default_rng(0)
    Dataset.from_dict({"loss_mask": [random.random(length) < 0.5 for length in some]}).save_to_disk(folder)
    rows = {"train": samples.column(Dataset.load_from_disk(folder), "loss_mask"), "heldout": []}
    shape = Shape(8, 1, "fp8", "fp8")
    plan = watch(f"extraction reads {len(some):,} loss masks", lambda: shard_plan.make_plan(rows, LONGEST * 16, shape))
    assert plan.lengths["train"] == some


def extract(watch: Stopwatch, lengths: list[int], shards: int, folder: Path) -> None:
    """Begin and finish a store, as if its shards had been written."""
    storage = LocalStorage(str(folder), folder)
    plan = watch("the shards are planned", lambda: make_plan(lengths, shards))
    writer = watch("extraction begins the store", lambda: StoreWriter(storage, PROVENANCE, plan, ranks=RANKS))
    print(f"  {(folder / PLAN).stat().st_size / 2**20:,.0f} MiB of plan, {len(plan.shards):,} shards")
    mine = watch(f"its first process of {RANKS:,} finds its shards", writer.mine)
    assert len(mine) >= len(plan.shards) // RANKS
    writer.write_tensors(TARGET, {"embed_tokens": torch.zeros(8, 8), "norm": torch.ones(8)})
    writer.lines = {shard.name: Line(shard.name, writer.id, shard.bytes, "0" * 32) for shard in plan.shards}
    writer._sizes = {shard.name: shard.bytes for shard in plan.shards}
    watch("and finishes the store", lambda: finish(writer))


def finish(writer: StoreWriter) -> None:
    lines = writer.gather()
    assert lines is not None  # all of them are there
    writer.finish(lines, {"seconds": 0.0})


def start_training(watch: Stopwatch, folder: Path) -> tuple[StoreSplit, list[list[int]]]:
    """Do what training does with all samples and shards before its first step; return its split and its steps."""

    def opened() -> StoreSplit:
        split = Store(folder).split("train")
        inputs.tokens_of_a_step(split, TrainConfig(batch_tokens=BATCH_TOKENS))
        return split

    split = watch("training opens the store", opened)
    cut = windows.cut(split, None)
    schedule = watch(
        "puts the steps of a pass in order",
        lambda: order.schedule(split.lengths, BATCH_TOKENS, 0, 1, None, windows.samples(cut)),
    )
    print(f"  {len(schedule):,} steps")
    usage = watch(
        "learns when each shard is used up", lambda: windows.Usage(split.store, split, schedule, cut, "t" * 16)
    )
    watch("and which shards are needed", lambda: usage.begin(0, remove=True))
    watch("at a checkpoint: which are needed no more", lambda: usage.release(len(schedule), remove=True))
    return split, schedule


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--samples", type=float, default=1e7)
    parser.add_argument("--shards", type=float, default=1e5)
    parser.add_argument("--out", type=Path, default=Path("runs/bench/scale.json"))
    chosen = parser.parse_args()
    watch, lengths = Stopwatch(), draw_lengths(int(chosen.samples))
    print(machine.summary(machine.describe()))
    held = status("VmRSS") / 2**20
    print(f"{len(lengths):,} samples, {sum(lengths):,} tokens; {held:,.0f} MiB with their lengths alone")
    with TemporaryDirectory() as folder:
        plan_from_masks(watch, lengths, Path(folder) / "data")
        extract(watch, lengths, int(chosen.shards), Path(folder) / "store")
        lengths.clear()  # otherwise training would hold them twice
        split, schedule = start_training(watch, Path(folder) / "store")
    watch(f"{STEPS} steps are shared among {RANKS:,} ranks", lambda: share_steps(schedule, split))
    result = {"machine": machine.describe(), "samples": len(split), "shards": len(split.shards), "rows": watch.rows}
    artifacts.write_json(chosen.out, result)


if __name__ == "__main__":
    run_main(main)
