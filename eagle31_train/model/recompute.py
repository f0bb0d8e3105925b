"""What the backward pass recomputes instead of keeping it.

The largest activations of a step are the cheapest to compute: a norm's output or SwiGLU's product takes one pass over
its inputs, which are kept anyway. `recomputed` is for those, and always on. `checkpointed` is for everything between
two attentions, matrix products included: train.activation_checkpointing.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

_checkpointing = ContextVar("_checkpointing", default=False)


@contextmanager
def recomputed(function: Callable[..., Tensor], *inputs: Any) -> Iterator[Tensor]:
    """Yield function(*inputs). Operators inside the context do not keep it for their gradients; they call it again.

    The function must be cheap, keep its inputs for its own gradient anyway, and give the same bits every time, also
    outside autocast (so no matrix product).
    """
    out = function(*inputs)
    if not torch.is_grad_enabled() or _checkpointing.get():  # hooks in a checkpoint would keep what it must forget
        yield out
        return
    again = _Again(partial(function, *inputs), out)
    with saved_tensors_hooks(again.pack, again.unpack):
        yield out


class _Again:
    """What autograd keeps instead of a tensor: how to compute it again, once for all operators that wait for it."""

    def __init__(self, function: Callable[[], Tensor], out: Tensor) -> None:
        self._function, self._place = function, _place(out)  # not `out` itself, which must be freed
        self._waiting = 0
        self._out: Tensor | None = None

    def pack(self, saved: Tensor) -> Tensor | None:
        """Return None for the recomputed tensor, and any other as it is."""
        if _place(saved) != self._place:
            return saved
        self._waiting += 1
        return None

    def unpack(self, packed: Tensor | None) -> Tensor:
        if packed is not None:
            return packed
        out = self._function() if self._out is None else self._out
        self._waiting -= 1
        self._out = out if self._waiting > 0 else None
        return out


def _place(x: Tensor) -> tuple[Any, ...]:
    return x.untyped_storage()._cdata, x.storage_offset(), x.shape, x.stride()


def checkpointed(function: Callable, *args: Any) -> Any:
    """Return function(*args). Only the arguments are kept; the whole function is called again for the gradient."""
    return checkpoint(
        function, *args, use_reentrant=False, preserve_rng_state=False, context_fn=lambda: (_inside(), _inside())
    )


@contextmanager
def _inside() -> Iterator[None]:
    token = _checkpointing.set(True)
    try:
        yield
    finally:
        _checkpointing.reset(token)
