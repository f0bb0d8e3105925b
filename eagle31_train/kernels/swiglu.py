"""SwiGLU's product, silu(gate) * up, and its gradient, each in one kernel. In plain torch: model/layer.py."""

from typing import Any

import torch
from torch import Tensor

BLOCK = 2048  # values of a program


def fused_silu_times(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up of two tensors alike, in fp32 or 16 bits; in fp32 inside, rounded once."""
    assert gate.dtype != torch.float64, "the kernel works in fp32"
    out: Tensor = silu_times_op(gate, up)
    return out


@torch.library.custom_op("eagle31::silu_times", mutates_args=())
def silu_times_op(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up."""
    from eagle31_train.kernels.triton_kernels import silu_times_kernel

    gate, up = gate.contiguous(), up.contiguous()
    out = torch.empty_like(gate)
    if out.numel():
        silu_times_kernel[_grid(out)](gate, up, out, out.numel(), BLOCK=BLOCK, num_warps=4)
    return out


@torch.library.custom_op("eagle31::silu_times_backward", mutates_args=())
def silu_times_backward_op(dout: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of gate and up."""
    from eagle31_train.kernels.triton_kernels import silu_times_backward_kernel

    dout, gate, up = dout.contiguous(), gate.contiguous(), up.contiguous()
    dgate, dup = torch.empty_like(gate), torch.empty_like(up)
    if dout.numel():
        kernel = silu_times_backward_kernel[_grid(dout)]
        kernel(dout, gate, up, dgate, dup, dout.numel(), BLOCK=BLOCK, num_warps=4)
    return dgate, dup


silu_times_op.register_fake(lambda gate, _up: gate.new_empty(gate.shape))
silu_times_backward_op.register_fake(lambda _dout, gate, up: (gate.new_empty(gate.shape), up.new_empty(up.shape)))


def _setup(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:  # noqa: ARG001 (as torch calls it)
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor]:
    dgate, dup = silu_times_backward_op(dout, *ctx.saved_tensors)
    return dgate, dup


silu_times_op.register_autograd(_backward, setup_context=_setup)


def _grid(x: Tensor) -> tuple[int]:
    return (-(-x.numel() // BLOCK),)
