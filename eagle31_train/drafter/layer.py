"""The drafter's parts: RMSNorm, RoPE, grouped-query attention's projections, MLP, and the one layer.

Parameter names are those of the checkpoint (`contract.py`): saving a drafter renames nothing.

Shapes: n rows; D draft hidden; h query heads; g key/value heads; d head width.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from eagle31_train.drafter.linear import Linear
from eagle31_train.schema import DrafterShape, UserError


class RMSNorm(nn.Module):
    """x / rms(x) * weight, in fp32 inside, as vLLM computes it."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """x [..., width] → the same shape and dtype."""
        return rms_norm(x, self.weight, self.eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm with an explicit weight; fp64 stays fp64, everything else is computed in fp32."""
    out: Tensor = _RmsNorm.apply(x, weight, eps)
    return out


class _RmsNorm(torch.autograd.Function):
    """Keeps its input and one number per row for the gradient, where autograd would keep two fp32 copies."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x if x.dtype == torch.float64 else x.float()
        inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)  # 1 / rms(x)
        ctx.save_for_backward(x, weight, inverse)
        return (wide * inverse * weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, inverse = ctx.saved_tensors
        scaled = x.to(inverse.dtype) * inverse
        dout = grads[0].to(inverse.dtype)
        dweight = (dout * scaled).flatten(0, -2).sum(0).to(weight.dtype) if ctx.needs_input_grad[1] else None
        if not ctx.needs_input_grad[0]:
            return None, dweight, None
        dscaled = dout * weight
        along = (dscaled * scaled).mean(-1, keepdim=True)  # what lies along x cannot change x / rms(x)
        return ((dscaled - scaled * along) * inverse).to(x.dtype), dweight, None


class Rope(nn.Module):
    """Half-split rotary embedding with the drafter's own base and scaling.

    The frequencies come from transformers, so every scaling it knows (llama3, yarn, linear, …) is
    the one that the target uses too; angles are computed in fp32.

    Raises:
        UserError: a scaling that transformers does not know, or that lacks a value.
    """

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        try:
            config = LlamaConfig(
                hidden_size=shape.num_attention_heads * shape.head_dim,
                num_attention_heads=shape.num_attention_heads,
                head_dim=shape.head_dim,
                max_position_embeddings=shape.max_position_embeddings,
                rope_parameters=rope_parameters(shape),
            )
            rotary = LlamaRotaryEmbedding(config)
        except KeyError as error:
            raise UserError(f"drafter.rope_scaling={shape.rope_scaling} is no RoPE of transformers: {error}") from None
        self.exact = rotary.inv_freq.clone()
        self.inv_freq: Tensor
        self.register_buffer("inv_freq", self.exact, persistent=False)
        self.factor = float(rotary.attention_scaling)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Rope":
        """Move with the module, but never to a narrower dtype: bf16 frequencies turn long contexts wrongly."""
        super()._apply(fn, recurse)
        self.inv_freq = self.exact.to(self.inv_freq.device)
        return self

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [n, heads, d], positions [n] int64 → x rotated, same dtype."""
        angles = positions[:, None].to(self.inv_freq.dtype) * self.inv_freq
        cos, sin = angles.cos() * self.factor, angles.sin() * self.factor
        cos, sin = cos[:, None].to(x.dtype), sin[:, None].to(x.dtype)
        first, second = x.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def rope_parameters(shape: DrafterShape) -> dict:
    """The RoPE of a drafter as transformers 5 writes it: type, theta and scaling in one place."""
    scaling = dict(shape.rope_scaling or {})
    kind = scaling.pop("type", None) or scaling.pop("rope_type", None) or "default"
    if scaling and kind == "default":
        raise UserError(f"drafter.rope_scaling={shape.rope_scaling} names no rope_type, and would change nothing")
    return {**scaling, "rope_type": kind, "rope_theta": shape.rope_theta}


Project = Callable[[Linear], Tensor]  # a linear layer → what it makes of the attention's input, [n, its width]


class GroupedQueryAttention(nn.Module):
    """Projections of the drafter's attention; who attends to whom is `attention.py`'s business.

    The input is 2D wide: the normed embedding beside the normed hidden state. How a projection is worked
    out is the caller's business: training computes the embedding's half once for all steps.
    """

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.heads, self.groups, self.width = (
            shape.num_attention_heads,
            shape.num_key_value_heads,
            shape.head_dim,
        )
        D = shape.hidden_size
        self.q_proj = Linear(2 * D, self.heads * self.width)
        self.k_proj = Linear(2 * D, self.groups * self.width)
        self.v_proj = Linear(2 * D, self.groups * self.width)
        self.o_proj = Linear(self.heads * self.width, D)
        self.rope = Rope(shape)
        self.scale = self.width**-0.5

    @property
    def query_inputs(self) -> list[Linear]:
        """The projections of the attention's input that queries need."""
        return [self.q_proj]

    @property
    def key_inputs(self) -> list[Linear]:
        """Those that keys and values need."""
        return [self.k_proj, self.v_proj]

    def queries(self, project: Project, positions: Tensor) -> Tensor:
        """Positions [n] → q [n, h, d], rotated."""
        return self.rope(project(self.q_proj).unflatten(-1, (self.heads, self.width)), positions)

    def keys_values(self, project: Project, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Positions [n] → k [n, g, d], rotated, and v [n, g, d]."""
        k = self.rope(project(self.k_proj).unflatten(-1, (self.groups, self.width)), positions)
        return k, project(self.v_proj).unflatten(-1, (self.groups, self.width))

    def output(self, o: Tensor) -> Tensor:
        """o [n, h, d] → [n, D]."""
        return self.o_proj(o.flatten(-2))


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        D, inner = shape.hidden_size, shape.intermediate_size
        self.gate_proj = Linear(D, inner)
        self.up_proj = Linear(D, inner)
        self.down_proj = Linear(inner, D)

    def forward(self, x: Tensor) -> Tensor:
        """x [n, D] → [n, D]."""
        gated: Tensor = _SiluTimes.apply(self.gate_proj(x), self.up_proj(x))
        return self.down_proj(gated)


class _SiluTimes(torch.autograd.Function):
    """silu(gate) * up; keeps the two for the gradient, where autograd would keep silu(gate) too."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate) * up

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        return torch.ops.aten.silu_backward(grads[0] * up, gate), grads[0] * F.silu(gate)


class MidLayer(nn.Module):
    """The drafter's one layer, split where training and decoding differ: around the attention."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        D, eps = shape.hidden_size, shape.rms_norm_eps
        self.input_layernorm = RMSNorm(D, eps)
        self.hidden_norm = RMSNorm(D, eps)
        self.self_attn = GroupedQueryAttention(shape)
        self.post_attention_layernorm = RMSNorm(D, eps)
        self.mlp = Mlp(shape)
        self.norm_before_residual = shape.norm_before_residual

    def state_input(self, g: Tensor) -> tuple[Tensor, Tensor]:
        """State g [n, D] → its half of the attention's input, and the residual, [n, D] each."""
        normed = self.hidden_norm(g)
        return normed, normed if self.norm_before_residual else g

    def attention_input(self, e: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        """Embedding e [n, D] and state g [n, D] → the attention's input [n, 2D] and the residual [n, D]."""
        normed, residual = self.state_input(g)
        return torch.cat([self.input_layernorm(e), normed], dim=-1), residual

    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        """Residual [n, D] and attention output [n, h, d] → h_k [n, D], before the final norm."""
        u = residual + self.self_attn.output(attended)
        return u + self.mlp(self.post_attention_layernorm(u))
