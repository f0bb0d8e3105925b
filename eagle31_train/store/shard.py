"""A shard file: many samples end to end, without padding, with encoded states.

For S samples of N tokens in all, C of them attended by slots and M supervised (see `Document`):

    tokens [N] int32, loss_mask [N] bool, top1 [N] int32
    aux.values [C, A, …], aux.scale [C, A, …]; last.values [M, …], last.scale [M, …]
    aux.channels [S, A, H], last.channels [S, H]: only for codecs that scale channels

Where a sample's rows begin is not stored: it follows from the lengths and the loss mask.
"""

import re
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from eagle31_train.store.backends import Storage
from eagle31_train.store.codec import CODECS, Encoded, concatenate, plain
from eagle31_train.store.document import Document, attended_positions, supervised_positions
from eagle31_train.store.format import Line, open_checked
from eagle31_train.store.sealed import DamagedError
from eagle31_train.store.shard_plan import Plan, PlannedShard, Shape, shape_of
from eagle31_train.store.tensors import checksum, save_file

NONE = plain(torch.empty(0, 0))


def write_shard(path: Path, documents: Sequence[Document]) -> str:
    """Write samples, whose states the store's codecs have encoded, to a file. Return `Line.checksums` for it."""
    tensors = {
        "tokens": torch.cat([document.tokens for document in documents]).int(),
        "loss_mask": torch.cat([document.loss_mask for document in documents]),
        "top1": torch.cat([document.top1 for document in documents]).int(),
    }
    for name in ("aux", "last"):
        joined = concatenate([getattr(document, name) for document in documents])
        tensors |= {f"{name}.values": joined.values, f"{name}.scale": joined.scale}
        if CODECS[joined.codec].channels:
            tensors[f"{name}.channels"] = joined.channels
    save_file(tensors, path)
    return checksum(tensors[name] for name in ("tokens", "loss_mask", "top1")) + "".join(map(_of_states, documents))


def _of_states(document: Document) -> str:
    both = (document.aux, document.last)
    return checksum(part for states in both for part in (states.values, states.scale, states.channels))


class ShardFile:
    """A shard of samples of these lengths, mapped into memory: data is copied only when it is used.

    DamagedError if it does not hold such samples and states, if it holds ids beyond `vocab_size`, or if a part does not
    match its line's `checksums`; states are compared when they are first read. One of `foreign.NO_TENSORS` if the file
    is no shard."""

    def __init__(
        self, path: Path, lengths: Sequence[int], shape: Shape, vocab_size: int, checksums: str | None = None
    ) -> None:
        tensors = load_file(path)  # maps it
        self.tokens, self.loss_mask, self.top1 = tensors["tokens"], tensors["loss_mask"], tensors["top1"]
        total = sum(lengths)
        for tensor, dtype in ((self.tokens, torch.int32), (self.loss_mask, torch.bool), (self.top1, torch.int32)):
            if (*tensor.shape, tensor.dtype) != (total, dtype):
                raise DamagedError(f"holds {list(tensor.shape)} {tensor.dtype}, not [{total}] {dtype}")
        whole, *of_samples = re.findall(r".{16}", checksums) if checksums else [None]
        if whole and checksum([self.tokens, self.loss_mask, self.top1]) != whole:
            raise DamagedError("has changed since it was written (a checksum differs)")
        self._unread = dict(enumerate(of_samples))  # sample → checksum that its states must have
        # Where each of S samples begins, and where the last ends: [S + 1] each.
        supervised = [supervised_positions(mask) for mask in self.loss_mask.split(list(lengths))]
        self._edges, self._aux_edges, self._last_edges = _find_rows(lengths, supervised)
        self.aux = _states(tensors, "aux", shape.aux_codec, (shape.aux_layers, shape.hidden_size), self._aux_edges)
        self.last = _states(tensors, "last", shape.last_codec, (shape.hidden_size,), self._last_edges)
        # An id outside the vocabulary, used as an index, would fail far from here, or silently wrap.
        for name, ids, least in (("tokens", self.tokens, 0), ("top1", self.top1, -1)):
            if len(ids) and (ids.min() < least or ids.max() >= vocab_size):
                raise DamagedError(f"holds {name} outside the {vocab_size} tokens of its target's vocabulary")
        for top1, where in zip(self.top1.split(list(lengths)), supervised, strict=True):
            if (top1[where] < 0).any():
                raise DamagedError("lacks the target's arg-max (top1) before some of the assistant's tokens")

    def not_finite(self) -> list[int]:
        """Return the samples, counted from the shard's first, that have a NaN or infinite state."""
        documents = enumerate(map(self.read, range(len(self._edges) - 1)))
        return [i for i, one in documents if not (one.aux.finite and one.last.finite)]

    def read(self, index: int, states: bool = True) -> Document:
        """Return sample `index` of the shard, with empty states unless `states`. DamagedError if they were altered."""

        def cut(edges: list[int]) -> slice:
            return slice(edges[index], edges[index + 1])

        tokens = cut(self._edges)
        aux = self.aux.of_document(index, cut(self._aux_edges)) if states else NONE
        last = self.last.of_document(index, cut(self._last_edges)) if states else NONE
        document = Document(self.tokens[tokens].long(), self.loss_mask[tokens], self.top1[tokens].long(), aux, last)
        if states and (expected := self._unread.get(index)) is not None:
            if _of_states(document) != expected:
                raise DamagedError("has changed since it was written (a sample's checksum differs)")
            self._unread.pop(index, None)  # another thread may have popped it meanwhile
        return document


