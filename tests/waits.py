"""Finds, on a machine without a GPU, the operations for which host and device would wait for one another."""

from contextlib import ExitStack
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# Operators whose result, or its size, must be known on the host.
OPERATORS = {
    "_local_scalar_dense",  # item(), int(), float(), bool(), `if tensor`
    "nonzero",
    "masked_select",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "bincount",
    "equal",
    "is_nonzero",
}
# A CPU tensor answers these without any operator.
QUESTIONS = ("tolist", "cpu", "numpy", "__array__")
# Numbers of the host, which are copied to the device while the host waits.
NUMBERS = ("tensor", "as_tensor", "asarray", "from_numpy")


class _Operators(TorchDispatchMode):
    def __init__(self, found):
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name in OPERATORS or (name == "repeat_interleave" and kwargs.get("output_size") is None):
            self.found.append(name)
        if name.startswith(("index", "_index", "_unsafe_index")):
            indices = [i for arg in args if isinstance(arg, list | tuple) for i in arg if isinstance(i, torch.Tensor)]
            # A single value for many places is a fill, which needs no count.
            fills = name.startswith("index_put") and args[2].numel() == 1 and not any(args[3:4])
            if not fills and any(i.dtype in (torch.bool, torch.uint8) for i in indices):
                self.found.append(f"{name} by a mask")
        return func(*args, **kwargs)


class Waits:
    """`with Waits() as found:` lists every operation in the block that would wait, by name; backward passes too."""

    def __enter__(self):
        self.found, self.patches = [], ExitStack()
        for owner, names in ((torch.Tensor, QUESTIONS), (torch, NUMBERS)):
            for name in names:
                self.patches.enter_context(patch.object(owner, name, self._noting(name, getattr(owner, name))))
        self.patches.enter_context(_Operators(self.found))
        return self.found

    def __exit__(self, *error):
        return self.patches.__exit__(*error)

    def _noting(self, name, original):
        def asked(*args, **kwargs):
            if name in QUESTIONS or not isinstance(args[0], torch.Tensor):
                self.found.append(name)
            return original(*args, **kwargs)

        return asked
