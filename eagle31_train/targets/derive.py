"""A drafter's options from its target: what is left open is the target's own."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from eagle31_train.checkpoint.contract import REQUIRED, drafter_shape, window_caveat
from eagle31_train.common.errors import Refused, UserError
from eagle31_train.config import MLA_WIDTHS, Config, DrafterConfig, DrafterShape, TargetConfig
from eagle31_train.model.rope import SCALINGS, target_positions
from eagle31_train.targets.description import TargetDescription, describe_target, kinds, pick_layers, read_raw

# Options of which another value than the target's makes a drafter that reads its states at a loss.
CONTRADICTIONS = {*REQUIRED, "num_key_value_heads", "head_dim", "rope_scaling"} - {"intermediate_size"}
ADAMW_LR, MUON_LR, MUON_WIDTH = 1e-4, 3e-3, 576  # the drafter's width at which Muon's rate was measured
# Muon's rate · weight decay · steps that suited trainings of 540 and 1,334 steps. Shorter ones decay as that of 540:
# docs/launch.md.
SHRINKAGE, SHORT = 1.62, 540
# Small steps teach more than large ones while they are few; more of them than any training here took are not tried.
STEP_TOKENS, MOST_STEPS, STEP_UNIT = 2048, 15_000, 256
THOUGHT, PROMPT = 4096, 2048  # tokens that an answer with a thought may want, and those before it
WITH_THOUGHT = [f"data.generate.max_new_tokens={THOUGHT}", f"data.max_length={PROMPT + THOUGHT}"]


def complete(config: Config, described: Mapping[str, Any] | None, recorded: Mapping[str, Any] | None = None) -> Config:
    """Fill in every option that the target decides: the drafter's shape and, if null, the learning rate.

    Args:
        described: the target, as stage 1's manifest has it; without it its config.json is read.
        recorded: the drafter's options of a run that training goes on with.
    """
    options = config.drafter
    if recorded is not None:
        values = {name: value for name, value in recorded.items() if getattr(options, name, 0) is None}
        if "rope_theta" in values:  # what is given of a scaling goes over the one that it was begun with
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
    """The default of a drafter of hidden size `width`, in two digits. The spectral norm of Muon's update is 0.2 · lr ·
    √(longer side), so its rate falls with √width; AdamW's is the same for all."""
    rate = MUON_LR * math.sqrt(MUON_WIDTH / max(width, MUON_WIDTH)) if optimizer == "muon" else ADAMW_LR
    return float(f"{rate:.2g}")


def default_batch_tokens(tokens: float, epochs: int, longest: int) -> int:
    """The default for `epochs` of a training split of so many tokens whose longest conversation has `longest`: small
    steps, or as large as makes MOST_STEPS of them. It does not depend on the devices, on any number of which a training
    may go on."""
    needed = max(STEP_TOKENS, longest, tokens * epochs / MOST_STEPS)
    return STEP_UNIT * math.ceil(needed / STEP_UNIT)


def default_weight_decay(optimizer: str, width: int, steps: int) -> float:
    """The default for a training of `steps`, to two digits; AdamW's is 0.

    At Muon's default rate it shrinks weights by the same factor in trainings of any length but short ones, and by less
    at a lower rate.
    """
    if optimizer != "muon":
        return 0.0
    return float(f"{SHRINKAGE / (peak_learning_rate(optimizer, width) * max(steps, SHORT)):.2g}")


def answer_lengths(target: TargetConfig) -> list[str]:
    """Options with which the answers of a target that may think are whole, if it has positions for them; none for
    others, and where its files are not at hand, or are none: the stage that needs them says what is wrong."""
    from eagle31_train.targets.chat import ChatTemplate  # its tokenizer, of which a shape needs nothing

    try:
        positions = _positions(describe_target(target)) or math.inf
        return WITH_THOUGHT if positions >= PROMPT + THOUGHT and ChatTemplate.load(target).thinks else []
    except (UserError, Refused):
        return []


def planned_drafter(config: Config, target: TargetDescription, draft_vocab_size: int) -> tuple[DrafterShape, list[str]]:
    """The drafter that a configuration makes for a target, and the table of where its options are from; UserError for
    auxiliary layers that the target does not have, or a drafter that vLLM could not serve."""
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
    """The options with nothing left open that the target decides, and of each such option a row for people: its value
    and where that is from. Given values stay; heads given alone have as many keys, and share `hidden_size`."""
    mla = options.architecture == "mla"
    names = list(REQUIRED)
    if options.num_attention_heads is None and not mla:
        names += ["num_key_value_heads"] if options.hidden_size else ["num_key_value_heads", "head_dim"]
    values = {name: (getattr(target, name), target.sources.get(name, name)) for name in names}
    values["rope_scaling"] = _scaling(options.architecture, target)
    if mla and target.mla:
        widths = [*MLA_WIDTHS]
        if all(getattr(options, name) is None for name in MLA_WIDTHS):  # else null may mean queries of full rank
            widths.append("q_lora_rank")
        values |= {name: (target.mla[name], name) for name in widths}
    # One who gives a base or a type of RoPE of their own gives the whole scaling too, or wants none.
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
    """The target's RoPE scaling, as far as a drafter can be served with it, and where it is from."""
    scaling = target.rope_scaling
    kind = scaling.get("rope_type", "default")
    if kind == "default":
        return {}, "rope_scaling: none"
    if kind not in SCALINGS[architecture]:
        return {}, f"rope_scaling {kind}, which no {architecture} drafter is served with: none"
    if "alpha" in scaling:  # Hunyuan's: it stretches the base
        return {}, f"rope_scaling {kind} with alpha, which no drafter is served with: none"
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
