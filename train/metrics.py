"""What a run reports: metrics per depth, files of JSON rows, the trackers, the progress line."""

import json
import time
from contextlib import suppress
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from eagle31_train.common import artifacts, foreign
from eagle31_train.common.console import Progress
from eagle31_train.reporting.training_page import HELDOUT, METRICS, TIMINGS


def summarise(sums: Tensor) -> dict[str, Any]:
    """Turn MEASURES summed over batches and ranks, [len(MEASURES), K], into what is reported.

    Returns:
        loss: mean divergence per depth, in nats, averaged over depths; acceptance_estimate: 1 + sum J_k; oov_share:
        share of eligible pairs that are not trained. [K] each: loss_at_depth; accuracy_at_depth: share of eligible
        pairs whose arg-max is the target's over the full vocabulary; prefix_at_depth: J_k, share of slots right at
        every step 0..k; rms_at_depth: RMS of the state that step k reads. A depth that no slot reaches has None there,
        and counts as 0 in means and sums.
    """
    loss, trained, correct, eligible, prefix, eligible_prefix, rms, slots = sums.double().cpu()
    per_depth = loss / trained.clamp(min=1)
    joint = prefix / eligible_prefix.clamp(min=1)
    return {
        "loss": per_depth.mean().item(),
        "acceptance_estimate": 1.0 + joint.sum().item(),
        "loss_at_depth": _shares(loss, trained),
        "accuracy_at_depth": _shares(correct, eligible),
        "prefix_at_depth": _shares(prefix, eligible_prefix),
        "rms_at_depth": _shares(rms, slots),
        "oov_share": 1.0 - (trained.sum() / eligible.sum().clamp(min=1)).item(),
    }


def heldout_text(metrics: dict[str, Any]) -> str:
    """Return `summarise` of the held-out split as text. Without any pair, a loss of 0 would look perfect."""
    if all(loss is None for loss in metrics["loss_at_depth"]):
        return "the held-out split has nothing to predict: raise data.draft_vocab_size or data.heldout"
    return f"held-out loss {metrics['loss']:.3f}, acceptance estimate {metrics['acceptance_estimate']:.3f}"


def _shares(sums: Tensor, counts: Tensor) -> list[float | None]:
    """Return sums / counts, [K]; None, which is not 0, where nothing was counted."""
    return [share if count else None for share, count in zip((sums / counts).tolist(), counts.tolist(), strict=True)]


def reduce_sums(accelerator: Accelerator, value: Tensor) -> Tensor:
    reduced = accelerator.reduce(value, reduction="sum")
    assert isinstance(reduced, torch.Tensor)
    return reduced


def fetch(*values: Tensor) -> list[Tensor]:
    """Copy tensors from a device to the CPU, in fp64, with one transfer and one wait for all of them."""
    together = torch.cat([value.detach().double().flatten() for value in values]).cpu()
    parts = together.split([value.numel() for value in values])
    return [part.view(value.shape) for part, value in zip(parts, values, strict=True)]


# ---------------------------------------------------------------- reports


def cut(rows: Path, step: int) -> dict[str, Any]:
    """Remove the JSON rows after `step` and a torn last line, which a kill after the checkpoint left. Return the last
    row that stays, {} if there is none.

    Rows are in the order of their steps, so the file is only truncated: that needs no disk space, and a kill during it
    does no harm. A damaged line before them stays: `eagle31 report` names it.
    """
    if not rows.exists():
        return {}
    size, last = 0, b""
    with rows.open("r+b") as file:
        for line in file:
            if not line.endswith(b"\n") or _step_of(line) > step:
                break
            size, last = size + len(line), line
        file.truncate(size)
    with suppress(ValueError):
        row = foreign.parse_json(last)
        return row if isinstance(row, dict) else {}
    return {}


