"""The drafter's layers: attention's projections, MLP, norms and residuals.

Parameters have the checkpoint's names (`contract.py`): saving a drafter renames nothing.

Shapes: n rows; D draft hidden; I the attention's input; h query heads; g key/value heads; d and dv widths of a key and
a value.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from eagle31_train.config import DrafterShape, mla_widths
from eagle31_train.kernels import swiglu
from eagle31_train.model.linear import Linear
from eagle31_train.model.norm import RMSNorm
from eagle31_train.model.recompute import recomputed
from eagle31_train.model.rope import Rope

Project = Callable[[Linear], Tensor]  # a linear layer → its output for the attention's input, [n, its width]


def applied_to(x: Tensor) -> Project:
    """Return the projections of the attention's input x [n, I] itself."""
    return lambda layer: layer(x)


class GroupedQueryAttention(nn.Module):
    """Projections of one layer's attention, as in Llama; `inputs` is I. See `attention.py` for who attends to whom.

    The caller computes the projections of the input (`query_inputs` for queries, `key_inputs` for keys and values),
    because training computes the embedding's half of the first layer's only once for all steps.
    """

    def __init__(self, shape: DrafterShape, inputs: int) -> None:
        super().__init__()
        self.heads, self.groups, self.width = shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim
        D, bias = shape.hidden_size, shape.attention_bias
        self.q_proj = Linear(inputs, self.heads * self.width, bias)
        self.k_proj = Linear(inputs, self.groups * self.width, bias)
        self.v_proj = Linear(inputs, self.groups * self.width, bias)
        self.o_proj = Linear(self.heads * self.width, D, bias and not shape.qk_norm)  # as in vLLM's Qwen3
        self.q_norm = RMSNorm(self.width, shape.rms_norm_eps) if shape.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(self.width, shape.rms_norm_eps) if shape.qk_norm else nn.Identity()
        self.query_inputs, self.key_inputs = [self.q_proj], [self.k_proj, self.v_proj]
        self.rope = Rope(shape)
        self.scale = self.width**-0.5
        self.window = shape.sliding_window

    def queries(self, project: Project, positions: Tensor) -> Tensor:
        """Positions [n] → q [n, h, d], normed if `qk_norm`, then rotated."""
        return self.rope(self.q_norm(project(self.q_proj).unflatten(-1, (self.heads, self.width))), positions)

    def keys_values(self, project: Project, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Positions [n] → k [n, g, d], normed if `qk_norm`, then rotated; v [n, g, d]."""
        k = self.rope(self.k_norm(project(self.k_proj).unflatten(-1, (self.groups, self.width))), positions)
        return k, project(self.v_proj).unflatten(-1, (self.groups, self.width))


class LatentAttention(nn.Module):
    """Projections of multi-head latent attention, as in DeepSeek-V2 and Kimi, with `GroupedQueryAttention`'s interface.

    Keys and values are made from one narrow latent per token, queries from another (without `q_lora_rank`, from the
    input). Each head's key is [without position | with position]; the second part is the same for all heads. Here the
    latent is expanded into a key and a value per head, so it is ordinary attention with as many key heads as query
    heads. (vLLM keeps the latent and moves the expansion into queries and outputs: the same numbers in another order.)

    Source: DeepSeek-V2 (arXiv 2405.04434); names and order of the parts as in vLLM's DeepseekV2MLAAttention.
    Shapes: d = nope + rope width of a key.
    """

    def __init__(self, shape: DrafterShape, inputs: int) -> None:
        super().__init__()
        D, eps, rank = shape.hidden_size, shape.rms_norm_eps, shape.q_lora_rank
        latent, nope, rope, value = mla_widths(shape)
        self.heads = shape.num_attention_heads
        self.query_parts, self.latent_parts, self.head_parts = [nope, rope], [latent, rope], [nope, value]
        self.low_rank = rank is not None
        if rank is None:
            self.q_proj = Linear(inputs, self.heads * (nope + rope))
        else:
            self.q_a_proj = Linear(inputs, rank)
            self.q_a_layernorm = RMSNorm(rank, eps)
            self.q_b_proj = Linear(rank, self.heads * (nope + rope))
        self.kv_a_proj_with_mqa = Linear(inputs, latent + rope)
        self.kv_a_layernorm = RMSNorm(latent, eps)
        self.kv_b_proj = Linear(latent, self.heads * (nope + value))
        self.o_proj = Linear(self.heads * value, D)
        self.query_inputs = [self.q_a_proj if self.low_rank else self.q_proj]
        self.key_inputs = [self.kv_a_proj_with_mqa]
        self.rope = Rope(shape)
        self.window = None
        self.scale = (nope + rope) ** -0.5 * self.rope.softmax_factor

    def queries(self, project: Project, positions: Tensor) -> Tensor:
        """Positions [n] → q [n, h, d], its second part rotated."""
        rows = project(self.query_inputs[0])
        if self.low_rank:
            rows = self.q_b_proj(self.q_a_layernorm(rows))
        still, turning = rows.unflatten(-1, (self.heads, -1)).split(self.query_parts, -1)
        return torch.cat([still, self.rope(turning, positions)], -1)

    def keys_values(self, project: Project, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Positions [n] → k [n, h, d], its second part rotated, and v [n, h, dv]."""
        latent, turning = project(self.kv_a_proj_with_mqa).split(self.latent_parts, -1)
        heads = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (self.heads, -1))
        still, v = heads.split(self.head_parts, -1)
        shared = self.rope(turning[:, None], positions).expand(-1, self.heads, -1)
        # Copy v: a view would keep the keys' part beside it for the gradient, too.
        return torch.cat([still, shared], -1), v.contiguous()


