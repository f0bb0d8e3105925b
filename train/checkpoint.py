"""Checkpoints: all that a run needs to go on, committed whole, and counted only once read back from the disk.

    checkpoints/step-000100/model.safetensors      the drafter's weights, fp32
                            optimizer.safetensors  its moments: exp_avg.NAME, exp_avg_sq.NAME, or momentum_buffer.NAME
                            rng.safetensors        random states of every rank: rank0.torch, rank0.numpy, …
                            drafter.json           the drafter's shape, for the stages after training
                            manifest.json          sealed: step, fingerprint, extra, size and checksum of each file

A checkpoint is built in `.step-000100.tmp`, forced to the disk, read back, compared with what was meant, and only
then renamed. An older one of the same step lies in `.step-000100.old` meanwhile, and comes back from there after a
kill between the two renames. So at any instant the newest whole checkpoint is the one before a save, or the one after.
"""

import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from eagle31_train import artifacts
from eagle31_train.schema import DrafterShape, UserError
from eagle31_train.store.sealed import DamagedError, checksum, read_sealed, seal, unseal
from train.readback import write_bytes, write_tensors

MODEL, OPTIMIZER, RNG, SHAPE = "model.safetensors", "optimizer.safetensors", "rng.safetensors", "drafter.json"
NAME = re.compile(r"step-(\d+)|\.step-(\d+)\.old")
Looks = tuple[tuple[str, int, int, int], ...]


@dataclass(frozen=True)
class Snapshot:
    """A run after `step` optimizer steps, however it is sharded; CPU tensors that nobody else writes to."""

    step: int
    weights: dict[str, Tensor]
    moments: dict[str, Tensor]  # exp_avg.NAME, exp_avg_sq.NAME
    rng: dict[str, Tensor]  # rankR.KIND; see train/rng.py
    shape: DrafterShape
    extra: Mapping[str, Any]  # JSON

    @property
    def files(self) -> dict[str, dict[str, Tensor]]:
        """File → its tensors."""
        return {MODEL: self.weights, OPTIMIZER: self.moments, RNG: self.rng}

    @property
    def bytes(self) -> int:
        """What it takes on the disk, but for some kilobytes."""
        return sum(t.numel() * t.element_size() for tensors in self.files.values() for t in tensors.values())


@dataclass(frozen=True)
class Loaded:
    """What a checkpoint holds; see `Snapshot`. The tensors are mapped from its files: copy what is kept."""

    step: int
    weights: dict[str, Tensor]
    moments: dict[str, Tensor]
    rng: dict[str, Tensor]
    extra: dict[str, Any]


# ---------------------------------------------------------------- reading


def newest(folder: Path, fingerprint: str, say: Callable[[str], None]) -> Path | None:
    """The newest checkpoint of this run that is whole, every byte of it read; others are named and passed over.

    One that a killed save had set aside gets its name back: only the main process may ask, and no `Saver` beside it.

    Raises:
        UserError: its name cannot be given back; going on from an older one would throw it away.
    """
    for path in reversed(in_order(folder)):
        try:
            put_back(path, fingerprint)
        except OSError as error:
            raise UserError(
                f"{_aside(path)} could not be put back as {path.name} ({error.strerror or error}): mend that, then run "
                "the same command again"
            ) from None
        if (problem := damage(path, path.name, fingerprint)) is None:
            return path
        say(f"checkpoint {path} is not used: {problem}")
    return None


def load(path: Path, shape: DrafterShape) -> Loaded:
    """Read a checkpoint that `newest` found; any number of processes may.

    Raises:
        UserError: it is of a drafter of another shape.
    """
    there, here = artifacts.read_json(path / SHAPE, "train.py"), asdict(shape)
    there = {name: there.get(name) for name in {**here, **there}}  # fields that came later were null
    if there != here:
        raise UserError(f"{path} is a drafter of another shape: {artifacts.describe_change(there, here)}")
    file = path / artifacts.MANIFEST
    manifest = read_sealed(file.read_bytes(), str(file), "run the same command again, which goes on from another")
    weights, moments, rng = (load_file(path / name) for name in (MODEL, OPTIMIZER, RNG))
    return Loaded(manifest["step"], weights, moments, rng, manifest["extra"])


def in_order(folder: Path) -> list[Path]:
    """Where the checkpoints of a run are, or belong that are set aside; oldest first."""
    found = (NAME.fullmatch(path.name) for path in folder.glob("*step-*"))
    return [folder / name_of(step) for step in sorted({int(match[1] or match[2]) for match in found if match})]


def name_of(step: int) -> str:
    """What the checkpoint of a step is called."""
    return f"step-{step:06d}"


def put_back(path: Path, fingerprint: str) -> None:
    """Give the checkpoint that a save had set aside its name back, where it is whole and what is there is not."""
    aside = _aside(path)
    if not aside.is_dir() or damage(aside, path.name, fingerprint) is not None:
        return
    if damage(path, path.name, fingerprint) is not None:
        if path.exists():
            shutil.rmtree(path)
        aside.replace(path)
        artifacts.fsync_path(path.parent)