def append(rows: Path, row: dict[str, Any]) -> None:
    """Append one row; numbers that are not finite become null, as JSON requires. Raise UserError on a full disk."""
    remedy = "free some space, then run the same command again to resume from the last checkpoint"
    with artifacts.explained(f"write {rows}", remedy), rows.open("a") as file:
        file.write(json.dumps(plain(row), allow_nan=False) + "\n")


def _step_of(line: bytes) -> int:
    """Return the step of a row, or 0 if the line is not a row."""
    try:
        return int(foreign.parse_json(line)["step"])
    except (ValueError, TypeError, KeyError, OverflowError):  # OverflowError: Infinity
        return 0


def plain(value: Any) -> Any:
    """Return the value with None for numbers that JSON does not know."""
    if isinstance(value, dict):
        return {name: plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    return None if isinstance(value, float) and not isfinite(value) else value


class Reporter:
    """Writes metrics on the main process; other ranks' calls do nothing. A row of metrics.jsonl is the same bit for bit
    in a run that was stopped and resumed. What depends on the clock or the machine goes into timings.jsonl."""

    def __init__(self, accelerator: Accelerator, folder: Path, step: int, total: int) -> None:
        self.accelerator, self.main = accelerator, accelerator.is_main_process
        self.bar = Progress(total=total, initial=step, unit="step", desc="train", disable=not self.main, smoothing=0.1)
        self.began = time.perf_counter()
        self.tokens = 0
        self.metrics, self.timings = folder / METRICS, folder / TIMINGS
        self.last: dict[str, Any] = {}  # row of metrics.jsonl, as this process found it
        if self.main:
            self.last = cut(self.metrics, step)
            cut(self.timings, step)

    def log(self, step: int, values: dict[str, Any]) -> None:
        """Append one row to metrics.jsonl and send its numbers to the trackers, by the names of `scalars`. With
        `train.finish`, it may be there: the evaluation of the step that the run is to end at."""
        if self.main and (self.last.get("step"), self.last.keys()) != (step, {"step", *values}):
            append(self.metrics, {"step": step, **values})
            self.accelerator.log(scalars("train", values), step=step)

    def timing(self, step: int, values: dict[str, Any]) -> None:
        """Append one row to timings.jsonl; the trackers show its numbers as `timing/…`: seconds (of the step, waiting
        included), waited (seconds of these, for data), aside (for evaluations and saves), tokens (over all ranks),
        memory_bytes."""
        if self.main:
            append(self.timings, {"step": step, **values})
            speed = {"tokens_per_second": values["tokens"] / (values["seconds"] - values["aside"])}
            self.accelerator.log(scalars("timing", {**values, **speed}), step=step)

    def progress(self, tokens: int, loss: float, estimate: float) -> None:
        """Advance the progress line by one step, which read `tokens` tokens. A step without a loss passes NaN."""
        self.tokens += tokens
        rate = self.tokens / (time.perf_counter() - self.began)
        trained = f"loss {loss:.3f} est. acceptance {estimate:.3f} " if isfinite(loss) else ""
        self.bar.set_postfix_str(f"{trained}{rate:,.0f} tok/s", refresh=False)
        self.bar.update(1)

    def close(self) -> None:
        """End the progress line and sync every row to disk. May be called again."""
        self.bar.close()
        for path in (self.metrics, self.timings):
            if self.main and path.exists():
                artifacts.fsync_path(path)


def scalars(group: str, values: dict[str, Any]) -> dict[str, float]:
    """Return a row as trackers take it: `group/name` → number, `group/name/k` for depth k of a list, `heldout/name` for
    heldout_name. What is not a finite number is left out: trackers either fail on it or draw it as zero."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        where = f"heldout/{name.removeprefix(HELDOUT)}" if name.startswith(HELDOUT) else f"{group}/{name}"
        flat |= {f"{where}/{k}": part for k, part in enumerate(value)} if isinstance(value, list) else {where: value}
    return {name: float(part) for name, part in flat.items() if isinstance(part, int | float) and isfinite(part)}
