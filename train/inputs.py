"""What a run trains on: data, store and drafter are read and checked, and every option that was left open is decided.

An open option is decided once all is known that it follows from: the drafter's first, then what depends on the stored
split, at last what depends on the number of steps. A run that goes on keeps what it was begun with.
"""

import math
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle31_train import provenance
from eagle31_train.checkpoint.drafter_checkpoint import DrafterCheckpoint
from eagle31_train.checkpoint.run_folder import CHECKPOINTS, RECORD, in_order, latest_run, recorded_inputs
from eagle31_train.combinations import check_longest
from eagle31_train.common import artifacts, order
from eagle31_train.common.console import say
from eagle31_train.common.errors import UserError
from eagle31_train.common.units import byte_count
from eagle31_train.config import SELF, Config, DrafterShape, TrainConfig
from eagle31_train.evaluation import trajectories
from eagle31_train.evaluation.trajectories import Trajectory, digest
from eagle31_train.model import vocab
from eagle31_train.model.batch import has_pairs
from eagle31_train.model.vocab import DraftVocab
from eagle31_train.provenance import Provenance
from eagle31_train.store import Store, StoreSplit, storage_of
from eagle31_train.store.stream import Pause
from eagle31_train.targets.derive import complete, default_batch_tokens, default_weight_decay
from train import initial_weights, launch, windows
from train.build import shape_of
from train.windows import Window

# Options of training that may be null; all but the last are as recorded wherever a run goes on.
RECORDED = ("batch_tokens", "lr", "weight_decay", "fc_init_scale")
OPEN = (*RECORDED, "fc_input_scale")
OF_DATA = ("max_length", "heldout", "shuffle", "draft_vocab_size")  # options that stage 1's record has


@dataclass(frozen=True)
class Inputs:
    """What a run trains on; `read_inputs` has checked that it fits together."""

    config: Config  # with nothing left open, and the options of data and store as these were made
    store: Store
    draft_vocab: DraftVocab
    shape: DrafterShape
    made_from: Provenance  # everything that the trained weights depend on
    train_split: StoreSplit
    heldout: StoreSplit
    windows: list[Window]
    schedule: list[list[int]]  # the samples of every step
    trajectories: list[Trajectory]  # what acceptance is measured on; may be none
    measured_on: list[str]  # their prompts, by `trajectories.digest`


def read_inputs(config: Config, pause: Pause, resources: ExitStack) -> Inputs:
    """Read all that a run trains on, and complete its options. Every process does this. Raise UserError, naming the
    option or the input, if no run can be made of them. pause: as in `Store.wait_for`."""
    source = None if initial_weights.goes_by_record(config) else initial_weights.open_source(config)
    config = complete_drafter(config, source)
    data = provenance.read_data(config)
    store = open_store(config, data, pause, resources)
    config = as_made(config, data, store)
    vocab_file = config.data_folder / "vocab.safetensors"
    draft_vocab = vocab.read(vocab_file)
    split = store.split("train")
    cut = windows.cut(split, config.train.window_tokens)
    windows.check(store, cut, config.train.epochs, byte_count(config.store.cache_bytes, "store.cache_bytes"))
    if len(cut) > 1 and data["inputs"].get("shuffle") is None:
        say("train: the windows follow the order of the data, which is not shuffled: set data.shuffle=SEED")
    measured = read_trajectories(store, config)
    measured_on = [digest(one.prompt) for one in measured]

    t, size = config.train, tokens_of_a_step(split, config.train)
    schedule = order.schedule(split.lengths, size, config.seed, t.epochs, t.max_steps, windows.samples(cut))
    shape = shape_of(config.drafter, store, draft_vocab)
    scales = scales_of_fc(config, shape, split, pause)
    t = complete_training(replace(t, batch_tokens=size), shape, len(schedule), scales)
    config = replace(config, train=t)

    made_from = partial(
        provenance.of_training,
        config,
        store.fingerprint,
        store.inputs["data"],
        artifacts.file_sha256(vocab_file),
        chosen_on=measured_on if by_acceptance(t) else None,
    )
    begun = made_from(initial_weights.identity(config, source))
    if not has_checkpoint(latest_run(config.train_folder), begun):
        source = source or initial_weights.open_source(config)
        if source is not None:
            initial_weights.refuse_other_kind(source, shape, store)
            begun = made_from(source.initial_identity)  # no longer with the recorded weights
        if store.manifest is not None and not windows.bounded(store):  # all shards are there, and none is used up
            check_pairs(split, draft_vocab, t.oov)
    return Inputs(
        config=config,
        store=store,
        draft_vocab=draft_vocab,
        shape=shape,
        made_from=begun,
        train_split=split,
        heldout=store.split("heldout"),
        windows=cut,
        schedule=schedule,
        trajectories=measured,
        measured_on=measured_on,
    )


