"""Fused kernels in Triton, as torch operators `eagle31::…`. model/ computes the same in plain torch.

The operators exist without Triton, too: benchmarks count operations on fake tensors, which need no kernel.
"""

import torch

from eagle31_train.common.errors import first_line


def missing(device: torch.device) -> str | None:
    """Return why the fused kernels cannot run on a device, or None if they can."""
    if device.type != "cuda":
        return f"training is on a {device.type.upper()}"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "the GPU is older than Ampere"
    return trial(device)


def trial(device: torch.device) -> str | None:
    """Return why Triton cannot launch a kernel on a device, or None if it can. A machine may lack Triton, or what
    Triton needs to compile C: a compiler or Python's headers."""
    from eagle31_train.kernels.swiglu import silu_times

    try:
        silu_times(*torch.ones(2, 16, device=device))
    except Exception as error:  # whatever compilers, drivers and Triton raise
        return f"Triton cannot launch a kernel: {first_line(error)}"
    return None
