"""Checkpoints: weights and AdamW's moments as safetensors, committed whole, verified before use.

    checkpoints/step-000100/{model.safetensors, optimizer.safetensors, drafter.json, manifest.json}

Training draws no random number after the initial weights, and the data order is a pure function of
the step: step, weights and moments are the whole state of a run.
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from eagle31_train import artifacts
from eagle31_train.drafter.model import Drafter
from eagle31_train.schema import UserError

MOMENTS = ("exp_avg", "exp_avg_sq")


def save(folder: Path, step: int, drafter: Drafter, optimizer: torch.optim.Optimizer, extra: Mapping[str, Any]) -> Path:
    """Write the checkpoint of a step, whole or not at all.

    Args:
        folder: where the checkpoints of the run lie.
        step: optimizer steps done.
        drafter, optimizer: unwrapped.
        extra: JSON kept in the checkpoint's manifest and returned by `restore`.
    """
    final = folder / f"step-{step:06d}"
    temporary = folder / f".{final.name}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    save_file(contiguous(drafter.state_dict()), temporary / "model.safetensors")
    moments = {
        f"{moment}.{name}": optimizer.state[parameter][moment]
        for name, parameter in drafter.named_parameters()
        for moment in MOMENTS
        if parameter in optimizer.state
    }
    save_file(contiguous(moments), temporary / "optimizer.safetensors")
    artifacts.write_json(temporary / "drafter.json", asdict(drafter.shape))
    files = artifacts.list_files(temporary, temporary.iterdir())
    artifacts.write_json(temporary / artifacts.MANIFEST, {"step": step, **extra, "files": files})
    artifacts.commit(temporary, final)
    return final


def contiguous(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors as safetensors wants them."""
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def in_order(folder: Path) -> list[Path]:
    """The checkpoints of a run, oldest first."""
    return sorted(folder.glob("step-*"), key=lambda path: int(path.name.removeprefix("step-")))


def newest(folder: Path, fingerprint: str) -> Path | None:
    """The newest checkpoint of this run that is whole; others are named and passed over."""
    for path in reversed(in_order(folder)):
        try:
            manifest = artifacts.read_json(path / artifacts.MANIFEST, "train.py")
            damage = artifacts.first_damaged(path, manifest["files"])
            if manifest["fingerprint"] != fingerprint:
                damage = "it is of a run of other inputs"
        except (UserError, KeyError) as error:
            damage = str(error)
        if damage is None:
            return path
        print(f"checkpoint {path} is not used: {damage}")
    return None


def restore(path: Path, drafter: Drafter, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Load weights and moments of a checkpoint; returns its manifest.

    Raises:
        UserError: the checkpoint is of a drafter of another shape.
    """
    manifest = artifacts.read_json(path / artifacts.MANIFEST, "train.py")
    there, here = json.loads((path / "drafter.json").read_text()), asdict(drafter.shape)
    if there != here:
        raise UserError(f"{path} is a drafter of another shape: {artifacts.describe_change(there, here)}")
    drafter.load_state_dict(load_file(path / "model.safetensors"))
    moments = load_file(path / "optimizer.safetensors")
    for name, parameter in drafter.named_parameters():
        if f"exp_avg.{name}" not in moments:
            continue
        optimizer.state[parameter] = {
            "step": torch.tensor(float(manifest["step"]), device=parameter.device),  # where fused AdamW wants it
            **{moment: moments[f"{moment}.{name}"].to(parameter.device) for moment in MOMENTS},
        }
    return manifest


def prune(folder: Path, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints, and what killed saves left."""
    for leftover in [*folder.glob(".step-*.tmp"), *folder.glob(".step-*.old")]:
        shutil.rmtree(leftover)
    for path in in_order(folder)[: -max(keep, 1)]:
        artifacts.discard(path)


def parameter_groups(drafter: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """AdamW's groups: matrices decay, norms do not; frozen parameters are left out."""
    trained = [parameter for parameter in drafter.parameters() if parameter.requires_grad]
    return [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0},
    ]