def has_checkpoint(folder: Path, made_from: Provenance) -> bool:
    """Return whether this same run has a checkpoint in the folder, from which it can resume."""
    record = folder / RECORD
    there = record.is_file() and bool(in_order(folder / CHECKPOINTS))
    return there and made_from.matches(artifacts.read_json(record, "train.py"))


# ---------------------------------------------------------------- data and store


def open_store(config: Config, data: dict[str, Any], pause: Pause, resources: ExitStack) -> Store:
    """Open the store. Raise UserError if it is not the one for these data (stage 1's manifest) and this target, or if
    machines would share its cache."""
    follow, patience = config.store.follow, config.store.patience
    store = resources.enter_context(closing(Store(storage_of(config), follow, patience, pause)))
    check_store(store, data, config)
    if store.storage.remote and config.store.cache_dir is None and launch.spans_machines():
        raise UserError(
            "several machines train, and the store's cache would be in run_dir, which they share: set "
            "store.cache_dir=… to a folder on each machine's own disk"
        )
    return store


def check_store(store: Store, data: dict[str, Any], config: Config) -> None:
    """Raise UserError for a store of other data (`data`: stage 1's manifest) or of another target than configured."""
    inputs = store.inputs
    if inputs["data"] != data["dataset_fingerprint"]:
        given = {"data_dir": config.data_dir, "store_dir": config.store_dir}
        led = " or ".join(f"{name}={value}" for name, value in given.items() if value)  # the store may be right
        raise UserError(
            f"{store.location} was made from other data than {config.data_folder} now holds: "
            + (f"correct {led}" if led else "run `eagle31 extract` again with overwrite=true")
        )
    there = {name: value for name, value in inputs["target"].items() if name != "weights"}
    here = {name: getattr(config.target, name) for name in there}
    if change := artifacts.describe_change(there, here, "target."):
        remedy = "set the run_dir=… of that target, or run `eagle31 extract` for this one"
        raise UserError(f"{store.location} was made for another target ({change}): {remedy}")


def as_made(config: Config, data: dict[str, Any], store: Store) -> Config:
    """Return the options with those of data and store as these were made, and tell of any other that was given: it
    changes nothing here, and the run's record would claim that it had. data: stage 1's manifest."""
    made = data["inputs"]
    if config.data.prompts == SELF and not provenance.are_answers(made):  # stage 1 had conversations
        config = replace(config, regenerate=False, data=replace(config.data, prompts=None))
    of_data = {name: made[name] for name in OF_DATA if name in made}
    if made.get("draft_vocab_size") is None and (config.data.draft_vocab_size or 0) >= made.get("vocab_size", math.inf):
        of_data.pop("draft_vocab_size", None)  # all tokens, by either
    of_store = {f"{name}_codec": codec for name, codec in store.inputs.get("codecs", {}).items()}
    for section, values, where in (("data", of_data, config.data_folder), ("store", of_store, store.location)):
        given = getattr(config, section)
        here = {name: getattr(given, name) for name in values}
        if change := artifacts.describe_change(values, here, f"{section}."):
            say(f"train: {where} was made with other options than these ({change}), which have no effect here")
        config = replace(config, **{section: replace(given, **values)})
    return config


def read_trajectories(store: Store, config: Config) -> list[Trajectory]:
    """Read what acceptance is measured on. Raise UserError if there is nothing and the run goes by acceptance."""
    measured = trajectories.read(store, config.evaluate.num_speculative_tokens)
    if by_acceptance(config.train) and not measured:
        raise UserError(
            f"train.keep_best and train.early_stop need measured acceptance, but {store.location} has no trajectories "
            "to measure it on: remove these options, or remove the store's manifest.json and run `eagle31 extract` "
            "with extract.trajectories above 0 (it keeps the shards)"
        )
    return measured


def by_acceptance(t: TrainConfig) -> bool:
    """Return whether measured acceptance decides which checkpoint the run leaves."""
    return t.keep_best or t.early_stop is not None


