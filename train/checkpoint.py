"""Checkpoints: all that a run needs to go on, committed whole, and counted only once read back from the disk.

    checkpoints/step-000100/model.safetensors      the drafter's weights, fp32
                            optimizer.safetensors  its moments: exp_avg.NAME, exp_avg_sq.NAME, or momentum_buffer.NAME
                            drafter.json           the drafter's shape, for the stages after training
                            manifest.json          sealed: step, fingerprint, extra, size and checksum of each file

A checkpoint is built in `.step-000100.tmp`, forced to the disk, read back and only then renamed; older ones are removed
after that. So at any instant the newest whole checkpoint is the one before a save, or the one after. Those of earlier
versions also hold rng.safetensors, which nothing needs: no step draws from a global random generator.
"""

import errno
import json
import os
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from eagle31_train import artifacts
from eagle31_train.checkpoint.run_folder import MODEL, OPTIMIZER, SHAPE, in_order, name_of, step_of
from eagle31_train.config import DrafterShape
from eagle31_train.errors import UserError
from eagle31_train.store.sealed import DamagedError, checksum, digest, read_sealed, seal, unseal
from eagle31_train.store.tensors import save_file


@dataclass(frozen=True)
class Snapshot:
    """A run after `step` optimizer steps, however it is sharded; CPU tensors that nobody else writes to."""

    step: int
    weights: dict[str, Tensor]
    moments: dict[str, Tensor]  # exp_avg.NAME, exp_avg_sq.NAME
    shape: DrafterShape
    extra: Mapping[str, Any]  # JSON

    @property
    def files(self) -> dict[str, dict[str, Tensor]]:
        """File → its tensors."""
        return {MODEL: self.weights, OPTIMIZER: self.moments}

    @property
    def bytes(self) -> int:
        """Of its files on the disk, but for some kilobytes."""
        return sum(t.numel() * t.element_size() for tensors in self.files.values() for t in tensors.values())


@dataclass(frozen=True)
class Loaded:
    """What a checkpoint holds; see `Snapshot`. The tensors are mapped from its files: copy those that you keep."""

    step: int
    weights: dict[str, Tensor]
    moments: dict[str, Tensor]
    extra: dict[str, Any]


# ---------------------------------------------------------------- reading


def newest(folder: Path, fingerprint: str, say: Callable[[str], None]) -> Path | None:
    """The newest checkpoint of this run that is whole, every byte of it read; others are named and passed over."""
    for path in reversed(in_order(folder)):
        if (problem := damage(path, fingerprint)) is None:
            return path
        say(f"checkpoint {path} is not used: {problem}")
    return None


def load(path: Path, shape: DrafterShape) -> Loaded:
    """Read a checkpoint that `newest` returned; any number of processes may.

    Raises:
        UserError: it is of a drafter of another shape.
    """
    there, here = artifacts.read_json(path / SHAPE, "train.py"), asdict(shape)
    there = {name: there.get(name) for name in {**here, **there}}  # fields that came later were null
    if there != here:
        raise UserError(f"{path} is a drafter of another shape: {artifacts.describe_change(there, here)}")
    file = path / artifacts.MANIFEST
    manifest = read_sealed(file.read_bytes(), str(file), "run the same command again, which goes on from another")
    return Loaded(manifest["step"], load_file(path / MODEL), load_file(path / OPTIMIZER), manifest["extra"])


def damage(path: Path, fingerprint: str) -> str | None:
    """What is wrong with a checkpoint, naming the file; None if it is whole and of the run with this fingerprint."""
    file = path / artifacts.MANIFEST
    try:
        manifest = unseal(file.read_bytes())
        if manifest.get("fingerprint") != fingerprint:
            return "it is of a run of other inputs"
        if name_of(manifest["step"]) != path.name:
            return f"{file} is of step {manifest['step']}"
        listed: dict[str, dict[str, Any]] = manifest["files"]
        if unknown := {entry.name for entry in path.iterdir()} - {*listed, artifacts.MANIFEST}:
            return f"{path / min(unknown)} does not belong to it"
        for name, entry in listed.items():
            file = path / name
            if (size := file.stat().st_size) != entry["bytes"]:
                return f"{file} has {size} bytes, not {entry['bytes']}: truncated or replaced"
            if checksum(file) != entry["checksum"]:
                return f"{file} does not match its checksum: damaged or replaced"
    except DamagedError as error:
        return f"{file} is damaged ({error})"
    except (FileNotFoundError, NotADirectoryError):
        return f"{file} is missing"
    except OSError as error:
        return f"{file} cannot be read ({error.strerror})"
    return None


# ---------------------------------------------------------------- writing


