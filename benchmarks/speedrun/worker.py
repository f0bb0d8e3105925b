"""The process of one training: `python -m benchmarks.speedrun.worker JOB.json`, in its trainer's environment."""

import importlib
import os
import sys
from contextlib import nullcontext, suppress
from pathlib import Path

from benchmarks import machine, run_main
from benchmarks.speedrun.job import RESULT, Clock, EnoughError, Job, flop_counter
from eagle31_train.common import artifacts


def run(job: Job) -> None:
    clock = Clock(job)
    trainer = importlib.import_module(f"benchmarks.speedrun.{job.contender}")
    counter = flop_counter() if job.count else None
    with counter or nullcontext(), suppress(EnoughError):
        trainer.train(job, clock)
    found = {**clock.result(), "machine": machine.describe()}
    if counter is not None:
        found["flops"] = counter.get_total_flops()
    artifacts.write_json(job.folder / RESULT, found)


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    run_main(lambda: run(Job.read(Path(sys.argv[1]))))
