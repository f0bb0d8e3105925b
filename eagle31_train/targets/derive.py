"""A drafter's options from its target: what is left open is the target's own, and where that is read is told."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from eagle31_train.checkpoint.contract import REQUIRED, drafter_shape, window_caveat
from eagle31_train.config import MLA_WIDTHS, Config, DrafterConfig, DrafterShape
from eagle31_train.model.rope import SCALINGS
from eagle31_train.targets.description import TargetDescription, describe_target, pick_layers

# Options of which another value than the target's makes a drafter that reads its states at a loss.
CONTRADICTIONS = {
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "rope_theta",
    "rope_scaling",
    "max_position_embeddings",
}


@dataclass(frozen=True)
class Derived:
    """One option of a drafter: its value, and where that is from, in words."""

    name: str
    value: Any
    source: str


def complete(config: Config, described: Mapping[str, Any] | None, begun: Mapping[str, Any] | None = None) -> Config:
    """The configuration with a drafter of which nothing is left open that its target decides.

    Args:
        described: the target as stage 1's manifest describes it; without it, its config.json is read if it must be.
        begun: the options of a drafter that training goes on with, or begins from. What is open is as in it.
    """
    options = config.drafter
    if begun is not None:
        opened = {name for name in begun if getattr(options, name, 0) is None}
        values = {name: begun[name] for name in opened}
        if "rope_theta" in opened:  # what is given of a scaling goes over the one that it was begun with
            values["rope_scaling"] = {**(begun.get("rope_scaling") or {}), **options.rope_scaling}
        options = replace(options, **values)
    if None in (getattr(options, name) for name in REQUIRED):
        target = TargetDescription(**described) if described else describe_target(config.target)
        options, _ = derive(options, target)
    return replace(config, drafter=options)


def planned_drafter(config: Config, target: TargetDescription, draft_vocab_size: int) -> tuple[DrafterShape, list[str]]:
    """The drafter that a configuration makes for a target, and the table of where its options are from.

    Raises:
        UserError: auxiliary layers that the target does not have, or a drafter that vLLM could not serve.
    """
    options, rows = derive(config.drafter, target)
    layers = pick_layers(config.target.aux_layers, target.num_hidden_layers, target.model_type)
    shape = drafter_shape(options, target.hidden_size, target.vocab_size, draft_vocab_size, layers)
    source = f"of {target.num_hidden_layers}" + ("" if config.target.aux_layers else ", by default")
    lines = table([Derived("aux_layers", ", ".join(map(str, layers)), source), *rows])
    window = window_caveat(target.sliding_window, target.max_position_embeddings)
    return shape, [*lines, *(f"  {caveat}" for caveat in window)]


def derive(options: DrafterConfig, target: TargetDescription) -> tuple[DrafterConfig, list[Derived]]:
    """The options with nothing left open that the target decides, and a row for each such option.

    Given values stay. Heads that are given alone have as many keys, and share `hidden_size` among them.
    """
    mla = options.architecture == "mla"
    values: dict[str, tuple[Any, str]] = {}

    def of_target(name: str, value: Any = None) -> None:
        values[name] = getattr(target, name) if value is None else value, target.sources.get(name, name)

    for name in REQUIRED:
        of_target(name)
    if options.num_attention_heads is None and not mla:
        of_target("num_key_value_heads")
        if options.hidden_size is None:
            of_target("head_dim")
    values["rope_scaling"] = _scaling(options.architecture, target)
    if mla and target.mla:
        for name in MLA_WIDTHS:
            of_target(name, target.mla[name])
        if all(getattr(options, name) is None for name in MLA_WIDTHS):  # else null may mean queries of full rank
            of_target("q_lora_rank", target.mla["q_lora_rank"])
    rows, filled = [], {}
    for name, (value, source) in values.items():
        given = getattr(options, name)
        if given is None:
            filled[name] = value
            rows.append(Derived(name, value, f"the target's {source}"))
        elif name == "rope_scaling" and _completes(options, value):
            filled[name] = value | given
            but = f", but {', '.join(f'{key} {of}' for key, of in given.items())}" if given else ""
            rows.append(Derived(name, filled[name], f"the target's {source}{but}"))
        else:
            differs = name in CONTRADICTIONS and given != value
            rows.append(Derived(name, given, f"given, UNLIKE the target's {_shown(value)}" if differs else "given"))
    return replace(options, **filled), rows


def _completes(options: DrafterConfig, scaling: dict[str, Any]) -> bool:
    """Whether what is given of RoPE's scaling, or nothing, goes over the target's: one who gives a base or a type of
    their own gives the whole scaling too, or wants none."""
    given = options.rope_scaling
    return options.rope_theta is None and given.get("rope_type", scaling.get("rope_type")) == scaling.get("rope_type")


def _scaling(architecture: str, target: TargetDescription) -> tuple[dict[str, Any], str]:
    """The target's RoPE scaling, as far as a drafter can be served with it, and where it is from."""
    scaling = target.rope_scaling
    kind = scaling.get("rope_type", "default")
    if kind == "default":
        return {}, "rope_scaling: none"
    if kind not in SCALINGS[architecture]:
        return {}, f"rope_scaling {kind}, which no {architecture} drafter is served with: none"
    needed, allowed = SCALINGS[architecture][kind]
    kept = {name: value for name, value in scaling.items() if name in needed | allowed and value is not None}
    return {"rope_type": kind, **kept}, "rope_scaling"


def table(rows: list[Derived]) -> list[str]:
    """The rows as lines of text."""
    names = max(len(row.name) for row in rows)
    values = [_shown(row.value) for row in rows]
    width = max(map(len, values))
    return [f"  {row.name:<{names}}  {value:<{width}}  {row.source}" for row, value in zip(rows, values, strict=True)]


def _shown(value: Any) -> str:
    if not isinstance(value, dict):
        return str(value)
    if "factor" in value and "rope_type" in value:
        return f"{value['rope_type']}, factor {value['factor']:g}"
    return ", ".join(f"{name} {of}" for name, of in value.items()) or "none"
