"""Mistakes of build_batch, which the reference finds; batches of encoded states, and with nothing to train.

Random batches: test_exactness.py. Of some slots: test_subset.py.
"""

import math
from dataclasses import replace

import pytest
import torch
from conftest import kept_mask, make_document, make_objective, make_shape
from model import test_recurrence
from planting import instead_of
from whole import encoded

from eagle31_train.model import batch
from eagle31_train.model import loss as loss_module
from eagle31_train.model.batch import build_batch
from eagle31_train.model.loss import divergence
from eagle31_train.store.codec import CODECS, plain


@pytest.mark.parametrize("codec", CODECS)
def test_encoded_states_train_to_the_bit_as_what_they_decode_to(codec):
    shape, generator = make_shape(), torch.Generator().manual_seed(3)
    documents = [make_document(shape, length, generator) for length in (9, 1, 14, 5, 2)]
    objective = make_objective(shape, torch.float32)
    kept = [encoded(d, codec, codec) for d in documents]
    decoded = [replace(d, aux=plain(d.aux.decode()), last=plain(d.last.decode())) for d in kept]
    for low in (False, True):  # batches are built within autocast, too
        with torch.autocast("cpu", torch.bfloat16, enabled=low):
            ours, theirs = (test_recurrence.trained(objective, some, 4) for some in (kept, decoded))
        assert ours.loss == theirs.loss
        assert all(torch.equal(ours.grads[name], gradient) for name, gradient in theirs.grads.items())


# ---------------------------------------------------------------- planted mistakes


def of_document(change):
    """The pairs are worked out of a document changed so."""

    @instead_of(batch, "_pairs")
    def plant(right, d, *rest):
        loss_mask, top1 = change(d)
        return right(replace(d, loss_mask=loss_mask, top1=top1), *rest)

    return plant


def of_batch(**changes):
    """The finished batch is changed so."""

    @instead_of(test_recurrence, "build_batch")
    def plant(right, *args):
        packed = right(*args)
        return replace(packed, **{name: change(packed) for name, change in changes.items()})

    return plant


MISTAKES = {
    "the mask of the token before": of_document(lambda d: (d.loss_mask.roll(1), d.top1)),
    "the mask of the token two before": of_document(lambda d: (d.loss_mask.roll(2), d.top1)),
    "the mask of the token after": of_document(lambda d: (d.loss_mask.roll(-1), d.top1)),
    "the arg-max of the position before": of_document(lambda d: (d.loss_mask, d.top1.roll(1))),
    "the arg-max of the position after": of_document(lambda d: (d.loss_mask, d.top1.roll(-1))),
    "every token taken for the assistant's": of_document(lambda d: (torch.ones_like(d.loss_mask), d.top1.clamp(min=1))),
    "inputs one step early": of_batch(reads=lambda p: p.reads.roll(1, 0)),
    "inputs of the slot before": of_batch(reads=lambda p: p.reads.roll(1, 1)),
    "inputs read one place late": of_batch(read=lambda p: (p.read + 1).clamp(max=len(p.ids) - 1)),
    "context inputs of the next document": of_batch(
        following=lambda p: (torch.arange(len(p.aux)) + 1).clamp(max=len(p.ids) - 1)
    ),
    "context inputs not shifted": of_batch(following=lambda p: p.following - 1),
    "all documents taken for one": instead_of(batch, "make_layout")(
        lambda right, documents, slots: right([(0, documents[-1][1])], slots)
    ),
    "states of the next context row": of_batch(aux=lambda p: plain(p.aux.decode().roll(-1, 0))),
    "teachers one position late": of_batch(teacher=lambda p: plain(p.teacher.decode() + 1)),
    "arg-max one position late": of_batch(top1=lambda p: p.top1.roll(-1)),
    "pairs of the next slot": of_batch(pair_row=lambda p: (p.pair_row + 1) % p.reads.numel()),
    "pairs of the next step": of_batch(pair_step=lambda p: (p.pair_step + 1) % p.ttt_length),
    "pairs taught by the next position": of_batch(
        pair_teacher=lambda p: (p.pair_teacher + 1).clamp(max=len(p.teacher) - 1)
    ),
    "a chunk that ends a pair late": of_batch(
        chunks=lambda p: [c._replace(pairs=slice(c.pairs.start, c.pairs.stop + 1)) for c in p.chunks]
    ),
    "the last chunk forgotten": of_batch(chunks=lambda p: p.chunks[:-1]),
    "prefixes counted as pairs": of_batch(eligible_prefix=lambda p: p.eligible),
    "eligible counted as trained": of_batch(eligible=lambda p: p.trained),
}


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES.keys())
@pytest.mark.core
def test_a_planted_off_by_one_is_caught(tiny, mistake, monkeypatch):
    """Chunks have two positions each, and products one pair."""
    monkeypatch.setattr(batch, "CHUNK", 2)
    monkeypatch.setattr(loss_module, "LOGITS", {"cpu": (1, 1)})
    test_recurrence.assert_right(*tiny)
    mistake(monkeypatch)
    with pytest.raises((AssertionError, IndexError, RuntimeError)):  # the last where a document has no such states
        test_recurrence.assert_right(*tiny)


# Why there is nothing: lengths of documents, and what of each is the assistant's.
NOTHING = {
    "single tokens": ([1, 1, 1], [0]),
    "no answer": ([9, 4], []),
    "first tokens only": ([6], [0, 1]),
    "out of the vocabulary": ([8], [2, 3, 4, 7]),
}


@pytest.mark.parametrize("why", NOTHING)
@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16"])
@pytest.mark.parametrize("lk", [0.0, 0.5])
def test_a_batch_without_a_slot_gives_zeros_and_no_nan(why, precision, lk):
    shape = make_shape()
    dtype = torch.float64 if precision == "fp64" else torch.float32
    objective = make_objective(shape, dtype)
    objective.lk = lk
    kept = kept_mask(objective)
    kept[0] = False
    (lengths, answer), generator = NOTHING[why], torch.Generator().manual_seed(0)
    documents = [make_document(shape, length, generator, answer=answer) for length in lengths]
    documents = [d.to(dtype) for d in documents]
    if why == "out of the vocabulary":
        documents = [replace(d, top1=torch.zeros_like(d.top1)) for d in documents]
    packed = build_batch(documents, 3, kept)
    assert len(packed.layout.slots) == sum(packed.trained) == 0
    # The weights that other ranks' pairs give: this part must add nothing to them.
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        loss, measured = objective(packed, torch.ones(3))
    loss.backward()
    assert loss.item() == 0
    for name, parameter in objective.drafter.named_parameters():
        assert torch.equal(parameter.grad, torch.zeros_like(parameter)), name
    eligible = dict(zip(("eligible", "eligible_prefix"), (packed.eligible, packed.eligible_prefix), strict=True))
    for name, row in zip(loss_module.MEASURES, measured, strict=True):
        assert torch.equal(row, eligible.get(name, torch.zeros(3)).float()), name


@pytest.mark.parametrize("lk", [0.3, 1.0])
def test_distributions_that_share_no_mass_have_a_finite_loss_and_lk_no_slope(lk):
    logits, p = torch.tensor([[1000.0, 0.0]]), torch.tensor([[0.0, 1.0]])
    value, slope = divergence(logits, p, torch.zeros(1), torch.zeros(1, dtype=torch.int64), "kl", lk)
    assert value.item() == pytest.approx((1 - lk) * 1000 - lk * math.log(torch.finfo(torch.float32).tiny))
    torch.testing.assert_close(slope, (1 - lk) * torch.tensor([[1.0, -1.0]]))
