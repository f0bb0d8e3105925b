"""Real launches of train.py, in one process or several, on the CPU over loopback."""

import os
import socket
import subprocess
import sys
from pathlib import Path

from pipeline import options

ROOT = Path(__file__).resolve().parent.parent
# `script` instead of train.py trains likewise, and may watch or disturb it before.
TRAIN = ROOT / "train.py"
DEFAULTS = f"+experiment={ROOT / 'tests' / 'defaults.yaml'}"  # as `options` has them in this process


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def command(profile, processes, script=TRAIN, launcher="accelerate.commands.launch"):
    """How a user launches a profile; "one" is one process without a launcher."""
    if profile == "one":
        return [sys.executable, str(script)]
    config = ["--config_file", f"configs/accelerate/{profile}.yaml", "--num_processes", str(processes)]
    address = ["--main_process_ip", "127.0.0.1", "--main_process_port", str(free_port())]
    return [sys.executable, "-m", launcher, *config, *address, str(script)]


def environment(profile, on_gpus=False, **more):
    """One thread each, and no GPU even where there is one: a fused step of another device rounds otherwise."""
    mine = {name: value for name, value in os.environ.items() if name != "ACCELERATE_USE_CPU"}
    cpu = {} if on_gpus or profile.startswith("zero") else {"ACCELERATE_USE_CPU": "true"}
    cpu |= {} if on_gpus else {"CUDA_VISIBLE_DEVICES": ""}
    paths = [str(ROOT), str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]
    fixed = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": os.pathsep.join(paths)}
    return {**mine, **fixed, **cpu, **more}


def arguments(run, *more):
    """The command line of a tiny run in its folder."""
    return options(run.folder, DEFAULTS, f"target.path={run.extracted / 'target'}", *more)


def execute(words, profile, timeout=300, on_gpus=False, **variables):
    """Run a command in the environment of a profile; returns the finished process."""
    how = {"cwd": ROOT, "capture_output": True, "text": True, "check": False, "timeout": timeout}
    return subprocess.run(words, env=environment(profile, on_gpus, **variables), **how)
