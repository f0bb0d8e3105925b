"""A drafter on disk, whoever wrote it: a run of this project, an exported folder, or a published EAGLE 3 or 3.1 draft.

checkpoint = DrafterCheckpoint.open("runs/smollm2")              # the finished run's checkpoint
checkpoint = DrafterCheckpoint.open("runs/smollm2/export")
checkpoint = DrafterCheckpoint.open("owner/name", revision="main")
checkpoint = DrafterCheckpoint.open("owner/name@outputs")        # its layer ids are outputs of layers, as SGLang's
drafter = checkpoint.load(target, torch.bfloat16, torch.float32)
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from eagle31_train import compose
from eagle31_train.checkpoint import contract, hub, published, run_folder
from eagle31_train.checkpoint.published_config import COUNTED
from eagle31_train.checkpoint.run_folder import CHECKPOINTS, MODEL, RECORD, SHAPE, TRAIN
from eagle31_train.common import artifacts
from eagle31_train.common.console import note
from eagle31_train.common.errors import UserError
from eagle31_train.config import DrafterShape, TargetConfig, is_hub_id
from eagle31_train.model.drafter import Drafter
from eagle31_train.model.vocab import DraftVocab
from eagle31_train.store import read_manifest

PADDING = 1024  # most rows that a target's embedding may have beyond the drafter's: more would be other tokens


class LoadedTarget(Protocol):
    """What a drafter needs of its target in memory: embedding [V, H] and lm_head, as modules; the number of layers."""

    embedding: Any
    head: Any
    depth: int


@dataclass(frozen=True)
class DrafterCheckpoint:
    """A drafter's weights on disk and what they mean, as made by `open`. Weights are read on first use."""

    where: str  # the run, folder or hub id that was given; for messages
    folder: Path  # holds the weights
    shape: DrafterShape
    vocab: DraftVocab  # the target's id of each row of lm_head
    commit: str | None = None  # of a hub repository
    target_name: str | None = None  # path or hub id of its target, where the checkpoint says it
    train: Path | None = None  # the run's folder train/; None of an export or a published drafter
    inputs: dict[str, Any] | None = None  # what a run or its export was trained from: fingerprints and options
    manifest: dict[str, Any] | None = None  # a finished training's manifest
    exported: dict[str, Any] | None = None  # of a run's export, the manifest of its training
    smaller: dict[str, Any] | None = None  # how it was made smaller after training: `smaller.py`
    _mapped: dict[str, Tensor] | None = field(default=None, repr=False)  # weights of a published drafter or smaller one
    _counted: str | None = None  # how the caller said that its layer ids are counted

    # ---------------------------------------------------------------- opening

    @classmethod
    def open(
        cls,
        where: str | Path,
        revision: str | None = None,
        *,
        data_folder: Path | None = None,
        allow_unfinished: bool = False,
        target_layers: Callable[[], int] | None = None,
    ) -> "DrafterCheckpoint":
        """Find a drafter and read everything but its weights. Raise UserError if there is none, or it is damaged
        or of another kind.

        Args:
            where: a run, its train/ or one of its checkpoints (train/checkpoints/step-…); a folder with config.json
                and safetensors, exported or published; or a repository of the hub, owner/name. A published
                one may end in @inputs or @outputs, which says how its config.json counts layers.
            revision: branch, tag or commit of the repository.
            data_folder: where to look first for a run's draft vocabulary.
            allow_unfinished: take the newest checkpoint of a run that is not finished.
            target_layers: returns the number of the target's layers, for a config.json without auxiliary layers.
        """
        where = str(where)
        place, counted = split_name(where)
        folder = Path(place)
        if is_hub_id(place):
            folder = hub.fetch(place, revision)
            return cls._published(where, folder, folder.name, target_layers, counted)
        if revision is not None:
            raise UserError(
                f"revision {revision} applies only to repositories of the hub, unlike {where}: remove the revision"
            )
        if (folder / published.CONFIG).is_file():
            return cls._published(where, folder, None, target_layers, counted)
        if counted is not None:
            raise UserError(
                f"{where}: @{counted} applies only to published drafters (a run knows its layers): remove @{counted}"
            )
        if (folder / SHAPE).is_file():
            return cls._of_run(where, folder.parent.parent, data_folder, folder)
        train = folder if (folder / CHECKPOINTS).is_dir() else folder / "train"
        if not train.is_dir():
            raise UserError(
                f"{where} is neither a run, nor a folder with a published drafter's config.json, nor a hub id"
            )
        if (train / artifacts.MANIFEST).is_file():
            return cls._of_run(where, train, data_folder)
        if not allow_unfinished:
            raise UserError(f"the training in {train} is not finished: run `{TRAIN}` again")
        if not (folders := run_folder.in_order(train / CHECKPOINTS)):
            raise UserError(f"{where} holds no checkpoint yet: run `{TRAIN}` again")
        return cls._of_run(where, train, data_folder, folders[-1])

    @classmethod
    def of_run(cls, run: Path, data_folder: Path) -> "DrafterCheckpoint":
        """Return the checkpoint of the finished training in `run`. Raise UserError unless its weights are whole."""
        checkpoint = cls._of_run(str(run), run / "train", data_folder)
        checkpoint.tensors  # noqa: B018
        return checkpoint

    @classmethod
    def _of_run(
        cls, where: str, train: Path, data_folder: Path | None, checkpoint: Path | None = None
    ) -> "DrafterCheckpoint":
        """Return this checkpoint of a run, or, without `checkpoint`, the one that a finished run's manifest names."""
        if checkpoint is None:
            record = manifest = artifacts.read_json(train / artifacts.MANIFEST, TRAIN)
            checkpoint = train / manifest["checkpoint"]
        else:
            record, manifest = artifacts.read_json(train / RECORD, TRAIN), None
            if record.get("fingerprint") != run_folder.sealed_manifest(checkpoint)["fingerprint"]:
                raise UserError(
                    f"{where}: {train / RECORD} belongs to another run than the checkpoint: pass the run's folder"
                )
        inputs, shape = record["inputs"], run_folder.read_shape(checkpoint)
        vocab = run_folder.find_vocab(train, inputs, shape, data_folder)
        target = run_folder.option(train, "target.path")
        return cls(where, checkpoint, shape, vocab, None, target, train, inputs=inputs, manifest=manifest)

    @classmethod
    def _published(
        cls, where: str, folder: Path, commit: str | None, layers: Callable[[], int] | None, counted: str | None
    ) -> "DrafterCheckpoint":
        try:
            shape, vocab, tensors, target = published.read(folder, layers, counted)
        except UserError as error:
            raise UserError(f"{where}: {error}") from None
        training = run_folder.training_of_export(folder)
        known: dict[str, Any] = {"inputs": training and training["inputs"], "exported": training}
        checkpoint = cls(where, folder, shape, vocab, commit, target, **known, _mapped=tensors, _counted=counted)
        checkpoint._require({name: tuple(tensor.shape) for name, tensor in tensors.items()})
        return checkpoint

    # ---------------------------------------------------------------- what it is

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """Weights by the names of `contract`, in the file's dtypes, memory-mapped; complete, finite, without d2t, t2d.

        A published drafter lacks lm_head.weight if it uses the target's. Raises UserError if they are damaged.
        """
        tensors = self._mapped if self._mapped is not None else run_folder.load_weights(self.folder, self.manifest)
        self._require(tensors)
        return tensors

    def _require(self, tensors: dict[str, Any]) -> None:
        """Raise UserError unless these tensors, or shapes of tensors, are exactly those of the drafter."""
        whole = dict(tensors)
        if not self.vocab.pruned and self.train is None:  # with the whole vocabulary, the target's head serves
            whole.setdefault("lm_head.weight", (self.shape.draft_vocab_size, self.shape.hidden_size))
        contract.require(whole, self.shape, str(self.folder / MODEL) if self.train else self.where)

    @cached_property
    def identity(self) -> str:
        """A fingerprint that changes with the weights, by which evaluations, comparisons and exports know a drafter."""
        whole = run_folder.identity(self.manifest or {"fingerprint": self._content})
        return artifacts.fingerprint([whole, self.smaller]) if self.smaller else whole

    @cached_property
    def measured_on(self) -> list[str]:
        """Digests of the prompts that its training was measured on; unknown, so empty, for a published drafter."""
        state = self.manifest or self.exported
        if state is None and self.train is not None:
            state = run_folder.sealed_manifest(self.folder)["extra"].get("state")
        return list((state or {}).get("measured_on", []))

    @cached_property
    def initial_identity(self) -> str:
        """What a training that starts with these weights records about them; from the hub, repository and commit."""
        return f"{self.where.removesuffix('@inputs')}@{self.commit}" if self.commit else self._content

    @cached_property
    def _content(self) -> str:
        """A fingerprint that changes with weights and vocabulary, but not with where they are stored."""
        if self.train is None:
            content = artifacts.weights_fingerprint(str(self.folder))
            return artifacts.fingerprint([content, self._counted]) if self._counted == "outputs" else content
        files = run_folder.sealed_manifest(self.folder)["files"]
        return artifacts.fingerprint([{name: files[name] for name in (MODEL, SHAPE)}, self.vocab.target_ids.tolist()])

    # ---------------------------------------------------------------- what it belongs to

    def check_data(self, data: dict[str, Any], folder: Path) -> None:
        """Raise UserError for other data (stage 1's manifest, in `folder`): its held-out prompts may be trained on."""
        if self.inputs is not None and data["dataset_fingerprint"] != self.inputs.get("data"):
            raise UserError(f"{folder} is not the data that the drafter was trained on: use that data, or train again")

    def check_target(self, target: TargetConfig, by_name: bool = False, store: dict[str, Any] | None = None) -> None:
        """Raise UserError for a target whose states the drafter was not trained on; note it if only names are known.

        Args:
            by_name: the target is not loaded, only named: it may be gone, and other weights under the name of
                training's target, as a quantized copy has, are only noted.
            store: see `trained_for`.
        """
        known = self.trained_for(store)
        if known and not (by_name or target.is_hub_id or Path(target.path).exists()):
            raise UserError(f"target.path={target.path} does not exist: set it to the target of {self.where}")
        if other := self._other(known, target):
            if "weights" in known and not (by_name and same_name(known["name"], target.name)):
                raise UserError(f"{other}: use the target of training, or another run")
            note(other)

    def other_target(self, target: TargetConfig, store: dict[str, Any] | None = None) -> str | None:
        """Say how a target differs from training's, if it does, as a quantized copy may. store: see `trained_for`."""
        return self._other(self.trained_for(store), target)

    def _other(self, known: dict[str, Any], target: TargetConfig) -> str | None:
        """Say how a target differs from the `known` one of training, if it does."""
        if not known or _same_target(known, target):
            return None
        if known["name"] == target.name:
            return f"{self.where} was trained for another {target.name} than target.path={target.path}"
        return f"{self.where} was trained for {known['name']}, but target.path is {target.path}"

    @property
    def options_folder(self) -> Path | None:
        """The folder with its training's options: train/ of the run, or of the run whose export it is; else None."""
        train = self.folder.resolve().parent / "train" if self.exported else self.train
        return train if train is not None and (train / run_folder.CONFIG).is_file() else None

    def trained_for(self, store: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return the target of a run, or of its export: name, weights and revision, as training recorded them. Earlier
        versions left that to the store, so of their trainings it is only the name if the store is gone or out of reach.
        Return nothing if the run's options are gone, too.
        store: a manifest that may be that store's; otherwise, the run's options say where the store is."""
        if (train := self.options_folder) is None:
            return {}
        trained_on = (self.inputs or {}).get("store")
        record = artifacts.read_json(train / RECORD, TRAIN) if (train / RECORD).is_file() else {}
        if "target" in record and record["inputs"].get("store") == trained_on:
            return dict(record["target"])
        trained = compose.load_config([f"run_dir={train.parent}"], train / run_folder.CONFIG)
        if store is None or store["fingerprint"] != trained_on:
            try:
                store = read_manifest(trained)
            except UserError:  # out of reach, or damaged
                store = None
        if store is None or store["fingerprint"] != trained_on:
            return {"name": trained.target.name}
        return dict(store["inputs"]["target"])

    def check_fits(self, target: LoadedTarget) -> None:
        """Raise UserError for a target of another size than the drafter was made for."""
        rows, width = target.embedding.weight.shape
        shape, depth = self.shape, max(self.shape.aux_layers)
        alike = 0 <= rows - shape.vocab_size <= PADDING
        if shape.target_hidden_size != width or not alike or depth > target.depth:
            wants = f"hidden size {shape.target_hidden_size}, {shape.vocab_size} tokens and at least {depth} layers"
            has = f"{width}, {rows} and {target.depth}"
            raise UserError(f"{self.where} was made for a target with {wants}, not {has}: use its own target")

    # ---------------------------------------------------------------- in memory

    def load(self, target: LoadedTarget, served_in: torch.dtype, dtype: torch.dtype) -> Drafter:
        """Load the drafter as it is served, on its target's device, computing in `dtype`. Raise UserError for a target
        that does not fit. `served_in`: the target's dtype, to which weights are rounded, as in an export."""
        self.check_fits(target)
        embedding = target.embedding.weight.data
        drafter = Drafter(self.shape, embedding[: self.shape.vocab_size])  # like the head, it may have padding rows
        if self.shape.share_embedding:
            drafter.shared_embedding = embedding[:0]  # so that it is neither rounded nor copied
        drafter.load_state_dict(
            {"lm_head.weight": target.head.weight.data[: self.shape.draft_vocab_size], **self.tensors}
        )
        drafter.to(served_in).to(embedding.device, dtype)
        if self.shape.share_embedding:
            drafter.shared_embedding = embedding
        drafter.eval().requires_grad_(False)
        return drafter


def _same_target(known: dict[str, Any], target: TargetConfig) -> bool:
    """Whether a target is the `known` one (see `trained_for`): by weights or, where they cannot be compared, by name.

    The weights of a hub id are not read, and a folder may have none, or be gone."""
    known_by_id = known.get("weights") == artifacts.fingerprint(known["name"])
    there = target.is_hub_id or any(any(Path(target.path).glob(kind)) for kind in ("*.safetensors", "*.bin"))
    if "weights" in known and known_by_id == target.is_hub_id and there:
        return (known["weights"], known["revision"]) == (artifacts.weights_fingerprint(target.path), target.revision)
    return same_name(known["name"], target.name)


def same_name(one: str, other: str) -> bool:
    """Whether two targets have the same name. A copy of a hub model may be in a folder with the last part of its id."""
    return Path(one).name == Path(other).name


def split_name(where: str) -> tuple[str, str | None]:
    """Split NAME, NAME@inputs or NAME@outputs into the folder or hub id and how layer ids are counted, if said."""
    name, _, counted = where.rpartition("@")
    return (name, counted) if name and counted in COUNTED and not Path(where).exists() else (where, None)
