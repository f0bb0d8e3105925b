"""The parts of the benchmarks that need no peer: cases, counted work, ratios, and a race in which one cannot start."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import mla
from benchmarks import pictures as redrawn
from benchmarks.contenders.ours import Ours
from benchmarks.flops import Work, count_work, necessary
from benchmarks.shapes import Case, make_material, turns
from eagle31_train.model import drafter


@pytest.mark.parametrize("unroll", [1, 3, 7])
def test_counted_pairs_are_those_of_the_batch(unroll):
    material = make_material(Case("tiny", 64, 0.5).drafter(), torch.rand(64, generator=torch.manual_seed(3)) < 0.4)
    batch = Ours(material, unroll).batch
    work = count_work([material.document.loss_mask], unroll)
    assert work.pairs == batch.trained.tolist()
    assert work.slots[0] == len(batch.layout.slots)
    assert work.positions == len(batch.aux)
    assert work.taught == len(batch.teacher)


# Slots 0..3 of a document of six tokens, two of which run a second step, and a document without slots.
WORK = Work(positions=4, taught=2, read=4, slots=[4, 2], keys=[1 + 2 + 3 + 4, 1 + 3], pairs=[2, 2])


def test_work_counted_by_hand():
    # Tokens 0..5, the assistant wrote 3 and 5. Pairs (t, k) predict t+2+k: (1,0) (0,1) for 3, (3,0) (2,1) for 5.
    mask = torch.tensor([False, False, False, True, False, True])
    assert count_work([mask, torch.zeros(4, dtype=torch.bool)], unroll=2) == WORK


def test_flops_counted_by_hand():
    shape = Case("tiny", 64, 1.0).drafter()  # D = H = 64, MLP 96, 4 heads and 2 groups of 16, vocabulary 256
    assert necessary(shape, WORK, train_lm_head=False) == {
        "fc": 3 * 2 * 4 * 192 * 64,
        "keys, values": 3 * 2 * (4 + 2 + 4) * 64 * 2 * 32,  # states, later states, tokens
        "queries": 3 * 2 * (6 + 4) * 64 * 64,
        "attention": 3 * 2 * (10 + 4 + 2) * 64 * 2,  # the two slots of step 1 see one later key each
        "output": 3 * 2 * 6 * 64 * 64,
        "mlp": 3 * 2 * 6 * 3 * 64 * 96,
        "lm_head": 2 * 2 * 4 * 64 * 256,
        "teacher": 2 * 2 * 64 * 256,
    }


@pytest.mark.parametrize("name", ["tiny", "tiny-mla"])
@pytest.mark.parametrize("unroll", [1, 7])
def test_our_step_does_little_more_than_is_necessary(unroll, name):
    shape = Case(name, 128, 0.5).drafter()
    material = make_material(shape, turns(128, 0.5))
    ours = Ours(material, unroll)
    parts = necessary(shape, count_work([material.document.loss_mask], unroll))

    # It sees products, but none inside the CPU's flash attention, and these only if told how to count them by shapes.
    others = {
        torch.ops.aten.addmm_: lambda _sum, a, b, **_options: 2 * a[0] * a[1] * b[1],
        torch.ops.mkldnn._linear_pointwise: lambda a, b, *_rest, **_options: 2 * a[0] * a[1] * b[0],
    }
    with FlopCounterMode(display=False, custom_mapping=others) as counted:
        ours.loss().backward()
    products = sum(parts.values()) - parts["attention"]
    assert products <= counted.get_total_flops() <= 1.25 * products


@pytest.mark.parametrize("name", ["tiny", "tiny-mla"])
def test_eager_attention_computes_the_same(name, monkeypatch):
    monkeypatch.setattr(drafter, "unrolled_attention", drafter.unrolled_attention)  # it is replaced, and put back here
    assert mla.difference(Case(name, 64, 0.5)) < 1e-5


def test_every_stored_picture_is_drawn_again_by_one_command(tmp_path, monkeypatch):
    shown = {file.stem for file in redrawn.RESULTS.glob("*.png")} | {"gain"}
    assert shown == redrawn.DRAWN.keys()
    monkeypatch.setattr(redrawn, "README", tmp_path)
    for name in ("gain", "codecs", "mla", "extraction", "storage", "peers", "study-serving"):
        redrawn.DRAWN[name](tmp_path / f"{name}.png")
    assert len(list(tmp_path.iterdir())) == 6 + 2
