"""Launching a Triton kernel."""

from typing import Any

import torch


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Launch a kernel on the device of its first argument, a tensor. (Triton itself uses the current device.) Do
    nothing for an empty grid, which CUDA refuses."""
    if all(grid):
        with torch.cuda.device_of(arguments[0]):
            kernel[grid](*arguments, **options)
