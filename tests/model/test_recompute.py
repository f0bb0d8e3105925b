"""What is worked out again for the gradient: the same bits as what is kept, once, and nothing of it is held.

How much less is kept: tests/planning/test_footprint.py and test_context_parallel.py."""

import gc
import weakref
from contextlib import nullcontext
from itertools import product

import pytest
import torch
from plan_cases import SMALL_MLA, objective_and_batch, shape_of

from benchmarks.shapes import turns
from eagle31_train.model import drafter, layer
from eagle31_train.model.recompute import recomputed

WEIGHTS = torch.tensor([1e-2, 5e-3, 2e-3])
SHAPES = {
    "llama": {},
    "one width": {"hidden_size": 64, "intermediate_size": 64},  # where a place is more than a shape
    "mla": SMALL_MLA,
    "norm before residual": {"norm_before_residual": True},
    "eagle 3": {"norm_output": False, "fc_norm": False},
    "two layers, two norms before fc": {"num_layers": 2, "norm_before_fc": True},
    "parallel, biases": {"parallel": True, "ptd_token_id": 0, "attention_bias": True, "mlp_bias": True},
}
PRECISIONS = {"fp32": (torch.float32, None), "bf16": (torch.bfloat16, torch.bfloat16), "fp64": (torch.float64, None)}


def gradients(changes, precision="fp32", recompute=False):
    low, autocast = PRECISIONS[precision]
    torch.manual_seed(0)
    objective, batch = objective_and_batch(shape_of(**changes), [turns(40, 0.5), turns(23, 1.0)], 3, low, "int8")
    if precision == "fp64":
        objective.double()
    objective.autocast, objective.drafter.recompute = autocast, recompute
    loss, _ = objective(batch, WEIGHTS)
    loss.backward()
    return {"loss": loss.detach(), **{name: p.grad for name, p in objective.drafter.named_parameters()}}


@pytest.mark.core
@pytest.mark.parametrize(("name", "precision"), [*product(SHAPES, ("fp32", "bf16")), ("llama", "fp64")])
def test_gradients_are_to_the_bit_those_of_keeping_everything(name, precision, monkeypatch):
    changes = SHAPES[name]
    some, whole = gradients(changes, precision), gradients(changes, precision, recompute=True)
    for module in (drafter, layer):  # as if there were no `recomputed`
        monkeypatch.setattr(module, "recomputed", lambda function, *inputs: nullcontext(function(*inputs)))
    kept = gradients(changes, precision)
    for name, gradient in kept.items():
        assert torch.equal(some[name], gradient), name
        assert torch.equal(whole[name], gradient), name


def test_it_goes_with_the_graph():
    """That it is not held before, and called once for all that wait: tests/test_fake_cuda.py."""
    state, weight = (torch.randn(4, 4, requires_grad=True) for _ in range(2))
    gc.disable()
    try:
        middle = state * 1
        there = weakref.ref(middle)
        with recomputed(torch.mul, middle, 2) as out:
            loss = (out @ weight).square().sum() + (out @ weight).sum()
        del middle, out
        assert there() is not None
        del loss
        assert there() is None, "a cycle, which would hold a step's memory until Python looks for it"
    finally:
        gc.enable()
