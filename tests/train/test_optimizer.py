"""Muon: which parameters it updates, and what one update is. By several ranks: test_context_parallel.py."""

from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch
from conftest import make_mla_shape, make_objective, make_shape

from eagle31_train.config import TrainConfig
from train import optimizer
from train.optimizer import make_optimizer

T = TrainConfig(optimizer="muon", lr=0.01, weight_decay=0.1)

LLAMA = {f"midlayer.self_attn.{x}_proj.weight" for x in "qkvo"}
MLA = {f"midlayer.self_attn.{x}.weight" for x in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")}
PARALLEL = {"parallel": True, "ptd_token_id": 1}
MATRICES = {"fc.weight", *(f"midlayer.mlp.{x}_proj.weight" for x in ("gate", "up", "down"))}


@pytest.mark.parametrize("own_embedding", [False, True])
@pytest.mark.parametrize("train_lm_head", [False, True])
@pytest.mark.parametrize(
    ("make", "attention"), [(make_shape, LLAMA), (make_mla_shape, MLA), (partial(make_shape, **PARALLEL), LLAMA)]
)
@pytest.mark.parametrize("which", ["muon", "adamw"])
def test_maps_decay_and_the_rest_does_not(make, attention, train_lm_head, own_embedding, which):
    """The rest: norms, mask_hidden, and of the head and the embedding what is trained."""
    drafter = make_objective(make(share_embedding=not own_embedding), torch.float32).drafter
    drafter.lm_head.weight.requires_grad_(train_lm_head)
    names = {parameter: name for name, parameter in drafter.named_parameters() if parameter.requires_grad}
    maps, rest = make_optimizer(drafter, replace(T, optimizer=which)).param_groups
    assert {names[parameter] for parameter in maps["params"]} == MATRICES | attention
    assert {names[parameter] for parameter in rest["params"]} == set(names.values()) - MATRICES - attention
    assert (maps["weight_decay"], rest["weight_decay"]) == (0.1, 0.0)


NEAR = {"bf16": 0.0, "no": 0.02}  # torch's is in bf16
UPDATES = [*product([(12, 12), (8, 20), (20, 8)], NEAR), ((1, 6), "bf16")]


@pytest.mark.parametrize(("size", "precision"), UPDATES)
def test_updates_are_torchs_own_to_the_bit_in_bf16(size, precision):
    generator = torch.Generator().manual_seed(1)
    weights, *gradients = (torch.randn(size, generator=generator) for _ in range(4))
    layers = [torch.nn.Linear(*reversed(size), bias=False) for _ in range(2)]
    for layer in layers:
        layer.weight.data.copy_(weights)
    options = {"momentum": 0.95, "nesterov": True, "adjust_lr_fn": "match_rms_adamw"}
    reference = torch.optim.Muon([layers[1].weight], T.lr, T.weight_decay, **options)
    updater, changes = optimizer.make_optimizer(layers[0], replace(T, precision=precision)), []
    for layer, steps in zip(layers, (updater, reference), strict=True):
        for gradient in gradients:
            before, layer.weight.grad = layer.weight.detach().clone(), gradient.clone()
            steps.step()
        changes.append((layer.weight.detach() - before).double())
    ours, theirs = changes
    assert (ours - theirs).norm() <= NEAR[precision] * theirs.norm()


@pytest.mark.parametrize("rows", [optimizer.STRIPE - 1, 2 * optimizer.STRIPE, 3 * optimizer.STRIPE + 5])
def test_stripes_of_a_symmetric_product_are_the_product(rows):
    x = torch.randn(rows, 300, dtype=torch.float64, generator=torch.Generator().manual_seed(rows))
    gram = optimizer.symmetric(x)
    torch.testing.assert_close(gram, x @ x.T)
    torch.testing.assert_close(optimizer.symmetric(gram, beta=-4.0, alpha=2.0), 2 * gram @ gram - 4 * gram)
