"""Initial weights from another drafter: `train.init_from`, a run's folder or a published EAGLE 3 or 3.1 draft.

Weights alone are taken: no moments, no position in the data. They mean what they meant only in the same shape, with
the same RoPE and on the same auxiliary layers; anything else is refused. Two things may differ:

    draft vocabulary   lm_head's rows are taken token by token; tokens that it lacks keep the target's rows
    EAGLE 3 → 3.1      fc_norm, which it lacks, starts so that fc reads about what it has read so far
"""

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle31_train import artifacts
from eagle31_train.checkpoint import run_folder
from eagle31_train.checkpoint.contract import LAYER_IDS
from eagle31_train.checkpoint.drafter_checkpoint import DrafterCheckpoint
from eagle31_train.checkpoint.run_folder import CHECKPOINTS, CONFIG, RECORD
from eagle31_train.config import Config, DrafterShape
from eagle31_train.errors import UserError
from eagle31_train.model.drafter import Drafter
from eagle31_train.model.rope import Rope, rope_parameters
from eagle31_train.model.vocab import DraftVocab
from eagle31_train.store import Store, StoreSplit
from eagle31_train.store.codec import as_encoded

POSITIONS = 512  # of the store, whose states tell what fc has read so far
# What two drafters may differ in and still share weights, or is looked at in another way; all else must agree.
ASIDE = {"target_hidden_size", "vocab_size", "aux_layers", "draft_vocab_size", "share_embedding"}
ASIDE |= {"fc_norm", "norm_output", "rope_theta", "rope_scaling", "max_position_embeddings"}
Say = Callable[[str], None]


def identity(config: Config) -> str | None:
    """What tells the weights that `train.init_from` names from any others; None where the run starts afresh.

    A run that has a checkpoint needs them no more: where they are on the hub, or gone, it goes by its own record. A
    folder that now holds other weights has another identity all the same.

    Raises:
        UserError: they cannot be had.
    """
    t = config.train
    if t.init_from is None:
        if t.init_revision is not None:
            raise UserError(f"train.init_revision={t.init_revision} is of nothing: set train.init_from to a hub id")
        return None
    if t.fc_init_scale != 1:
        raise UserError(
            f"train.fc_init_scale={t.fc_init_scale} is of weights that start afresh, and train.init_from gives fc's: "
            "leave out one of them"
        )
    recorded = recorded_identity(config) if is_continued(config) else None
    if recorded is not None and not Path(t.init_from).exists():
        return recorded
    try:
        return open_source(config).initial_identity
    except UserError:
        if recorded is None:
            raise
        return recorded


def check(config: Config, shape: DrafterShape, store: Store, inputs: dict[str, Any]) -> None:
    """Refuse weights that do not fit before a folder is claimed for them; a run that goes on needs none.

    With overwrite=true a run of other inputs does not go on: it is replaced, and must not be for nothing.

    Args:
        inputs: what this run is made from, as `claim` compares it.

    Raises:
        UserError: they cannot be had, are damaged, or would mean something else in this drafter.
    """
    replaced = config.overwrite and recorded_inputs(config) != inputs
    if config.train.init_from is not None and (replaced or not is_continued(config)):
        refuse_other_kind(open_source(config), shape, store)


def copy_initial_weights(
    config: Config, shape: DrafterShape, vocab: DraftVocab, store: Store, drafter: Drafter, say: Say = print
) -> None:
    """Copy the weights of `train.init_from` into a drafter that has its own initial weights and is not wrapped yet.

    Every rank reads them for itself, to the same bits.

    Args:
        say: prints a line, on one rank.

    Raises:
        UserError: they cannot be had, are not those that the run was begun with, or do not fit.
    """
    if config.train.init_from is None:
        return
    recorded = recorded_identity(config)
    source = open_source(config, recorded)
    if recorded is not None and source.initial_identity != recorded:
        raise UserError(
            f"train.init_from={source.where} holds other weights than this run began with ({source.initial_identity}, "
            f"not {recorded}), and no checkpoint of it is left: put them back, or begin anew with overwrite=true"
        )
    refuse_other_kind(source, shape, store)
    say(f"train: starts with the weights of {source.folder}")
    copy_weights(source, vocab, store, drafter, say)


# ---------------------------------------------------------------- where they are


def recorded_inputs(config: Config) -> dict[str, Any]:
    """The inputs of the run in the configuration's folder; empty where none was begun."""
    record = Path(config.run_dir) / "train" / RECORD
    inputs: dict[str, Any] = artifacts.read_json(record, "train.py").get("inputs", {}) if record.is_file() else {}
    return inputs


