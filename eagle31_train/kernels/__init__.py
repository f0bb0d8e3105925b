"""Fused kernels in Triton, as torch operators `eagle31::…`. What they compute is in plain torch in model/.

The operators are there without Triton too: fake tensors, on which steps are counted, need no kernel.
"""

import importlib.util
from typing import Any

import torch

from eagle31_train.errors import first_line


def missing(device: torch.device) -> str | None:
    """Why the fused kernels cannot run on a device; None if they can."""
    if device.type != "cuda":
        return f"this trains on a {device.type.upper()}"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "the GPU is older than Ampere"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    return trial(device)


def trial(device: torch.device) -> str | None:
    """What keeps Triton from launching a kernel on a device; None if nothing does. It compiles a piece of C for that,
    and a machine may lack a compiler, or Python's headers."""
    from eagle31_train.kernels.swiglu import silu_times

    try:
        silu_times(*torch.ones(2, 16, device=device))
    except Exception as error:  # whatever compilers, drivers and Triton raise
        return f"triton launches no kernel: {first_line(error)}"
    return None


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Launch a kernel on the device of its first argument, a tensor: Triton itself takes the current one."""
    with torch.cuda.device_of(arguments[0]):
        kernel[grid](*arguments, **options)
