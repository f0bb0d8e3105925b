"""The drafter's layers: attention's projections, MLP, norms and residuals.

Parameter names are those of the checkpoint (`contract.py`): saving a drafter renames nothing.

Shapes: n rows; D draft hidden; h query heads; d and dv widths of a key and a value.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from eagle31_train.config import DrafterShape
from eagle31_train.model.gqa import GroupedQueryAttention
from eagle31_train.model.linear import Linear
from eagle31_train.model.mla import LatentAttention
from eagle31_train.model.norm import RMSNorm

Attention = GroupedQueryAttention | LatentAttention
ATTENTIONS: dict[str, type[Attention]] = {"llama": GroupedQueryAttention, "mla": LatentAttention}


class Mlp(nn.Module):
    """SwiGLU.

    Attributes:
        function: what works out silu(gate) * up.
    """

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        D, inner = shape.hidden_size, shape.intermediate_size
        self.gate_proj = Linear(D, inner)
        self.up_proj = Linear(D, inner)
        self.down_proj = Linear(inner, D)
        self.function = silu_times

    def forward(self, x: Tensor) -> Tensor:
        """x [n, D] → [n, D]."""
        return self.down_proj(self.function(self.gate_proj(x), self.up_proj(x)))


def silu_times(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up of two tensors alike."""
    out: Tensor = _SiluTimes.apply(gate, up)
    return out


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


class Layer(nn.Module):
    """A layer above the first: as a Llama's. Split where training and decoding differ: around the attention."""

    reads_tokens = False

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        D, eps = shape.hidden_size, shape.rms_norm_eps
        self.input_layernorm = RMSNorm(D, eps)
        if self.reads_tokens:
            self.hidden_norm = RMSNorm(D, eps)
        self.self_attn: Attention = ATTENTIONS[shape.architecture](shape, D * (1 + self.reads_tokens))
        self.post_attention_layernorm = RMSNorm(D, eps)
        self.mlp = Mlp(shape)

    def state_input(self, g: Tensor) -> tuple[Tensor, Tensor]:
        """State g [n, D] → what the attention reads of it, and the residual, [n, D] each."""
        return self.input_layernorm(g), g

    def attention_input(self, e: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG002 (the first layer's)
        """State g [n, D] of the layer below → the attention's input and the residual, [n, D] each; no embedding."""
        return self.state_input(g)

    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        """Residual [n, D] and attention output [n, h, d] → h_k [n, D], before the final norm."""
        u = residual + self.self_attn.output(attended)
        return u + self.mlp(self.post_attention_layernorm(u))


class MidLayer(Layer):
    """The first layer, in most drafters the only one: it reads a token's embedding beside the state."""

    reads_tokens = True

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__(shape)
        self.norm_before_residual = shape.norm_before_residual

    def state_input(self, g: Tensor) -> tuple[Tensor, Tensor]:
        """State g [n, D] → its half of the attention's input, and the residual, [n, D] each."""
        normed = self.hidden_norm(g)
        return normed, normed if self.norm_before_residual else g

    def attention_input(self, e: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        """Embedding e [n, D] and state g [n, D] → the attention's input [n, 2D] and the residual [n, D]."""
        normed, residual = self.state_input(g)
        return torch.cat([self.input_layernorm(e), normed], dim=-1), residual
