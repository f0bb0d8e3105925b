"""One conversation, as extraction stores it and training reads it."""

from dataclasses import dataclass

from numpy.typing import NDArray
from torch import Tensor

from eagle31_train.common.transfers import to_device
from eagle31_train.store.codec import Encoded, plain


def supervised_positions(loss_mask: Tensor) -> Tensor:
    """Return the positions, except 0, whose next token the assistant wrote: [M] int64, ascending.

    loss_mask: [T] bool, true where the assistant wrote the token."""
    return loss_mask[2:].nonzero()[:, 0] + 1


def attended_positions(supervised: Tensor | NDArray) -> int:
    """Return how many positions slots attend to. The last slot is the position before the last supervised one."""
    return int(supervised[-1]) if len(supervised) else 0


@dataclass(frozen=True)
class Document:
    """One tokenized conversation, with those of the target's states that training needs.

    Shapes: T tokens, A auxiliary layers, H hidden size, M supervised positions. Positions count from 0.

    tokens: [T] int64.
    loss_mask: [T] bool, true where the assistant wrote the token.
    top1: [T] int64, the target's arg-max over the full vocabulary at each position, that is, its
        prediction of the next token; -1 where the assistant did not write the next token.
    aux: [attended, A, H] auxiliary hidden states of the first `attended` positions: no slot sees later ones.
    last: [M, H] last hidden states, before the final norm, in order of `supervised`.
    """

    tokens: Tensor
    loss_mask: Tensor
    top1: Tensor
    aux: Encoded
    last: Encoded

    @classmethod
    def of(cls, tokens: Tensor, loss_mask: Tensor, top1: Tensor, aux: Tensor, last: Tensor) -> "Document":
        """Build a document from the states of all positions: aux [T, A, H], last [T, H]; any float dtype and device."""
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
