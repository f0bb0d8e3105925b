"""Run every stage in turn, from a target's name to a checkpoint that vLLM serves.

    eagle31 run target.path=Qwen/Qwen2.5-7B-Instruct name=qwen
    eagle31 run target.path=Qwen/Qwen2.5-7B-Instruct name=qwen data.prompts=prompts.jsonl \\
        --from extract --until train

Finished stages are skipped, so the same command resumes after a stop. Without prompts the target writes its own
(data.prompts=self); without a recipe +experiment=any is used. Extraction and training use every GPU of this machine,
or its CPU. --profile ddp, fsdp2, zero2 … chooses how they share the training (docs/launch.md).
"""

import argparse
import os
import signal
import subprocess
import sys
from pathlib import Path

from eagle31_train import cli
from eagle31_train.combinations import check_context_parallel, check_longest, check_wandb, check_zero
from eagle31_train.common.artifacts import MANIFEST
from eagle31_train.common.console import INTERRUPTED, STOPPED, note
from eagle31_train.common.errors import Stopped, UserError
from eagle31_train.common.locations import CONFIGS
from eagle31_train.common.machine import gpus
from eagle31_train.config import Config, TrainConfig, is_hub_id
from eagle31_train.precision import TRUE

STAGES = ("data", "extract", "train", "evaluate", "export", "summary")
KILLED = 128 + signal.SIGKILL
USE_CPU = "ACCELERATE_USE_CPU"
ALONE = ("cpu", "gpu")  # profiles of one process
PROFILES = [*ALONE, "ddp", "fsdp2", "zero1", "zero2", "zero2_offload", "zero3", "zero3_offload"]  # of one machine


