"""A kernel that merges a slot's own keys and values into its attention, and one for the gradient.

model/attention.py does the same in plain torch. A program handles one slot and the query heads that share a key.

Shapes: S slots; h query heads; g key/value heads; d key width; dv value width; k own keys.
"""

from typing import Any

import torch
from torch import Tensor

from eagle31_train.kernels.launching import launch


@torch.library.custom_op("eagle31::merge_own_keys", mutates_args=())
def merge_own_keys(
    q: Tensor, out: Tensor, lse: Tensor, keys: Tensor, values: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Extend a softmax over other keys, given by its output and log-sum-exp, to a slot's own keys.

    Args:
        q: [S, h, d].
        out, lse: [S, h, dv], any float dtype, and [S, h] fp32: output and log-sum-exp over the other keys.
        keys, values: [k, S, g, d] and [k, S, g, dv].

    Returns:
        Output [S, h, dv] in q's dtype, log-sum-exp [S, h] fp32.
    """
    from eagle31_train.kernels.triton_kernels import merge_kernel

    merged, merged_lse = _merged(q, out)
    tensors = [x.contiguous() for x in (q, out, lse, keys, values)]
    grid, sizes = launch_options(q.shape, keys.shape, values.shape)
    launch(merge_kernel, grid, *tensors, merged, merged_lse, len(q), scale, **sizes)
    return merged, merged_lse


@torch.library.custom_op("eagle31::merge_own_keys_backward", mutates_args=())
def merge_own_keys_backward(
    dout: Tensor, q: Tensor, out: Tensor, lse: Tensor, keys: Tensor, values: Tensor, dq: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, keys and values.

    Args:
        dout: [S, h, dv].
        out, lse: of the merged softmax.
        dq: [S, h, d], the gradient of q from the other keys, which is added.
    """
    from eagle31_train.kernels.triton_kernels import merge_backward_kernel

    results = _gradients(q, keys, values)
    tensors = [x.contiguous() for x in (dout, q, out, lse, keys, values, dq)]
    grid, sizes = launch_options(q.shape, keys.shape, values.shape)
    launch(merge_backward_kernel, grid, *tensors, *results, len(q), scale, **sizes)
    return results


merge_own_keys.register_fake(lambda q, out, *_: _merged(q, out))
merge_own_keys_backward.register_fake(lambda _dout, q, _out, _lse, keys, values, *_: _gradients(q, keys, values))


def launch_options(q: tuple[int, ...], keys: tuple[int, ...], values: tuple[int, ...]) -> tuple[Any, dict[str, int]]:
    """Return the grid and constants (sizes, blocks that hold them, warps) for these shapes of q, keys and values."""
    own, slots, groups, width = keys
    shared, value_width = q[1] // groups, values[3]
    blocks = [1 << (size - 1).bit_length() for size in (shared, width, value_width)]
    warps = min(max(blocks[0] * max(blocks[1:]) // 512, 1), 8)
    sizes = {"OWN": own, "G": groups, "R": shared, "D": width, "DV": value_width}
    sizes |= dict(zip(("R_BLOCK", "D_BLOCK", "DV_BLOCK"), blocks, strict=True))
    return (slots, groups), {**sizes, "num_warps": warps}


def _merged(q: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
    return q.new_empty(out.shape), q.new_empty(q.shape[:2], dtype=torch.float32)


def _gradients(q: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), keys.new_empty(keys.shape), values.new_empty(values.shape)
