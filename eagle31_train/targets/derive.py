"""Derive a drafter's options from its target: an option that is not given takes the target's value."""

import math
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from eagle31_train import provenance
from eagle31_train.checkpoint.contract import REQUIRED, drafter_shape, window_caveat
from eagle31_train.common import artifacts
from eagle31_train.common.errors import UserError
from eagle31_train.config import ANSWERED, MLA_WIDTHS, Config, DataConfig, DrafterConfig, DrafterShape
from eagle31_train.model.rope import SCALINGS, target_positions
from eagle31_train.targets.description import TargetDescription, describe_target, kinds, pick_layers, read_raw

# Options for which any value but the target's makes a drafter that reads the target's states poorly.
CONTRADICTIONS = {*REQUIRED, "num_key_value_heads", "head_dim", "rope_scaling"} - {"intermediate_size"}
ADAMW_LR, MUON_LR, MUON_WIDTH = 1e-4, 3e-3, 576  # the drafter's width at which Muon's rate was measured
# Muon's rate · weight decay · steps, as it suited trainings of 540 and 1,334 steps. Shorter trainings use the decay of
# 540 steps: docs/launch.md.
SHRINKAGE, SHORT = 1.62, 540
# Small steps teach more than large ones while they are few. No training here took more than MOST_STEPS of them.
STEP_TOKENS, MOST_STEPS, STEP_UNIT = 2048, 15_000, 256
THOUGHT, PROMPT = 4096, 2048  # tokens that an answer with a thought may need, and tokens of its prompt
ANSWER, WHOLE = "data.generate.max_new_tokens", "data.max_length"


def complete(config: Config, described: Mapping[str, Any] | None, recorded: Mapping[str, Any] | None = None) -> Config:
    """Fill in every option that the target decides: the drafter's shape and, if null, the learning rate.

    Args:
        described: the target as recorded in stage 1's manifest; without it, its config.json is read.
        recorded: the drafter's options of the run that training continues.
    """
    options = config.drafter
    if recorded is not None:
        values = {name: value for name, value in recorded.items() if getattr(options, name, 0) is None}
        if "rope_theta" in values:  # given scaling options override those that the run began with
            values["rope_scaling"] = {**(recorded.get("rope_scaling") or {}), **options.rope_scaling}
        options = replace(options, **values)
    train = config.train
    if train.lr is None or None in (getattr(options, name) for name in REQUIRED):
        target = TargetDescription(**described) if described else describe_target(config.target)
        options, _ = derive(options, target)
        if train.lr is None:
            train = replace(train, lr=peak_learning_rate(train.optimizer, options.hidden_size or target.hidden_size))
    return replace(config, drafter=options, train=train)


def peak_learning_rate(optimizer: str, width: int) -> float:
    """Return the default learning rate for a drafter of hidden size `width`, to two digits. The spectral norm of Muon's
    update is 0.2 · lr · √(longer side), so its rate falls with √width; AdamW's is the same for all widths."""
    rate = MUON_LR * math.sqrt(MUON_WIDTH / max(width, MUON_WIDTH)) if optimizer == "muon" else ADAMW_LR
    return float(f"{rate:.2g}")


def default_batch_tokens(tokens: float, epochs: int, longest: int) -> int:
    """Return the default tokens per step for `epochs` of a split of `tokens` whose longest conversation has `longest`.

    Steps are small, or just large enough that there are MOST_STEPS of them. Their size does not depend on the number of
    devices, since a training may continue on any number."""
    needed = max(STEP_TOKENS, longest, tokens * epochs / MOST_STEPS)
    return STEP_UNIT * math.ceil(needed / STEP_UNIT)


def default_weight_decay(optimizer: str, width: int, steps: int) -> float:
    """Return the default weight decay for a training of `steps`, to two digits; 0 for AdamW.

    At Muon's default rate, it shrinks weights by the same factor in trainings of any length except short ones; at a
    lower rate it shrinks them less.
    """
    if optimizer != "muon":
        return 0.0
    return float(f"{SHRINKAGE / (peak_learning_rate(optimizer, width) * max(steps, SHORT)):.2g}")


def answer_lengths(config: Config, given: Collection[str]) -> dict[str, int]:
    """Return values of the length options not `given`: those of a run that has answers or data, else those that leave
    room for the answers of a target that may think.

    Without a record, the result is empty for other targets, for those with too few positions, and if the target's files
    cannot be read (the stage that needs them reports why). It lacks the length of an answer if nothing is answered.
    """
    lengths = _recorded_lengths(config)
    if len(lengths) < 2:  # a stop between answers and data leaves one of them
        lengths = _lengths_for_thoughts(config, WHOLE in given) | lengths
    now = {ANSWER: config.data.generate.max_new_tokens, WHOLE: config.data.max_length}
    return {option: tokens for option, tokens in lengths.items() if option not in given and tokens != now[option]}


def _lengths_for_thoughts(config: Config, keep_whole: bool) -> dict[str, int]:
    from eagle31_train.targets.chat import ChatTemplate  # for the tokenizer, which a shape does not need

    try:
        lengths = room_for_thoughts(config.data, describe_target(config.target), keep_whole)
        if not lengths or not ChatTemplate.load(config.target).thinks:
            return {}
    except UserError:
        return {}
    if not config.regenerate:
        del lengths[ANSWER]
    return lengths


