"""On what a measurement ran: hardware, versions, commit. Results without these cannot be repeated."""

import os
import platform
import subprocess
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("torch", "transformers", "numpy", "speculators", "specforge", "triton")


def describe() -> dict[str, Any]:
    """Machine, threads, versions and our commit, as plain values."""
    info = Path("/proc/cpuinfo").read_text().splitlines()
    memory = Path("/proc/meminfo").read_text().split()[1]
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "cpu": next((line.split(":")[1].strip() for line in info if line.startswith("model name")), platform.machine()),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "memory_gib": round(int(memory) / 2**20, 1),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in PACKAGES},
        "commit": commit(),
        "load": os.getloadavg()[0],
    }


def version(package: str) -> str | None:
    """Of an installed package; None if it is not."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def commit() -> str | None:
    """Our commit, with `+changes` if the source differs from it; None outside a checkout."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", "../eagle31_train", ".")
        return git("rev-parse", "--short=12", "HEAD") + ("+changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def summary(machine: dict[str, Any]) -> str:
    """One line for tables and plots."""
    return (
        f"{machine['cpu']} ({machine['capability']}), {machine['threads']} of {machine['cores']} threads, "
        f"{machine['memory_gib']:.0f} GiB, torch {machine['versions']['torch']}, commit {machine['commit']}"
    )
