"""What extraction stores of a conversation, and training reads."""

from dataclasses import dataclass

from numpy.typing import NDArray
from torch import Tensor

from eagle31_train.common.transfers import to_device
from eagle31_train.store.codec import Encoded, plain


def supervised_positions(loss_mask: Tensor) -> Tensor:
    """[M] int64, ascending: positions but the first whose next token is the assistant's, by loss_mask [T] bool."""
    return loss_mask[2:].nonzero()[:, 0] + 1


def attended_positions(supervised: Tensor | NDArray) -> int:
    """How many positions slots attend to: the last slot is one before the last supervised position."""
    return int(supervised[-1]) if len(supervised) else 0


@dataclass(frozen=True)
class Document:
    """One tokenized conversation with the target's states, as far as training needs them: T tokens, A auxiliary layers,
    H hidden.

    tokens: [T] int64.
    loss_mask: [T] bool, true where the assistant wrote the token.
    top1: [T] int64, the target's arg-max over the full vocabulary at this position, that is its
        prediction of the next token; -1 where the next token is not the assistant's.
    aux: [attended, A, H] auxiliary hidden states of the first positions: no slot sees the others.
    last: [M, H] last hidden states, before the final norm, in order of `supervised`.

    Positions count from 0.
    """

    tokens: Tensor
    loss_mask: Tensor
    top1: Tensor
    aux: Encoded
    last: Encoded

    @classmethod
    def of(cls, tokens: Tensor, loss_mask: Tensor, top1: Tensor, aux: Tensor, last: Tensor) -> "Document":
        """From the states of all positions, aux [T, A, H] and last [T, H], of any float dtype, on any device."""
        supervised = supervised_positions(loss_mask)
        needed = last[to_device(supervised, last.device)]
        return cls(tokens, loss_mask, top1, plain(aux[: attended_positions(supervised)]), plain(needed))

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def supervised(self) -> Tensor:
        """[M] int64, see `supervised_positions`."""
        return supervised_positions(self.loss_mask)

    @property
    def attended(self) -> int:
        return attended_positions(self.supervised)
