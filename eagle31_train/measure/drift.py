"""Drift over many prompts: every slot counts once, so a prompt weighs as many slots as its output has."""

from collections.abc import Sequence
from dataclasses import fields

import numpy as np
from numpy.typing import NDArray

from eagle31_train.measure.results import Drift, Measured

MEASURES = tuple(field.name for field in fields(Drift))


def drift_sums(measured: Sequence[Measured]) -> tuple[dict[str, NDArray[np.float64]], NDArray[np.int64]]:
    """Every measure summed over the slots of each prompt, [prompts, depth], and the slots [prompts].

    Ratios of these sums, of all prompts or of prompts drawn again, are means over slots: what an interval is made of.
    Prompts without slots, whose drift is None, are left out.

    Raises:
        ValueError: drifts of different depths.
    """
    told = [(m.drift, len(m.accepted)) for m in measured if m.drift is not None]
    slots = np.array([count for _, count in told], dtype=np.int64)
    sums = {name: np.array([getattr(drift, name) for drift, _ in told]) for name in MEASURES}
    return {name: means * slots[:, None] if len(told) else means for name, means in sums.items()}, slots
