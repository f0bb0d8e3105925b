"""Checkpoints: all that a run needs to resume, committed atomically.

    checkpoints/step-000100/model.safetensors      the drafter's weights, fp32
                            optimizer.safetensors  its moments: exp_avg.NAME, exp_avg_sq.NAME, or momentum_buffer.NAME
                            drafter.json           the drafter's shape, for the stages after training
                            manifest.json          sealed: step, fingerprint, extra, size and checksum of each file

A checkpoint is built in `.step-000100.tmp`, synced to disk and only then renamed; older ones are removed after that.
So at any instant the newest whole checkpoint is the one before a save, or the one after. Those of earlier versions also
hold rng.safetensors, which nothing needs: no step draws from a global random generator.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from eagle31_train.checkpoint import run_folder
from eagle31_train.checkpoint.run_folder import MODEL, OPTIMIZER, SHAPE, in_order, name_of, sealed_manifest, step_of
from eagle31_train.common import artifacts
from eagle31_train.common.background import Background
from eagle31_train.common.errors import UserError
from eagle31_train.config import DrafterShape
from eagle31_train.store.sealed import seal
from eagle31_train.store.tensors import save_file


@dataclass(frozen=True)
class Snapshot:
    """A run after `step` optimizer steps. Its tensors are unsharded and on the CPU; loaded ones are memory-mapped."""

    step: int
    weights: dict[str, Tensor]
    moments: dict[str, Tensor]  # exp_avg.NAME, exp_avg_sq.NAME, momentum_buffer.NAME
    shape: DrafterShape
    extra: Mapping[str, Any]  # JSON


# ---------------------------------------------------------------- reading


def newest(folder: Path, fingerprint: str, say: Callable[[str], None]) -> Path | None:
    """Return the newest whole checkpoint of this run, if any. Read every byte; name damaged ones and skip them."""
    for path in reversed(in_order(folder)):
        if (problem := damage(path, fingerprint)) is None:
            return path
        say(f"skipping checkpoint {path}: {problem}")
    return None


def load(path: Path) -> Snapshot:
    """Read a checkpoint that `newest` returned. Any number of processes may do so."""
    manifest, shape = sealed_manifest(path), run_folder.read_shape(path)
    return Snapshot(manifest["step"], load_file(path / MODEL), load_file(path / OPTIMIZER), shape, manifest["extra"])


def damage(path: Path, fingerprint: str) -> str | None:
    """Return what is wrong with a checkpoint, naming the file; None if it is whole and has this fingerprint."""
    try:
        manifest = sealed_manifest(path)
    except UserError as error:
        return str(error)
    if manifest.get("fingerprint") != fingerprint:
        return "it belongs to a run with other inputs"
    return artifacts.first_damaged(path, manifest["files"])


# ---------------------------------------------------------------- writing


class Saver(Background):
    """Writes the checkpoints of a run in a background thread, and keeps the newest ones and the best.

    A full disk or another file-system error does not stop the run: one line reports it, the older checkpoints stay, and
    the next save tries again.

    Args:
        folder: holds the run's checkpoints.
        fingerprint: of the run.
        keep: how many checkpoints to keep besides the best.
        say: prints a line; called from the background thread.
        step: of the checkpoint from `newest` that the run resumes from; 0 without one.
        best: step of the best checkpoint, if any.
    """

    def __init__(
        self,
        folder: Path,
        fingerprint: str,
        keep: int,
        say: Callable[[str], None],
        step: int = 0,
        best: int | None = None,
    ) -> None:
        self.folder, self.fingerprint, self.keep, self.say, self.best = folder, fingerprint, keep, say, best
        # Those after the one that the run resumes from are damaged.
        self._whole = [path for path in in_order(folder) if step_of(path) <= step]
        self._failed: UserError | None = None
        super().__init__("checkpoint")

    @property
    def committed(self) -> Path | None:
        """The newest checkpoint that was written whole."""
        return self._whole[-1] if self._whole else None

    def save(self, snapshot: Snapshot, required: bool = False, best: bool = False) -> None:
        """Wait for the previous save, then start to write; the snapshot belongs to the saver from now on. `required`:
        return when it is on disk, or raise UserError. `best`: keep it until another one is the best."""
        self.start(self._save, snapshot, required, best)
        if required:
            self.wait()
            if self._failed:
                raise self._failed

    def _save(self, snapshot: Snapshot, required: bool, best: bool) -> None:
        path = self.folder / name_of(snapshot.step)
        self._failed = None
        try:
            self._remove_leftovers()  # their disk space may be needed
            _write(snapshot, path, self.fingerprint)
        except OSError as error:
            start = self.committed or "the beginning"
            what = f"{path} could not be written ({error.strerror or error})"
            self._failed = UserError(f"{what}: fix that, then run the same command again to resume from {start}")
            if not required:
                self.say(
                    f"checkpoint {what}: training continues; if it stops before the next one, it resumes from {start}"
                )
            return
        artifacts.remove_backup(self.folder.parent)  # of the run that this one replaces
        self.best = snapshot.step if best else self.best
        self._whole = [*self._whole, path][-self.keep :]
        try:
            for other in in_order(self.folder) if len(self._whole) == self.keep else ():
                if step_of(other) < snapshot.step and other not in self._whole and step_of(other) != self.best:
                    artifacts.discard(other)
        except OSError as error:
            self.say(f"old checkpoints in {self.folder} could not be removed ({error}): the next save tries again")

    def _remove_leftovers(self) -> None:
        """Remove what killed saves left: half a checkpoint, or one that was being replaced or removed."""
        for leftover in self.folder.glob(".step-*"):
            shutil.rmtree(leftover, ignore_errors=True)


def _write(snapshot: Snapshot, path: Path, fingerprint: str) -> None:
    with artifacts.building(path) as temporary:
        save_file(snapshot.weights, temporary / MODEL)
        save_file(snapshot.moments, temporary / OPTIMIZER)
        (temporary / SHAPE).write_bytes(json.dumps(asdict(snapshot.shape), indent=2).encode() + b"\n")
        written = [temporary / name for name in (MODEL, OPTIMIZER, SHAPE)]
        files = {file.name: {"bytes": file.stat().st_size, "checksum": artifacts.checksum(file)} for file in written}
        manifest = {"step": snapshot.step, "fingerprint": fingerprint, "extra": dict(snapshot.extra), "files": files}
        # Seal what JSON will read back: a key that is not a string, for one, comes back as another.
        (temporary / artifacts.MANIFEST).write_bytes(seal(json.loads(json.dumps(manifest)), indent=2))
