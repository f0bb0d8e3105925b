"""Initial weights from another drafter: `train.init_from`, a run's folder or a published EAGLE 3 or 3.1 draft.

Only weights are taken: no moments, no position in the data. They mean the same only with the same shape, RoPE and
auxiliary layers; anything else is refused. Two things may differ:

    draft vocabulary   lm_head's rows are taken token by token; tokens that the source lacks keep the target's rows
    EAGLE 3 → 3.1      fc_norm, which the source lacks, starts so that fc reads about what it read before
"""

from dataclasses import fields
from pathlib import Path

import torch
from torch import Tensor

from eagle31_train.checkpoint import run_folder
from eagle31_train.checkpoint.contract import REQUIRED
from eagle31_train.checkpoint.drafter_checkpoint import DrafterCheckpoint, same_name, split_name
from eagle31_train.checkpoint.run_folder import CHECKPOINTS, RECORD
from eagle31_train.common import artifacts
from eagle31_train.common.console import say
from eagle31_train.common.errors import UserError
from eagle31_train.config import MLA_WIDTHS, Config, DrafterShape
from eagle31_train.model.drafter import Drafter
from eagle31_train.model.norm import RMSNorm
from eagle31_train.model.rope import Rope, rope_parameters
from eagle31_train.model.vocab import DraftVocab
from eagle31_train.store import Store, StoreSplit
from eagle31_train.store.stream import Pause

POSITIONS = 512  # stored positions from whose states `state_rms` estimates what fc has read so far
ROPE = {"rope_theta", "rope_scaling", "max_position_embeddings"}
# Fields in which drafters that share weights may differ, or that are compared in another way. All others must agree.
ASIDE = {"draft_vocab_size", "share_embedding", "fc_norm", "norm_output", *ROPE}
# Options that, if open, take the source's value. Not its number of positions, on which no weight depends.
FOLLOWED = {*MLA_WIDTHS, "q_lora_rank", "num_key_value_heads", "head_dim", "rope_scaling", *REQUIRED}
FOLLOWED -= {"max_position_embeddings"}


def open_source(config: Config) -> DrafterCheckpoint | None:
    """Return the drafter that `train.init_from` names; None for fresh weights. Raise UserError if there is no such
    drafter, or it is the run's own."""
    t = config.train
    if t.init_from is None:
        return None

    def target_layers() -> int:
        from eagle31_train.targets.hf import read_config  # imports transformers: slow, seldom needed

        return int(read_config(config.target).num_hidden_layers)

    source = DrafterCheckpoint.open(
        t.init_from, t.init_revision, data_folder=config.data_folder, allow_unfinished=True, target_layers=target_layers
    )
    run = Path(config.run_dir)
    if (source.train or source.folder).resolve() in ((run / "train").resolve(), (run / "export").resolve()):
        raise UserError(f"train.init_from={t.init_from} is this run's own folder: set another name=…, or unset it")
    return source


def goes_by_record(config: Config) -> bool:
    """Return whether the configuration's run resumes without its initial weights: it has a checkpoint, began with the
    same weights, and these are on the hub or gone."""
    init, train = config.train.init_from, run_folder.latest_run(config.train_folder)
    if init is None or Path(split_name(init)[0]).exists() or not (train / RECORD).is_file():
        return False
    names = ("init_from", "init_revision")
    alike = all(run_folder.option(train, f"train.{name}") == getattr(config.train, name) for name in names)
    return alike and bool(run_folder.in_order(train / CHECKPOINTS))


def identity(config: Config, source: DrafterCheckpoint | None) -> str | None:
    """Return what identifies the weights that a run begins with; None for fresh ones. source: None for a run that
    `goes_by_record`, too."""
    if source is not None:
        return source.initial_identity
    record = run_folder.recorded_inputs(config.train_folder)
    return record["train"]["init_from"] if record is not None and config.train.init_from is not None else None


def refuse_other_kind(source: DrafterCheckpoint, shape: DrafterShape, store: Store) -> None:
    """Raise UserError, naming the options to set, if the weights would mean something else here."""
    there = source.shape
    other = {field.name for field in fields(there) if field.name not in ASIDE}
    other |= set() if _same_rope(there, shape) else ROPE
    if there.sliding_window is None:  # a drafter that saw everything can go on with a window
        other -= {"sliding_window"}
    # EAGLE 3 can go on as 3.1. The other way round, there is no place for what fc_norm has learnt.
    other |= {name for name in ("fc_norm", "norm_output") if getattr(there, name)}
    theirs, ours = ({name: getattr(kind, name) for name in other} for kind in (there, shape))
    if change := artifacts.describe_change(theirs, ours):
        raise UserError(
            f"the weights of {source.where} do not fit this drafter ({change}): set the drafter.* options that they "
            "were trained with, and extract with their target and target.aux_layers"
        )
    embedding, V = source.tensors.get("embed_tokens.weight"), shape.vocab_size
    if shape.share_embedding and embedding is not None:
        target = store.target["embed_tokens"][:V].float()
        if not _alike(target, embedding[:V].float()):
            raise UserError(f"{source.where} has its own embedding: set drafter.share_embedding=false")


