"""States on their way from where the target runs into this machine's memory, while the target runs on.

A GPU is never waited for: each sample's states are encoded there and their copies queued, and nobody looks at a value,
not even at whether all are finite, before the whole shard has arrived.
"""

from dataclasses import replace

import torch
from torch import Tensor

from eagle31_train.errors import UserError
from eagle31_train.store.codec import NOT_FINITE, Encoded, encode_unchecked
from eagle31_train.store.document import Document
from eagle31_train.store.shard_plan import PlannedShard, Shape
from eagle31_train.transfers import each_tensor, to_host


class Arriving:
    def __init__(self, shape: Shape, shard: PlannedShard) -> None:
        self._shape, self._shard = shape, shard
        self._documents: dict[int, Document] = {}
        self._finite: dict[int, list[Tensor]] = {}
        self._queued: dict[torch.device, torch.cuda.Event] = {}  # the last copy from each device

    def add(self, index: int, document: Document) -> None:
        """Encode the states of the shard's sample `index`, on any device, where they are, and queue their copies."""
        finite: list[Tensor] = []

        def encoded(states: Tensor | Encoded, codec: str) -> Encoded:
            assert isinstance(states, Tensor)
            here, fine = encode_unchecked(states, codec)
            finite.append(to_host(fine))
            return each_tensor(here, to_host)

        self._documents[index] = replace(
            document,
            top1=to_host(document.top1),
            aux=encoded(document.attended_states, self._shape.aux_codec),
            last=encoded(document.supervised_states, self._shape.last_codec),
        )
        self._finite[index] = finite
        for states in (document.top1, document.aux, document.last):
            if states.device.type == "cuda":
                self._queued[states.device] = torch.cuda.current_stream(states.device).record_event()

    def wait(self) -> list[Document]:
        """The documents, in order, once all are here; UserError with the number of a sample that is not finite."""
        for event in self._queued.values():
            event.synchronize()
        order = sorted(self._documents)
        for index in order:
            if not all(self._finite[index]):
                raise UserError(f"{self._shard.name}: sample {self._shard.first + index}: {NOT_FINITE}")
        return [self._documents[index] for index in order]
