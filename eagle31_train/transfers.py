"""Copies between this machine's memory and a device for which the host does not wait.

On CUDA they go through pinned memory, whose blocks torch keeps and uses again.
"""

import torch
from torch import Tensor


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """A tensor of this machine's memory on a device, in the order of what is queued there."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


def to_host(x: Tensor) -> Tensor:
    """A tensor in this machine's memory: from CUDA only once what is queued there now is done."""
    return x.to("cpu", non_blocking=x.is_cuda)
