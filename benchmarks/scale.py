"""What a very large store costs before and between steps, without its states: `python -m benchmarks.scale`.

10^7 samples in 10^5 shards are some 6·10^9 tokens, whose states no machine here could hold. Lengths are drawn, and
everything that looks at all samples or shards runs on them: the plan is written, read and checked; 1,024 processes
share the shards, and 1,024 ranks the samples of a step.
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import numpy as np

from benchmarks import machine, run_main
from eagle31_train import artifacts
from eagle31_train.store.format import PLAN
from eagle31_train.store.sealed import seal, unseal
from eagle31_train.store.shard_plan import HEADER, Plan, PlannedShard, plan_shards
from train import order

RANKS = 1024
BATCH_TOKENS = 2**22  # 4,096 tokens for each rank
LONGEST = 4096
STEPS = 20  # that are shared among the ranks

Result = TypeVar("Result")


def memory_mib() -> float:
    """What this process holds now."""
    resident = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(resident.split()[1]) / 1024


def draw_lengths(samples: int, seed: int = 0) -> list[int]:
    """Tokens of each sample: log-normal, 500 in the median."""
    drawn = np.random.default_rng(seed).lognormal(np.log(500), 0.7, samples)
    return np.clip(drawn, 16, LONGEST).astype(int).tolist()


def make_plan(lengths: list[int], shards: int) -> Plan:
    """A store of these training samples, in about so many shards."""
    planned = []
    for number, (first, end) in enumerate(plan_shards(lengths, sum(lengths) // shards)):
        tokens = sum(lengths[first:end])
        name = f"shards/train-{number:05d}.safetensors"
        planned.append(PlannedShard(name, "train", number, first, end, tokens, HEADER + tokens * 14_000))
    return Plan({"heldout": [], "train": lengths}, planned)


def sealed(plan: Plan) -> bytes:
    """plan.json as extraction writes it."""
    return seal({"lengths": plan.lengths, "shards": [asdict(shard) for shard in plan.shards], "store": "scale"})


class Stopwatch:
    """Seconds and memory after each piece of work, printed as they come."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def __call__(self, what: str, work: Callable[[], Result]) -> Result:
        began, busy = time.perf_counter(), time.process_time()
        result = work()
        row = {"what": what, "seconds": time.perf_counter() - began, "cpu_seconds": time.process_time() - busy}
        self.rows.append({**row, "mib": memory_mib()})
        print(f"{what:<58} {row['cpu_seconds']:9.3f} s of a core {self.rows[-1]['mib']:7,.0f} MiB", flush=True)
        return result


def share_steps(schedule: list[list[int]], lengths: list[int]) -> None:
    """Share the first steps among RANKS; every sample goes to exactly one rank."""
    for batch in schedule[:STEPS]:
        shares = order.share(batch, lengths, RANKS)
        assert sorted(i for share in shares for i in share) == sorted(batch), "a sample is lost or there twice"


def share_shards(plan: Plan) -> None:
    """Share all shards among RANKS extracting processes, as the first and the last of them do."""
    first, last = plan.share(0, RANKS), plan.share(RANKS - 1, RANKS)
    assert not {shard.name for shard in first} & {shard.name for shard in last}, "a shard is there twice"


def main() -> None:
    """Measure, and print a line for each piece of work."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--samples", type=float, default=1e7)
    parser.add_argument("--shards", type=float, default=1e5)
    parser.add_argument("--out", type=Path, default=Path("runs/bench/scale.json"))
    chosen = parser.parse_args()
    watch, lengths = Stopwatch(), draw_lengths(int(chosen.samples))
    print(machine.summary(machine.describe()))
    print(f"{len(lengths):,} samples, {sum(lengths):,} tokens; {memory_mib():,.0f} MiB with their lengths alone")
    with TemporaryDirectory() as folder:
        file = Path(folder) / PLAN
        plan = watch("the plan is made", lambda: make_plan(lengths, int(chosen.shards)))
        watch("and written", lambda: file.write_bytes(sealed(plan)))
        print(f"  {file.stat().st_size / 2**20:,.0f} MiB, {len(plan.shards):,} shards")
        del plan
        plan = watch("the plan is read and checked", lambda: Plan.from_json(unseal(file.read_bytes())))
    lengths = plan.lengths["train"]
    watch(f"shards of two of {RANKS:,} extracting processes", lambda: share_shards(plan))
    schedule = watch("one pass's steps are put in order", lambda: order.schedule(lengths, BATCH_TOKENS, 0, 1, None))
    print(f"  {len(schedule):,} steps")
    watch(f"{STEPS} steps are shared among {RANKS:,} ranks", lambda: share_steps(schedule, lengths))
    result = {"machine": machine.describe(), "samples": len(lengths), "shards": len(plan.shards), "rows": watch.rows}
    chosen.out.parent.mkdir(parents=True, exist_ok=True)
    artifacts.write_text(chosen.out, json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    run_main(main)
