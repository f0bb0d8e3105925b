"""Long curves in as many points as a picture shows, without losing what sticks out."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
PICTURE, LINE = 400, 64  # buckets of a band, about a pixel each, and of a mean that is to calm its curve


@dataclass(frozen=True)
class Band:
    """A curve in B buckets of equal width: where each lies, its lowest, mean and highest value, each [B]."""

    steps: Floats
    low: Floats
    mean: Floats
    high: Floats

    def __len__(self) -> int:
        return len(self.steps)


def thin(steps: Floats, values: Floats, weights: Floats | None = None, buckets: int = LINE) -> Band:
    """A curve's buckets; empty ones and values that are not finite are left out.

    Args:
        steps, values: [N]; steps ascending.
        weights: [N], of the mean; default: all alike. A rate's mean over time wants the seconds.
        buckets: most of them.
    """
    weights = np.ones_like(values) if weights is None else weights
    good = np.isfinite(values) & np.isfinite(weights)
    steps, values, weights = steps[good], values[good], weights[good]
    if not len(steps):
        return Band(steps, values, values, values)
    width = max((steps[-1] - steps[0]) / buckets, np.finfo(float).tiny)
    number = np.minimum((steps - steps[0]) // width, buckets - 1)
    first = np.flatnonzero(np.diff(number, prepend=-1.0))
    count = np.diff(first, append=len(steps))
    total = np.add.reduceat(weights, first)
    return Band(
        np.add.reduceat(steps, first) / count,
        np.minimum.reduceat(values, first),
        np.add.reduceat(values * weights, first) / np.where(total > 0, total, 1.0),
        np.maximum.reduceat(values, first),
    )


def spread(wanted: list[float], apart: float, low: float = 0.0, high: float = 1.0) -> list[float]:
    """Places for labels, as near to the wanted ones as they can be at least `apart`, in the same order.

    Of labels for one place the first is the highest. Labels that would overlap form a block around the
    mean of their places (isotonic regression). Where there is no room, they come closer.
    """
    apart = min(apart, (high - low) / max(len(wanted) - 1, 1))
    order = sorted(range(len(wanted)), key=lambda i: (wanted[i], -i))
    blocks: list[tuple[float, int]] = []  # mean of `wanted - rank * apart`, and of how many
    for rank, index in enumerate(order):
        mean, size = wanted[index] - rank * apart, 1
        while blocks and blocks[-1][0] >= mean:
            other, others = blocks.pop()
            mean, size = (mean * size + other * others) / (size + others), size + others
        blocks.append((mean, size))
    places = [0.0] * len(wanted)
    room = max(high - (len(wanted) - 1) * apart, low)
    bases = [min(max(mean, low), room) for mean, size in blocks for _ in range(size)]
    for rank, index in enumerate(order):
        places[index] = bases[rank] + rank * apart
    return places
