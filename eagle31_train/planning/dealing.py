"""How evenly a step's work is dealt to devices: all wait for the one that has most."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from eagle31_train import order
from eagle31_train.config import TrainConfig
from eagle31_train.planning.work import Work

DRAWN = 100_000  # conversations, unless two steps have more: half a second
DEALT = 16  # steps
FULL = 0.9  # of a step's tokens: the last one of an epoch may be nearly empty


@dataclass(frozen=True)
class Dealt:
    busy: float  # share of the devices' time in which they have something to do
    largest: float  # the largest micro-batch over one of average size, by its work or by its tokens


def deal(each: Sequence[Work], flops: Sequence[float], conversations: float, t: TrainConfig, replicas: int) -> Dealt:
    """Draw conversations from `each`, whose training takes `flops`, pack them into steps and deal these, as training
    does it with so many conversations; no conversation is divided."""
    if not any(flops):  # too short to be trained
        return Dealt(1.0, 1.0)
    tokens, supervised = [round(one.tokens) for one in each], [round(one.targets) for one in each]
    step = t.batch_tokens * len(each) / sum(tokens)  # conversations of one
    count = min(conversations, order.PACKED * step, max(DRAWN, 2 * step))
    drawn = np.random.default_rng(0).integers(len(each), size=max(1, round(count))).tolist()
    lengths = [tokens[i] for i in drawn]
    steps = order.global_batches(lengths, max(t.batch_tokens, *tokens), 0, 0)
    steps = [one for one in steps if sum(lengths[i] for i in one) > FULL * t.batch_tokens] or steps[:1]
    full = t.batch_tokens / (replicas * t.gradient_accumulation_steps)  # tokens of an average micro-batch
    average = full * sum(flops) / sum(tokens)
    means, most, largest = 0.0, 0.0, 1.0
    for batch in steps[:: math.ceil(len(steps) / DEALT)]:
        kinds, lengths_of = [drawn[i] for i in batch], [lengths[i] for i in batch]
        costs = order.costs([tokens[i] for i in kinds], [supervised[i] for i in kinds], t.ttt_length, t.slots_per_batch)
        parts = order.share(range(len(batch)), costs, replicas * t.gradient_accumulation_steps)
        loads = np.array([sum(flops[kinds[place]] for place in part) for part in parts])
        means, most = means + loads.sum() / replicas, most + loads.reshape(-1, replicas).sum(0).max()
        longest = max(sum(lengths_of[place] for place in part) for part in parts)
        largest = max(largest, loads.max() / average, longest / full)
    return Dealt(float(means / most), float(largest))