def _alike(ours: Tensor, theirs: Tensor) -> bool:
    """Return whether weights are the same, as bf16 or fp16 keeps them."""
    return torch.allclose(ours, theirs, rtol=2**-7, atol=1e-6)


def _same_rope(there: DrafterShape, here: DrafterShape) -> bool:
    """Return whether RoPE does the same, however it is written."""
    if all(getattr(there, name) == getattr(here, name) for name in ROPE):
        return True
    try:
        old, new = Rope(there), Rope(here)
    except UserError:  # vLLM would read theirs differently
        return False
    kinds = {rope_parameters(shape)["rope_type"] for shape in (there, here)}  # some act on long inputs only
    factors = {(rope.factor, rope.softmax_factor) for rope in (old, new)}
    return len(kinds) == len(factors) == 1 and torch.equal(old.exact, new.exact)


# ---------------------------------------------------------------- into the drafter


@torch.no_grad()
def copy_weights(
    source: DrafterCheckpoint, vocab: DraftVocab, store: Store, drafter: Drafter, pause: Pause | None = None
) -> None:
    """Copy the source's weights into a drafter that has its own initial weights and is not wrapped yet. Every rank gets
    the same bits. What the source lacks keeps its value, and a line says so. pause: as in `Store.wait_for`, for states
    that are needed but not there yet."""
    say(f"train: starting from the weights of {source.folder}")
    their, our = source.trained_for() or {"name": source.target_name}, store.inputs["target"]
    copied = their.get("weights", "unknown") == our.get("weights")
    if their["name"] and not (copied or same_name(their["name"], our["name"])):
        say(f"train: those weights were trained for {their['name']}, and the stored states are of {our['name']}")
    if source.train is not None and source.manifest is None and Path(source.where).resolve() != source.folder.resolve():
        say(
            "train: that run is not finished, and once it has a later checkpoint, this command cannot resume: set "
            f"train.init_from={source.folder} to be able to"
        )
    for name, parameter in drafter.named_parameters():
        if name.startswith("fc_norm.") and not source.shape.fc_norm:
            continue
        if name not in source.tensors:
            say(f"train: those weights have no {name.removesuffix('.weight')}: it starts as a copy of the target's")
        elif name == "lm_head.weight":  # [Vd, D], row by row
            ours, theirs = torch.from_numpy(vocab.target_ids), torch.from_numpy(source.vocab.target_ids)
            places = torch.searchsorted(theirs, ours).clamp(max=len(theirs) - 1)
            known = theirs[places] == ours
            rows = source.tensors[name][places[known]].to(parameter.dtype)
            stuck = not parameter.requires_grad and not _alike(parameter[known], rows)
            parameter[known] = rows
            if missing := int((~known).sum()):
                say(
                    f"train: {missing:,} of {len(ours):,} draft tokens are not in their vocabulary, and start untrained"
                    + (", and stay so beside rows that were trained: set drafter.train_lm_head=true" if stuck else "")
                )
        else:
            parameter.copy_(drafter.from_checkpoint(name, source.tensors[name].to(parameter.dtype)))
    if drafter.shape.fc_norm and not source.shape.fc_norm:
        rms = state_rms(store.split("train"), drafter.input_norm, pause)
        say(f"train: those weights have no fc_norm: it starts at the RMS of its inputs, {rms.numpy().round(3)}")
        for name, parameter in drafter.named_parameters():
            if name.startswith("fc_norm."):
                parameter.fill_(rms[int(name.split(".")[1])])


def input_scale(split: StoreSplit, pause: Pause) -> list[float]:
    """Return `train.fc_input_scale` of an fc without a norm before it: the powers of two nearest to 1 / `state_rms`."""
    return (2.0 ** -state_rms(split, None, pause).log2().round()).tolist()


def state_rms(split: StoreSplit, input_norm: RMSNorm | None = None, pause: Pause | None = None) -> Tensor:
    """Return the median RMS of each auxiliary layer's states at the split's first POSITIONS positions, [A] fp32. The
    states are taken after the norm of all layers together, if there is one (`norm_before_fc`).

    fc_norm divides a state by its RMS r. With the weight c, fc reads c / r times what it read before. If c is the
    median of r, fc reads at most as many states too large as too small. A mean would follow the first tokens of the
    documents, whose states are hundreds of times as large in some targets.
    """
    rows: list[Tensor] = []
    for index in range(len(split)):
        split.store.wait_for([split.shard_of(index)], pause)
        states = split.read(index).aux[: POSITIONS - sum(map(len, rows))]
        decoded = states.decode().float()  # [n, A, H]
        if input_norm is not None:
            decoded = input_norm(decoded.flatten(1).to(input_norm.weight.device)).unflatten(1, decoded.shape[1:]).cpu()
        rows.append(decoded.square().mean(-1).sqrt())  # [n, A]
        if sum(map(len, rows)) == POSITIONS:
            break
    sizes = torch.cat(rows)
    if not len(sizes):
        raise UserError(f"{split.store.location} has no states to train on: check what the loss masks cover")
    return sizes.median(0).values
