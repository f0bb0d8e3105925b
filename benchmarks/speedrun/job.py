"""One training of the speedrun: its process's job, its clock, and the drafts that it saves on the way."""

import json
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from eagle31_train.checkpoint import config_json
from eagle31_train.common import artifacts
from eagle31_train.config import DrafterShape
from eagle31_train.model.vocab import DraftVocab
from eagle31_train.store.tensors import save_file

JOB, RESULT, DRAFTS = "job.json", "training.json", "drafts"
MADE_BY = "python -m benchmarks.speedrun train"
Save = Callable[[Path], None]  # writes the current drafter into an existing folder


@dataclass(frozen=True)
class Job:
    """A training.

    contender: a module of this package. options: of its own trainer, over its authors' defaults; of ours, key=value.
    recipe: our configuration, as overrides. data, store, target: folders. out: the folder that it writes.
    shape: the drafter's, from which the peers take sizes. marks: seconds after which a draft is saved.
    steps: of the whole schedule. seconds: when to end the training before its schedule does; None for no limit.
    count: count FLOPs, which takes longer.
    """

    contender: str
    options: list[str]
    recipe: list[str]
    data: str
    store: str
    target: str
    out: str
    shape: dict[str, Any]
    seed: int
    steps: int
    marks: list[float] = field(default_factory=list)
    seconds: float | None = None
    count: bool = False

    @property
    def folder(self) -> Path:
        return Path(self.out)

    @property
    def drafter_shape(self) -> DrafterShape:
        return DrafterShape(**self.shape)

    @property
    def given(self) -> dict[str, str]:
        return dict(option.partition("=")[::2] for option in self.options)

    def write(self) -> Path:
        self.folder.mkdir(parents=True, exist_ok=True)
        artifacts.write_json(self.folder / JOB, asdict(self))
        return self.folder / JOB

    @classmethod
    def read(cls, file: Path) -> "Job":
        return cls(**artifacts.read_json(file, MADE_BY))

    def probe(self, name: str, **changes: Any) -> "Job":
        """Return a short training of the same kind, which saves no drafts."""
        return replace(self, out=str(self.folder / name), marks=[], **changes)


class EnoughError(Exception):
    """A training's time is over."""


class Clock:
    """Counts the seconds of a training, and saves drafts when due; the clock stops while saving. `points` has a row for
    each draft; `seconds` has those after each step."""

    def __init__(self, job: Job) -> None:
        self.job, self.points = job, list[dict[str, Any]]()
        self.seconds: list[float] = [0.0]
        self.tokens = 0
        self._due = sorted(job.marks)
        self._wall = self._cpu = 0.0  # spent so far
        self._since: tuple[float, float] | None = None

    def begin(self, save: Save) -> None:
        """Save the initial weights; the clock does not run yet."""
        if self.job.marks and not self.points:
            self._leave(0, 0, save)

    def run(self) -> None:
        self._since = time.perf_counter(), time.process_time()

    def pause(self) -> None:
        """Stop, until `run`."""
        if self._since is not None:
            self._wall += time.perf_counter() - self._since[0]
            self._cpu += time.process_time() - self._since[1]
            self._since = None

    def step(self, step: int, tokens: int, save: Save) -> None:
        """Record the end of an optimizer step, counted from 1, and the tokens so far; EnoughError if time is over."""
        self.pause()
        self.seconds.append(self._wall)
        self.tokens = tokens
        due = [mark for mark in self._due if mark <= self._wall]
        if self.job.marks and (due or step == self.job.steps):
            self._due = self._due[len(due) :]
            self._leave(step, tokens, save)
        if self.job.seconds is not None and self._wall >= self.job.seconds:
            raise EnoughError
        self.run()

    def _leave(self, step: int, tokens: int, save: Save) -> None:
        folder = self.job.folder / DRAFTS / f"step-{step:06d}"
        folder.mkdir(parents=True)
        save(folder)
        row = {"step": step, "tokens": tokens, "seconds": self._wall, "cpu_seconds": self._cpu, "draft": folder.name}
        self.points.append(row)

    def result(self) -> dict[str, Any]:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return {
            "steps": len(self.seconds) - 1,
            "tokens": self.tokens,
            "seconds": self._wall,
            "cpu_seconds": self._cpu,
            "memory_bytes": peak,
            "step_seconds": self.seconds,
            "points": self.points,
        }


def write_draft(
    folder: Path, shape: DrafterShape, weights: dict[str, Tensor], vocab: DraftVocab, dtype: str, target: str
) -> None:
    """Write a checkpoint as stage 5 exports it, into an existing folder. weights: by the contract's names, of any
    dtype. dtype: what they are rounded to."""
    tensors = {name: tensor.detach().to(getattr(torch, dtype)) for name, tensor in weights.items()}
    tensors |= {"d2t": torch.from_numpy(vocab.d2t), "t2d": torch.from_numpy(vocab.t2d)} if vocab.pruned else {}
    (folder / "config.json").write_text(json.dumps(config_json.config_json(shape, dtype, target), indent=1))
    save_file(tensors, folder / "model.safetensors")


def flop_counter() -> FlopCounterMode:
    """Return a counter of every matrix product that is dispatched, with attention as if nothing were masked."""

    def product(a: Sequence[int], b: Sequence[int], *_rest: Any, **_options: Any) -> int:
        return 2 * a[0] * a[1] * b[0]

    def added(_sum: Any, a: Sequence[int], b: Sequence[int], **_options: Any) -> int:
        return 2 * a[0] * a[1] * b[1]

    def attention(q: Any, k: Any, v: Any, *_rest: Any, **_options: Any) -> int:
        return int(sdpa_flop_count(q, k, v))

    def attention_backward(out: Any, q: Any, k: Any, v: Any, *_rest: Any, **_options: Any) -> int:
        return int(sdpa_backward_flop_count(out, q, k, v))

    aten = torch.ops.aten
    others = {
        aten.addmm_: added,
        torch.ops.mkldnn._linear_pointwise: product,
        aten._scaled_dot_product_flash_attention_for_cpu: attention,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: attention_backward,
    }
    return FlopCounterMode(display=False, custom_mapping=others)