def run(config: Config, overrides: list[str], first: str, last: str, profile: str | None = None) -> None:
    """Run the stages from `first` to `last`, each in its own process, training as `profile` says. SystemExit with its
    status if one fails. UserError for options with which they could not finish."""
    stages = stages_between(first, last, config.evaluate.backend)
    check_inputs(config, stages)
    if config.store.max_bytes and {"extract", "train"} <= set(stages):
        raise UserError(
            "store.max_bytes needs `eagle31 extract` and `eagle31 train store.follow=true` side by side: remove it"
        )
    if "train" in stages and not (config.train_folder / MANIFEST).is_file():
        check_training(config.train, profile)
    environment = {"OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false", **os.environ}
    cores = len(os.sched_getaffinity(0))  # of the job; os.cpu_count is the machine's
    if profile == "cpu":
        environment[USE_CPU] = "true"
    for number, stage in enumerate(stages):
        note(f"run: {stage}")
        if stage == "extract" and "train" in stages:
            check_lengths(config)
        early = ["push=false"] * (stage == "export" and "export" in stages[number + 1 :])
        words, processes = command(stage, config, profile)
        # vLLM's workers and servers choose their own number of threads.
        by_vllm = {"extract": config.extract.engine, "evaluate": config.evaluate.backend}.get(stage) == "vllm"
        threads = {} if by_vllm else {"OMP_NUM_THREADS": str(max(1, cores // processes))}
        end_with(finished([*words, *overrides, *early], threads | environment), stage)


def end_with(status: int, stage: str) -> None:
    """Say why a stage ended with this exit status, and end with it, unless it is 0."""
    again = "run the same command again to resume"
    if status == STOPPED:
        raise Stopped(f"run: {stage} stopped, its progress saved; {again}")
    if status == 128 + signal.SIGTERM:  # outside of training there is nothing to save
        raise Stopped(f"run: {stage} stopped; {again}")
    if status:
        why = ": it was killed (out of memory?); " if status == KILLED else "; fix the error above, then "
        note(f"run: stopped at {stage}{why}{again}", error=True)
        raise SystemExit(status)


def check_inputs(config: Config, stages: list[str]) -> None:
    """Raise UserError, before the first stage begins, for what a later stage would not find."""
    from eagle31_train.checkpoint import hub  # takes half a second, which would delay `--help`

    options = config.evaluate
    if "evaluate" in stages and (options.prompts or options.suites or options.perturbations):
        from eagle31_train.evaluation import workloads  # slow to import

        workloads.inputs(config)
    if "evaluate" in stages and options.backend == "vllm":
        from eagle31_train.evaluation.serving import engine  # slow to import (vLLM's own torch)

        engine.check(config)
    if {"extract", "evaluate"} & set(stages) and config.target.device not in ("auto", "cpu"):
        from eagle31_train.targets.hf import pick_device  # slow to import

        pick_device(config.target.device)
    if "export" in stages:
        hub.check(config)
    if config.train.finish and "train" in stages and not any((config.train_folder / "checkpoints").glob("step-*")):
        raise UserError(
            f"train.finish=true needs a checkpoint, but {config.train_folder} has none: remove train.finish"
        )
    begun = (config.train_folder / "inputs.json").is_file()  # such a run goes on without its initial weights
    source = config.train.init_from if "train" in stages and not begun else None
    folders = [("train.init_from", source)] if source else []
    folders += [("comparisons", one) for one in config.comparisons if "export" in stages]
    for option, folder in folders:
        place = folder if Path(folder).exists() else folder.rpartition("@")[0] or folder  # DRAFT@outputs
        if not Path(place).exists() and (place.startswith("runs/") or not is_hub_id(place)):
            raise UserError(f"{option}={folder} does not exist: correct the path")
    if source and "extract" in stages:
        check_source(config, source)


def check_source(config: Config, init_from: str) -> None:
    """Raise UserError for initial weights whose auxiliary layers or target sizes differ from this run's."""
    from eagle31_train.checkpoint.drafter_checkpoint import DrafterCheckpoint  # slow to import
    from eagle31_train.targets.description import describe_target, kinds, pick_layers, read_raw

    target = describe_target(config.target)
    layers = pick_layers(config.target.aux_layers, target.num_hidden_layers, kinds(read_raw(config.target)))
    source = DrafterCheckpoint.open(
        init_from,
        config.train.init_revision,
        data_folder=config.data_folder,
        allow_unfinished=True,
        target_layers=lambda: target.num_hidden_layers,
    )
    there = source.shape
    theirs, ours = (there.target_hidden_size, there.vocab_size), (target.hidden_size, target.vocab_size)
    if theirs != ours:
        sizes = "{} wide with {:,} tokens".format
        raise UserError(f"train.init_from={init_from} is for a target {sizes(*theirs)}, but this one is {sizes(*ours)}")
    if list(there.aux_layers) != list(layers):
        raise UserError(
            f"train.init_from={init_from} reads layers {list(there.aux_layers)}, but {list(layers)} would be "
            f"extracted: set 'target.aux_layers={list(there.aux_layers)}'"
        )


def check_lengths(config: Config) -> None:
    """Raise UserError, before the target reads them, if the data have a conversation that training has no room for."""
    from eagle31_train.evaluation.workloads import longest_sample  # slow to import

    if config.train.batch_tokens and (config.data_folder / MANIFEST).is_file():
        longest = longest_sample(config.data_folder / "dataset")
        check_longest(f"a conversation in {config.data_folder}", longest, config.train.batch_tokens)


def check_training(t: TrainConfig, profile: str | None) -> None:
    """Raise UserError for options with which this machine's devices cannot train."""
    profile, count = training_profile(profile)
    if profile.startswith("zero"):
        check_zero(t)
    elif profile == "fsdp2" and count < 2:
        raise UserError("--profile fsdp2 needs several devices, which this machine does not have: remove it")
    check_context_parallel(t.context_parallel, max(1, count), "processes")
    check_wandb(t)
    on_cpu = os.environ.get(USE_CPU, "").lower() in TRUE
    if t.kernels == "fused" and (not count or on_cpu):
        raise UserError("train.kernels=fused does not run on a CPU: set train.kernels=auto or plain")


def stages_between(first: str, last: str, backend: str) -> list[str]:
    """Return the stages from `first` to `last`, in order; UserError if there are none. With vLLM, export comes before
    evaluation, which serves it, and again after it, so that the card shows what was measured."""
    if first == last:
        return [first]
    order = list(STAGES)
    if backend == "vllm":
        order[order.index("evaluate") : order.index("summary")] = ["export", "evaluate", "export"]
    begin, end = order.index(first), len(order) - order[::-1].index(last)
    if begin >= end:
        raise UserError(f"--from {first} comes after --until {last}: no stage is left")
    return order[begin:end]


def finished(words: list[str], environment: dict[str, str]) -> int:
    """Run a stage and return its exit status: 128 + N if signal N ended it, as in a shell.

    Ctrl-C reaches the stage, which ends its servers and says so; a second one kills it. SIGTERM is passed on: a stage
    that went on alone would not save before the machine is taken away.
    """
    with subprocess.Popen(words, env=environment) as process:
        before = signal.signal(signal.SIGTERM, lambda *_: process.terminate())
        try:
            status = process.wait()
            return status if status >= 0 else 128 - status
        except KeyboardInterrupt:  # subprocess.run would kill it a quarter of a second later
            try:
                if process.wait() != INTERRUPTED:  # the signal was for this process alone
                    note("run: stopped; run the same command again to resume", error=True)
            except KeyboardInterrupt:
                process.kill()
            raise SystemExit(INTERRUPTED) from None
        finally:
            signal.signal(signal.SIGTERM, before)


def command(stage: str, config: Config, profile: str | None = None) -> tuple[list[str], int]:
    """Return the words that start a stage, without its options, and how many processes it has. Extraction and training
    use all devices of this machine."""
    script = Path(sys.executable).with_name("eagle31")
    program = [str(script)] if script.is_file() else ["-m", "eagle31_train"]
    alone = [sys.executable, *program, stage]
    if stage not in ("extract", "train"):
        return alone, 1
    one_has_it_all = config.extract.engine == "vllm" or config.target.device_map or config.target.device != "auto"
    if stage == "extract" and one_has_it_all:  # one process has the whole target
        return alone, 1
    profile, count = training_profile(profile if stage == "train" else None)
    where = f"{count} GPU{'s' * (count > 1)}" if count else "the CPU"
    note(f"run: training on {where}, profile {profile}" if stage == "train" else f"run: extracting on {where}")
    if profile in ALONE:  # needs no launcher, which takes seconds
        return alone, 1
    launch = [sys.executable, "-m", "eagle31_train.launcher"]
    processes = max(1, count)
    launch += ["--config_file", str(CONFIGS / "accelerate" / f"{profile}.yaml"), "--num_processes", str(processes)]
    return [*launch, *(["--module", "eagle31_train"] if program[0] == "-m" else program), stage], processes


def training_profile(given: str | None) -> tuple[str, int]:
    """Return the profile, `given` or the one that fits this machine, and how many of the GPUs it uses."""
    count = 0 if given == "cpu" else gpus()
    profile = given or ("ddp" if count > 1 else ALONE[count])
    return profile, min(count, ALONE.index(profile)) if profile in ALONE else count


def main() -> None:
    parser = argparse.ArgumentParser("eagle31 run", add_help=False, allow_abbrev=False)
    parser.add_argument("--from", dest="first", choices=STAGES, default=STAGES[0])
    parser.add_argument("--until", dest="last", choices=STAGES, default=STAGES[-1])
    parser.add_argument("--profile", choices=PROFILES)
    ends, words = parser.parse_known_args()
    before = signal.signal(signal.SIGTERM, _stop)
    try:
        cli.run(
            lambda config: run(config, cli.with_recipe(words, config), **vars(ends)),
            __doc__ or "",
            argv=words,
            before="[--from STAGE] [--until STAGE] [--profile PROFILE] ",
            resolve=False,  # each stage resolves for itself
        )
    finally:
        signal.signal(signal.SIGTERM, before)


def _stop(*_: object) -> None:
    """Handle SIGTERM between stages; while one runs, `finished` has another handler."""
    raise Stopped("run: stopped; run the same command again to resume")


if __name__ == "__main__":
    main()