def recorded_identity(config: Config) -> str | None:
    """The identity of the weights with which the run in the configuration's folder was begun, if it was."""
    recorded: str | None = recorded_inputs(config).get("train", {}).get("init_from")
    return recorded


def is_continued(config: Config) -> bool:
    """Whether that run has a checkpoint and was begun with the same `train.init_from`."""
    train = Path(config.run_dir) / "train"
    if not (train / CONFIG).is_file() or not run_folder.in_order(train / CHECKPOINTS):
        return False
    names = ("init_from", "init_revision")
    return all(run_folder.option(train, f"train.{name}") == getattr(config.train, name) for name in names)


def open_source(config: Config, begun_with: str | None = None) -> DrafterCheckpoint:
    """The drafter that `train.init_from` names.

    Args:
        begun_with: the identity of the weights that a run began with: of a repository of the hub, that commit is taken.

    Raises:
        UserError: there is nothing there, or nothing to start from.
    """
    init, revision = config.train.init_from, config.train.init_revision
    assert init is not None
    if begun_with and begun_with.startswith(f"{init}@"):
        revision = begun_with.removeprefix(f"{init}@")
    source = DrafterCheckpoint.open(
        init,
        revision,
        data_folder=config.data_folder,
        allow_unfinished=True,
        target_layers=lambda: target_layers(config),
    )
    if source.train is not None and source.train.resolve() == (Path(config.run_dir) / "train").resolve():
        raise UserError(
            f"train.init_from={init} is this run's own folder: choose another name=…, or leave train.init_from out"
        )
    return source


def target_layers(config: Config) -> int:
    """Layers of the target, where vLLM would count them."""
    from eagle31_train.targets.hf import read_config  # imports transformers, seconds that are seldom needed

    try:
        return int(read_config(config.target).num_hidden_layers)
    except UserError as error:
        raise UserError(
            f"its config.json names no auxiliary layers, and the target, whose layers vLLM would count, cannot be read "
            f"({error}): write {LAYER_IDS} into it"
        ) from None


# ---------------------------------------------------------------- does it fit


def refuse_other_kind(source: DrafterCheckpoint, shape: DrafterShape, store: Store) -> None:
    """Raise a UserError that names the options to set, where the weights would mean something else here."""
    there = source.shape
    if (there.target_hidden_size, there.vocab_size) != (shape.target_hidden_size, shape.vocab_size):
        raise UserError(
            f"{source.where} is a drafter for another target, of hidden size {there.target_hidden_size} and "
            f"{there.vocab_size} tokens; the store's target has {shape.target_hidden_size} and {shape.vocab_size}"
        )
    if there.aux_layers != shape.aux_layers:
        raise UserError(
            f"{source.where} reads the inputs of layers {there.aux_layers}, but the store holds those of "
            f"{shape.aux_layers}{_counted_otherwise(there.aux_layers, shape.aux_layers)}: run `python -m "
            f"eagle31_train.extract` with target.aux_layers={there.aux_layers}"
        )
    kept = [field.name for field in fields(there) if field.name not in ASIDE]
    wanted = {name: getattr(there, name) for name in kept if getattr(there, name) != getattr(shape, name)}
    # EAGLE 3 can go on as 3.1; the other way there is nowhere to put what fc_norm has learnt.
    wanted |= {name: True for name in ("fc_norm", "norm_output") if getattr(there, name) and not getattr(shape, name)}
    wanted |= _other_rope(there, shape)
    if wanted:
        here = {name: getattr(shape, name) for name in wanted}
        raise UserError(
            f"{source.where} was trained otherwise, and its weights are no good here "
            f"({artifacts.describe_change(wanted, here)}): set {' '.join(map(_option, wanted, wanted.values()))}"
        )
    if shape.share_embedding and (embedding := source.tensors.get("embed_tokens.weight")) is not None:
        _refuse_other_embedding(source, embedding, store.target["embed_tokens"])


def _counted_otherwise(there: list[int], here: list[int]) -> str:
    """A hint where the ids look like those of trainers that count outputs of layers."""
    if [layer + 1 for layer in there] != here:
        return ""
    return (
        f" (if its {LAYER_IDS} count outputs of layers, as some trainers for SGLang do, add 1 to each in config.json)"
    )


def _other_rope(there: DrafterShape, here: DrafterShape) -> dict[str, Any]:
    """What of RoPE differs, by what it does rather than by how it is written."""
    names = ("rope_theta", "rope_scaling", "max_position_embeddings")  # some scalings go by the last one
    wanted = {name: getattr(there, name) for name in names if getattr(there, name) != getattr(here, name)}
    try:
        old, new = Rope(there), Rope(here)
    except UserError:  # theirs is one that vLLM would read otherwise
        return wanted
    kinds = [rope_parameters(shape)["rope_type"] for shape in (there, here)]  # some act on long inputs only
    factors = [(rope.factor, rope.softmax_factor) for rope in (old, new)]
    if kinds[0] == kinds[1] and torch.equal(old.exact, new.exact) and factors[0] == factors[1]:
        return {}
    if wanted.keys() & {"rope_theta", "rope_scaling"}:
        wanted.pop("max_position_embeddings", None)
    return wanted