class Saver:
    """Writes the checkpoints of a run in a background thread, and keeps the newest ones.

    A full disk, or another error of the file system, does not stop the run: it is said in one line, the older
    checkpoints stay, and the next save tries again.

    Args:
        folder: where the checkpoints of the run lie.
        fingerprint: of the run.
        keep: how many checkpoints stay.
        say: prints a line; called from the background thread.
        committed: the checkpoint that the run goes on from, as `newest` has just returned it.

    Attributes:
        committed: the newest checkpoint that was written and read back whole.
    """

    def __init__(
        self, folder: Path, fingerprint: str, keep: int, say: Callable[[str], None], committed: Path | None = None
    ) -> None:
        self.folder, self.fingerprint, self.keep, self.say = folder, fingerprint, keep, say
        # What lies behind the one that the run goes on from is damaged.
        last = 0 if committed is None else step_of(committed)
        self._whole = [path for path in in_order(folder) if step_of(path) <= last]
        self._failed: UserError | None = None
        # The interpreter waits for its thread, whatever ends the main one.
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._saving: Future[None] | None = None

    @property
    def committed(self) -> Path | None:
        """See the class."""
        return self._whole[-1] if self._whole else None

    def save(self, snapshot: Snapshot, required: bool = False) -> None:
        """Wait for the save before this one, then begin to write; the snapshot is the saver's from now on.

        Args:
            required: return once it is on the disk.

        Raises:
            UserError: it is required, and cannot be written.
            BaseException: whatever but an OSError stopped the save before.
        """
        self.wait()
        self._saving = self._thread.submit(self._save, snapshot)
        if required:
            self.wait()
            if self._failed:
                raise self._failed

    def wait(self) -> None:
        """Return when nothing is being written.

        Raises:
            BaseException: whatever but an OSError stopped the save.
        """
        if self._saving is None:
            return
        error = self._saving.exception()  # Ctrl-C meanwhile leaves it to be waited for again
        self._saving = None
        if error is not None:
            raise error

    def close(self) -> None:
        """Wait, raising as `wait` does, and end the thread."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()

    def _save(self, snapshot: Snapshot) -> None:
        path = self.folder / name_of(snapshot.step)
        try:
            self._remove_leftovers()  # whose bytes may be needed
            _write(snapshot, path, self.fingerprint)
        except OSError as error:
            what = f"{path} could not be written ({error.strerror or error}); it takes {snapshot.bytes:,} bytes"
            start = self.committed or "the beginning"
            self._failed = UserError(f"{what}: mend that, then run the same command again, which goes on from {start}")
            self.say(
                f"checkpoint {what}: training goes on, and the next checkpoint tries again; a stop now would go "
                f"back to {start}"
            )
            return
        self._failed = None
        self._whole = [*self._whole, path][-self.keep :]
        try:
            for other in in_order(self.folder) if len(self._whole) == self.keep else ():
                if step_of(other) < snapshot.step and other not in self._whole:
                    artifacts.discard(other)
            self._remove_leftovers()
        except OSError as error:
            self.say(
                f"old checkpoints in {self.folder} could not be removed ({error}): the next checkpoint tries again"
            )

    def _remove_leftovers(self) -> None:
        """Remove what killed saves left: half a checkpoint, or one that was being replaced or removed."""
        for leftover in self.folder.glob(".step-*"):
            shutil.rmtree(leftover, ignore_errors=True)


def _write(snapshot: Snapshot, path: Path, fingerprint: str) -> None:
    """Write a checkpoint, whole and read back, or not at all.

    Raises:
        OSError: the disk is full, or fails, or did not keep what was written.
    """
    folder = path.parent
    if not folder.is_dir():
        folder.mkdir(parents=True)
        artifacts.fsync_path(folder.parent)
    disk = shutil.disk_usage(folder)
    if disk.free < snapshot.bytes and disk.total:  # a network's file system may say 0 of 0
        # Not even tried: a disk full to the brim would stop the run's other files.
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {disk.free:,} bytes are free")
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.mkdir()
    try:
        files = {name: _write_tensors(tensors, temporary / name) for name, tensors in snapshot.files.items()}
        shape = json.dumps(asdict(snapshot.shape), indent=2).encode() + b"\n"
        (temporary / SHAPE).write_bytes(shape)
        files[SHAPE] = {"bytes": len(shape), "checksum": digest(shape)}
        manifest = {"step": snapshot.step, "fingerprint": fingerprint, "extra": dict(snapshot.extra), "files": files}
        # Sealed as JSON has it: a key that is no string, for one, would be read back as another.
        (temporary / artifacts.MANIFEST).write_bytes(seal(json.loads(json.dumps(manifest)), indent=2))
        artifacts.commit(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write_tensors(tensors: dict[str, Tensor], path: Path) -> dict[str, Any]:
    """Write tensors of the CPU as safetensors, and read them back from the disk; returns the file's size and checksum.

    Raises:
        OSError: the disk is full, fails, or gives back anything else.
    """
    save_file(tensors, path)
    artifacts.fsync_path(path)
    if hasattr(os, "posix_fadvise"):  # or what is read would come from the machine's memory
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    try:
        written = load_file(path)
    except SafetensorError:
        written = {}
    if written.keys() != tensors.keys() or any(not _same_bits(written[name], tensors[name]) for name in tensors):
        raise OSError(errno.EIO, f"{path.name} did not read back as it was written: check the disk")
    return {"bytes": path.stat().st_size, "checksum": checksum(path)}


def _same_bits(ours: Tensor, theirs: Tensor) -> bool:
    same_kind = (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
    return same_kind and torch.equal(ours.flatten().view(torch.uint8), theirs.flatten().view(torch.uint8))
