"""What a record says about where it was made: processor, versions of packages, commit."""

import platform
import subprocess
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

from eagle31_train.common.errors import UserError

GIT_SECONDS = 10.0  # wait no longer for a checkout on a slow network disk


def processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.is_file() else []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.processor() or platform.machine())


def gpus() -> int:
    """Return how many GPUs this process may use. UserError if torch counts some that it cannot use."""
    import torch  # takes seconds, which `--help` need not wait for

    count = torch.cuda.device_count()
    if count and not torch.cuda.is_available():  # NVML counts them, CUDA does not start
        raise UserError(
            f"torch {torch.__version__} cannot use this machine's {count} GPUs: install a build for their driver, or "
            "set CUDA_VISIBLE_DEVICES= to use the CPU"
        )
    return count


def versions(packages: Iterable[str]) -> dict[str, str | None]:
    """Return the versions of packages, None for one that is not installed."""
    result: dict[str, str | None] = {}
    for name in packages:
        try:
            result[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            result[name] = None
    return result


def checkout(root: Path) -> dict[str, Any] | None:
    """Return {"commit": 40 hex digits, "changed": whether tracked files differ from it} of the checkout at `root`.

    None if `root` is not the top of a checkout, or if git does not answer."""
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
