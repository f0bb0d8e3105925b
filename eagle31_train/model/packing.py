"""Where documents and slots lie in a packed batch, and so which step-0 keys each slot sees.

Slots at consecutive positions of one document form a *run*. Its last slot sees the document up to its own position, the
slot before it one key fewer, and so on. So a run is a causal block of attention, aligned at its end, and needs no mask.
An attention kernel needs to know nothing else.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

MOST_COPIES = 8.0  # copies of a key, on average: see `make_segments`


@dataclass(frozen=True)
class Run:
    """Slots first..end-1 lie at consecutive positions, `begin` onwards, of the document that starts at `document`."""

    first: int
    end: int
    document: int
    begin: int

    @property
    def keys(self) -> slice:
        """The step-0 keys that the last slot of the run sees."""
        return slice(self.document, self.begin + self.end - self.first)


@dataclass(frozen=True)
class Segments:
    """The runs for a flash kernel that takes packed sequences: stretches of queries and of keys, end to end."""

    query_edges: Tensor  # [R + 1] int32, where each run's queries begin, and the end
    key_edges: Tensor  # [R + 1] int32, the same for keys
    queries: int  # in the longest stretch, but at least 2: for 1, torch's kernel uses its decoding algorithm
    keys: int  # in the longest stretch
    key_rows: Tensor | None  # [M] int64, the position whose key is in each row; None: no key is copied
    query_rows: Tensor | None  # [S] int64, the row of each slot's query among `query_total`; None: no idle rows
    query_total: int


@dataclass(frozen=True)
class Layout:
    """How documents and slots lie in a packed batch."""

    documents: list[tuple[int, int]]  # first and end position of each, in order, without gaps
    slots: Tensor  # [S] int64, the packed position t of each slot, ascending
    runs: list[Run]  # the slots as stretches of consecutive positions within one document
    segments: Segments | None  # the runs for a flash kernel; None without slots


def make_layout(documents: list[tuple[int, int]], slots: Tensor) -> Layout:
    """Find the runs of slots [S] (on the CPU, ascending)."""
    starts = torch.tensor([start for start, _ in documents])
    owner = torch.searchsorted(starts, slots, right=True) - 1
    broken = (slots[1:] != slots[:-1] + 1) | (owner[1:] != owner[:-1])
    edges = [0, *(broken.nonzero()[:, 0] + 1).tolist(), len(slots)] if len(slots) else [0]
    runs = [Run(first, end, documents[int(owner[first])][0], int(slots[first])) for first, end in pairwise(edges)]
    return Layout(documents, slots, runs, make_segments(documents, slots, runs) if runs else None)


def make_segments(
    documents: list[tuple[int, int]], slots: Tensor, runs: list[Run], most_copies: float = MOST_COPIES
) -> Segments:
    """Lay out the runs (at least one) for a kernel that takes packed sequences.

    Runs of one document see overlapping keys, so each run gets a copy of the keys it sees, unless every document is one
    run. If the copies would be more than `most_copies` times the batch (slots scattered over long documents), queries
    are spread over whole documents instead, with idle rows between the slots.
    """
    total = documents[-1][1]
    spans = [run.keys for run in runs]
    if sum(span.stop - span.start for span in spans) > most_copies * total:
        edges = torch.tensor([0, *(end for _, end in documents)], dtype=torch.int32)
        longest = int(edges.diff().max())
        return Segments(edges, edges, max(2, longest), longest, None, slots, total)
    copies = torch.cat([torch.arange(span.start, span.stop) for span in spans])
    whole = torch.equal(copies, torch.arange(total))  # every run sees all of its document
    queries = torch.tensor([0, *(run.end for run in runs)], dtype=torch.int32)
    sizes = torch.tensor([span.stop - span.start for span in spans])
    return Segments(
        query_edges=queries,
        key_edges=torch.cat([sizes.new_zeros(1), sizes.cumsum(0)]).int(),
        queries=max(2, int(queries.diff().max())),
        keys=int(sizes.max()),
        key_rows=None if whole else copies,
        query_rows=None,
        query_total=len(slots),
    )
