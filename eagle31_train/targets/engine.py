"""Engines run the target over conversations and give its hidden states: transformers (`hf.py`) or vLLM.

Both give the same states within the target's own rounding: auxiliary layer i is the input of layer i, the last hidden
state is before the final norm.

Shapes: T tokens of one conversation; A auxiliary layers; H hidden; V vocabulary.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from eagle31_train.errors import UserError
from eagle31_train.targets.readout import Readout


@dataclass(frozen=True)
class Reference:
    """The target's own next-token distribution at n positions: [n, V] fp32 logits `own`; or, with `ids` [n, k] int64,
    the most likely tokens among others, [n, k] fp32 log-probabilities of those."""

    own: Tensor
    ids: Tensor | None = None


class Engine(Protocol):
    """What extraction asks of an engine; `longest`: tokens that a conversation may have, None for any number."""

    name: str
    readout: Readout
    layers: list[int]

    @property
    def longest(self) -> int | None: ...

    def run(self, tokens: Sequence[Tensor]) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Conversations [T] int64 → (index, aux [T, A, H], last [T, H]) of each, in any order, in the target's dtype,
        on any device. UserError for one that the engine cannot take."""
        ...

    def reference(self, tokens: Tensor, positions: Tensor) -> Reference:
        """What the target itself says at some positions, none of them the last, of a conversation [T]."""
        ...


def check_length(engine: Engine, length: int) -> None:
    """Refuse a conversation of so many tokens where the engine does not take it."""
    if engine.longest is not None and length > engine.longest:
        raise UserError(
            f"a conversation of {length} tokens is too long for extract.engine={engine.name}, which takes "
            f"{engine.longest} here: cut the data by data.max_length={engine.longest}, or, with vLLM and a target that "
            "has more positions, set extract.engine_args.max_model_len"
        )
