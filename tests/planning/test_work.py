"""Arithmetic counted from loss masks, against the benchmarks' count and against torch's own of a real step."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from plan_cases import MLA, SMALL_MLA, objective_and_batch, shape_of
from torch.optim._muon import _zeropower_via_newtonschulz
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import flops
from benchmarks.shapes import turns
from eagle31_train.planning.work import count_work, extraction_flops, made_mask, newton_schulz_flops, training_flops
from eagle31_train.store.codec import plain

RANDOM = np.random.default_rng(0)
MASKS = {
    "turns": [turns(97, 0.4).numpy(), turns(60, 1.0).numpy()],
    "scattered": [RANDOM.random(size) < 0.3 for size in (40, 5, 1, 17)],
    "nothing": [np.zeros(9, dtype=bool), np.ones(1, dtype=bool), RANDOM.random(12) < 0.5],
}


@pytest.mark.parametrize("unroll", [1, 3, 7])
@pytest.mark.parametrize("name", MASKS)
def test_work_is_what_the_benchmarks_count(name, unroll):
    ours = count_work(MASKS[name], unroll)
    theirs = flops.count_work([torch.from_numpy(mask) for mask in MASKS[name]], unroll)
    for field in ("positions", "taught", "read", "slots", "keys", "pairs"):
        assert getattr(ours, field) == getattr(theirs, field), field
    assert ours.tokens == sum(map(len, MASKS[name]))
    assert ours.squares == sum(len(mask) ** 2 for mask in MASKS[name])
    assert ours.assistant == sum(mask.sum() for mask in MASKS[name])


@pytest.mark.parametrize("train_lm_head", [True, False])
@pytest.mark.parametrize(
    "changes",
    [{}, {"fc_norm": False}, {"hidden_size": 128, "num_key_value_heads": 8}, MLA, {**MLA, "q_lora_rank": None}],
)
def test_flops_are_what_the_benchmarks_count(changes, train_lm_head):
    shape, masks = shape_of(**changes), MASKS["turns"]
    theirs = flops.necessary(shape, flops.count_work([torch.from_numpy(m) for m in masks], 7), train_lm_head)
    assert training_flops(shape, count_work(masks, 7), train_lm_head) == theirs


@pytest.mark.parametrize("changes", [{}, {"fc_norm": False}, SMALL_MLA, {**SMALL_MLA, "q_lora_rank": None}])
def test_flops_are_what_torch_counts_of_a_step(changes):
    """But for attention, whose kernel torch does not count; and every slot runs all steps, needed or not."""
    masks = [turns(128, 0.5), turns(96, 1.0)]
    small = {"hidden_size": 64, "target_hidden_size": 64, "intermediate_size": 96, "draft_vocab_size": 200}
    shape = shape_of(**small, **changes)
    objective, batch = objective_and_batch(shape, masks, 7)
    objective, exact = (
        objective.double(),
        {name: plain(getattr(batch, name).decode().double()) for name in ("aux", "teacher")},
    )
    with FlopCounterMode(display=False) as counter:
        objective(replace(batch, **exact), torch.full((7,), 1e-3, dtype=torch.float64))[0].backward()
    counted = counter.get_flop_counts()["Global"][torch.ops.aten.mm]

    work = count_work([mask.numpy() for mask in masks], 7)
    parts = training_flops(shape, replace(work, slots=[work.slots[0]] * 7))
    assert sum(parts.values()) - parts["attention"] == pytest.approx(counted, rel=0.005)
    assert sum(training_flops(shape, work).values()) < sum(parts.values())


def test_extraction_of_a_small_target_by_hand():
    work = count_work([made_mask(10, 0.5), made_mask(4, 0.5)], 1)
    # 14 tokens through 100 parameters; two layers of width 3: scores and values of (10·10 + 4·4) / 2 pairs.
    assert extraction_flops(100, 2, 3, work) == 2 * 100 * 14 + 2 * 2 * (2 * 3) * (100 + 16) / 2


def test_newton_schulz_is_counted_as_torch_does_it():
    sizes = [(12, 30), (30, 12), (8, 8)]
    with FlopCounterMode(display=False) as counter:
        for size in sizes:
            _zeropower_via_newtonschulz(torch.randn(size), (3.4445, -4.7750, 2.0315), 5, 1e-7)
    assert newton_schulz_flops(sizes) == counter.get_total_flops()
