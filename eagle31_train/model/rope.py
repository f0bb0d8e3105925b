"""Rotary position embedding with the drafter's own base and scaling.

Two layouts of the same rotation: Llama rotates the pairs (i, i + d/2) of a head, DeepSeek the pairs (2i, 2i + 1).

YaRN also sharpens the softmax of an MLA drafter, by a factor of its scale, `Rope.softmax_factor`. As vLLM computes both
(its DeepseekScalingRotaryEmbedding and DeepseekV2MLAAttention):

    m(a) = 0.1 a ln(factor) + 1
    cos, sin   times m(mscale) / m(mscale_all_dim)
    softmax    times m(mscale_all_dim)²              defaults: mscale 1, mscale_all_dim 0

Shapes: n rows; d rotated width.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from eagle31_train.common.errors import UserError
from eagle31_train.config import DrafterShape, mla_widths

ORIGINAL = "original_max_position_embeddings"
_YARN = ({"factor", ORIGINAL}, {"beta_fast", "beta_slow", "mscale", "mscale_all_dim"})
# Scalings that vLLM (from 0.31 on) and transformers read alike: required keys, optional keys. vLLM takes every scaling
# of an MLA drafter for YaRN. Left out: longrope, since vLLM uses the long factors wherever contexts may be long,
# whatever contexts the drafter was trained on; and proportional, which means different things in the two.
SCALINGS: dict[str, dict[str, tuple[set[str], set[str]]]] = {
    "llama": {
        "linear": ({"factor"}, set()),
        "dynamic": ({"factor"}, set()),  # trained unscaled, as it is for the first tokens
        "llama3": ({"factor", "low_freq_factor", "high_freq_factor", ORIGINAL}, set()),
        "yarn": (_YARN[0], _YARN[1] | {"attention_factor", "truncate"}),
    },
    "mla": {"yarn": _YARN},
}


class Rope(nn.Module):
    """The rotation of queries and keys. Raises UserError for a scaling that vLLM would read differently.

    The frequencies come from transformers, so a scaling (llama3, yarn, linear, …) is computed as in the target. Angles
    are fp32.
    """

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        check_rope(shape)
        latent = shape.architecture == "mla"
        self.interleaved = latent
        width = mla_widths(shape)[2] if latent else shape.head_dim
        with torch.device("cpu"):  # real values even where weights are on the meta device
            self.exact, self.factor = frequencies(shape, width)
        self.softmax_factor = 1.0  # by which the scaling multiplies the softmax scale
        if latent:
            self.factor, self.softmax_factor = mla_factors(shape)
        self.inv_freq: Tensor
        self.register_buffer("inv_freq", self.exact, persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Rope":
        """Move with the module, but never to a narrower dtype: bf16 frequencies are wrong in long contexts."""
        super()._apply(fn, recurse)
        self.inv_freq = self.exact.to(self.inv_freq.device)
        return self

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [n, heads, d], positions [n] int64 → x rotated, in the same dtype."""
        angles = positions[:, None].to(self.inv_freq.dtype) * self.inv_freq
        cos, sin = angles.cos() * self.factor, angles.sin() * self.factor
        cos, sin = cos[:, None].to(x.dtype), sin[:, None].to(x.dtype)
        first, second = x.unflatten(-1, (-1, 2)).unbind(-1) if self.interleaved else x.chunk(2, dim=-1)
        turned = first * cos - second * sin, second * cos + first * sin
        return torch.stack(turned, -1).flatten(-2) if self.interleaved else torch.cat(turned, dim=-1)


def frequencies(shape: DrafterShape, width: int) -> tuple[Tensor, float]:
    """Return a checked RoPE's inverse frequencies [width / 2] fp32, and transformers' factor of cos and sin. Raise
    UserError if its numbers give no frequencies."""
    parameters, theta = rope_parameters(shape), shape.rope_theta
    if parameters["rope_type"] == "default":
        return 1.0 / theta ** (torch.arange(0, width, 2).float() / width), 1.0
    from transformers import LlamaConfig  # takes seconds to import; plain RoPE does without
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(
        hidden_size=shape.num_attention_heads * width,
        num_attention_heads=shape.num_attention_heads,
        head_dim=width,
        max_position_embeddings=shape.max_position_embeddings,
        rope_parameters=parameters,
    )
    try:
        inverse, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, torch.device("cpu"))
    except (ArithmeticError, ValueError):  # a base of 1, say, or numbers near the largest float
        inverse, factor = torch.full((1,), torch.nan), 1.0
    if not torch.isfinite(inverse).all():
        raise UserError(f"drafter.rope_scaling={shape.rope_scaling} gives no frequencies with rope_theta={theta}")
    return inverse, float(factor)


