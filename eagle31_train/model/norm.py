"""RMSNorm, as vLLM computes it, with a gradient that keeps little memory."""

from typing import Any

import torch
from torch import Tensor, nn

from eagle31_train.kernels.rms_norm import norm_rows, norm_rows_backward


class RMSNorm(nn.Module):
    """x / rms(x) * weight, computed in fp32 as in vLLM. With `fused`, the kernels of kernels/rms_norm.py compute it."""

    fused = False

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """x [..., width] → the same shape and dtype."""
        return rms_norm(x, self.weight, self.eps, self.fused)


def rms_norm(x: Tensor, weight: Tensor, eps: float, fused: bool = False) -> Tensor:
    """RMSNorm with an explicit weight, computed in fp32; in fp64 for fp64, which no kernel takes."""
    return _RmsNorm.apply(x, weight, eps, fused)


class _RmsNorm(torch.autograd.Function):
    """Keeps its input and one number per row for the gradient, where autograd would keep two fp32 copies."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, fused: bool) -> Tensor:
        ctx.fused = fused
        if fused:
            out, inverse = norm_rows(x.reshape(-1, x.shape[-1]), weight, eps)
            ctx.save_for_backward(x, weight, inverse)
            return out.view(x.shape)
        wide = x if x.dtype == torch.float64 else x.float()
        inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)  # 1 / rms(x)
        ctx.save_for_backward(x, weight, inverse)
        return (wide * inverse * weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, inverse = ctx.saved_tensors
        wants_dx, wants_dweight = ctx.needs_input_grad[:2]
        if ctx.fused:
            rows = (one.reshape(-1, x.shape[-1]) for one in (grads[0], x))
            dx, dweight = norm_rows_backward(*rows, weight, inverse, wants_dx)
            return dx.view(x.shape) if wants_dx else None, dweight.to(weight.dtype), None, None
        scaled = x.to(inverse.dtype) * inverse
        dout = grads[0].to(inverse.dtype)
        dweight = (dout * scaled).flatten(0, -2).sum(0).to(weight.dtype) if wants_dweight else None
        if not wants_dx:
            return None, dweight, None, None
        dscaled = dout * weight
        along = (dscaled * scaled).mean(-1, keepdim=True)  # a change along x does not change x / rms(x)
        return ((dscaled - scaled * along) * inverse).to(x.dtype), dweight, None, None
