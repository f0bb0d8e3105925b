"""The folder of a training run: the names of its files, and how to find and read them.

RUN/train/inputs.json           what the weights depend on; written first
          config.yaml           all options
          checkpoints/step-…/   drafter.json, model.safetensors, …: see train/checkpoint.py
          manifest.json         written last: the run is finished
RUN/export.json                 the record of RUN/export/
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import OmegaConf
from safetensors.torch import load_file
from torch import Tensor

from eagle31_train.common import artifacts
from eagle31_train.common.errors import UserError
from eagle31_train.config import DrafterShape
from eagle31_train.model import vocab
from eagle31_train.model.vocab import DraftVocab
from eagle31_train.store.sealed import DamagedError, unseal

TRAIN, EXPORT = "eagle31 train", "eagle31 export"
CARD = "export/README.md", "export/images/"  # may be edited by hand
EXPORTED = "export.json"  # beside RUN/export/, in which every file is for vLLM or the hub
RECORD, CONFIG, CHECKPOINTS = "inputs.json", "config.yaml", "checkpoints"
MODEL, OPTIMIZER, SHAPE = "model.safetensors", "optimizer.safetensors", "drafter.json"
RNG = "rng.safetensors"  # in checkpoints of earlier versions
NAME = re.compile(r"step-\d+")


def in_order(folder: Path) -> list[Path]:
    """Return the checkpoints of a run, whole or not, oldest first."""
    return sorted((path for path in folder.glob("step-*") if NAME.fullmatch(path.name)), key=step_of)


def latest_run(train: Path) -> Path:
    """Return the folder of the run in train/: its backup, as long as the run that replaces it has no checkpoint."""
    backup = artifacts.backup_of(train)
    return backup if backup.is_dir() and not in_order(train / CHECKPOINTS) else train


def recorded_inputs(train: Path) -> artifacts.Record | None:
    """Return what the run of `latest_run` was made from; None if there is none. UserError if its record is damaged."""
    file = latest_run(train) / RECORD
    if not file.is_file():
        return None
    return artifacts.Record(artifacts.read_json(file, "train.py")["inputs"], file, "train.py")


def restore_replaced(train: Path) -> bool:
    """Restore the backed-up run, if any, unless the run that replaces it has a checkpoint. Return whether it was."""
    return not in_order(train / CHECKPOINTS) and artifacts.restore_backup(train)


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def name_of(step: int) -> str:
    return f"step-{step:06d}"


def identity(manifest: dict[str, Any]) -> str:
    """Return a fingerprint that tells two trainings apart by their manifests, even if their inputs are the same."""
    return artifacts.fingerprint([manifest["fingerprint"], manifest.get("files", {})])


def read_shape(checkpoint: Path) -> DrafterShape:
    """Read the shape that training wrote beside its weights. Raise UserError if it is missing or not a drafter's."""
    path = checkpoint / SHAPE
    try:
        shape = DrafterShape(**artifacts.read_json(path, TRAIN))
    except TypeError as error:
        raise UserError(f"{path} is not a drafter's shape ({error}): run `{TRAIN}` again") from None
    if shape.architecture not in ("llama", "mla"):
        raise UserError(f"{path} has an unknown architecture, {shape.architecture}")
    return shape


def sealed_manifest(checkpoint: Path) -> dict[str, Any]:
    """Read a checkpoint's own manifest: step, fingerprint of the run, size and checksum of each file. Raise UserError
    if it is missing or damaged."""
    file = checkpoint / artifacts.MANIFEST
    try:
        try:
            return unseal(file.read_bytes())
        except DamagedError:  # it may have been a single read error: read again
            artifacts.forget_pages(file)
            return unseal(file.read_bytes())
    except (OSError, DamagedError) as error:
        raise UserError(f"{file} is missing or damaged ({error}): use another checkpoint") from None


