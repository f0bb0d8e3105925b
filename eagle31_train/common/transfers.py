"""Copies between host memory and a device for which the host does not wait.

On CUDA they go through pinned memory, whose blocks torch keeps and reuses.
"""

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Moved = TypeVar("Moved", bound="DataclassInstance")


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor from host memory to a device, in the order of what is queued there."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


def to_host(x: Tensor) -> Tensor:
    """Copy a tensor to host memory. From CUDA, it holds the values only once what is queued there now is done."""
    return x.to("cpu", non_blocking=x.is_cuda)


def each_tensor(value: Moved, move: Callable[[Tensor], Tensor]) -> Moved:
    """Return a dataclass with its tensors, and those of dataclasses in it, replaced by `move` of each."""
    changed: dict[str, Any] = {}
    for field in fields(value):
        part = getattr(value, field.name)
        if isinstance(part, Tensor):
            changed[field.name] = move(part)
        elif is_dataclass(part) and not isinstance(part, type):
            changed[field.name] = each_tensor(part, move)
    return replace(value, **changed)
