"""Minutes, tokens and FLOPs to an acceptance length: our trainer beside speculators' and SpecForge's, in turns.

    python -m benchmarks.speedrun all                            # everything, from the target alone (`make speedrun`)
    python -m benchmarks.speedrun data                           # stages 1 and 2
    python -m benchmarks.speedrun train ours speculators         # some trainings, one after another
    python -m benchmarks.speedrun train speculators:total-seq-len=1024,lr=3e-3
    python -m benchmarks.speedrun measure --prompts mt_bench=FILE

A training is NAME, with its authors' defaults, or NAME:option=value,…; --sweep adds the stated options of each NAME.
What is finished is skipped. docs/speedrun.md has the rules and the records.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import run_main
from benchmarks.pictures import draw_speedrun
from benchmarks.speedrun import measure
from benchmarks.speedrun.job import JOB, RESULT, Job
from eagle31_train import compose
from eagle31_train.common import artifacts
from eagle31_train.common.errors import UserError
from eagle31_train.model import vocab
from eagle31_train.store import Store
from train.build import shape_of
from train.inputs import complete_drafter

ROOT = Path(__file__).resolve().parents[2]
CONTENDERS = ("ours", "speculators", "specforge")
# An equal number of tries for each, of the options known to matter most to it at this size.
SWEEP = {
    "ours": ["train.lr=1.5e-3", "train.batch_tokens=4096"],
    "speculators": ["total-seq-len=1024", "total-seq-len=1024,lr=3e-3"],
    "specforge": ["learning_rate=1e-3", "learning_rate=1e-3,ttt_length=3"],
}
SHARES = (0.04, 0.08, 0.12, 0.2, 0.32, 0.48, 0.72)  # of the time, after which a draft is saved; and the last step
LEVELS = (1.4, 1.5, 1.6, 1.8, 2.0)
PROMPTS = "carried=benchmarks/speedrun/prompts.jsonl"
SELF_WRITTEN = 700  # prompts; with the shipped ones, and three answers to each, a million tokens
TIMED = 45.0  # seconds of training from which the number of steps is computed


def stages(chosen: argparse.Namespace) -> None:
    """Make data and hidden states from the target alone: prompts that it writes, shipped prompts, and its answers."""
    carried = ROOT / "data_prep/prompts/prompts.jsonl"
    count = sum(1 for line in carried.read_text().splitlines() if line.strip())
    sources = {"own": ("self", chosen.self_prompts), "carried": (carried, count)}
    made = ["regenerate=true", "data.conversations=null", "data.prompts=null"]
    made += [f"data.sources.{name}.path={path}" for name, (path, _) in sources.items()]
    made += [f"data.sources.{name}.weight={weight}" for name, (_, weight) in sources.items()]
    made += [f"data.self_prompts.count={chosen.self_prompts}", f"run_dir={chosen.out}"]
    for stage in ("data_prep", "eagle31_train.extract"):
        run([sys.executable, "-m", stage, *recipe(chosen), *made])


def recipe(chosen: argparse.Namespace) -> list[str]:
    data, store = ((getattr(chosen, name) or chosen.out / name).absolute() for name in ("data", "store"))
    folders = [f"data_dir={data}", f"store_dir={store}"]
    return [f"+experiment={chosen.experiment}", "name=speedrun", *folders, *chosen.options]


def trainings(words: Sequence[str], sweep: bool) -> list[tuple[str, list[str]]]:
    """Return contender and options of each requested training."""
    parted = [
        (name, [option for option in given.split(",") if option])
        for name, _, given in (w.partition(":") for w in words)
    ]
    for name, options in parted:
        if name not in CONTENDERS or not all("=" in option for option in options):
            raise UserError(
                f"{name}:{','.join(options)} is not a training: choose {', '.join(CONTENDERS)}, or NAME:option=value,…"
            )
    if sweep:
        parted += [
            (name, tried.split(",")) for name in dict.fromkeys(name for name, _ in parted) for tried in SWEEP[name]
        ]
    return parted


def make_job(chosen: argparse.Namespace, contender: str, options: list[str]) -> Job:
    """Return the training's job, without its number of steps."""
    words = recipe(chosen)
    config = complete_drafter(compose.load_config([*words, f"run_dir={chosen.out}"]), None)
    store, kept = Store(Path(str(config.store_dir))), vocab.read(config.data_folder / "vocab.safetensors")
    slug = re.sub(r"[^\w.=-]+", "-", ",".join([contender, *options]))
    return Job(
        contender=contender,
        options=options,
        recipe=words,
        data=str(config.data_folder),
        store=str(config.store_dir),
        target=config.target.path if config.target.is_hub_id else str(Path(config.target.path).absolute()),
        out=str((chosen.out / slug).absolute()),
        shape=vars(shape_of(config.drafter, store, kept)),
        seed=config.seed,
        steps=0,
        marks=[share * 60 * chosen.minutes for share in SHARES],
    )