def load_weights(checkpoint: Path, manifest: dict[str, Any] | None) -> dict[str, Tensor]:
    """Verify the files that a drafter needs, and return its weights, memory-mapped. UserError if they are damaged.
    `manifest`: that of the finished run; None for an unfinished one, whose checkpoints have their own checksums."""
    if manifest is not None:
        files = {name: entry for name, entry in manifest["files"].items() if not name.endswith((OPTIMIZER, RNG))}
        damage = artifacts.first_damaged(checkpoint.parent.parent, files)
    else:
        files = sealed_manifest(checkpoint)["files"]
        damage = artifacts.first_damaged(checkpoint, {name: files[name] for name in (MODEL, SHAPE)})
    if damage:
        raise UserError(f"{damage}: use another checkpoint, or run `{TRAIN}` again")
    try:
        return load_file(checkpoint / MODEL)
    except FileNotFoundError:  # a training has just replaced the run
        gone = f"{checkpoint / MODEL} has just been removed"
        raise UserError(f"{gone}: run this again after the training") from None


def option(train: Path, name: str) -> Any:
    """Return an option of the run; None if it is not set, or the run left no options."""
    return OmegaConf.select(OmegaConf.load(train / CONFIG), name) if (train / CONFIG).is_file() else None


def find_vocab(train: Path, inputs: dict[str, Any], shape: DrafterShape, data_folder: Path | None) -> DraftVocab:
    """Return the draft vocabulary: what the rows of lm_head mean. Its file is known by its hash and may be in
    `data_folder`, beside train/, or where the run's options say. Raise UserError if it is nowhere: another file of the
    same size would silently change what the rows mean."""
    V = shape.vocab_size
    if shape.draft_vocab_size == V:
        return DraftVocab(np.arange(V, dtype=np.int64), V)
    folders = [data_folder, train.parent / "data", option(train, "data_dir")]
    files = list(dict.fromkeys(Path(folder) / "vocab.safetensors" for folder in folders if folder))
    for file in files:
        if file.is_file() and artifacts.file_sha256(file)[:16] == inputs.get("vocab"):
            return vocab.read(file)
    where = " or ".join(map(str, files))
    raise UserError(f"{where} is not the vocabulary that the drafter was trained with: restore it, or use the export")


def read_export(run: Path) -> dict[str, Any]:
    """Read the exporter's record of a run. Raise UserError if it is missing, or if the export is damaged or has
    other weights than train/."""
    record = artifacts.read_json(run / EXPORTED, EXPORT)
    served = {name: file for name, file in record["files"].items() if not name.startswith(CARD)}
    if damage := artifacts.first_damaged(run, served):
        raise UserError(f"{damage}: run `{EXPORT}` again")
    if "checkpoint" not in record:
        raise UserError(f"{run / EXPORTED} was written by an earlier version: run `{EXPORT}` again")
    if (run / "train" / artifacts.MANIFEST).is_file():  # the export also works without it
        train, made_from = artifacts.read_json(run / "train" / artifacts.MANIFEST, TRAIN), record["inputs"]
        weights = train.get("files", {}).get(f"{train['checkpoint']}/{MODEL}", {}).get("sha256")
        if (made_from["train"], made_from["weights"]) != (train["fingerprint"], weights):
            other = f"{run / 'export'} has other weights than {run / 'train'}"
            raise UserError(f"{other}: run `{EXPORT}` again, with overwrite=true")
    return record


def is_export_of(record: Mapping[str, Any], shape: DrafterShape, target_ids: list[int]) -> bool:
    """Return whether an export, by its record, has these draft tokens and this shape's sliding window."""
    made = record["inputs"]
    quantized = "weights_as" in made  # by an earlier version
    kind = made["vocab"], made["shape"].get("sliding_window")
    return not quantized and kind == (artifacts.fingerprint(target_ids), shape.sliding_window)


def training_of_export(folder: Path) -> dict[str, Any] | None:
    """Return the manifest of the training whose export is in `folder`; None if that is not known for certain."""
    run = folder.resolve().parent
    if folder.resolve().name != "export" or not (run / EXPORTED).is_file():
        return None
    try:
        read_export(run)
        return artifacts.read_json(run / "train" / artifacts.MANIFEST, TRAIN)
    except UserError:
        return None
