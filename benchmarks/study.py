"""EAGLE 3.1 against EAGLE 3, each of its two switches alone, and unroll depths: the trainings of docs/study-eagle31.md.

    python -m benchmarks.study data.conversations=FILE                       # three seeds of everything: hours
    python -m benchmarks.study --seeds 0 --only 3.0 3.1 data.conversations=FILE
    python -m benchmarks.study --seeds 0 --only 3.1 --unrolls 5 --passes 2 data.conversations=FILE

Data and hidden states are made once, then every drafter is trained on them by the stages' own commands, --jobs at a
time with one thread each. What is finished is skipped, and what was stopped goes on. At the end stands the command that
compares.
"""

import argparse
import os
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
RECIPE, FIRST = "+experiment=smollm2_study", "study"
SWITCHES = {
    "3.0": ["drafter.norm_output=false", "drafter.fc_norm=false"],
    "fc_norm": ["drafter.norm_output=false"],
    "norm_output": ["drafter.fc_norm=false"],
    "3.1": [],
}
UNROLLS = (5, 3, 7)  # all four are trained at the first, only 3.0 and 3.1 at the others
LAUNCH = ["-m", "accelerate.commands.launch", "--quiet", "--config_file", str(ROOT / "configs/accelerate/cpu.yaml")]


@dataclass(frozen=True)
class Training:
    switches: str
    unroll: int
    seed: int
    passes: int = 1

    @property
    def label(self) -> str:
        """The shared name of trainings that differ only in their seed."""
        unroll = f"-unroll-{self.unroll}" if self.unroll != UNROLLS[0] else ""
        return f"{self.switches}{unroll}{f'-passes-{self.passes}' if self.passes > 1 else ''}"

    @property
    def name(self) -> str:
        passes = f"-p{self.passes}" if self.passes > 1 else ""
        return f"{FIRST}-{self.switches}-u{self.unroll}{passes}-s{self.seed}"

    @property
    def options(self) -> list[str]:
        own = [f"name={self.name}", f"seed={self.seed}", f"train.ttt_length={self.unroll}"]
        return [*own, f"train.epochs={self.passes}", *SWITCHES[self.switches]]


def trainings(seeds: list[int], switches: list[str], unrolls: list[int], passes: int) -> Iterator[Training]:
    """Yield all trainings; the first seed of everything comes before the second of anything."""
    for seed in seeds:
        for unroll in unrolls:
            some = switches if unroll == UNROLLS[0] else [one for one in switches if one in ("3.0", "3.1")]
            yield from (Training(one, unroll, seed, passes) for one in some)


def run(arguments: list[str], log: Path, threads: int) -> None:
    """Run a stage's command, with its output in `log`; exit if it fails."""
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}
    with log.open("a", encoding="utf-8") as output:
        command = [sys.executable, *arguments]
        done = subprocess.run(command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(arguments)} ended with status {done.returncode}: see {log}")


def groups(done: list[Training]) -> list[str]:
    """Return the drafters of one comparison, 3.0 first. Trainings that differ only in their seed share one name."""
    named: dict[str, list[str]] = {}
    for one in done:
        named.setdefault(one.label, []).append(f"runs/{one.name}")
    return [f"{name}:{','.join(runs)}" for name, runs in sorted(named.items(), key=lambda pair: pair[0] != "3.0")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("options", nargs="+", metavar="key=value", help="for every stage: data.conversations=FILE, …")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", choices=list(SWITCHES), default=list(SWITCHES), metavar="SWITCHES")
    parser.add_argument("--unrolls", type=int, nargs="+", choices=UNROLLS, default=list(UNROLLS), help="draft steps")
    parser.add_argument("--passes", type=int, default=1, help="over the data [1]")
    parser.add_argument("--jobs", type=int, default=2, help="trainings at a time, of one thread each [2]")
    chosen = parser.parse_intermixed_args()

    folder, common = ROOT / "runs" / FIRST, [RECIPE, *chosen.options]
    for stage in ("data_prep", "eagle31_train.extract"):
        print(f"study: {stage}", flush=True)
        run(["-m", stage, *common, f"name={FIRST}"], folder / f"{stage}.log", chosen.jobs)
    shared = [f"data_dir=runs/{FIRST}/data", f"store_dir=runs/{FIRST}/store", "train.wandb=disabled"]
    planned = list(trainings(chosen.seeds, chosen.only, chosen.unrolls, chosen.passes))
    stop = threading.Event()

    def train(one: Training) -> None:
        if stop.is_set():
            return
        try:
            run([*LAUNCH, "train.py", *common, *shared, *one.options], folder / f"{one.name}.log", 1)
        except SystemExit:
            stop.set()  # trainings under way finish by themselves
            raise

    with ThreadPoolExecutor(chosen.jobs) as pool, tqdm(total=len(planned), desc="study", unit="training") as bar:
        for future in [pool.submit(train, one) for one in planned]:
            future.result()
            bar.update()
    print("compare them:")
    print(f"  eagle31 compare {shlex.join(groups(planned))} compare.out=runs/{FIRST}/comparison")


if __name__ == "__main__":
    main()