def tokens_to_keep(vocab: DraftVocab, oov: str) -> Tensor:
    """Return `build_batch`'s keep_mask [V] by `train.oov`."""
    return torch.from_numpy(vocab.t2d) if oov == "mask" else torch.ones(vocab.target_size, dtype=torch.bool)


def check_pairs(split: StoreSplit, vocab: DraftVocab, oov: str) -> None:
    """Raise UserError if no sample has a pair to train. Usually the first sample that is read has one."""
    keep_mask = tokens_to_keep(vocab, oov)
    if not any(has_pairs(split.read(index, states=False), keep_mask) for index in range(len(split))):
        raise UserError(
            f"the {len(split):,} samples of {split.store.location} have nothing to train: no answer has a token whose "
            f"prediction is in the draft vocabulary of {len(vocab):,} tokens: raise data.draft_vocab_size, and check "
            "what the loss masks cover"
        )


# ---------------------------------------------------------------- open options


def complete_drafter(config: Config, source: DrafterCheckpoint | None) -> Config:
    """Fill in the drafter's open options and the learning rate: from the record of the run that goes on, else from the
    initial weights, else from the target. Of training's other open options, fill in those that such a record has."""
    record, drafter = recorded_inputs(config.train_folder), None
    if record is not None and not config.overwrite:  # other versions may choose differently
        drafter = record["drafter"]
        names = [name for name in RECORDED if getattr(config.train, name) is None]
        values = {name: provenance.recorded_value(record["train"], f"train.{name}") for name in names}
        config = replace(config, train=replace(config.train, **values))
    elif source is not None:
        drafter = {name: getattr(source.shape, name) for name in initial_weights.FOLLOWED}
    elif record is not None and initial_weights.goes_by_record(config):
        drafter = record["drafter"]  # what was open followed the weights, which are not read
    return complete(config, provenance.read_data(config).get("target"), drafter)


def tokens_of_a_step(split: StoreSplit, t: TrainConfig) -> int:
    """Return `train.batch_tokens`, or its default for this training split. Raise UserError if a sample is longer."""
    longest = max(split.lengths)
    batch_tokens = t.batch_tokens or default_batch_tokens(sum(split.lengths), t.epochs, longest)
    row = f"row {split.lengths.index(longest)} of the train split in {split.store.location}"
    check_longest(row, longest, batch_tokens)
    return batch_tokens


def scales_of_fc(config: Config, shape: DrafterShape, split: StoreSplit, pause: Pause) -> list[float]:
    """Return `train.fc_input_scale`, empty for none. If it is open, a run that goes on keeps its own. Another one has
    none if a norm precedes fc or fc_init_scale is given; else it takes those of the stored states. Raise UserError for
    given ones that do not fit."""
    if (given := config.train.fc_input_scale) is not None:
        check_scales(given, shape)
        return given
    record = recorded_inputs(config.train_folder)
    recorded: list[float] = []
    if record is not None:
        recorded = provenance.recorded_value(record["train"], "train.fc_input_scale")
    if record is not None and not config.overwrite:
        return recorded
    if shape.norms_states or config.train.fc_init_scale is not None:
        return []
    if record is not None and record.get("store") == split.store.fingerprint and recorded:
        return recorded  # of the same states, which may be used up by now
    return initial_weights.input_scale(split, pause)


def check_scales(scales: list[float], shape: DrafterShape) -> None:
    """Raise UserError for scales of fc that do not fit the drafter, or would round its weights."""
    exact = all(math.frexp(scale)[0] == 0.5 for scale in scales)
    if scales and (shape.norms_states or len(scales) != len(shape.aux_layers) or not exact):
        one = f"a power of two for each of the {len(shape.aux_layers)} auxiliary layers"
        raise UserError(f"train.fc_input_scale={scales} applies only to EAGLE 3, and must have {one}: remove it")


def complete_training(t: TrainConfig, shape: DrafterShape, steps: int, scales: list[float]) -> TrainConfig:
    """Fill in what is still open, with fc's scales as given: a weight decay by width and steps, and fc_init_scale=1."""
    decay = default_weight_decay(t.optimizer, shape.hidden_size, steps) if t.weight_decay is None else t.weight_decay
    first = 1.0 if t.fc_init_scale is None else t.fc_init_scale
    return replace(t, weight_decay=decay, fc_init_scale=first, fc_input_scale=scales)
