"""Matrix products of the drafter: torch's own, except in fp32 on a CPU.

There torch calls MKL, which on AMD's processors is less than half as fast as oneDNN in the same precision
(docs/log.md). oneDNN is in every CPU build of torch, but fp32 products reach it only through an operator without a
gradient, so the gradient is written here: two more products.

For bf16 products on a CPU torch calls oneDNN, which compiles a kernel for every new shape, in 1 to 5 ms. The number of
rows differs in every training step, so large numbers are rounded up to a multiple of ROWS with rows of zeros.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

BLOCK = 512  # logits per block in `first_largest`
ROWS = 64  # few shapes, yet at most a fifth of the rows are zeros: up to 4 * ROWS rows are not padded
ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


class Linear(nn.Linear):
    """nn.Linear computed by `linear`. A bias, which few drafters have, starts at 0."""

    def __init__(self, inputs: int, outputs: int, bias: bool = False) -> None:
        super().__init__(inputs, outputs, bias)
        if bias:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., inputs] → [..., outputs]."""
        return self.shifted(linear(x, self.weight))

    def shifted(self, rows: Tensor) -> Tensor:
        """Add the bias, if there is one, to products [..., outputs]."""
        return rows if self.bias is None else rows + self.bias.to(rows.dtype)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [..., inputs], weight [outputs, inputs] → x @ weight.T [..., outputs], with its gradient."""
    if spare := spare_rows(count := x.shape[:-1].numel(), x):
        return _FilledUp.apply(x.reshape(count, -1), weight, spare).view(*x.shape[:-1], len(weight))
    if not _asks_onednn(x, weight) or torch.is_autocast_enabled("cpu"):
        return F.linear(x, weight)
    return _Linear.apply(x.reshape(-1, x.shape[-1]), weight).view(*x.shape[:-1], len(weight))


def soft_capped(logits: Tensor, cap: float | None) -> Tensor:
    """Logits, overwritten by cap * tanh(logits / cap) if there is a cap, as in Gemma 2."""
    return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)


def first_largest(logits: Tensor) -> Tensor:
    """logits [n, V] → `logits.max(-1).indices`, [n] int64: the first of equal values, and NaN before all.

    A CPU finds a largest value many times faster than its index: so find the block first, then the index within it.
    """
    if logits.device.type != "cpu":
        return logits.max(-1).indices
    V = logits.shape[-1]
    width = min(BLOCK, V)
    whole = V // width * width
    largest = logits[:, :whole].unflatten(-1, (-1, width)).amax(-1)
    if whole < V:
        largest = torch.cat([largest, logits[:, whole:].amax(-1, keepdim=True)], -1)
    # The last block starts early enough to be full. The values that it shares with the block before it are smaller.
    start = (largest.max(-1).indices * width).clamp_max(V - width)
    places = start[:, None] + torch.arange(width, device=logits.device)
    return start + logits.gather(-1, places).max(-1).indices


def spare_rows(count: int, x: Tensor) -> int:
    """Return how many rows to add to `count` rows like x, so that few shapes occur where each new one costs time."""
    many = count > 4 * ROWS and x.device.type == "cpu" and compute_dtype(x) == torch.bfloat16
    return -count % ROWS if many else 0


def filled_up(x: Tensor, spare: int) -> Tensor:
    """Return x [n, ...] followed by `spare` rows of zeros; x itself if `spare` is 0."""
    return torch.cat([x, x.new_zeros(spare, *x.shape[1:])]) if spare else x


@cache
def since_ampere(device: torch.device) -> bool:
    """Return whether a CUDA device is NVIDIA's, Ampere or later. Older ones lack kernels that we use; AMD's kernels
    return results in another layout. Without any GPU, as for fake tensors, return True."""
    if torch.version.hip is not None:
        return False
    return not torch.cuda.is_available() or torch.cuda.get_device_capability(device) >= (8, 0)


def compute_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of products of x: autocast's if it is on, else x's own."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def product(a: Tensor, b: Tensor) -> Tensor:
    """a [n, k], b [m, k] → a @ b.T [n, m], where no gradient is recorded."""
    if _asks_onednn(a, b):
        # For other strides oneDNN has only reference code, a thousand times slower.
        b = b if b.is_contiguous() or b.T.is_contiguous() else b.contiguous()
        return torch.ops.mkldnn._linear_pointwise(a, b, None, "none", [], "")
    return a @ b.T


def _asks_onednn(a: Tensor, b: Tensor) -> bool:
    fp32_on_cpu = a.device.type == "cpu" and a.dtype == b.dtype == torch.float32
    return fp32_on_cpu and a.numel() > 0 and ONEDNN and bool(torch.backends.mkldnn.enabled)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return product(x, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dx = product(grads[0], weight.T) if ctx.needs_input_grad[0] else None
        return dx, product(grads[0].T, x.T) if ctx.needs_input_grad[1] else None


class _FilledUp(torch.autograd.Function):
    """F.linear as under autocast. Rows are filled up only for the products: x itself is kept for the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, spare: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.spare = spare
        low = compute_dtype(x)  # not by autocast, which would cache the weight's cast without a gradient
        return (filled_up(x.to(low), spare) @ weight.to(low).T)[: len(x)]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dout, low = filled_up(grads[0], ctx.spare), grads[0].dtype
        dx = (dout @ weight.to(low))[: len(x)].to(x.dtype) if ctx.needs_input_grad[0] else None
        dweight = None
        if ctx.needs_input_grad[1]:
            dweight = (dout.T @ filled_up(x.to(low), ctx.spare)).to(weight.dtype)
        return dx, dweight, None
