"""Documents that several ranks share: who has which positions, and how the keys of all reach everybody.

A slot's own keys stay on the rank that has the slot. What it needs of other ranks are the step-0 keys and values of its
document. These are gathered once per layer, before the first step, and serve all K steps; on the way back every rank's
gradient of a key is added up on the rank that has the key. Every position, slot and pair is of one rank, so that
losses, counts and gradients of weights add up over ranks as they do without.

Letters: N ranks that share documents; C positions of their context, of all ranks; C_r of them on this rank.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist


@dataclass(frozen=True)
class Mesh:
    """Where a rank is: `context` neighbouring ranks share their documents, and are together one replica."""

    ranks: int = 1
    rank: int = 0
    context: int = 1

    @property
    def part(self) -> tuple[int, int]:
        """This rank's part of its documents, and of how many."""
        return self.rank % self.context, self.context

    @property
    def replicas(self) -> int:
        """How many groups of ranks have documents of their own."""
        return self.ranks // self.context

    @property
    def replica(self) -> int:
        """Which of them this rank is in."""
        return self.rank // self.context


def owners(slots: Tensor, ranks: int) -> Tensor:
    """[T] int64: the rank that has each position of a document. slots: [T] bool.

    Slots, which cost most, are cut into 2N pieces, and rank r has the pieces r and 2N - 1 - r: as many slots as any
    other rank's, which see about as many keys. The other positions likewise.
    """
    owner = torch.empty(len(slots), dtype=torch.int64)
    for some in (slots, ~slots):
        count = int(some.sum())
        piece = torch.arange(count) * 2 * ranks // max(count, 1)
        owner[some] = torch.minimum(piece, 2 * ranks - 1 - piece)
    return owner


@dataclass(frozen=True)
class Places:
    """Where the keys of a batch's context stand in what ranks gather, `most` rows of each rank."""

    rows: Tensor  # [C] int64 into [N * most]
    most: int


def make_places(owner: Tensor, ranks: int) -> Places:
    """Of the context positions [C] by their owners, which have them in this order."""
    counts = torch.bincount(owner, minlength=ranks)
    most = max(1, int(counts.max()))  # not every back end exchanges nothing
    order = owner.argsort(stable=True)
    rows = torch.empty_like(owner)
    rows[order] = torch.arange(len(owner)) + (torch.arange(ranks) * most - counts.cumsum(0) + counts)[owner[order]]
    return Places(rows, most)


def gather_context(keys: Tensor, values: Tensor, places: Places, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """This rank's keys [C_r, g, d] and values [C_r, g, dv] → those of all ranks, [C, g, d] and [C, g, dv]. Collective,
    and so is the gradient."""
    gathered: tuple[Tensor, Tensor] = _GatherContext.apply(keys, values, places, group)
    return gathered


class _GatherContext(torch.autograd.Function):
    """One exchange each way: what ranks have goes to all, and what all say of it goes back, added up."""

    @staticmethod
    def forward(
        ctx: Any, keys: Tensor, values: Tensor, places: Places, group: dist.ProcessGroup
    ) -> tuple[Tensor, Tensor]:
        ctx.places, ctx.group, ctx.count = places, group, len(keys)
        mine = torch.cat([keys, values], -1)
        mine = torch.cat([mine, mine.new_zeros(places.most - len(mine), *mine.shape[1:])])
        everyone = mine.new_empty(group.size() * places.most, *mine.shape[1:])
        dist.all_gather_into_tensor(everyone, mine, group)
        gathered = everyone.split([keys.shape[-1], values.shape[-1]], -1)
        return gathered[0].index_select(0, places.rows), gathered[1].index_select(0, places.rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        places, widths = ctx.places, [grad.shape[-1] for grad in grads]
        together = torch.cat(grads, -1)
        everyone = together.new_zeros(ctx.group.size() * places.most, *together.shape[1:])
        everyone.index_copy_(0, places.rows, together)
        mine = everyone.new_empty(places.most, *together.shape[1:])
        dist.reduce_scatter_tensor(mine, everyone, group=ctx.group)
        return *mine[: ctx.count].split(widths, -1), None, None
