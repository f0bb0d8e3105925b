"""Fused kernels in Triton, as torch operators `eagle31::…`. What they compute is in plain torch in model/.

The operators are there without Triton too: fake tensors, on which steps are counted, need no kernel.
"""

import importlib.util

import torch


def missing(device: torch.device) -> str | None:
    """Why the fused kernels cannot run on a device; None if they can."""
    if device.type != "cuda":
        return f"this trains on a {device.type.upper()}"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "the GPU is older than Ampere"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    return None
