"""Fused kernels in Triton, as torch operators `eagle31::…`. What they compute is in plain torch in model/.

The operators are there without Triton too: fake tensors, on which steps are counted, need no kernel.
"""

import torch

from eagle31_train.common.errors import first_line


def missing(device: torch.device) -> str | None:
    """Why the fused kernels cannot run on a device; None if they can."""
    if device.type != "cuda":
        return f"this trains on a {device.type.upper()}"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "the GPU is older than Ampere"
    return trial(device)


def trial(device: torch.device) -> str | None:
    """Why Triton cannot launch a kernel on a device, for which it compiles C: a machine may lack Triton, a
    compiler, or Python's headers. None if it can."""
    from eagle31_train.kernels.swiglu import silu_times

    try:
        silu_times(*torch.ones(2, 16, device=device))
    except Exception as error:  # whatever compilers, drivers and Triton raise
        return f"triton launches no kernel: {first_line(error)}"
    return None
