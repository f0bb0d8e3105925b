"""On what a measurement ran: hardware, versions, commit. Results without these cannot be repeated."""

import os
import platform
import subprocess
import sys
from collections.abc import Iterable
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from eagle31_train.evaluation.measurement import processor

GIT_SECONDS = 10.0  # a checkout on a slow network disk is not waited for
PACKAGES = ("torch", "transformers", "numpy", "speculators", "specforge", "triton", "safetensors", "xxhash", "datasets")


def describe() -> dict[str, Any]:
    """Machine, threads, versions, our commit and the command, as plain values."""
    memory = Path("/proc/meminfo").read_text().split()[1]
    commit = checkout(Path(__file__).parent.parent)
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "cpu": processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "memory_gib": round(int(memory) / 2**20, 1),
        "python": platform.python_version(),
        "versions": versions(PACKAGES),
        "commit": commit and commit["commit"][:12] + ("+changes" if commit["changed"] else ""),
        "load": os.getloadavg()[0],
        "command": sys.argv,
    }


def summary(described: dict[str, Any]) -> str:
    """One line for tables and plots."""
    return (
        f"{described['cpu']} ({described['capability']}), {described['threads']} of {described['cores']} threads, "
        f"{described['memory_gib']:.0f} GiB, torch {described['versions']['torch']}, commit {described['commit']}"
    )


def versions(packages: Iterable[str]) -> dict[str, str | None]:
    """Of these packages; None for one that is not installed."""
    result: dict[str, str | None] = {}
    for name in packages:
        try:
            result[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            result[name] = None
    return result


def checkout(root: Path) -> dict[str, Any] | None:
    """{"commit": 40 hex digits, "changed": whether tracked files differ from it} of the checkout at `root`; None if it
    is no checkout's top, or git does not answer."""
    try:
        if Path(_git(root, "rev-parse", "--show-toplevel")).resolve() != root.resolve():
            return None
        changed = _git(root, "status", "--porcelain", "--untracked-files=no")
        return {"commit": _git(root, "rev-parse", "HEAD"), "changed": bool(changed)}
    except (OSError, subprocess.SubprocessError):
        return None


def _git(root: Path, *words: str) -> str:
    command = ["git", "--no-optional-locks", "-C", str(root), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=GIT_SECONDS).stdout.strip()
