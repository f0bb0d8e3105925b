"""Context parallelism: several ranks share documents. Which rank has which positions, and how they exchange keys.

A slot's own keys stay on the slot's rank. From other ranks it needs the step-0 keys and values of its document. These
are exchanged once per layer, before the first step, and serve all K steps, in one of two ways:

    few key heads (GQA)             `GatherRows`: every rank gets all keys. In the backward pass all ranks' gradients of
                                    a key are summed on the key's rank.
    as many as query heads (MLA)    `DealHeads`: every rank gets the keys of a share of the heads, and at every step
                                    attends with these heads for the slots of all ranks. No rank holds all keys.

Every position, slot and pair belongs to one rank, so losses, counts and gradients of weights add up over ranks as they
do without sharing.

Letters: N ranks that share documents; C positions of their context, of all ranks; C_r of them on this rank.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from eagle31_train.config import DrafterShape


class Mesh:
    """The place of a rank. `context` neighbouring ranks share their documents and form one replica. part: the index of
    this rank's part of the documents, and the number of parts; replica: the index of its replica, out of `replicas`."""

    def __init__(self, ranks: int = 1, rank: int = 0, context: int = 1) -> None:
        self.ranks, self.rank, self.context = ranks, rank, context
        self.part = rank % context, context
        self.replica, self.replicas = rank // context, ranks // context


def owners(slots: Tensor, ranks: int) -> Tensor:
    """Return the rank that has each position of a document, [T] int64. slots: [T] bool, which positions are slots.

    Slots, which cost most, are cut into 2N pieces; rank r has the pieces r and 2N - 1 - r. So all ranks have equally
    many slots, which see about equally many keys. The other positions are divided in the same way.
    """
    owner = torch.empty(len(slots), dtype=torch.int64)
    for some in (slots, ~slots):
        count = int(some.sum())
        piece = torch.arange(count) * 2 * ranks // max(count, 1)
        owner[some] = torch.minimum(piece, 2 * ranks - 1 - piece)
    return owner


@dataclass(frozen=True)
class Places:
    """Where shared rows (positions of a context, or slots) are in an exchanged tensor of `most` rows per rank."""

    rows: Tensor  # [C] int64 into [N * most]
    most: int


def make_places(owner: Tensor, ranks: int) -> Places:
    """Return the places of rows, given the rank that has each, [C]. The rows of a rank keep their order."""
    counts = torch.bincount(owner, minlength=ranks)
    most = max(1, int(counts.max()))  # some back ends cannot exchange empty tensors
    order = owner.argsort(stable=True)
    rows = torch.empty_like(owner)
    rows[order] = torch.arange(len(owner)) + (torch.arange(ranks) * most - counts.cumsum(0) + counts)[owner[order]]
    return Places(rows, most)


def deals_heads(shape: DrafterShape, ranks: int) -> bool:
    """Return whether ranks that share documents deal out heads: if keys have as many as queries, and N divides these.
    With fewer, all keys are small compared with the queries and outputs that would have to be sent at every step."""
    return shape.num_key_value_heads == shape.num_attention_heads and shape.num_attention_heads % ranks == 0


@dataclass(frozen=True)
class Exchange:
    """A collective exchange of rows (keys, values, queries, …) between the ranks of a group. `back` is the transpose of
    `forth`, and so computes its gradient."""

    places: Places
    group: dist.ProcessGroup

    def forth(self, x: Tensor) -> Tensor:
        """Rows of this rank, [C_r, g, …] → those of all ranks, [C, …]."""
        raise NotImplementedError

    def back(self, x: Tensor, count: int) -> Tensor:
        """The other way: [C, …] → [C_r, g, …], C_r being `count`."""
        raise NotImplementedError

    def keys_values(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Apply `forth` to keys [C_r, g, d] and values [C_r, g, dv], with a gradient."""
        return _Exchanged.apply(keys, values, self)


class GatherRows(Exchange):
    """Every rank gets all rows, [C, g, …]. On the way back, all ranks' values of a row are summed."""

    def forth(self, x: Tensor) -> Tensor:
        mine = torch.cat([x, x.new_zeros(self.places.most - len(x), *x.shape[1:])])
        everyone = mine.new_empty(self.group.size() * len(mine), *mine.shape[1:])
        dist.all_gather_into_tensor(everyone, mine, self.group)
        return everyone.index_select(0, self.places.rows)

    def back(self, x: Tensor, count: int) -> Tensor:
        mine = x.new_empty(self.places.most, *x.shape[1:])
        everyone = x.new_zeros(self.group.size() * len(mine), *x.shape[1:]).index_copy_(0, self.places.rows, x)
        dist.reduce_scatter_tensor(mine, everyone, group=self.group)
        return mine[:count]


class DealHeads(Exchange):
    """Rank r gets the r-th share of the heads of all rows, [C, g / N, …]."""

    def forth(self, x: Tensor) -> Tensor:
        by_rank = x.unflatten(1, (self.group.size(), -1)).transpose(0, 1)
        sent = x.new_zeros(len(by_rank), self.places.most, *by_rank.shape[2:])
        sent[:, : len(x)] = by_rank
        return self._swapped(sent).flatten(0, 1).index_select(0, self.places.rows)

    def back(self, x: Tensor, count: int) -> Tensor:
        sent = x.new_zeros(self.group.size() * self.places.most, *x.shape[1:]).index_copy_(0, self.places.rows, x)
        by_rank = self._swapped(sent).unflatten(0, (-1, self.places.most))[:, :count]
        return by_rank.transpose(0, 1).flatten(1, 2)

    def _swapped(self, sent: Tensor) -> Tensor:
        """Send the r-th part to rank r, and return what came from rank r as the r-th part."""
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        return received


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, keys: Tensor, values: Tensor, exchange: Exchange) -> tuple[Tensor, Tensor]:
        ctx.exchange, ctx.count = exchange, len(keys)
        return exchange.forth(keys), exchange.forth(values)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return *(ctx.exchange.back(grad, ctx.count) for grad in grads), None
