"""What a measurement ran on: hardware, versions, commit. Results without these cannot be repeated."""

import os
import platform
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import psutil
import torch

from eagle31_train.common import machine

PACKAGES = ("torch", "transformers", "numpy", "speculators", "specforge", "triton", "safetensors", "xxhash", "datasets")


def describe() -> dict[str, Any]:
    """Return machine, threads, versions, our commit and the command, as plain values."""
    checkout = machine.checkout(Path(__file__).parent.parent)
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "cpu": machine.processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "python": platform.python_version(),
        "versions": machine.versions(PACKAGES),
        "commit": checkout and checkout["commit"][:12] + ("+changes" if checkout["changed"] else ""),
        "load": os.getloadavg()[0],
        "command": sys.argv,
    }


def summary(described: dict[str, Any]) -> str:
    return (
        f"{described['cpu']} ({described['capability']}), {described['threads']} of {described['cores']} threads, "
        f"{described['memory_gib']:.0f} GiB, torch {described['versions']['torch']}, commit {described['commit']}"
    )
