"""A step's memory grows with the length of a document, not with its square: seven steps, every kind of attention."""

from itertools import accumulate

import pytest
import torch
from conftest import kept_mask, make_document, make_mla_shape, make_objective, make_shape
from torch.profiler import ProfilerActivity, profile

from eagle31_train.model.batch import build_batch

K, LENGTH = 7, 768


def allocations(shape, length):
    """Bytes at the worst moment of forward and backward, and of the largest piece: one document of answers."""
    objective = make_objective(shape, torch.float32)
    d = make_document(shape, length, torch.Generator().manual_seed(0), answer=slice(1, None))
    packed = build_batch([d], K, kept_mask(objective, "keep"))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        objective(packed, torch.full((K,), 1e-3))[0].backward()
    events = [e for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(events, key=lambda e: e.start_ns())]
    return max(accumulate(sizes)), max(sizes)


CASES = {"llama": (make_shape, False), "mla": (make_mla_shape, False), "mla, recomputed": (make_mla_shape, True)}


@pytest.mark.parametrize(("make", "recompute"), CASES.values(), ids=CASES.keys())
def test_twice_the_length_is_twice_the_memory(make, recompute, monkeypatch):
    monkeypatch.setattr("eagle31_train.model.drafter.Drafter.recompute", recompute)
    short, _ = allocations(make(), LENGTH)
    long, largest = allocations(make(), 2 * LENGTH)
    assert 1.8 < long / short < 2.1
    assert largest < (2 * LENGTH) ** 2, "a byte for each pair of positions, such as a mask"