class Mlp(nn.Module):
    """SwiGLU. With `fused`, the kernels of kernels/swiglu.py compute its product."""

    fused = False

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        D, inner, bias = shape.hidden_size, shape.intermediate_size, shape.mlp_bias
        self.gate_proj = Linear(D, inner, bias)
        self.up_proj = Linear(D, inner, bias)
        self.down_proj = Linear(inner, D, bias)

    def forward(self, x: Tensor) -> Tensor:
        """x [n, D] → [n, D]."""
        with recomputed(silu_times, self.gate_proj(x), self.up_proj(x), self.fused) as product:
            return self.down_proj(product)


def silu_times(gate: Tensor, up: Tensor, fused: bool = False) -> Tensor:
    return _SiluTimes.apply(gate, up, fused)


class _SiluTimes(torch.autograd.Function):
    """silu(gate) * up. Keeps only gate and up for the gradient; autograd would keep silu(gate), too."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, fused: bool) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.fused = fused
        return swiglu.silu_times(gate, up) if fused else F.silu(gate) * up

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        if ctx.fused:
            return *swiglu.silu_times_backward(grads[0], gate, up), None
        return torch.ops.aten.silu_backward(grads[0] * up, gate), grads[0] * F.silu(gate), None


class Layer(nn.Module):
    """A Llama layer, split around the attention, where training and decoding differ. The `first` one, in most drafters
    the only one, reads a token's embedding beside the state."""

    def __init__(self, shape: DrafterShape, first: bool = False) -> None:
        super().__init__()
        D, eps = shape.hidden_size, shape.rms_norm_eps
        self.first, self.normed_residual = first, first and shape.norm_before_residual
        self.input_layernorm = RMSNorm(D, eps)
        if first:
            self.hidden_norm = RMSNorm(D, eps)
        attention = LatentAttention if shape.architecture == "mla" else GroupedQueryAttention
        self.self_attn: GroupedQueryAttention | LatentAttention = attention(shape, D * (1 + first))
        self.post_attention_layernorm = RMSNorm(D, eps)
        self.mlp = Mlp(shape)

    @property
    def state_norm(self) -> RMSNorm:
        """The norm that is applied to a state before attention reads it."""
        return self.hidden_norm if self.first else self.input_layernorm

    def residual(self, g: Tensor, normed: Tensor) -> Tensor:
        """Return what attention's output is added to, given a state and its norm, [n, D] each."""
        return normed if self.normed_residual else g

    def attention_input(self, e: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        """Embedding e (read by the first layer only) and state g, [n, D] each → attention's input [n, I], residual."""
        normed = self.state_norm(g)
        x = torch.cat([self.input_layernorm(e), normed], dim=-1) if self.first else normed
        return x, self.residual(g, normed)

    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        """Residual [n, D] and attention output [n, h, dv] → h_k [n, D], before the final norm."""
        u = residual + self.self_attn.o_proj(attended.flatten(-2))
        with recomputed(self.post_attention_layernorm, u) as normed:
            return u + self.mlp(normed)
