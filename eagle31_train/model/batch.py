"""From documents to a packed batch: which slots are trained, and what each of their steps predicts.

All index arithmetic of the recurrence is here, and only here:

    slot t, step k:  input token x[t+1+k], RoPE position t+k,
                     predicts x[t+2+k], supervised by the target's distribution at t+1+k.

A pair (t, k) is *eligible* if x[t+2+k] is in the same document and was written by the assistant. An eligible pair is
*trained* if the draft vocabulary holds the target's arg-max at t+1+k; with `train.oov=keep` every eligible pair is. A
slot exists if any of its pairs is trained.

A step may train a random subset of its slots (`choose_slots`). The subset is unbiased: its sums times `scale` are, on
average, those of all slots.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eagle31_train.common.transfers import each_tensor
from eagle31_train.model.context_parallel import Places, make_places, owners
from eagle31_train.model.packing import Layout, make_layout
from eagle31_train.store.codec import Encoded, concatenate
from eagle31_train.store.document import Document

CHUNK = 32  # supervised positions per chunk: the loss multiplies whole chunks, of up to K * 32 rows each
STRETCH = 32  # length of the runs in a subset of the slots: attention of neighbouring slots is cheap


@dataclass(frozen=True)
class Subset:
    """The slots that one step trains, drawn with the same probability for every slot."""

    taken: list[Tensor]  # for each document, [T] bool: positions that are counted, and trained if they are slots
    scale: float  # 1 / probability
    slots: list[int]  # number of trained slots in each document

    def of(self, documents: Sequence[int]) -> "Subset":
        return Subset([self.taken[i] for i in documents], self.scale, [self.slots[i] for i in documents])


class Chunk(NamedTuple):
    """A run of supervised positions, and the pairs that they supervise."""

    positions: slice  # into the J supervised positions
    pairs: slice  # into the P pairs


@dataclass(frozen=True)
class Batch:
    """Packed documents and the pairs to train. N tokens, S slots, J supervised positions, P pairs.

    The positions of a document up to its last slot are its *context*, which slots attend to: C positions in all
    documents. Nothing is computed for the others. Pairs are sorted by the position that supervises them, so that a
    chunk of positions is a contiguous run of pairs.

    With context parallelism a rank has a part of the positions, slots and pairs, and the tokens that these read. Its
    layouts place the slots and positions among the C positions of all ranks.
    """

    aux: Encoded  # [C, A, H]
    ids: Tensor  # [N] int64, token ids
    following: Tensor  # [C] int64 into [N]: the index of x[t+1], the step-0 input, for every position
    read: Tensor  # [R] int64 into [N], ascending: the tokens that any slot reads
    reads: Tensor  # [K, S] int64 into [R]: the token that slot t reads at step k (x[t+1+k])
    positions: Tensor  # [C] int64: position within the document
    slot_rows: Tensor  # [S] int64 into [C]: the position of each slot
    layout: Layout  # of the slots among the C positions
    everywhere: Layout  # of all C positions: at step 0 the layers below the last compute all of them
    teacher: Encoded  # [J, H] last hidden state of the target at the supervised positions
    top1: Tensor  # [J] int64, full vocabulary
    pair_row: Tensor  # [P] int64 into the flattened [K, S]
    pair_teacher: Tensor  # [P] int64 into [J], ascending
    pair_step: Tensor  # [P] int64
    chunks: list[Chunk]  # CHUNK supervised positions each
    trained: Tensor  # [K] int64: trained pairs per step, P together
    eligible: Tensor  # [K] int64: eligible pairs per step
    eligible_prefix: Tensor  # [K] int64: slots eligible at every step 0..k
    population: Tensor  # [K] int64: trained pairs of all slots, in the subset or not: this batch's part of N_k
    scale: float  # multiplies the weight of every pair: 1 without a subset
    shared: Places | None = None  # context parallelism: the C positions of all ranks

    @property
    def ttt_length(self) -> int:
        """K."""
        return len(self.reads)

    def to(self, device: torch.device | str) -> "Batch":
        """Return the batch on another device. The host does not wait for the copy of a `pinned` batch."""
        return each_tensor(self, lambda tensor: tensor.to(device, non_blocking=True))

    def pinned(self) -> "Batch":
        """Return the batch in page-locked memory, from which a CUDA device copies asynchronously."""
        return each_tensor(self, Tensor.pin_memory)


def build_batch(
    documents: Sequence[Document],
    ttt_length: int,
    keep_mask: Tensor,
    subset: Subset | None = None,
    part: tuple[int, int] = (0, 1),
) -> Batch:
    """Pack documents, and find every slot and pair.

    Args:
        documents: at least one; none sees another's tokens.
        ttt_length: K.
        keep_mask: [V] bool, which arg-maxes of the target are trained (usually the draft vocabulary's `t2d`).
        subset: the slots to train and count; None for all.
        part: this rank's index among the ranks that share the documents, and their number (`context_parallel.py`).
    """
    pairs = zip(*(_pairs(document, ttt_length, keep_mask) for document in documents), strict=True)
    eligible, trained = (torch.cat(some) for some in pairs)  # [N, K] bool each
    edges = torch.tensor([0, *map(len, documents)]).cumsum(0)
    owner = torch.arange(len(documents)).repeat_interleave(edges.diff())  # the document of each token
    within = torch.arange(len(owner)) - edges[owner]  # its position there
    population = trained  # all slots, in the subset or not
    if subset is not None:
        eligible, trained = (some & torch.cat(subset.taken)[:, None] for some in (eligible, trained))

    slot = trained.any(1).nonzero()[:, 0]
    sizes = edges.new_zeros(len(documents)).scatter_reduce_(0, owner[slot], within[slot] + 1, "amax")
    whole = context = (within < sizes[owner]).nonzero()[:, 0]  # each document up to its last slot
    spans = [span for span in pairwise([0, *sizes.cumsum(0).tolist()]) if span[0] < span[1]]
    shared, states = None, [slice(size) for size in sizes.tolist()]

    index, count = part
    if count > 1:
        rank = torch.cat([owners(some, count) for some in trained.any(1).split(edges.diff().tolist())])
        shared = make_places(rank[context], count)
        mine = rank == index
        eligible, trained, population = (some & mine[:, None] for some in (eligible, trained, population))
        slot, context = slot[mine[slot]], context[mine[context]]
        states = within[context].split(owner[context].bincount(minlength=len(documents)).tolist())

    # Steps past the end of a document are not pairs. They read its last token, so that indices stay valid.
    wanted = torch.minimum(slot + 1 + torch.arange(ttt_length)[:, None], edges[owner[slot] + 1] - 1)
    (read, reads), following = wanted.unique(return_inverse=True), context + 1
    ids = torch.cat([document.tokens for document in documents])
    if shared is not None:  # drop tokens that only other ranks read
        used = torch.cat([following, read]).unique()
        ids, following, read = ids[used], torch.searchsorted(used, following), torch.searchsorted(used, read)

    rows, steps = trained[slot].nonzero(as_tuple=True)
    supervised, order = (slot[rows] + 1 + steps).sort(stable=True)
    teachers, pair_teacher = torch.unique_consecutive(supervised, return_inverse=True)
    held = torch.cat([d.supervised + start for d, start in zip(documents, edges.tolist(), strict=False)])
    return Batch(
        aux=concatenate([d.aux[some] for d, some in zip(documents, states, strict=True)]),
        ids=ids,
        following=following,
        read=read,
        reads=reads,
        positions=within[context],
        slot_rows=torch.searchsorted(context, slot),
        layout=make_layout(spans, torch.searchsorted(whole, slot)),
        everywhere=make_layout(spans, torch.searchsorted(whole, context)),
        teacher=concatenate([d.last for d in documents])[torch.searchsorted(held, teachers)],
        top1=torch.cat([d.top1 for d in documents])[teachers],
        pair_row=(steps * len(slot) + rows)[order],
        pair_teacher=pair_teacher,
        pair_step=steps[order],
        chunks=_chunks(pair_teacher, len(teachers)),
        trained=trained.sum(0),
        eligible=eligible.sum(0),
        eligible_prefix=eligible.cumprod(1).sum(0),
        population=population.sum(0),
        scale=1.0 if subset is None else subset.scale,
        shared=shared,
    )


def choose_slots(
    documents: Sequence[Document], ttt_length: int, keep_mask: Tensor, slots: int, seed: int, step: int
) -> Subset | None:
    """Draw exactly `slots` of a step's slots at random; return None if the step has no more than that.

    The choice depends on seed, step and documents, not on how ranks share the documents. States are not read.

    A position that is eligible but not a slot (all its targets are out of the vocabulary, so all are misses) counts if
    the slot before it is taken; before the first slot, if the last slot is taken. So every position has the same
    probability, and ratios such as the accuracy are unbiased.
    """
    exists = torch.cat([_pairs(document, ttt_length, keep_mask)[1].any(1) for document in documents])
    total = int(exists.sum())
    if total <= slots:
        return None
    # The third number keeps this random stream apart from the data order's.
    random = np.random.Generator(np.random.PCG64([seed, step, 1]))
    taken = torch.from_numpy(draw_stretches(total, slots, random))[exists.cumsum(0) - 1]
    lengths = [len(document) for document in documents]
    trained = [int(some.sum()) for some in (taken & exists).split(lengths)]
    return Subset(list(taken.split(lengths)), total / slots, trained)


def draw_stretches(total: int, count: int, random: np.random.Generator) -> NDArray[np.bool_]:
    """Mark exactly `count` of `total` slots, in runs of STRETCH: [total] bool.

    The other slots are spread at random over the gaps between the runs, and the whole is rotated at random. The
    rotation alone gives every slot the probability count / total, whatever the gaps.
    """
    stretches = -(-count // STRETCH)
    sizes = [STRETCH] * (stretches - 1) + [count - STRETCH * (stretches - 1)]
    gaps = random.multinomial(total - count, [1 / stretches] * stretches)
    ring = np.repeat([True, False] * stretches, np.stack([sizes, gaps], axis=1).ravel())
    return np.roll(ring, random.integers(total))


def has_pairs(document: Document, keep_mask: Tensor) -> bool:
    """Return whether a document has anything to train, at any depth. States are not read."""
    return bool(_pairs(document, 1, keep_mask)[1].any())  # if (t, k) is a pair, so is (t + k, 0)


def _chunks(pair_teacher: Tensor, supervised: int) -> list[Chunk]:
    """Cut the supervised positions into runs of CHUNK, on the host, so that a step never waits for a device."""
    edges = [*range(0, supervised, CHUNK), supervised]
    pairs = torch.searchsorted(pair_teacher, torch.tensor(edges)).tolist()
    return [Chunk(slice(*p), slice(*q)) for p, q in zip(pairwise(edges), pairwise(pairs), strict=True)]


def _pairs(document: Document, ttt_length: int, keep_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Eligible pairs and trained pairs of one document, [T, K] bool each."""
    T = len(document)
    predicted = torch.arange(T)[:, None] + 2 + torch.arange(ttt_length)  # x[t+2+k]
    inside = predicted < T
    predicted = predicted.clamp(max=T - 1)
    eligible = inside & document.loss_mask[predicted]
    return eligible, eligible & keep_mask[document.top1[predicted - 1]]  # arg-max at t+1+k