def mla_factors(shape: DrafterShape) -> tuple[float, float]:
    """Return a checked YaRN's factors of an MLA drafter's cos and sin, and softmax scale; 1 and 1 without YaRN."""
    yarn = rope_parameters(shape)
    if yarn["rope_type"] == "default":
        return 1.0, 1.0
    turned = _mscale(yarn["factor"], yarn.get("mscale", 1.0))
    sharpened = _mscale(yarn["factor"], yarn.get("mscale_all_dim", 0.0))
    return turned / sharpened, sharpened**2


def _mscale(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def rope_parameters(shape: DrafterShape) -> dict:
    """Return a drafter's RoPE as transformers 5 writes it: type, theta and scaling in one dictionary."""
    scaling = dict(shape.rope_scaling or {})
    kinds = {scaling.pop(key) for key in ("type", "rope_type") if scaling.get(key)} or {"default"}
    if len(kinds) > 1:
        raise UserError(f"drafter.rope_scaling={shape.rope_scaling} names two types: set only rope_type")
    kind = kinds.pop()
    if scaling and kind == "default":
        raise UserError(
            f"drafter.rope_scaling={shape.rope_scaling} has no rope_type that scales: set one, or {{}} for none"
        )
    if (theta := scaling.get("rope_theta", shape.rope_theta)) != shape.rope_theta:
        raise UserError(f"drafter.rope_scaling.rope_theta={theta} would be ignored: set drafter.rope_theta instead")
    return {**scaling, "rope_type": kind, "rope_theta": shape.rope_theta}


def check_rope(shape: DrafterShape) -> dict:
    """Return `rope_parameters`. Raise UserError, naming the key, if vLLM would read them differently from training."""
    rotated = "qk_rope_head_dim" if shape.architecture == "mla" else "head_dim"
    if (width := getattr(shape, rotated)) % 2:
        raise UserError(f"drafter.{rotated}={width} must be even, since RoPE rotates pairs")
    parameters = rope_parameters(shape)
    kind, kinds = parameters["rope_type"], SCALINGS[shape.architecture]
    if kind == "default":
        return parameters
    if kind not in kinds:
        raise UserError(
            f"drafter.rope_scaling.rope_type={kind} would not be served as trained"
            + (" (vLLM treats every scaling of an MLA drafter as YaRN)" if shape.architecture == "mla" else "")
            + f": use rope_type={' or '.join(kinds)}, or {{}} for none"
        )
    needed, allowed = kinds[kind]
    numbers = {name: value for name, value in parameters.items() if name not in ("rope_type", "truncate")}
    problem = None
    if other := sorted(parameters.keys() - needed - allowed - {"rope_type", "rope_theta"}):
        problem = f"{other[0]} is ignored or read differently by vLLM, which knows {sorted(needed | allowed)}"
    elif missing := sorted(needed - parameters.keys()):
        problem = f"{missing[0]} is missing"
    elif not all(type(value) in (int, float) and math.isfinite(value) for value in numbers.values()):
        problem = "a value is not a number"
    elif any(value <= 0 for name, value in numbers.items() if not name.startswith("mscale")):
        problem = "a value must be above 0"
    elif not all(0 <= value <= 1000 for name, value in numbers.items() if name.startswith("mscale")):
        problem = "an mscale must be from 0 to 1000"
    elif not isinstance(parameters.get("truncate", True), bool):
        problem = "truncate must be true or false"
    elif kind == "llama3" and parameters["high_freq_factor"] <= parameters["low_freq_factor"]:
        problem = "high_freq_factor must be above low_freq_factor"
    if problem:
        raise UserError(f"drafter.rope_scaling={shape.rope_scaling}: {problem}")
    if (reach := table_end(parameters)) is not None and shape.max_position_embeddings > reach:
        raise UserError(
            f"drafter.max_position_embeddings={shape.max_position_embeddings} is beyond the {reach:g} positions of "
            "drafter.rope_scaling (factor times original_max_position_embeddings), where vLLM's table ends"
        )
    return parameters


def table_end(checked: dict) -> float | None:
    """Return the positions in vLLM's table of a YaRN; None for other RoPEs, whose table is as long as the target's
    contexts."""
    return checked["factor"] * checked[ORIGINAL] if checked["rope_type"] == "yarn" else None


def stretched(positions: int, scaling: Mapping[str, Any] | None) -> int:
    """Return how many positions vLLM's RoPE table has if the config names `positions`. A linear scaling multiplies
    them. A dynamic one does not: vLLM accepts longer contexts, and fails there."""
    scaling = scaling or {}
    linear = "linear" in (scaling.get("rope_type"), scaling.get("type"))
    return int(positions * (scaling.get("factor") or 1)) if linear else positions


def target_positions(count: int | None, model_type: str, scalings: Iterable[Mapping[str, Any]]) -> int | None:
    """Return how many positions a target has whose config.json says `count`, with these scalings; None: no bound."""
    if count is None or "gemma3" in model_type:  # Gemma 3's count is that of the stretched RoPE
        return count
    return max((stretched(count, scaling) for scaling in scalings), default=count)
