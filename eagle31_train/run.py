"""Every stage in turn, from a target's name to a checkpoint that vLLM serves.

    eagle31 run target.path=Qwen/Qwen3-8B name=qwen
    eagle31 run target.path=Qwen/Qwen3-8B name=qwen data.prompts=prompts.jsonl --from extract --until train

Each stage that is done is passed over, so the same command goes on after a stop. Without prompts the target writes
them itself (data.prompts=self). Training uses every GPU of this machine, or its CPU.
"""

import os
import subprocess
import sys
from pathlib import Path

from eagle31_train import cli
from eagle31_train.config import Config
from eagle31_train.errors import Stopped
from eagle31_train.locations import CONFIGS

STAGES = ("data", "extract", "train", "evaluate", "export", "summary")
SELF = ["regenerate=true", "data.prompts=self"]


def run(config: Config, overrides: list[str], first: str = STAGES[0], last: str = STAGES[-1]) -> None:
    """Run the stages from `first` to `last`, each in a process of its own.

    Raises:
        SystemExit: a stage ended with this status, and has said why.
    """
    if not (config.data.conversations or config.data.prompts or config.data.sources):
        print("run: no prompts are given (data.prompts=FILE): the target writes them itself, data.prompts=self")
        overrides = [*overrides, *SELF]
    environment = {"OMP_NUM_THREADS": str(os.cpu_count() or 1), "OMP_WAIT_POLICY": "PASSIVE", **os.environ}
    environment.setdefault("TOKENIZERS_PARALLELISM", "false")
    for stage in STAGES[STAGES.index(first) : STAGES.index(last) + 1]:
        print(f"run: {stage}", flush=True)
        done = subprocess.run([*command(stage), *overrides], env=environment, check=False)
        if done.returncode == cli.STOPPED:
            raise Stopped(f"run: {stage} was stopped and saved; the same command goes on from there")
        if done.returncode:
            print(f"run: stopped at {stage}; the same command goes on from there", file=sys.stderr)
            raise SystemExit(done.returncode)


def command(stage: str) -> list[str]:
    """The words that start a stage, without its options; training on all devices of this machine."""
    script = Path(sys.executable).with_name("eagle31")
    program = [str(script)] if script.is_file() else ["-m", "eagle31_train"]
    if stage != "train":
        return [sys.executable, *program, stage]
    profile, devices = launch_profile()
    print(f"run: training on {devices or 'the CPU'}{' GPUs' if devices else ''}, profile {profile}", flush=True)
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--quiet"]
    launch += ["--config_file", str(CONFIGS / "accelerate" / f"{profile}.yaml")]
    launch += ["--num_processes", str(devices)] if devices > 1 else []
    return [*launch, *(["--module", "eagle31_train"] if program[0] == "-m" else program), stage]


def launch_profile() -> tuple[str, int]:
    """The launch profile for this machine's devices, and how many GPUs these are."""
    import torch  # seconds, which `--help` need not wait for

    devices = torch.cuda.device_count()
    return ("cpu", "gpu")[devices] if devices < 2 else "ddp", devices


def main() -> None:
    """Command line: --from and --until beside the options of every stage."""
    words, ends = sys.argv[1:], {"--from": STAGES[0], "--until": STAGES[-1]}
    for flag in ends:
        if flag in words:
            at = words.index(flag)
            ends[flag] = words[at + 1] if at + 1 < len(words) else ""
            if ends[flag] not in STAGES:
                print(f"error: {flag} takes one of {', '.join(STAGES)}", file=sys.stderr)
                raise SystemExit(2)
            del words[at : at + 2]
    cli.run(
        lambda config: run(config, [word for word in words if word != "--cfg"], ends["--from"], ends["--until"]),
        __doc__ or "",
        argv=words,
        before="[--from STAGE] [--until STAGE] ",
    )


if __name__ == "__main__":
    main()