def train(chosen: argparse.Namespace, contender: str, options: list[str]) -> None:
    """Run one training, after short ones that count its FLOPs and time its steps."""
    job = make_job(chosen, contender, options)
    python = str(chosen.peers_python) if contender != "ours" else sys.executable
    if (job.folder / RESULT).is_file():
        made = Job.read(job.folder / JOB)
        if replace(made, steps=0) != job:
            raise UserError(f"{job.folder} was made with other options: set another --out, or remove it")
        print(f"speedrun: {job.folder.name}: finished before")
        return
    shutil.rmtree(job.folder, ignore_errors=True)  # left by a training that was stopped
    worker(python, job.probe("count", steps=2, count=True), {"TORCHDYNAMO_DISABLE": "1"})
    steps = chosen.steps
    if steps is None:
        timed = worker(python, job.probe("timing", steps=1000, seconds=min(TIMED, 60 * chosen.minutes)))["step_seconds"]
        first = 1 if len(timed) > 2 else 0  # the first step includes libraries' one-time setup
        steps = max(1, round(60 * chosen.minutes * (len(timed) - 1 - first) / (timed[-1] - timed[first])))
    print(f"speedrun: {job.folder.name}: {steps} steps, about {chosen.minutes:g} minutes", flush=True)
    result = worker(python, replace(job, steps=steps))
    print(f"speedrun: {job.folder.name}: {result['seconds'] / 60:.1f} minutes, {result['tokens']:,} tokens", flush=True)


def worker(python: str, job: Job, more: dict[str, str] | None = None) -> dict[str, Any]:
    """Run a job in its own process, with its output in its log; return its result."""
    file = job.write()
    log = job.folder / "log"
    environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "PYTHONPATH": str(ROOT), **(more or {})}
    command = [python, "-m", "benchmarks.speedrun.worker", str(file)]
    with log.open("w", encoding="utf-8") as output:
        try:
            done = subprocess.run(
                command, cwd=ROOT, env=environment, check=False, stdout=output, stderr=subprocess.STDOUT
            )
        except OSError as error:
            raise UserError(f"{python} cannot be run ({error.strerror}): see benchmarks/install_peers.sh") from None
    if done.returncode or not (job.folder / RESULT).is_file():
        last = log.read_text(errors="replace").strip().rpartition("\n")[2]
        raise UserError(f"{job.folder.name} ended with status {done.returncode} ({last[:200]}): see {log}")
    return artifacts.read_json(job.folder / RESULT, "the worker")


def run(command: list[str]) -> None:
    if status := subprocess.run(command, cwd=ROOT, check=False).returncode:
        raise SystemExit(status)


def tell(chosen: argparse.Namespace) -> None:
    done = measure.read(chosen.out)
    asked = {"num_prompts": 40, "max_speculative_tokens": 3, "batch_size": 16, "timed_prompts": 1}
    options = [f"evaluate.{name}={value}" for name, value in asked.items()]
    suites = [f"evaluate.suites.{word.replace('=', '.path=', 1)}" for word in chosen.prompts]
    found, draft_tokens = measure.accepted(done, [*options, *suites, "compare.verified=1", *chosen.options], chosen.out)
    result = measure.summarise(done, found, chosen.levels, draft_tokens)
    result["suites"] = [word.partition("=")[0] for word in chosen.prompts]
    artifacts.write_json(chosen.out / "speedrun.json", result)
    draw_speedrun(result, chosen.out)
    print(measure.tables(result))
    print(f"written: {chosen.out / 'speedrun.json'}, speedrun-light.svg and speedrun-dark.svg")


def options(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("all", "data", "train", "measure"))
    parser.add_argument("words", nargs="*", metavar="NAME | key=value", help="trainings; options of our configuration")
    parser.add_argument("--out", type=Path, default=Path("runs/speedrun"), help="everything lies here [runs/speedrun]")
    parser.add_argument("--data", type=Path, help="stage 1's folder [OUT/data]")
    parser.add_argument("--store", type=Path, help="stage 2's folder [OUT/store]")
    parser.add_argument("--experiment", default="smollm2", metavar="NAME", help="our recipe [smollm2]")
    parser.add_argument("--self-prompts", type=int, default=SELF_WRITTEN, help="that the target writes [%(default)s]")
    parser.add_argument("--minutes", type=float, default=25.0, help="of each training [25]")
    parser.add_argument("--steps", type=int, help="of each schedule; default: as many as --minutes has room for")
    parser.add_argument("--sweep", action="store_true", help="also train with the stated options of each")
    parser.add_argument("--peers-python", type=Path, default=ROOT / ".venv-peers/bin/python", help="the peers' python")
    parser.add_argument("--prompts", nargs="+", default=[PROMPTS], metavar="NAME=FILE", help="of other kinds")
    parser.add_argument("--levels", type=float, nargs="+", default=LEVELS, help="acceptance lengths to be reached")
    chosen = parser.parse_intermixed_args(argv)
    chosen.names = [word for word in chosen.words if word.partition(":")[0] in CONTENDERS or "=" not in word]
    chosen.options = [word for word in chosen.words if word not in chosen.names]
    return chosen


def main(argv: list[str] | None = None) -> None:
    chosen = options(argv)
    if chosen.what in ("all", "data"):
        stages(chosen)
    if chosen.what in ("all", "train"):
        for contender, given in trainings(chosen.names or CONTENDERS, chosen.sweep):
            train(chosen, contender, given)
    if chosen.what in ("all", "measure"):
        tell(chosen)


if __name__ == "__main__":
    run_main(main)
