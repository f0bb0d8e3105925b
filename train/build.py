"""From a configuration and a store to the things that are trained: shape, drafter, teacher, objective."""

import math
from typing import Any

import torch
from torch import Tensor

from eagle31_train import artifacts
from eagle31_train.drafter.model import Drafter
from eagle31_train.loss import Objective, Teacher
from eagle31_train.schema import (
    Config,
    DrafterConfig,
    DrafterShape,
    TargetConfig,
    TrainConfig,
    UserError,
)
from eagle31_train.shape import check_drafter, drafter_shape
from eagle31_train.store import REMAKE, TARGET, Store, StoreSplit
from eagle31_train.vocab import DraftVocab
from train.optimizer import OPTIMIZERS

CHOICES = {
    "optimizer": OPTIMIZERS,
    "loss": ("kl", "ce"),
    "oov": ("mask", "keep"),
    "precision": ("bf16", "no"),
    "wandb": ("online", "offline", "disabled"),
}
POSITIVE = "unroll gamma epochs batch_tokens accumulation lr clip fc_start"
POSITIVE += " eval_every eval_samples checkpoint_every keep_checkpoints"
FINITE = ("lr", "gamma", "fc_start", "weight_decay")  # clip may be inf: nothing is cut


def check_options(t: TrainConfig, d: DrafterConfig) -> None:
    """Refuse, before anything is read or written, values that no run can use.

    Raises:
        UserError: names the option.
    """
    for name, choices in CHOICES.items():
        if (value := getattr(t, name)) not in choices:
            raise UserError(f"train.{name}={value!r} is not one of {', '.join(choices)}")
    for name in POSITIVE.split():
        if not (value := getattr(t, name)) > 0:
            raise UserError(f"train.{name}={value} must be above 0")
    for name in ("workers", "skip_nonfinite", "weight_decay"):
        if not (value := getattr(t, name)) >= 0:
            raise UserError(f"train.{name}={value} must be 0 or more")
    for name in FINITE:
        if not math.isfinite(value := getattr(t, name)):
            raise UserError(f"train.{name}={value} is not a finite number")
    if t.max_steps is not None and t.max_steps < 1:
        raise UserError(f"train.max_steps={t.max_steps} must be above 0, or null for whole epochs")
    if t.window_tokens is not None and t.window_tokens < 1:
        raise UserError(f"train.window_tokens={t.window_tokens} must be above 0, or null for one window")
    if t.slots_per_batch is not None and t.slots_per_batch < 1:
        raise UserError(f"train.slots_per_batch={t.slots_per_batch} must be above 0, or null for all slots")
    if len(t.betas) != 2 or not all(0 <= beta < 1 for beta in t.betas):
        raise UserError(f"train.betas={t.betas} are not two numbers in [0, 1)")
    for name in ("warmup", "min_lr", "lk"):
        if not 0 <= (value := getattr(t, name)) <= 1:
            raise UserError(f"train.{name}={value} is not in [0, 1]")
    check_drafter(d)


def check_store(store: Store, data: dict[str, Any], target: TargetConfig) -> None:
    """Refuse a store of other data or of another target than the configuration's.

    Args:
        data: manifest of the data stage, whose draft vocabulary training reads.
    """
    made = store.inputs
    if made["data"] != data["dataset_fingerprint"]:
        raise UserError(
            f"{store.location} was made from other data than is in its run now: "
            "run `python -m eagle31_train.extract` again with overwrite=true"
        )
    there = {name: value for name, value in made["target"].items() if name != "weights"}
    here = {name: getattr(target, name) for name in there}
    if change := artifacts.describe_change(there, here, "target."):
        raise UserError(
            f"{store.location} was made for another target ({change}): choose its run_dir=…, "
            "or run `python -m eagle31_train.extract` for this one"
        )


def check_samples(split: StoreSplit, batch_tokens: int) -> None:
    """Refuse, by the lengths alone, a training split that the token budget of a step cannot hold.

    Raises:
        UserError: a sample is longer than `batch_tokens`, or there is none.
    """
    if not len(split):
        raise UserError(f"{split.store.location} holds no sample to train on: run `python -m data_prep` with more data")
    longer = [length for length in split.lengths if length > batch_tokens]
    if longer:
        longest = max(longer)
        raise UserError(
            f"{len(longer)} of {len(split)} training samples in {split.store.location} are longer than "
            f"train.batch_tokens={batch_tokens}; the longest, row {split.lengths.index(longest)} of the train split, "
            f"has {longest} tokens: set train.batch_tokens={longest} or more, or make data and store again with "
            f"data.max_length={batch_tokens}"
        )


def shape_of(config: DrafterConfig, store: Store, vocab: DraftVocab) -> DrafterShape:
    """The drafter's architecture, joined with what the store says of its target."""
    H, V = store.states["hidden_size"], store.states["vocab_size"]
    if vocab.target_size != V:
        raise UserError(
            f"the draft vocabulary is of a target with {vocab.target_size} tokens, the store's target has {V}: "
            "run `python -m data_prep` and `python -m eagle31_train.extract` for the same target"
        )
    return drafter_shape(config, H, V, len(vocab), list(store.states["aux_layers"]))


def check_target(weights: dict[str, Tensor], shape: DrafterShape, where: str) -> None:
    """Refuse weights of the target that do not fit what the store says of it.

    Raises:
        UserError: names the tensor of the file `where`.
    """
    V, H = shape.vocab_size, shape.target_hidden_size
    # An embedding may be padded with rows that no token names.
    rows = max(V, len(weights["embed_tokens"]))
    for name, wanted in {"embed_tokens": [rows, H], "lm_head": [V, H], "norm": [H]}.items():
        if (found := list(weights[name].shape)) != wanted:
            raise UserError(f"{where} holds {name} {found}, but its store says {wanted} of the target: {REMAKE}")


def build_objective(config: Config, shape: DrafterShape, store: Store, vocab: DraftVocab) -> Objective:
    """Drafter and teacher with their initial weights, on the CPU; the same for the same seed.

    Where the widths agree, the drafter starts as a poor copy of the target's last layers: fc passes the
    last auxiliary state on, and lm_head and the final norm are the target's, whose rows expect states of
    that norm's scale. Against random ones: docs/log.md.
    """
    torch.manual_seed(config.seed)
    weights = store.target
    check_target(weights, shape, f"{store.location}/{TARGET}")
    ids = torch.from_numpy(vocab.target_ids)
    low = torch.bfloat16 if config.train.precision == "bf16" else torch.float32
    drafter = Drafter(shape, weights["embed_tokens"][: shape.vocab_size].to(low))
    head_rows = weights["lm_head"][ids]
    if shape.hidden_size == shape.target_hidden_size:
        drafter.lm_head.weight.data.copy_(head_rows)
        drafter.norm.weight.data.copy_(weights["norm"])
        # fc passes the last auxiliary state on, a little of the others mixed in.
        drafter.fc.weight.data.mul_(0.25)[:, -shape.hidden_size :] += torch.eye(shape.hidden_size)
    drafter.fc.weight.data.mul_(config.train.fc_start)
    drafter.lm_head.weight.requires_grad_(config.drafter.train_lm_head)
    teacher = Teacher(weights["norm"], store.states["norm"]["eps"], head_rows.to(low), ids)
    drafter.recompute = config.train.recompute
    objective = Objective(drafter, teacher, config.train.loss, config.train.lk)
    objective.autocast = torch.bfloat16 if config.train.precision == "bf16" else None
    if config.train.compile:
        objective.compile_kernels()
    return objective