def _recorded_lengths(config: Config) -> dict[str, int]:
    """Return the lengths with which a run's answers and data were made, as far as they are there."""
    answered = Path(config.run_dir, ANSWERED).with_suffix(".manifest.json")
    lengths = {}
    for record, option in ((answered, ANSWER), (config.data_folder / artifacts.MANIFEST, WHOLE)):
        if record.is_file():
            inputs = artifacts.read_json(record, "eagle31 data").get("inputs", {})
            lengths[option] = provenance.recorded_value(inputs, option)
    return {option: tokens for option, tokens in lengths.items() if tokens is not None}


def room_for_thoughts(data: DataConfig, target: TargetDescription, keep_whole: bool = False) -> dict[str, int]:
    """Return lengths of an answer and of its conversation that leave room for thoughts, at least those of `data`; with
    `keep_whole` the conversation's stays. Empty if the target has too few positions."""
    answer = max(data.generate.max_new_tokens, THOUGHT)
    whole = data.max_length if keep_whole else max(data.max_length, PROMPT + answer)
    return {ANSWER: min(answer, whole), WHOLE: whole} if whole <= (_positions(target) or math.inf) else {}


def planned_drafter(config: Config, target: TargetDescription, draft_vocab_size: int) -> tuple[DrafterShape, list[str]]:
    """Return the drafter that a configuration makes for a target, and a table of where its options come from.
    UserError for auxiliary layers that the target lacks, or a drafter that vLLM could not serve."""
    options, rows = derive(config.drafter, target)
    layers = pick_layers(config.target.aux_layers, target.num_hidden_layers, kinds(read_raw(config.target)))
    shape = drafter_shape(options, target.hidden_size, target.vocab_size, draft_vocab_size, layers)
    source = f"of {target.num_hidden_layers}" + ("" if config.target.aux_layers else ", by default")
    positions = _positions(target)
    window = window_caveat(shape, target.sliding_window, positions)
    first = row("aux_layers", ", ".join(map(str, layers)), source)
    if config.train.lr is None:
        optimizer, width = config.train.optimizer, shape.hidden_size
        of_width = f" for a drafter {width:,} wide" if optimizer == "muon" else ""
        rows.append(row("train.lr", peak_learning_rate(optimizer, width), f"{optimizer}'s default{of_width}"))
    return shape, [first, *rows, *(f"  {caveat}" for caveat in window)]


def _positions(target: TargetDescription) -> int | None:
    return target_positions(target.max_position_embeddings, target.model_type, [target.rope_scaling])


def derive(options: DrafterConfig, target: TargetDescription) -> tuple[DrafterConfig, list[str]]:
    """Fill in every option that the target decides. Return the options, and for each such option a printable row: its
    value and where that comes from. Given values stay. If only the number of heads is given, there are as many
    key/value heads, and the heads share `hidden_size`."""
    mla = options.architecture == "mla"
    names = list(REQUIRED)
    if options.num_attention_heads is None and not mla:
        names += ["num_key_value_heads"] if options.hidden_size else ["num_key_value_heads", "head_dim"]
    values = {name: (getattr(target, name), target.sources.get(name, name)) for name in names}
    values["rope_scaling"] = _scaling(options.architecture, target)
    if mla and target.mla:
        widths = [*MLA_WIDTHS]
        if all(getattr(options, name) is None for name in MLA_WIDTHS):  # otherwise null may mean full-rank queries
            widths.append("q_lora_rank")
        values |= {name: (target.mla[name], name) for name in widths}
    # Whoever gives their own RoPE base or type gives the whole scaling too, or wants none.
    kind = values["rope_scaling"][0].get("rope_type")
    completes = options.rope_theta is None and options.rope_scaling.get("rope_type", kind) == kind
    rows, filled = [], {}
    for name, (value, source) in values.items():
        given = getattr(options, name)
        if given is None:
            filled[name] = value
            rows.append(row(name, value, f"the target's {source}"))
        elif name == "rope_scaling" and completes:
            filled[name] = value | given
            but = f", but {_shown(given)}" if given else ""
            rows.append(row(name, filled[name], f"the target's {source}{but}"))
        else:
            differs = name in CONTRADICTIONS and given != value
            rows.append(row(name, given, f"given, UNLIKE the target's {_shown(value)}" if differs else "given"))
    return replace(options, **filled), rows


def _scaling(architecture: str, target: TargetDescription) -> tuple[dict[str, Any], str]:
    """Return the part of the target's RoPE scaling that a drafter can be served with, and where it comes from."""
    scaling = target.rope_scaling
    kind = scaling.get("rope_type", "default")
    if kind == "default":
        return {}, "rope_scaling: none"
    if kind not in SCALINGS[architecture]:
        return {}, f"rope_scaling {kind}, with which no {architecture} drafter can be served: none"
    if "alpha" in scaling:  # Hunyuan's: it stretches the base
        return {}, f"rope_scaling {kind} with alpha, with which no drafter can be served: none"
    needed, allowed = SCALINGS[architecture][kind]
    taken = {name: value for name, value in scaling.items() if name in needed | allowed and value is not None}
    return {"rope_type": kind, **taken}, "rope_scaling"


def row(name: str, value: Any, source: str) -> str:
    return f"  {name:<23}  {_shown(value):<22}  {source}"


def _shown(value: Any) -> str:
    if not isinstance(value, dict):
        return str(value)
    if isinstance(value.get("factor"), int | float) and "rope_type" in value:
        return f"{value['rope_type']}, factor {value['factor']:g}"
    return ", ".join(f"{name} {of}" for name, of in value.items()) or "none"
