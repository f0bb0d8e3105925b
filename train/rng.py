"""The random states of a process as tensors: torch's, CUDA's, numpy's and Python's, without pickle."""

import random
import struct
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

# 624 words of the Mersenne Twister, its position, whether a normal number is left over, and that number.
TWISTER = struct.Struct("<625I?d")
VERSION = 3  # of Python's state: the only one since 2006


def rng_state(device: torch.device) -> dict[str, Tensor]:
    """This process's random states: "torch", "numpy", "python", and "cuda" where the device is one; uint8, CPU."""
    state = {"torch": torch.get_rng_state(), "numpy": _numpy_state(), "python": _python_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_rng_state(state: Mapping[str, Tensor], device: torch.device) -> None:
    """Put back what `rng_state` gave, on this machine or another; a generator that it lacks stays as it is."""
    if "torch" in state:
        torch.set_rng_state(state["torch"])
    if "cuda" in state and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)
    if "numpy" in state:
        *words, position, has_gauss, gauss = _unpack(state["numpy"])
        np.random.set_state(("MT19937", np.array(words, dtype=np.uint32), position, int(has_gauss), gauss))
    if "python" in state:
        *words, has_gauss, gauss = _unpack(state["python"])
        random.setstate((VERSION, tuple(words), gauss if has_gauss else None))


def of_all(states: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The states of every rank under one roof: "rank0.torch", …"""
    return {f"rank{rank}.{kind}": tensor for rank, state in enumerate(states) for kind, tensor in state.items()}


def of_rank(states: Mapping[str, Tensor], rank: int) -> dict[str, Tensor]:
    """What `of_all` was given for a rank; empty where there were fewer."""
    prefix = f"rank{rank}."
    return {name.removeprefix(prefix): tensor for name, tensor in states.items() if name.startswith(prefix)}


def _numpy_state() -> Tensor:
    found = np.random.get_state(legacy=False)
    assert found["bit_generator"] == "MT19937", "nothing here gives numpy another generator"
    return _pack(*found["state"]["key"].tolist(), found["state"]["pos"], bool(found["has_gauss"]), found["gauss"])


def _python_state() -> Tensor:
    version, words, gauss = random.getstate()
    assert version == VERSION
    return _pack(*words, gauss is not None, 0.0 if gauss is None else gauss)


def _pack(*values: float) -> Tensor:
    return torch.frombuffer(bytearray(TWISTER.pack(*values)), dtype=torch.uint8)


def _unpack(tensor: Tensor) -> tuple:
    return TWISTER.unpack(tensor.numpy().tobytes())
