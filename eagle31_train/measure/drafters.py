"""The drafters that are measured, as they are served: of a run of ours, or published by anybody.

Served means: weights rounded to the target's dtype, as the exporter writes them, and run in evaluate.dtype.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from eagle31_train import artifacts, published, vocab
from eagle31_train.drafter.model import Drafter
from eagle31_train.measure.serving.command import max_model_len
from eagle31_train.schema import Config, DrafterShape, TargetConfig, UserError, check_architecture
from eagle31_train.targets.hf import HiddenStateTarget, pick_dtype, read_config

TRAIN, EXPORT = "accelerate launch train.py", "python -m eagle31_train.export"
WEIGHTS = "model.safetensors"


@dataclass(frozen=True)
class Checkpoint:
    """Weights on the disk and what they mean.

    where: what to call it in a message. identity: changes with the weights; see `identity`.
    manifest: what training left, None of a published draft. tensors: None of a run, whose weights are read when needed.
    """

    where: str
    identity: str
    shape: DrafterShape
    vocab: vocab.DraftVocab
    weights: Path | None = None
    manifest: dict[str, Any] | None = None
    tensors: dict[str, Tensor] | None = None


@dataclass(frozen=True)
class Candidate:
    """A drafter in memory, beside its target.

    identity: its checkpoint's. target_ids: [Vd] int64, on the drafter's device.
    """

    name: str
    identity: str
    drafter: Drafter
    target_ids: Tensor

    @property
    def aux_layers(self) -> list[int]:
        """The auxiliary layers that it reads."""
        return self.drafter.shape.aux_layers


def target_identity(target: TargetConfig) -> dict[str, Any]:
    """What tells two targets apart."""
    weights = artifacts.weights_fingerprint(target.path)
    return {"name": target.name, "revision": target.revision, "weights": weights, "dtype": target.dtype}


def identity(train: dict[str, Any]) -> str:
    """What tells two checkpoints apart, given training's manifest.

    Its fingerprint alone does not: training again from the same inputs need not give the same weights.
    """
    return artifacts.fingerprint([train["fingerprint"], train.get("files", {})])


def of_run(run_dir: Path, data_folder: Path) -> Checkpoint:
    """The checkpoint that training left, whole and with its own vocabulary.

    Raises:
        UserError: there is none, or it is damaged, or of another vocabulary.
    """
    folder = run_dir / "train"
    manifest = artifacts.read_json(folder / artifacts.MANIFEST, TRAIN)
    if damage := artifacts.first_damaged(folder, manifest.get("files", {})):
        raise UserError(f"{damage}: run `{TRAIN}` again")
    if "checkpoint" not in manifest:
        raise UserError(f"{folder / artifacts.MANIFEST} names no checkpoint: run `{TRAIN}` again")
    checkpoint = folder / manifest["checkpoint"]
    shape = read_shape(checkpoint / "drafter.json")
    if not (weights := checkpoint / WEIGHTS).is_file():
        raise UserError(f"{weights} is missing: run `{TRAIN}` first")
    file = data_folder / "vocab.safetensors"
    kept = vocab.read(file)
    # Another vocabulary of the same size would change the meaning of lm_head's rows in silence.
    same = manifest.get("inputs", {}).get("vocab") == artifacts.file_sha256(file)[:16]
    sizes = (len(kept), kept.target_size)
    if not same or sizes != (shape.draft_vocab_size, shape.vocab_size):
        raise UserError(
            f"{file} ({sizes[0]} of {sizes[1]} tokens) is not the vocabulary that the drafter was trained with "
            f"({shape.draft_vocab_size} of {shape.vocab_size}): run `{TRAIN}` on this data, or restore the old file"
        )
    return Checkpoint(str(run_dir), identity(manifest), shape, kept, weights, manifest)


def read_shape(path: Path) -> DrafterShape:
    """What training wrote beside its weights.

    Raises:
        UserError: it is not there, or is no drafter's shape.
    """
    try:
        shape = DrafterShape(**artifacts.read_json(path, TRAIN))
    except TypeError as error:
        raise UserError(f"{path} is not a drafter's shape ({error}): run `{TRAIN}` again") from None
    check_architecture(shape.architecture)
    return shape


def of_published(path: str, revision: str | None, target_layers: int) -> Checkpoint:
    """An exported or published draft: a folder, or a repository of the hub.

    Raises:
        UserError: there is none, or vLLM would not load it, or load it and serve it badly.
    """
    folder = Path(path) if Path(path).is_dir() else published.fetch(path, revision)
    draft = published.read(folder, path, lambda: target_layers)
    known_by = identity({"fingerprint": artifacts.weights_fingerprint(str(folder))})
    return Checkpoint(path, known_by, draft.shape, draft.vocab, tensors=draft.tensors)


def exported(run: Path) -> dict[str, Any]:
    """The exporter's record of a run: its checkpoint is whole, and has the weights of train/, where that is there.

    Raises:
        UserError: nothing was exported, or it is damaged, or of other weights.
    """
    record = artifacts.read_json(run / "export.json", EXPORT)
    if damage := artifacts.first_damaged(run, record["files"]):
        raise UserError(f"{damage}: run `{EXPORT}` again")
    if "checkpoint" not in record:
        raise UserError(f"{run / 'export.json'} is of an earlier version: run `{EXPORT}` again")
    if (run / "train" / artifacts.MANIFEST).is_file():  # vLLM can do without
        train, made_from = artifacts.read_json(run / "train" / artifacts.MANIFEST, TRAIN), record["inputs"]
        weights = train.get("files", {}).get(f"{train['checkpoint']}/{WEIGHTS}", {}).get("sha256")
        if (made_from["train"], made_from["weights"]) != (train["fingerprint"], weights):
            raise UserError(
                f"{run / 'export'} has other weights than {run / 'train'}: run `{EXPORT}` again, with overwrite=true"
            )
    return record


def load(checkpoint: Checkpoint, name: str, target: HiddenStateTarget, config: Config) -> Candidate:
    """The drafter as it is served, beside its target.

    Raises:
        UserError: weights that do not fit their shape, or a drafter that was made for another target.
    """
    embedding, head = target.embedding.weight.data, target.head.weight.data
    refuse_misfit(checkpoint, target)
    drafter = Drafter(checkpoint.shape, embedding)
    try:
        tensors = checkpoint.tensors
        if tensors is None:
            assert checkpoint.weights is not None
            tensors = load_file(checkpoint.weights)
        elif "lm_head.weight" not in tensors:  # the target's own is meant
            tensors = {**tensors, "lm_head.weight": head}
        drafter.load_state_dict(tensors)
    except (RuntimeError, SafetensorError, OSError) as error:
        reason = " ".join(str(error).split())[:200]
        if checkpoint.manifest is None:
            raise UserError(f"{checkpoint.where} does not fit its config.json ({reason}): get it again") from None
        raise UserError(f"{checkpoint.weights} does not fit its drafter.json ({reason}): run `{TRAIN}` again") from None
    # The exporter writes weights in target.dtype, hence the rounding, here and nowhere else.
    drafter.to(pick_dtype(config.target.dtype)).to(embedding.device, pick_dtype(config.evaluate.dtype))
    if checkpoint.shape.share_embedding:
        drafter.shared_embedding = embedding  # the target's own, which the rounding has no business with
    ids = torch.from_numpy(checkpoint.vocab.target_ids).to(embedding.device)
    return Candidate(name, checkpoint.identity, drafter.eval().requires_grad_(False), ids)


def refuse_other_target(checkpoint: Checkpoint, store: dict[str, Any] | None, target: TargetConfig) -> None:
    """UserError for a drafter of a run that learnt from another target's states: its store's manifest, where there is
    one still, knows whose."""
    if (
        store is None
        or checkpoint.manifest is None
        or store["fingerprint"] != checkpoint.manifest["inputs"].get("store")
    ):
        return
    learnt, given = store["inputs"]["target"], target_identity(target)
    if (learnt["weights"], learnt["revision"]) != (given["weights"], given["revision"]):
        raise UserError(
            f"{checkpoint.where}: the drafter was trained for {learnt['name']}, which had other weights than "
            f"target.path={target.path}: give the target of training, or another run"
        )


def refuse_misfit(checkpoint: Checkpoint, target: HiddenStateTarget) -> None:
    """UserError for a drafter that was made for a target of another size."""
    rows, width = target.embedding.weight.shape
    shape = checkpoint.shape
    if shape.target_hidden_size != width or shape.vocab_size > rows or max(shape.aux_layers) > target.depth:
        raise UserError(
            f"{checkpoint.where} was made for a target of hidden size {shape.target_hidden_size}, {shape.vocab_size} "
            f"tokens and at least {max(shape.aux_layers)} layers; target.path has {width}, {rows} and {target.depth}: "
            "give its own target"
        )


def room(config: Config, positions: Iterable[int | None], drafted: Iterable[int] = ()) -> int:
    """How many tokens a prompt may have, so that vLLM takes it and drafts every time: near the last position it drafts
    less. With evaluate.backend=vllm, its own limit and its depths count, too.

    Args:
        positions: of every drafter, where they are limited. drafted: numbers of draft tokens that are tried here.

    Raises:
        UserError: a limit of vLLM's that is no number.
    """
    options = config.evaluate
    limits = [*positions, getattr(read_config(config.target), "max_position_embeddings", None)]
    if options.backend == "vllm":
        limits.append(max_model_len(config))
        drafted = [*drafted, *options.serve_depths]
    most = max(drafted, default=0)
    return min(limit for limit in limits if limit) - options.max_new_tokens - past_the_end(most)


def past_the_end(draft_tokens: int) -> int:
    """Positions that vLLM needs beyond an answer, or it shortens the last drafts: those of a verification, and of the
    next, which it prepares while that is under way as if all of it were accepted (seen in 0.32, async scheduling)."""
    return 2 * (draft_tokens + 1)
