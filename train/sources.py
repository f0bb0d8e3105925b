"""Where initial weights lie: which of a run's checkpoints, which revision of a repository, and what identifies them."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import OmegaConf
from safetensors.torch import load_file

from eagle31_train import artifacts, published, vocab
from eagle31_train.published import Draft
from eagle31_train.schema import Config, DrafterShape, UserError
from eagle31_train.store.sealed import DamagedError, checksum, unseal
from eagle31_train.vocab import DraftVocab
from train.checkpoint import MODEL, SHAPE, in_order
from train.claim import RECORD
from train.tracking import CONFIG

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


@dataclass(frozen=True)
class Source:
    """Weights that were found and not read yet.

    where: the option that named them. path: where they are. identity: what tells them from any others.
    """

    where: str
    path: Path
    identity: str
    read: Callable[[], Draft]


# ---------------------------------------------------------------- what the run itself knows


def begun_from(config: Config) -> dict[str, Any]:
    """The inputs of the run in the configuration's folder; empty where none was begun."""
    record = Path(config.run_dir) / "train" / RECORD
    inputs: dict[str, Any] = artifacts.read_json(record, "train.py").get("inputs", {}) if record.is_file() else {}
    return inputs


def recorded(config: Config) -> str | None:
    """The identity of the weights with which the run in the configuration's folder was begun, if it was."""
    found: str | None = begun_from(config).get("train", {}).get("init_from")
    return found


def going_on(config: Config) -> bool:
    """Whether that run has a checkpoint and was begun with the same `train.init_from`."""
    train = Path(config.run_dir) / "train"
    if not (train / CONFIG).is_file() or not in_order(train / "checkpoints"):
        return False
    begun = OmegaConf.load(train / CONFIG)
    names = ("init_from", "init_revision")
    return all(OmegaConf.select(begun, f"train.{name}") == getattr(config.train, name) for name in names)


# ---------------------------------------------------------------- finding


def find(config: Config, begun_with: str | None) -> Source:
    """What `train.init_from` names.

    Args:
        begun_with: the identity of the weights that a run began with: of a repository of the hub, that commit is taken.

    Raises:
        UserError: there is nothing there, or nothing to start from.
    """
    init, revision = config.train.init_from, config.train.init_revision
    assert init is not None
    where, folder = f"train.init_from={init}", Path(init)
    if not folder.exists() and HUB_ID.fullmatch(init):
        commit = begun_with.removeprefix(f"{init}@") if begun_with and begun_with.startswith(f"{init}@") else revision
        folder = published.fetch(init, commit)
        return Source(where, folder, f"{init}@{folder.name}", _reader(folder, where, config))
    if revision is not None:
        raise UserError(f"train.init_revision={revision} is for a repository of the hub, but {where} is none")
    if (folder / published.CONFIG).is_file():
        known_by = artifacts.weights_fingerprint(str(folder))
        return Source(where, folder, known_by, _reader(folder, where, config))
    if not folder.is_dir():
        raise UserError(f"{where} is no folder, and no hub id of the form owner/name either")
    return _run(config, folder, where)


def _reader(folder: Path, where: str, config: Config) -> Callable[[], Draft]:
    return partial(published.read, folder, where, partial(_target_layers, config))


def _target_layers(config: Config) -> int:
    """Layers of the target, where vLLM would count them."""
    from transformers import AutoConfig  # seconds, and seldom needed

    t = config.target
    try:
        read = AutoConfig.from_pretrained(t.path, revision=t.revision, trust_remote_code=t.trust_remote_code)
        return int(read.get_text_config().num_hidden_layers)
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(
            f"its config.json names no auxiliary layers, and target.path={t.path}, whose layers vLLM would count, "
            f"cannot be read ({str(error).splitlines()[0]}): write eagle_aux_hidden_state_layer_ids into it"
        ) from None


# ---------------------------------------------------------------- runs of this project


def _run(config: Config, folder: Path, where: str) -> Source:
    """A run, its train/, or one of its checkpoints."""
    if (folder / SHAPE).is_file():
        train, checkpoint = folder.parent.parent, folder
    else:
        train = folder if (folder / "checkpoints").is_dir() else folder / "train"
        checkpoint = _newest(train, where)
    if train.resolve() == (Path(config.run_dir) / "train").resolve():
        raise UserError(f"{where} is this run's own folder: choose another name=…, or leave train.init_from out")
    try:
        manifest = unseal((checkpoint / artifacts.MANIFEST).read_bytes())
        shape = DrafterShape(**artifacts.read_json(checkpoint / SHAPE, "train.py"))
        files = {name: manifest["files"][name] for name in (MODEL, SHAPE)}
    except (OSError, UserError, DamagedError, KeyError, TypeError) as error:
        raise UserError(f"{where}: {checkpoint} is no whole checkpoint ({error}): give another one") from None
    kept = _vocabulary(train, manifest["fingerprint"], shape, config, where)
    known_by = artifacts.fingerprint([files, kept.target_ids.tolist()])
    return Source(where, checkpoint, known_by, partial(_read, checkpoint, where, files, shape, kept))


def _newest(train: Path, where: str) -> Path:
    """The checkpoint of a finished run, or the newest of one that is not."""
    if (train / artifacts.MANIFEST).is_file():
        return train / artifacts.read_json(train / artifacts.MANIFEST, "train.py")["checkpoint"]
    there = [path for path in in_order(train / "checkpoints") if path.is_dir()]
    if not there:
        raise UserError(f"{where} holds neither a run with a checkpoint nor a config.json of a published draft")
    return there[-1]


def _vocabulary(train: Path, fingerprint: str, shape: DrafterShape, config: Config, where: str) -> DraftVocab:
    """What the rows of lm_head mean: the file is known by its hash, and may lie in any of three folders."""
    V = shape.vocab_size
    if shape.draft_vocab_size == V:
        return DraftVocab(np.arange(V, dtype=np.int64), V)
    record = artifacts.read_json(train / RECORD, "train.py")
    if record.get("fingerprint") != fingerprint:
        raise UserError(f"{where}: {train / RECORD} is of another run than the checkpoint: give the run's folder")
    folders = [config.data_folder, train.parent / "data"]
    if (train / CONFIG).is_file() and (elsewhere := OmegaConf.select(OmegaConf.load(train / CONFIG), "data_dir")):
        folders.append(Path(elsewhere))
    for file in (folder / "vocab.safetensors" for folder in folders):
        if file.is_file() and artifacts.file_sha256(file)[:16] == record["inputs"].get("vocab"):
            return vocab.read(file)
    raise UserError(
        f"{where}: the draft vocabulary that its lm_head was trained with is in none of "
        f"{', '.join(map(str, folders))}: put vocab.safetensors back, or start from the run's export"
    )


def _read(folder: Path, where: str, files: dict[str, Any], shape: DrafterShape, kept: DraftVocab) -> Draft:
    """A checkpoint's weights, once their bytes are known to be those that were written."""
    for name, entry in files.items():
        file = folder / name
        if not file.is_file() or file.stat().st_size != entry["bytes"] or checksum(file) != entry["checksum"]:
            raise UserError(
                f"{where}: {file} is not as it was written: give another checkpoint, {folder.parent}/step-…"
            )
    return Draft(where, shape, load_file(folder / MODEL), kept)
