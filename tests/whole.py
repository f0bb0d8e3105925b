"""Documents that have the states of all their positions, too, and states as codecs keep them."""

from dataclasses import dataclass, replace

from torch import Tensor

from eagle31_train.store import codec as codecs
from eagle31_train.store.document import Document


@dataclass(frozen=True)
class Whole(Document):
    """all_aux [T, A, H] and all_last [T, H], of any float dtype: what references compute with."""

    all_aux: Tensor
    all_last: Tensor

    @classmethod
    def of(cls, tokens, loss_mask, top1, aux, last):
        return cls(**vars(Document.of(tokens, loss_mask, top1, aux, last)), all_aux=aux, all_last=last)

    def to(self, dtype):
        return self.of(self.tokens, self.loss_mask, self.top1, self.all_aux.to(dtype), self.all_last.to(dtype))


def encode(states, codec):
    encoded, finite = codecs.encode(states, codec)
    assert finite
    return encoded


def encoded(document, aux_codec, last_codec):
    """As extraction hands it to the writer."""
    return replace(document, aux=encode(document.aux.values, aux_codec), last=encode(document.last.values, last_codec))
