"""A drafter's options from its target: what is left open is the target's own, and where that is read is told."""

from dataclasses import dataclass, replace
from typing import Any

from eagle31_train.config import MLA_WIDTHS, DrafterConfig
from eagle31_train.model.rope import SCALINGS
from eagle31_train.targets.description import TargetDescription

# Options of which another value than the target's makes a drafter that reads its states at a loss.
CONTRADICTIONS = ("num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta")
CONTRADICTIONS += ("rope_scaling", "max_position_embeddings")


@dataclass(frozen=True)
class Derived:
    """One option of a drafter: its value, and where that is from, in words."""

    name: str
    value: Any
    source: str


def derive(options: DrafterConfig, target: TargetDescription) -> tuple[DrafterConfig, list[Derived]]:
    """The options with nothing left open that the target decides, and a row for each such option.

    Given values stay. Heads that are given alone have as many keys, and share `hidden_size` among them.
    """
    mla = options.architecture == "mla"
    values: dict[str, tuple[Any, str]] = {}

    def of_target(name: str, value: Any = None) -> None:
        values[name] = getattr(target, name) if value is None else value, target.sources.get(name, name)

    for name in ("intermediate_size", "num_attention_heads", "rms_norm_eps", "rope_theta", "max_position_embeddings"):
        of_target(name)
    if options.num_attention_heads is None and not mla:
        of_target("num_key_value_heads")
        if options.hidden_size is None:
            of_target("head_dim")
    if options.rope_theta is None:  # one who gives a base of their own gives the scaling too, or wants none
        values["rope_scaling"] = _scaling(options.architecture, target)
    if mla and target.mla:
        for name in MLA_WIDTHS:
            of_target(name, target.mla[name])
        if all(getattr(options, name) is None for name in MLA_WIDTHS):  # else null may mean queries of full rank
            of_target("q_lora_rank", target.mla["q_lora_rank"])
    rows, filled = [], {}
    for name, (value, source) in values.items():
        given = getattr(options, name)
        if given in (None, {}):
            filled[name] = value
            rows.append(Derived(name, value, f"the target's {source}"))
        else:
            differs = name in CONTRADICTIONS and given != value
            rows.append(Derived(name, given, f"given, UNLIKE the target's {value}" if differs else "given"))
    return replace(options, **filled), rows


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
    values = [", ".join(f"{k} {v}" for k, v in r.value.items()) or "none" if isinstance(r.value, dict) else f"{r.value}" for r in rows]
    width = min(max(map(len, values)), 32)
    return [f"  {row.name:<{names}}  {value:<{width}}  {row.source}" for row, value in zip(rows, values, strict=True)]
