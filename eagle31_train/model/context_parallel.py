"""Context parallelism: several ranks share documents. Which rank has which positions, and how they exchange keys.

A slot's own keys stay on the slot's rank. From other ranks it needs the step-0 keys and values of its document. Every
rank gets those of all ranks, once per layer, before the first step; they serve all K steps. In the backward pass all
ranks' gradients of a key are summed on the key's rank.

Every position, slot and pair belongs to one rank, so losses, counts and gradients of weights add up over ranks as they
do without sharing.

Letters: N ranks that share documents; C positions of their context, of all ranks; C_r of them on this rank.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist


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
    """Where the positions of a context are in a tensor gathered from all ranks, `most` rows from each."""

    rows: Tensor  # [C] int64 into [N * most]
    most: int


def make_places(owner: Tensor, ranks: int) -> Places:
    """Return the places of positions, given the rank that has each, [C]. Those of a rank keep their order."""
    counts = torch.bincount(owner, minlength=ranks)
    most = max(1, int(counts.max()))  # some back ends cannot exchange empty tensors
    order = owner.argsort(stable=True)
    rows = torch.empty_like(owner)
    rows[order] = torch.arange(len(owner)) + (torch.arange(ranks) * most - counts.cumsum(0) + counts)[owner[order]]
    return Places(rows, most)


def gather_keys(keys: Tensor, values: Tensor, places: Places, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Keys [C_r, g, d] and values [C_r, g, dv] of this rank → those of all ranks, [C, g, d] and [C, g, dv]."""
    return _Gathered.apply(keys, values, places, group)


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, keys: Tensor, values: Tensor, places: Places, group: dist.ProcessGroup
    ) -> tuple[Tensor, Tensor]:
        ctx.places, ctx.group, ctx.count = places, group, len(keys)
        return _gather(keys, places, group), _gather(values, places, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        keys, values = (_add_up(grad, ctx.places, ctx.group)[: ctx.count] for grad in grads)
        return keys, values, None, None


def _gather(x: Tensor, places: Places, group: dist.ProcessGroup) -> Tensor:
    """Rows of this rank, [C_r, …] → those of all ranks, [C, …]."""
    mine = torch.cat([x, x.new_zeros(places.most - len(x), *x.shape[1:])])
    everyone = mine.new_empty(group.size() * len(mine), *mine.shape[1:])
    dist.all_gather_into_tensor(everyone, mine, group)
    return everyone.index_select(0, places.rows)


def _add_up(x: Tensor, places: Places, group: dist.ProcessGroup) -> Tensor:
    """Each rank's values of all rows, [C, …] → the sums over ranks of this rank's rows, [most, …]."""
    mine = x.new_empty(places.most, *x.shape[1:])
    everyone = x.new_zeros(group.size() * len(mine), *x.shape[1:]).index_copy_(0, places.rows, x)
    dist.reduce_scatter_tensor(mine, everyone, group=group)
    return mine
