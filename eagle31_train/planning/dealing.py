"""How evenly a step's work is dealt to devices: all wait for the one that has most."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from eagle31_train.common import order
from eagle31_train.config import TrainConfig
from eagle31_train.planning.work import Work

DRAWN = 100_000  # conversations, which take half a second; more if two steps have more
DEALT = 16  # steps
FULL = 0.9  # least share of a step's tokens for it to count: the last one of an epoch may be nearly empty


@dataclass(frozen=True)
class Dealt:
    busy: float  # share of the devices' time in which they have something to do
    largest: float  # the largest micro-batch over one of average size, by its work or by its tokens


def deal(each: Sequence[Work], flops: Sequence[float], conversations: float, t: TrainConfig, replicas: int) -> Dealt:
    """Draw conversations from `each`, pack them into steps and share these out, as training does.

    Args:
        each: conversations that stand for all.
        flops: FLOPs of training on each of them.
        conversations: how many there are in all.
        replicas: ranks among which a step is shared; no conversation is divided.
    """
    if not any(flops):  # too short to be trained
        return Dealt(1.0, 1.0)
    batch_tokens = t.batch_tokens
    assert batch_tokens is not None, "`reckon` fills it in"
    step = batch_tokens * len(each) / sum(one.tokens for one in each)  # conversations per step
    count = min(conversations, order.PACKED * step, max(DRAWN, 2 * step))
    drawn = np.random.default_rng(0).integers(len(each), size=max(1, round(count))).tolist()
    known = [(round(one.tokens), round(one.targets), of) for one, of in zip(each, flops, strict=True)]
    tokens, supervised, work = zip(*(known[i] for i in drawn), strict=True)
    steps = order.global_batches(tokens, max(batch_tokens, max(tokens)), 0, 0)
    steps = [one for one in steps if sum(tokens[i] for i in one) > FULL * batch_tokens] or steps[:1]

    parts = replicas * t.gradient_accumulation_steps
    average_tokens = batch_tokens / parts  # of a micro-batch
    average_work = average_tokens * sum(flops) / sum(one.tokens for one in each)
    mean, slowest, largest = 0.0, 0.0, 1.0
    for batch in steps[:: math.ceil(len(steps) / DEALT)]:
        of_step = sum(supervised[i] for i in batch)
        share = 1.0 if t.slots_per_batch is None else min(1.0, t.slots_per_batch / max(1, of_step))
        slots = [round(share * supervised[i]) for i in batch]
        costs = order.costs([tokens[i] for i in batch], slots, t.ttt_length)
        micro_batches = order.share(batch, costs, parts)
        loads = np.array([sum(work[i] for i in one) for one in micro_batches])
        mean += loads.sum() / replicas
        slowest += loads.reshape(-1, replicas).sum(0).max()
        longest = max(sum(tokens[i] for i in one) for one in micro_batches)
        largest = max(largest, loads.max() / average_work, longest / average_tokens)
    return Dealt(float(mean / slowest), float(largest))
