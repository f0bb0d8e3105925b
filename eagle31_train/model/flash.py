"""FlashAttention 3 or 4 instead of torch's own flash kernel (FlashAttention 2), where one is installed.

torch.nn.attention.activate_flash_attention_impl (torch 2.11 and later) puts it behind aten's operators
_flash_attention_forward and _backward, and behind scaled_dot_product_attention, for the whole process. On CUDA
`context_attention.py` calls these operators; it only has to leave values narrower than keys unpadded.

Like torch's own kernel, both take packed runs aligned at the end, windows and shared key heads, and return the
log-sum-exp as [h, queries]. Their limits, by torch/nn/attention/_fa3.py and _fa4.py and by flash-attention's sources of
2026-08 (hopper/ and flash_attn/cute/):

    FA3    Hopper. Widths up to 256; values may differ in width from keys only if keys are up to 64 wide, or up to 192
           with values from 97 to 128 (Kimi: 192 and 128). No deterministic gradient at width 256
    FA4    Hopper, and Blackwell with widths up to 128, or 192 and 128, or 256. Since 2026-06 its forward returns four
           results; torch 2.11 and 2.13 expect two and raise, torch 2.15 takes four
"""

import torch
from torch import Tensor
from torch.nn import attention
from torch.nn import functional as F

from eagle31_train.common.transfers import each_tensor
from eagle31_train.config import DrafterShape, mla_widths
from eagle31_train.model import context_attention
from eagle31_train.model.attention import unrolled_attention
from eagle31_train.model.packing import Layout, make_layout

NAMES = {9: ("FA3", "FA4"), 10: ("FA4",)}  # by major compute capability of the GPU; the first that works is used
NEAR = 0.02  # largest difference of two bf16 kernels, relative to the norm: twice the error of each
WINDOW = 22  # positions that a slot sees in the trial of a drafter with a window


def switch_flash(shape: DrafterShape, device: torch.device) -> str | None:
    """Switch a drafter's attention on a CUDA device to FlashAttention 3 or 4 if its results agree with torch's own.
    Return which kernel is in use, and why the others are not; None if neither supports the device or the shape.

    A small random problem with the drafter's heads decides, forward and backward. A kernel that cannot be loaded,
    raises or differs is switched off again, and torch's own stays.
    """
    restore_flash()
    names = NAMES.get(torch.cuda.get_device_capability(device)[0])
    if names is None:
        return None
    problem = _problem(shape, device)
    if not context_attention.takes_flash(problem[0], problem[2]):
        return None
    if not hasattr(attention, "restore_flash_attention_impl"):
        return "torch's own attention (others need torch 2.11)"
    window = None if shape.sliding_window is None else WINDOW
    right, wrong = _worked_out(*problem, window), []
    for name in names:
        try:
            attention.activate_flash_attention_impl(name)
            results = _worked_out(*problem, window)
            errors = [(a.float() - b).norm() / b.float().norm() for a, b in zip(results, right, strict=True)]
            error = torch.stack(errors).max().item()  # NaN if any is
            if error <= NEAR:
                return f"attention by {name}"
            wrong.append(f"{name} differs from it by {error:.1%}")
        except Exception as raised:  # whatever others' kernels raise: ImportError, AssertionError, …
            wrong.append(f"{name}: {str(raised).partition(chr(10))[0]}")
        restore_flash()
    return f"torch's own attention ({'; '.join(wrong)})"


def restore_flash() -> None:
    if context_attention.replaced():
        attention.restore_flash_attention_impl()


def _problem(shape: DrafterShape, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor, Layout, float]:
    """Return q [S, h, d], k [N, g, d], v [N, g, dv], dout [S, h, dv] in bf16; three runs in two documents; a scale."""
    h, g, d = shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim
    dv = mla_widths(shape)[3] if shape.architecture == "mla" else d
    layout = make_layout([(0, 90), (90, 300)], torch.tensor([*range(9, 60), *range(110, 200), *range(230, 299)]))
    generator, S, N = torch.Generator().manual_seed(0), len(layout.slots), layout.documents[-1][1]
    sizes = ((S, h, d), (N, g, d), (N, g, dv), (S, h, dv))
    q, k, v, dout = (torch.randn(size, generator=generator).to(device, torch.bfloat16) for size in sizes)
    return q, k, v, dout, each_tensor(layout, lambda x: x.to(device)), d**-0.5


def _worked_out(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, layout: Layout, scale: float, window: int | None
) -> list[Tensor]:
    """Return attention and gradients of q, k and v in a step with own keys, so that the kernel computes part of a
    softmax. Also return an output of the decoder's attention (`decode.py` measures acceptance in the same process)."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    own_k, own_v = [k[layout.slots]], [v[layout.slots]]
    out = unrolled_attention(leaves[0], leaves[1], leaves[2], own_k, own_v, layout, scale, window=window)
    keys, values = (x[:200].unflatten(0, (4, 50)).transpose(1, 2) for x in (k, v))
    decoded = F.scaled_dot_product_attention(q[:4].unflatten(1, (k.shape[1], -1)), keys, values, scale=scale)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout), decoded]