def damage(path: Path, name: str, fingerprint: str) -> str | None:
    """What is wrong with the checkpoint in a folder, naming the file; None if it is whole and of this run.

    Args:
        path: the folder.
        name: what the checkpoint is called, whose step must be the one inside.
        fingerprint: of the run.
    """
    file = path / artifacts.MANIFEST
    try:
        manifest = unseal(file.read_bytes())
        if manifest.get("fingerprint") != fingerprint:
            return "it is of a run of other inputs"
        if name_of(manifest["step"]) != name:
            return f"{file} is of step {manifest['step']}"
        listed: dict[str, dict[str, Any]] = manifest["files"]
        if unknown := {found.name for found in path.iterdir()} - {*listed, artifacts.MANIFEST}:
            return f"{path / min(unknown)} does not belong to it"
        for entry, wanted in listed.items():
            file = path / entry
            if (size := file.stat().st_size) != wanted["bytes"]:
                return f"{file} has {size} bytes, not {wanted['bytes']}: truncated or replaced"
            if checksum(file) != wanted["checksum"]:
                return f"{file} does not match its checksum: damaged or replaced"
    except DamagedError as error:
        return f"{file} is damaged ({error})"
    except (FileNotFoundError, NotADirectoryError):
        return f"{file} is missing"
    except OSError as error:
        return f"{file} cannot be read ({error.strerror})"
    return None


def _aside(path: Path) -> Path:
    """Where `artifacts` puts what it replaces or removes."""
    return path.with_name(f".{path.name}.old")


# ---------------------------------------------------------------- writing


class Saver:
    """Writes the checkpoints of a run in a background thread, and keeps the newest whole ones.

    A full disk, or another error of the file system, does not stop the run: it is said in one line, the older
    checkpoints stay, and the next save tries again.

    Args:
        folder: where the checkpoints of the run lie.
        fingerprint: of the run.
        keep: how many whole checkpoints stay.
        say: prints a line; called from the background thread.
        committed: the checkpoint that the run goes on from, as `newest` has just found it.

    Attributes:
        committed: the newest checkpoint that was written and read back whole.
        failed: why the last save was none; None if it was one.
    """

    def __init__(
        self, folder: Path, fingerprint: str, keep: int, say: Callable[[str], None], committed: Path | None = None
    ) -> None:
        assert keep > 0
        self.folder, self.fingerprint, self.keep, self.say = folder, fingerprint, keep, say
        self.committed = committed
        self.failed: UserError | None = None
        # What files looked like when they were read, and what was wrong: gigabytes are not read at every save.
        self._seen: dict[Path, tuple[Looks, str | None]] = {}
        if committed is not None:
            self._seen[committed] = (_looks(committed), None)
        # The interpreter waits for its thread, whatever ends the main one.
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._saving: Future[None] | None = None

    def save(self, snapshot: Snapshot) -> None:
        """Wait for the save before this one, then begin to write; the snapshot is the saver's from now on.

        Raises:
            BaseException: whatever but an OSError stopped the save before.
        """
        self.wait()
        self._saving = self._thread.submit(self._save, snapshot)

    def wait(self) -> None:
        """Return when nothing is being written; raises as `save` does."""
        if self._saving is None:
            return
        error = self._saving.exception()  # Ctrl-C meanwhile leaves it to be waited for again
        self._saving = None
        if error is not None:
            raise error

    def close(self) -> None:
        """Wait, raising as `save` does, and end the thread."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()

    def _save(self, snapshot: Snapshot) -> None:
        path = self.folder / name_of(snapshot.step)
        try:
            for leftover in self.folder.glob(".step-*.tmp"):  # of killed saves; its room may be needed
                shutil.rmtree(leftover, ignore_errors=True)
            _write(snapshot, path, self.fingerprint)
        except OSError as error:
            what = f"{path} could not be written ({error.strerror or error}); it takes {snapshot.bytes:,} bytes"
            start = self.committed or "the beginning"
            self.failed = UserError(f"{what}: mend that, then run the same command again, which goes on from {start}")
            self.say(
                f"checkpoint {what}: training goes on, and the next checkpoint tries again; a stop now would go "
                f"back to {start}"
            )
            with suppress(OSError):
                put_back(path, self.fingerprint)
            return
        self._seen[path] = (_looks(path), None)
        self.committed, self.failed = path, None
        try:
            self._prune()
        except OSError as error:
            self.say(
                f"old checkpoints in {self.folder} could not be removed ({error}): the next checkpoint tries again"
            )

    def _prune(self) -> None:
        """Remove what is older than the newest `keep` whole checkpoints, and what killed saves left."""
        kept = 0
        for path in reversed(in_order(self.folder)):
            if kept < self.keep:
                kept += self._is_whole(path)
            elif path.exists():
                artifacts.discard(path)
                self._seen.pop(path, None)
        for leftover in self.folder.glob(".step-*.old"):
            shutil.rmtree(leftover)

    def _is_whole(self, path: Path) -> bool:
        if path not in self._seen or self._seen[path][0] != _looks(path):
            put_back(path, self.fingerprint)
            self._seen[path] = (_looks(path), damage(path, path.name, self.fingerprint))
        return self._seen[path][1] is None


def _looks(path: Path) -> Looks:
    """What changes whenever a checkpoint's files do."""
    try:
        with os.scandir(path) as entries:
            found = [(entry.name, entry.stat()) for entry in entries]
    except (FileNotFoundError, NotADirectoryError):
        return ()
    return tuple(sorted((name, s.st_size, s.st_mtime_ns, s.st_ino) for name, s in found))


def _write(snapshot: Snapshot, path: Path, fingerprint: str) -> None:
    """Write a checkpoint, whole and read back, or not at all.

    Raises:
        OSError: the disk is full, or fails, or did not keep what was written; what stood at `path` is there, or aside.
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
        files = {name: write_tensors(tensors, temporary / name) for name, tensors in snapshot.files.items()}
        files[SHAPE] = write_bytes(json.dumps(asdict(snapshot.shape), indent=2).encode() + b"\n", temporary / SHAPE)
        manifest = {"step": snapshot.step, "fingerprint": fingerprint, "extra": dict(snapshot.extra), "files": files}
        # Sealed as JSON has it: a key that is no string, for one, would be read back as another.
        write_bytes(seal(json.loads(json.dumps(manifest)), indent=2), temporary / artifacts.MANIFEST)
        artifacts.commit(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
