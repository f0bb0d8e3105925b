"""What a step takes on a CUDA device is what the plan says."""

import pytest
import torch
from plan_cases import objective_and_batch, shape_of

from benchmarks.shapes import turns
from eagle31_train.planning.footprint import Step, activations
from eagle31_train.planning.work import count_work

K = 7


def requested(when):
    """Bytes that were asked for. torch's allocator leaves up to a MiB of a block with the tensor that gets it, and
    counts it as allocated: 2 % here."""
    return torch.cuda.memory_stats()[f"requested_bytes.all.{when}"]


@pytest.mark.parametrize("recompute", [False, True])
def test_activations_are_what_the_device_allocates(recompute):
    shape = shape_of(hidden_size=1024, target_hidden_size=1024, intermediate_size=2816, head_dim=128)
    masks = [turns(512, 0.5)] * 4
    objective, batch = objective_and_batch(shape, masks, K, torch.bfloat16, "int8")
    objective, batch, weights = objective.cuda(), batch.to("cuda"), torch.full((K,), 1e-3, device="cuda")
    objective.autocast, objective.drafter.recompute = torch.bfloat16, recompute
    objective(batch, weights)[0].backward()  # what is made once is there
    objective.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = requested("current")
    loss = objective(batch, weights)[0]
    kept = requested("current") - before
    loss.backward()
    peak = requested("peak") - before

    work = count_work([mask.numpy() for mask in masks], K)
    reckoned = activations(shape, work, Step(recompute=recompute))
    assert reckoned.after_forward == pytest.approx(kept, rel=0.005)
    assert reckoned.peak == pytest.approx(peak, rel=0.15)
