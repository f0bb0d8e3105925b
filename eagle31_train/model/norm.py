"""RMSNorm, as vLLM computes it, with a gradient that keeps little."""

from typing import Any

import torch
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """x / rms(x) * weight, in fp32 inside, as vLLM computes it, by `function`: `rms_norm`, compiled or fused or not."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps
        self.function = rms_norm

    def forward(self, x: Tensor) -> Tensor:
        """x [..., width] → the same shape and dtype."""
        return self.function(x, self.weight, self.eps)


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
