"""RMSNorm and its gradient, one kernel each, computed in fp32. model/norm.py does the same in plain torch.

Shapes: n rows; W their width.
"""

import torch
from torch import Tensor

from eagle31_train.kernels.launching import launch

# At least this many programs, and this many warps in all, share the gradient's rows; narrow rows take few warps each. A
# program goes through its rows one by one and leaves a partial sum of the weight's gradient.
PROGRAMS, WARPS = 256, 2048


@torch.library.custom_op("eagle31::rms_norm", mutates_args=())
def norm_rows(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x [n, W] of fp32 or 16 bits, weight [W] → norm [n, W] in x's dtype, 1 / rms [n] fp32."""
    from eagle31_train.kernels.triton_kernels import norm_kernel

    assert x.dtype != torch.float64, "the kernel works in fp32"
    x = _in_rows(x)
    out, inverse = _outputs(x)
    sizes = (x.shape[1], x.stride(0), eps)
    launch(norm_kernel, (len(x),), x, weight, out, inverse, *sizes, **launch_options(x.shape[1]))
    return out, inverse


@torch.library.custom_op("eagle31::rms_norm_backward", mutates_args=())
def norm_rows_backward(
    dout: Tensor, x: Tensor, weight: Tensor, inverse: Tensor, wants_dx: bool
) -> tuple[Tensor, Tensor]:
    """Return dx [n, W] in x's dtype ([0, W] unless wanted) and dweight [W] fp32."""
    from eagle31_train.kernels.triton_kernels import norm_backward_kernel

    x, dout = _in_rows(x), dout.contiguous()
    dx, dweight = _gradients(x, wants_dx)
    options = launch_options(x.shape[1])
    parts = dweight.new_empty(min(max(PROGRAMS, WARPS // options["num_warps"]), len(x)), x.shape[1])
    tensors, sizes = (dout, x, weight, inverse, dx, parts), (len(x), x.shape[1], x.stride(0))
    launch(norm_backward_kernel, (len(parts),), *tensors, *sizes, DX=wants_dx, **options)
    return dx, parts.sum(0)


norm_rows.register_fake(lambda x, *_: _outputs(x))
norm_rows_backward.register_fake(lambda _dout, x, _weight, _inverse, wants_dx: _gradients(x, wants_dx))


def _in_rows(x: Tensor) -> Tensor:
    """Return x with each row's values contiguous."""
    return x if x.stride(1) == 1 else x.contiguous()


def _outputs(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(len(x), dtype=torch.float32)


def _gradients(x: Tensor, wants_dx: bool) -> tuple[Tensor, Tensor]:
    dx = x.new_empty(x.shape if wants_dx else (0, x.shape[1]))
    return dx, x.new_empty(x.shape[1], dtype=torch.float32)


def launch_options(width: int) -> dict[str, int]:
    """Return block size and warps of a launch whose programs each hold one row of this width at a time."""
    block = 1 << max(width - 1, 1).bit_length()
    return {"BLOCK": block, "num_warps": min(max(block // 512, 1), 16)}
