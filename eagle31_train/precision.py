"""Precision `auto`: bf16 where the hardware multiplies in it, float32 elsewhere.

Without such instructions bf16 is slower than float32 (docs/log.md). `auto` is resolved when the command line is read.
Existing records come first, so that a run keeps its precision when another machine continues it.
"""

import json
import os
from pathlib import Path

import yaml

from eagle31_train.common.machine import gpus
from eagle31_train.config import Config

AUTO = "auto"
CPU_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}  # as Linux calls them; the last is Arm's
CPUINFO = Path("/proc/cpuinfo")
TRUE = ("1", "true", "yes", "on", "y", "t")  # as accelerate reads its environment


def resolve(config: Config) -> dict[str, str]:
    """Replace every `auto` by a value; return option → a line on what the hardware decided, and why."""
    target, t, chosen = config.target, config.train, {}
    if target.dtype == AUTO:
        target.dtype = _recorded_dtype(config)
    if t.precision == AUTO:
        record = config.train_folder / "inputs.json"
        t.precision = _recorded(record, "inputs", "train", "precision")
        if t.precision != AUTO and config.overwrite:  # the record may be of a run that this one replaces
            chosen["train.precision"] = f"auto: train.precision={t.precision} (as in {record})"
    if target.dtype == AUTO:
        native, why = native_bf16(on_cpu=target.device == "cpu")
        target.dtype = "bfloat16" if native else "float32"
        chosen["target.dtype"] = f"auto: target.dtype={target.dtype} ({why})"
    if t.precision == AUTO:
        native, why = native_bf16(os.environ.get("ACCELERATE_USE_CPU", "").lower() in TRUE)
        t.precision = "bf16" if native else "no"
        chosen["train.precision"] = f"auto: train.precision={t.precision} ({why})"
    return chosen


def native_bf16(on_cpu: bool) -> tuple[bool, str]:
    """Return whether the hardware multiplies in bf16, and how we know."""
    if not on_cpu:
        import torch  # seconds, which `--help` need not wait for

        if devices := gpus():
            native = all(torch.cuda.get_device_capability(index) >= (8, 0) for index in range(devices))
            return native, "the GPUs support bf16" if native else "a GPU here does not support bf16"
    lines = CPUINFO.read_text(encoding="utf-8").splitlines() if CPUINFO.is_file() else []
    flags = next((set(line.split()) for line in lines if line.startswith(("flags", "Features"))), set())
    having = sorted(flags & CPU_FLAGS)
    return bool(having), f"this CPU has {having[0]}" if having else "this CPU has no bf16 instructions"


def whole_float32() -> None:
    """Make GPUs multiply float32 in full precision, whatever the environment says: NVIDIA's containers set
    TORCH_ALLOW_TF32_CUBLAS_OVERRIDE, with which torch rounds the factors to eleven bits."""
    import torch

    torch.set_float32_matmul_precision("highest")


def _recorded_dtype(config: Config) -> str:
    """Return the target's dtype from the first record of the run's store, training, answers and prompts, or `auto`."""
    run, dtypes = Path(config.run_dir), []
    if "://" not in config.store_location:
        dtypes.append(_recorded(Path(config.store_location) / "provenance.json", "inputs", "target", "dtype"))
    dtypes.append(_recorded(run / "train" / "config.yaml", "target", "dtype"))
    dtypes += [_recorded(run / f"{name}.manifest.json", "inputs", "dtype") for name in ("conversations", "prompts")]
    return next((dtype for dtype in dtypes if dtype != AUTO), AUTO)


def _recorded(file: Path, *keys: str) -> str:
    """Return the text at `keys` of a JSON or YAML record; `auto` if missing or damaged, which its stage reports."""
    try:
        text = file.read_bytes()
        value = yaml.safe_load(text) if file.suffix == ".yaml" else json.loads(text)  # YAML takes minutes for megabytes
    except (OSError, ValueError, yaml.YAMLError):
        return AUTO
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value if isinstance(value, str) else AUTO
