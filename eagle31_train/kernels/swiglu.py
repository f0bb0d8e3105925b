"""SwiGLU's product, silu(gate) * up, and its gradient, one kernel each. model/layer.py does the same in plain torch.

Both compute in fp32, on tensors of equal shape in fp32 or 16 bits, and round once.
"""

import torch
from torch import Tensor

from eagle31_train.kernels.launching import launch

BLOCK = 2048  # values per program


@torch.library.custom_op("eagle31::silu_times", mutates_args=())
def silu_times(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up."""
    from eagle31_train.kernels.triton_kernels import silu_times_kernel

    assert gate.dtype != torch.float64, "the kernel works in fp32"
    gate, up = gate.contiguous(), up.contiguous()
    out = torch.empty_like(gate)
    launch(silu_times_kernel, _grid(out), gate, up, out, out.numel(), BLOCK=BLOCK, num_warps=4)
    return out


@torch.library.custom_op("eagle31::silu_times_backward", mutates_args=())
def silu_times_backward(dout: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of gate and up."""
    from eagle31_train.kernels.triton_kernels import silu_times_backward_kernel

    dout, gate, up = dout.contiguous(), gate.contiguous(), up.contiguous()
    dgate, dup = torch.empty_like(gate), torch.empty_like(up)
    tensors = (dout, gate, up, dgate, dup)
    launch(silu_times_backward_kernel, _grid(dout), *tensors, dout.numel(), BLOCK=BLOCK, num_warps=4)
    return dgate, dup


silu_times.register_fake(lambda gate, _up: gate.new_empty(gate.shape))
silu_times_backward.register_fake(lambda _dout, gate, up: (gate.new_empty(gate.shape), up.new_empty(up.shape)))


def _grid(x: Tensor) -> tuple[int]:
    return (-(-x.numel() // BLOCK),)
