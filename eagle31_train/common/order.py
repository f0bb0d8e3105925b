"""The order of the data: a pure function of (seed, epoch, lengths, windows), the same for any number of ranks.

A global batch is a list of sample indices. `share` splits it into micro-batches, which affects only speed and memory,
since the loss is normalised over the whole global batch."""

import math
from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from heapq import heapreplace

import numpy as np

from eagle31_train.common.errors import UserError

LISTED = 10**7  # most steps of a run: all are listed in memory before the first, some 2 GB
PACKED = 64  # batches that are packed together
SLOT_COST = 4  # cost of a slot at one depth, in context positions: by FLOPs 4.5 to 9.8, depending on the recipe


def global_batches(
    lengths: Sequence[int], batch_tokens: int, seed: int, epoch: int, windows: Sequence[range] | None = None
) -> list[list[int]]:
    """Return the batches of one epoch. In each window, samples are shuffled and packed, then batches are shuffled.

    Every sample occurs exactly once. No batch has more than `batch_tokens` tokens, nor may any sample
    (`build.tokens_of_a_step` tells the user). Packing makes steps about equally large. Samples are packed PACKED
    batches' worth at a time, so that it stays nearly random which samples share a batch.

    Args:
        windows: ranges of samples to train on one after another: in order in the first epoch, which may follow a
            store that is still being written, and later in random order. None: all samples are one window.
    """
    assert max(lengths, default=0) <= batch_tokens, "a sample is longer than the budget of a batch"
    random = np.random.Generator(np.random.PCG64([seed, epoch]))
    windows = windows or [range(len(lengths))]
    turns = random.permutation(len(windows)).tolist() if epoch and len(windows) > 1 else range(len(windows))
    ordered: list[list[int]] = []
    for window in (windows[turn] for turn in turns):
        batches: list[list[int]] = []
        together: list[int] = []
        tokens = 0
        for place in random.permutation(len(window)).tolist():
            together.append(window[place])
            tokens += lengths[window[place]]
            if tokens >= PACKED * batch_tokens:
                batches += best_fit(together, lengths, batch_tokens)
                together, tokens = [], 0
        batches += best_fit(together, lengths, batch_tokens)
        ordered += [batches[i] for i in random.permutation(len(batches)).tolist()]
    return ordered


def longest_first(samples: Sequence[int], lengths: Sequence[int] | Mapping[int, int]) -> list[int]:
    """Sort samples, longest first, ties by index. (Two sorts by one number are faster than one sort by pairs.)"""
    return sorted(sorted(samples), key=lengths.__getitem__, reverse=True)


def best_fit(samples: Sequence[int], lengths: Sequence[int], batch_tokens: int) -> list[list[int]]:
    """Pack samples by best fit, longest first: each goes into the fullest batch that still has room for it."""
    batches: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens left, batch), ascending
    for index in longest_first(samples, lengths):
        place = bisect_left(room, (lengths[index], -1))
        if place == len(room):
            batches.append([])
            left, batch = batch_tokens, len(batches) - 1
        else:
            left, batch = room.pop(place)
        batches[batch].append(index)
        insort(room, (left - lengths[index], batch))
    return batches


def schedule(
    lengths: Sequence[int],
    batch_tokens: int,
    seed: int,
    epochs: int,
    max_steps: int | None,
    windows: Sequence[range] | None = None,
) -> list[list[int]]:
    """Return every global batch of a run, in order: item i is what optimizer step i+1 trains on. UserError for more
    than LISTED."""
    batches: list[list[int]] = []
    for epoch in range(epochs):
        batches += global_batches(lengths, batch_tokens, seed, epoch, windows)
        if not epoch and (steps := min(len(batches) * epochs, max_steps or math.inf)) > LISTED:
            raise UserError(f"train.epochs={epochs} makes {steps:,} steps: set train.max_steps to at most {LISTED:,}")
        if max_steps is not None and len(batches) >= max_steps:
            return batches[:max_steps]
    return batches


def costs(lengths: Sequence[int], slots: Sequence[int] | None, ttt_length: int) -> list[int]:
    """Return the relative cost of training each sample: mostly that of its slots, since prompts cost little.

    Args:
        lengths: tokens of each sample.
        slots: how many slots of each sample the step trains; for all of them, its supervised positions are an
            estimate. None for stores of earlier versions, which did not count them: then the cost is the tokens.
    """
    if slots is None:
        return list(lengths)
    return [tokens + SLOT_COST * ttt_length * count for tokens, count in zip(lengths, slots, strict=True)]


def share(batch: Sequence[int], costs: Sequence[int], parts: int) -> list[list[int]]:
    """Split a global batch into `parts` of about equal cost, given the cost of each sample; a part may be empty."""
    shares: list[list[int]] = [[] for _ in range(parts)]
    cost = dict(zip(batch, costs, strict=True))
    loads = [(0, part) for part in range(parts)]  # a heap: the lightest part, the first of equals, is at its top
    for index in longest_first(batch, cost):
        load, lightest = loads[0]
        shares[lightest].append(index)
        heapreplace(loads, (load + cost[index], lightest))
    return shares