def _find_rows(lengths: Sequence[int], supervised: Sequence[Tensor]) -> tuple[list[int], list[int], list[int]]:
    """Return where each sample's tokens, auxiliary states and last states begin, and where the last sample's end."""
    counts = (lengths, map(attended_positions, supervised), map(len, supervised))
    edges, aux_edges, last_edges = ([0, *accumulate(count)] for count in counts)
    return edges, aux_edges, last_edges


def _states(tensors: Mapping[str, Tensor], name: str, codec: str, row: tuple[int, ...], edges: list[int]) -> Encoded:
    """Return a shard's states, with a row of shape `row` for each position.

    DamagedError if their shape or type is not the store's: they would fail far from here."""
    how, samples, (*outer, width) = CODECS[codec], len(edges) - 1, row
    blocks = -(-width // how.block) if how.block else 0
    expected = {
        "values": ((edges[-1], *outer, -(-width // how.packed)), how.dtype),
        "scale": ((edges[-1], *outer, blocks), torch.bfloat16),
        "channels": ((samples, *outer, width if how.channels else 0), torch.bfloat16),
    }
    held = {part: tensors[f"{name}.{part}"] for part in expected if f"{name}.{part}" in tensors}
    if not how.channels:
        held["channels"] = torch.empty(expected["channels"][0], dtype=torch.bfloat16)
    if {part: (tuple(tensor.shape), tensor.dtype) for part, tensor in held.items()} != expected:
        raise DamagedError("holds other states than its store and its loss mask require")
    document = torch.arange(samples).repeat_interleave(torch.tensor(edges).diff())
    return Encoded(codec, width, **held, document=document)


def open_shard(
    storage: Storage, plan: Plan, shard: PlannedShard, line: Line, states: Mapping[str, Any], whole: bool = True
) -> ShardFile:
    """Open a shard's file if it matches the plan, its line and the store's states; see `open_checked`.

    With `whole`, compare the file with its checksum now; otherwise compare each part when it is first read."""
    lengths, shape = plan.lengths[shard.split][shard.first : shard.end], shape_of(states)
    checksums = None if whole else line.checksums
    return open_checked(
        storage,
        line,
        lambda path: ShardFile(path, lengths, shape, states["vocab_size"], checksums),
        f" ({shard.samples()})",
        verified=not whole,
    )
