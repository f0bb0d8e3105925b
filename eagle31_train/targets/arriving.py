"""States on their way from where the target runs into this machine's memory, while the target runs on.

A GPU is never waited for: each sample's states are encoded there and their copies queued, and nobody looks at a value,
not even at whether all are finite, before the whole shard has arrived.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from eagle31_train.errors import UserError
from eagle31_train.store.codec import NOT_FINITE, encode_unchecked
from eagle31_train.store.document import Document
from eagle31_train.store.shard_plan import PlannedShard, Shape
from eagle31_train.transfers import each_tensor, to_host


class Arriving:
    def __init__(self, shape: Shape, shard: PlannedShard) -> None:
        self._shape, self._shard = shape, shard
        self._documents: dict[int, tuple[Document, list[Tensor]]] = {}  # with whether their states are finite
        self._queued: dict[torch.device, torch.cuda.Event] = {}  # the last copy from each device

    def add(self, index: int, document: Document) -> None:
        """Encode the states of the shard's sample `index`, on any device, where they are, and queue their copies."""
        states: tuple[Any, Any] = document.attended_states, document.supervised_states
        aux, aux_finite = encode_unchecked(states[0], self._shape.aux_codec)
        last, last_finite = encode_unchecked(states[1], self._shape.last_codec)
        aux, last, top1 = each_tensor(aux, to_host), each_tensor(last, to_host), to_host(document.top1)
        here = replace(document, top1=top1, aux=aux, last=last)
        self._documents[index] = here, [to_host(aux_finite), to_host(last_finite)]
        for device in {document.top1.device, states[0].device, states[1].device}:
            if device.type == "cuda":
                self._queued[device] = torch.cuda.current_stream(device).record_event()

    def wait(self) -> list[Document]:
        """The documents, in order, once all are here; UserError with the number of a sample that is not finite."""
        for event in self._queued.values():
            event.synchronize()
        order = sorted(self._documents)
        for index in order:
            if not all(self._documents[index][1]):
                raise UserError(f"{self._shard.name}: sample {self._shard.first + index}: {NOT_FINITE}")
        return [self._documents[index][0] for index in order]