def _refuse_other_embedding(source: DrafterCheckpoint, theirs: Tensor, target: Tensor, rows: int = 8192) -> None:
    """A draft's own embedding may only be left out if it is the target's, as exactly as bf16 or fp16 keeps it."""
    differ = sum(
        int((~torch.isclose(ours.float(), part.float(), rtol=2**-7, atol=1e-6)).any(-1).sum())
        for part, ours in zip(theirs.split(rows), target[: len(theirs)].split(rows), strict=True)
    )
    if differ:
        raise UserError(
            f"{source.where} has an embedding of its own ({differ:,} of {len(theirs):,} rows are not the target's): "
            "set drafter.share_embedding=false"
        )


def _option(name: str, value: Any) -> str:
    """An option as the command line takes it."""
    if isinstance(value, dict):
        inner = ",".join(f"{key}:{item}" for key, item in value.items())
        return f"'drafter.{name}={{{inner}}}'"
    if name == "rope_scaling":
        return "no drafter.rope_scaling"
    return f"drafter.{name}={'null' if value is None else str(value).lower()}"


# ---------------------------------------------------------------- into the drafter


@torch.no_grad()
def copy_weights(source: DrafterCheckpoint, vocab: DraftVocab, store: Store, drafter: Drafter, say: Say) -> None:
    """Put a draft that fits into a drafter; whatever it lacks keeps the value it has there, and that is said."""
    shape, tensors = drafter.shape, source.tensors
    rms = _start_fc_norm(store.split("train"), say) if shape.fc_norm and not source.shape.fc_norm else None
    if shape.norm_output and not source.shape.norm_output:
        say("train: it was trained without norm_output; from now on its steps read the normed state of the one before")
    for name, parameter in drafter.named_parameters():
        if name == "lm_head.weight":
            _copy_head(source, parameter, vocab, shape, say)
        elif name.startswith("fc_norm.") and rms is not None:
            parameter.fill_(rms[int(name.split(".")[1])])
        elif name == "embed_tokens.weight" and name not in tensors:
            say("train: it shares the target's embedding, from which embed_tokens starts")
        else:
            parameter.copy_(tensors[name])


def _copy_head(source: DrafterCheckpoint, head: Tensor, vocab: DraftVocab, shape: DrafterShape, say: Say) -> None:
    """Rows of lm_head [Vd, D], token by token."""
    if (rows := source.tensors.get("lm_head.weight")) is None:
        say("train: it shares the target's lm_head, from which its own starts")
        return
    ours, theirs = torch.from_numpy(vocab.target_ids), torch.from_numpy(source.vocab.target_ids)
    places = torch.searchsorted(theirs, ours).clamp(max=len(theirs) - 1)
    known = theirs[places] == ours
    head[known] = rows[places[known]].to(head.dtype)
    if missing := int((~known).sum()):
        start = "the target's rows" if shape.hidden_size == shape.target_hidden_size else "random rows"
        say(f"train: {missing:,} of {len(ours):,} draft tokens are not in its vocabulary and start from {start}")


def _start_fc_norm(split: StoreSplit, say: Say) -> Tensor:
    """[A] the weight with which fc_norm starts."""
    rms, count = state_rms(split)
    values = ", ".join(f"{value:.3g}" for value in rms.tolist())
    say(f"train: it has no fc_norm, which starts at the RMS of the target's states ({values}; {count} positions)")
    return rms


def state_rms(split: StoreSplit) -> tuple[Tensor, int]:
    """[A] fp32, the RMS of each auxiliary layer's states, and of how many positions: the split's first POSITIONS.

    fc_norm divides a state by its RMS r; with the weight c, fc reads c / r times what it read before. The median of
    r is the c with which it reads at most as many states too large as too small: a mean would follow the first
    tokens of the documents, whose states are hundreds of times as large in some targets.
    """
    rows: list[Tensor] = []
    for index in range(len(split)):
        states = as_encoded(split.read(index).attended_states)[: POSITIONS - sum(map(len, rows))]
        rows.append(states.decode().float().square().mean(-1).sqrt())  # [n, A]
        if sum(map(len, rows)) == POSITIONS:
            break
    rms = torch.cat(rows)
    if not len(rms):
        raise UserError(f"{split.store.location} holds no state that trains: run `python -m data_prep` with more data")
    return rms.median(0).values, len(rms)
