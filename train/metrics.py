"""What a run reports: tau and accuracies per depth, a JSONL file, the tracker, the progress line."""

import json
import time
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from tqdm import tqdm

from eagle31_train import artifacts


def summarise(sums: Tensor) -> dict[str, Any]:
    """`Measured.stacked()` summed over batches and ranks, [MEASURES, K] → what is reported.

    Returns:
        loss: mean divergence per depth, in nats, averaged over depths; accuracy: [K] share of
        eligible pairs whose arg-max is the target's over the full vocabulary; prefix: [K] J_k, share
        of slots right at every step 0..k; tau: 1 + sum J_k; rms: [K] RMS of the state step k reads.
    """
    loss, trained, correct, eligible, prefix, eligible_prefix, rms, slots = sums.double().cpu()
    per_depth = loss / trained.clamp(min=1)
    joint = prefix / eligible_prefix.clamp(min=1)
    return {
        "loss": per_depth.mean().item(),
        "tau": 1.0 + joint.sum().item(),
        "loss_at_depth": per_depth.tolist(),
        "accuracy_at_depth": (correct / eligible.clamp(min=1)).tolist(),
        "prefix_at_depth": joint.tolist(),
        "rms_at_depth": (rms / slots.clamp(min=1)).tolist(),
        "oov_share": 1.0 - (trained.sum() / eligible.sum().clamp(min=1)).item(),
    }


def reduce_sums(accelerator: Accelerator, value: Tensor) -> Tensor:
    """Add a tensor up over all ranks."""
    reduced = accelerator.reduce(value, reduction="sum")
    assert isinstance(reduced, torch.Tensor)
    return reduced


def fetch(*values: Tensor) -> list[Tensor]:
    """Tensors of a device, on the CPU in fp64: one transfer and one wait for all of them."""
    together = torch.cat([value.detach().double().flatten() for value in values]).cpu()
    parts = together.split([value.numel() for value in values])
    return [part.view(value.shape) for part, value in zip(parts, values, strict=True)]


class Reporter:
    """Writes metrics on the main process; other ranks' calls do nothing.

    Args:
        folder: where metrics.jsonl lies. Rows past `step`, left by a run that was killed after its
            last checkpoint, are cut off.
        step, total: optimizer steps done and to do.
    """

    def __init__(self, accelerator: Accelerator, folder: Path, step: int, total: int) -> None:
        self.accelerator = accelerator
        self.path = folder / "metrics.jsonl"
        self.bar = tqdm(
            total=total,
            initial=step,
            unit="step",
            desc="train",
            disable=not accelerator.is_main_process,
            smoothing=0.1,
        )
        self.began = time.perf_counter()
        self.tokens = 0
        if accelerator.is_main_process and self.path.exists():
            rows = self.path.read_text(encoding="utf-8").splitlines()
            kept = [row for row in rows if row.endswith("}") and json.loads(row)["step"] <= step]
            artifacts.write_text(self.path, "".join(row + "\n" for row in kept))

    def log(self, step: int, values: dict[str, Any]) -> None:
        """Append one row and send its scalars to the tracker."""
        if not self.accelerator.is_main_process:
            return
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")
        flat: dict[str, float] = {}
        for name, value in values.items():
            if isinstance(value, list):
                flat |= {f"{name}/{k}": v for k, v in enumerate(value)}
            else:
                flat[name] = value
        self.accelerator.log(flat, step=step)

    def progress(self, tokens: int, loss: float, tau: float) -> None:
        """Move the live line one step on; `tokens` is what this step read."""
        self.tokens += tokens
        rate = self.tokens / (time.perf_counter() - self.began)
        self.bar.set_postfix_str(f"loss {loss:.3f} tau {tau:.3f} {rate:,.0f} tok/s", refresh=False)
        self.bar.update(1)

    def note(self, text: str) -> None:
        """A line above the progress line."""
        if self.accelerator.is_main_process:
            self.bar.write(text)
