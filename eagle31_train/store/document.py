"""What extraction stores of a conversation, and training reads."""

from dataclasses import dataclass

from numpy.typing import NDArray
from torch import Tensor

from eagle31_train.store.codec import Encoded
from eagle31_train.transfers import to_device


def supervised_positions(loss_mask: Tensor) -> Tensor:
    """[M] int64, ascending: positions but the first whose next token is the assistant's, by loss_mask [T] bool."""
    return loss_mask[2:].nonzero()[:, 0] + 1


def attended_positions(supervised: Tensor | NDArray) -> int:
    """How many positions slots attend to: the last slot is one before the last supervised position."""
    return int(supervised[-1]) if len(supervised) else 0


@dataclass(frozen=True)
class Document:
    """One tokenized conversation with the target's states: T tokens, A auxiliary layers, H hidden.

    tokens: [T] int64.
    loss_mask: [T] bool, true where the assistant wrote the token.
    top1: [T] int64, the target's arg-max over the full vocabulary at this position, that is its
        prediction of the next token; -1 where the next token is not the assistant's.
    aux: [T, A, H] auxiliary hidden states, or only the first `attended` rows: no slot sees the others.
    last: [T, H] last hidden state, before the final norm, or only the rows of `supervised`.

    Positions count from 0. States are tensors of any float dtype, or as a codec encodes them.
    """

    tokens: Tensor
    loss_mask: Tensor
    top1: Tensor
    aux: Tensor | Encoded
    last: Tensor | Encoded

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def supervised(self) -> Tensor:
        """[M] int64, see `supervised_positions`."""
        return supervised_positions(self.loss_mask)

    @property
    def attended(self) -> int:
        return attended_positions(self.supervised)

    @property
    def attended_states(self) -> Tensor | Encoded:
        """The auxiliary states that are needed, [attended, A, H]."""
        return self.aux[: self.attended]

    @property
    def supervised_states(self) -> Tensor | Encoded:
        """The last hidden states that are needed, [M, H]: in order of `supervised`."""
        # Fewer positions are supervised than there are tokens, so the number of rows tells the two forms apart.
        return self.last[to_device(self.supervised, self.last.device)] if len(self.last) == len(self) else self.last
