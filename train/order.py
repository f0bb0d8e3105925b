"""The order of the data: a pure function of (seed, epoch, lengths), the same for any number of ranks.

A global batch is a list of sample indices; `share` splits it into the micro-batches of ranks and
accumulation steps. Splitting otherwise changes nothing but speed, since the loss is normalised over
the whole global batch.
"""

from collections.abc import Sequence

import numpy as np


def global_batches(lengths: Sequence[int], batch_tokens: int, seed: int, epoch: int) -> list[list[int]]:
    """One epoch: a random permutation, cut into batches of at most `batch_tokens` tokens.

    A sample longer than that is a batch of its own. Every sample occurs exactly once.
    """
    order = np.random.Generator(np.random.PCG64([seed, epoch])).permutation(len(lengths))
    batches: list[list[int]] = []
    held = 0
    for index in order.tolist():
        if batches and held + lengths[index] <= batch_tokens:
            batches[-1].append(index)
            held += lengths[index]
        else:
            batches.append([index])
            held = lengths[index]
    return batches


def schedule(
    lengths: Sequence[int], batch_tokens: int, seed: int, epochs: int, max_steps: int | None
) -> list[list[int]]:
    """Every global batch of a run, in order: item i is what optimizer step i+1 trains on."""
    batches: list[list[int]] = []
    for epoch in range(epochs):
        batches += global_batches(lengths, batch_tokens, seed, epoch)
        if max_steps is not None and len(batches) >= max_steps:
            return batches[:max_steps]
    return batches


def share(batch: Sequence[int], lengths: Sequence[int], parts: int) -> list[list[int]]:
    """Split a global batch into `parts` of about equal token counts; a part may be empty."""
    shares: list[list[int]] = [[] for _ in range(parts)]
    loads = [0] * parts
    for index in sorted(batch, key=lambda i: (-lengths[i], i)):
        lightest = loads.index(min(loads))
        shares[lightest].append(index)
        loads[lightest] += lengths[index]
    return shares
