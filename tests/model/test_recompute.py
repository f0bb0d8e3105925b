"""What is worked out again for the gradient: the same bits as what is kept, once, and nothing of it is held.

How much less is kept: tests/planning/test_footprint.py and test_context_parallel.py."""

import gc
import weakref
from contextlib import nullcontext
from itertools import product

import pytest
import torch
from plan_cases import SMALL_MLA, objective_and_batch, shape_of
from planting import instead_of

from benchmarks.shapes import turns
from eagle31_train.model import drafter, layer, recompute
from eagle31_train.model.recompute import _Again, checkpointed, recomputed

WEIGHTS = torch.tensor([1e-2, 5e-3, 2e-3])
SHAPES = {
    "llama": {},
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


def unpacked(wrong):
    """Where a tensor is worked out again, it is `wrong` of it and of what it comes from."""

    @instead_of(_Again, "unpack")
    def plant(right, self, packed):
        out = right(self, packed)
        return wrong(out, self._function.args[0]) if packed is None else out

    return plant


PLANTED = {
    "other values": unpacked(lambda out, _: out * 1.0001),
    "other rows": unpacked(lambda out, _: out.roll(1, 0)),
    "what is normed": unpacked(lambda out, x: x if x.shape == out.shape else out),
    "whatever has its shape": lambda patch: patch.setattr(recompute, "_place", lambda x: x.shape),
}


@pytest.mark.core
@pytest.mark.parametrize("plant", PLANTED.values(), ids=PLANTED.keys())
def test_a_tensor_in_place_of_another_is_seen(plant, monkeypatch):
    changes = {"hidden_size": 64, "intermediate_size": 64}
    right = gradients(changes)
    plant(monkeypatch)
    different = {name for name, gradient in gradients(changes).items() if not torch.equal(gradient, right[name])}
    assert {f"midlayer.mlp.{name}_proj.weight" for name in ("gate", "up")} <= different
    assert "midlayer.self_attn.q_proj.weight" in different
    assert not {"loss", "lm_head.weight"} & different, "what no such tensor is needed for"


def test_it_is_called_once_more_for_all_that_wait_and_goes_with_the_graph():
    calls = []

    def double(x):
        calls.append(torch.is_grad_enabled())
        return 2 * x  # whose gradient needs neither

    def graph(x):
        with recomputed(double, x) as out:
            held = weakref.ref(out)
            return (out @ weight).square().sum() + (out @ weight).sum(), held

    x, weight = (torch.randn(4, 4, requires_grad=True) for _ in range(2))
    gc.disable()
    try:
        loss, held = graph(x)
        assert held() is None
        loss.backward(retain_graph=True)
        assert calls == [True, False]
        first, x.grad = x.grad, None
        loss.backward()
        assert torch.equal(x.grad, first)
        middle = x * 1
        state = weakref.ref(middle)
        loss = graph(middle)[0]
        del middle
        assert state() is not None
        del loss
        assert state() is None, "a cycle, which would hold a step's memory until Python looks for it"
    finally:
        gc.enable()
    with torch.no_grad():
        del calls[:]
        graph(x)
    assert calls == [False]
    del calls[:]
    checkpointed(lambda x: graph(x)[0], x).backward()
    assert calls == [True, True], "once in each pass through the whole"
