"""Arithmetic counted from loss masks, by hand and against torch's own count of a real step."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from plan_cases import SMALL_MLA, objective_and_batch, shape_of
from torch.optim._muon import _zeropower_via_newtonschulz
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.shapes import Case, turns
from eagle31_train.planning.work import (
    Work,
    count_work,
    extraction_flops,
    made_mask,
    newton_schulz_flops,
    training_flops,
)
from eagle31_train.store.codec import plain

# Slots 0..3 of a document of six tokens, two of which run a second step, and a document without slots.
WORK = Work(2, 10, 6**2 + 4**2, 2, 4, 4, 2, 4, slots=[4, 2], keys=[1 + 2 + 3 + 4, 1 + 3], pairs=[2, 2])


def test_work_counted_by_hand():
    # Tokens 0..5, the assistant wrote 3 and 5. Pairs (t, k) predict t+2+k: (1,0) (0,1) for 3, (3,0) (2,1) for 5.
    mask = np.array([False, False, False, True, False, True])
    assert count_work([mask, np.zeros(4, dtype=bool)], 2) == WORK


def test_copies_of_keys_are_those_that_a_layout_has():
    masks = [turns(128, 0.5), turns(96, 1.0), turns(64, 0.2)]
    _, batch = objective_and_batch(shape_of(), masks, 7)
    copies = count_work([mask.numpy() for mask in masks], 7).copies
    assert copies == len(batch.layout.segments.key_rows) > 1.5 * len(batch.positions)


def test_flops_that_torch_does_not_count_are_counted_by_hand():
    shape = Case("tiny", 64, 1.0).drafter()  # D = H = 64, MLP 96, 4 heads and 2 groups of 16, vocabulary 256
    parts = training_flops(shape, WORK, train_lm_head=False)
    assert parts["attention"] == 3 * 2 * (10 + 4 + 2) * 64 * 2  # the two slots of step 1 see one later key each
    assert parts["lm_head"] == 2 * 2 * 4 * 64 * 256


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"fc_norm": False},
        {"num_layers": 3, "norm_before_fc": True},
        {"parallel": True, "ptd_token_id": 0, "num_layers": 2},
        SMALL_MLA,
        {**SMALL_MLA, "q_lora_rank": None},
    ],
)
def test_flops_are_what_torch_counts_of_a_step(changes):
    """But for attention, whose kernel torch does not count; and every slot runs all steps, needed or not."""
    masks = [turns(64, 0.5), turns(48, 1.0)]
    small = {"hidden_size": 64, "target_hidden_size": 64, "intermediate_size": 96, "draft_vocab_size": 200}
    shape = shape_of(**small, **changes)
    objective, batch = objective_and_batch(shape, masks, 7)
    exact = {name: plain(getattr(batch, name).decode().double()) for name in ("aux", "teacher")}
    with FlopCounterMode(display=False) as counter:
        objective.double()(replace(batch, **exact), torch.full((7,), 1e-3, dtype=torch.float64))[0].backward()
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
