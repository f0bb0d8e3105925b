"""Who is measured. Each contender is one trainer's own step on the same weights and document.

A trainer is imported only when it is asked for, so that no contender pays for another's imports.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any, Protocol

from torch import Tensor
from torch.nn import functional

from benchmarks.shapes import Material
from eagle31_train.model.linear import linear


class Contender(Protocol):
    """One trainer with its model and data built, ready to step."""

    def loss(self) -> Tensor:
        """The loss of one forward pass, with its graph."""
        ...

    def parameters(self) -> dict[str, Tensor]:
        """What is trained, by the checkpoint's names."""
        ...

    def logits(self) -> Tensor:
        """[K, T, Vd]: logits of slot t at step k. NaN where this trainer computes none or reads a made-up token."""
        ...


# name: module, class, options, environment of its process
_CONTENDERS: dict[str, tuple[str, str, dict[str, Any], dict[str, str]]] = {
    "ours": ("ours", "Ours", {}, {}),
    "ours, frozen head": ("ours", "Ours", {"train_lm_head": False}, {}),
    "ours, compiled": ("ours", "Ours", {"compiled": True}, {}),
    "ours, compiled, frozen head": ("ours", "Ours", {"compiled": True, "train_lm_head": False}, {}),
    "ours, torch's products": ("ours", "Ours", {"onednn": False}, {}),
    "ours, torch's products, frozen head": ("ours", "Ours", {"onednn": False, "train_lm_head": False}, {}),
    "ours, eager attention": ("ours", "Ours", {"eager": True}, {}),
    "speculators": ("speculators", "Speculators", {}, {}),
    "speculators, eager": ("speculators", "Speculators", {"attention": "eager"}, {}),
    "speculators, oneDNN": ("speculators", "Speculators", {"onednn": True}, {}),
    "specforge": ("specforge", "SpecForge", {}, {}),
    "specforge, uncompiled": ("specforge", "SpecForge", {}, {"TORCHDYNAMO_DISABLE": "1"}),
    "specforge, oneDNN": ("specforge", "SpecForge", {"onednn": True}, {}),
}
NAMES = list(_CONTENDERS)


def environment(name: str) -> dict[str, str]:
    """What a contender's process needs in its environment."""
    return _CONTENDERS[name][3]


def build(name: str, material: Material, unroll: int, **options: Any) -> Contender:
    """Import a trainer and build its model and data."""
    module, kind, defaults, _ = _CONTENDERS[name]
    chosen = {**defaults, **options}
    if module != "ours" and chosen.pop("onednn", False):
        functional.linear = _without_bias
    maker: Callable[..., Contender] = getattr(import_module(f"benchmarks.contenders.{module}"), kind)
    return maker(material, unroll, **chosen)


def _without_bias(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Stands where functional.linear stands."""
    assert bias is None
    return linear(x, weight)


def drop_gradients(contender: Contender) -> None:
    """As an optimizer's zero_grad does: the next step allocates them anew."""
    for parameter in contender.parameters().values():
        parameter.grad = None
