"""The contenders that are measured. Each is one trainer's own step on the same weights and document.

A trainer is imported only on request, so that no contender pays for another's imports.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any, Protocol

from torch import Tensor

from benchmarks.shapes import Material


class Contender(Protocol):
    """One trainer with its model and data built, ready to step."""

    def loss(self) -> Tensor: ...

    def parameters(self) -> dict[str, Tensor]: ...

    def logits(self) -> Tensor:
        """Return [K, T, Vd], logits of slot t at step k; NaN where the trainer has none or reads a made-up token."""
        ...


# name: module, class, options
_CONTENDERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "ours": ("ours", "Ours", {}),
    "ours, frozen head": ("ours", "Ours", {"train_lm_head": False}),
    "ours, torch's products": ("ours", "Ours", {"onednn": False}),
    "ours, torch's products, frozen head": ("ours", "Ours", {"onednn": False, "train_lm_head": False}),
    "ours, eager attention": ("ours", "Ours", {"eager": True}),
    "speculators": ("speculators", "Speculators", {}),
    "specforge": ("specforge", "SpecForge", {}),
}
NAMES = list(_CONTENDERS)


def build(name: str, material: Material, unroll: int) -> Contender:
    module, kind, options = _CONTENDERS[name]
    maker: Callable[..., Contender] = getattr(import_module(f"benchmarks.contenders.{module}"), kind)
    return maker(material, unroll, **options)


def drop_gradients(contender: Contender) -> None:
    """Drop gradients as an optimizer's zero_grad does; the next step allocates them anew."""
    for parameter in contender.parameters().values():
        parameter.grad = None
