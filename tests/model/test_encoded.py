"""Encoded states train exactly as the bf16 states that they decode to."""

from dataclasses import replace

import pytest
import torch
from conftest import make_document, make_objective, make_shape
from model.test_recurrence import trained

from eagle31_train.model.batch import build_batch
from eagle31_train.store.codec import CODECS, encode

K = 4


@pytest.fixture
def documents():
    shape = make_shape()
    generator = torch.Generator().manual_seed(3)
    return shape, [make_document(shape, length, generator) for length in (9, 1, 14, 5, 2)]


def assert_same_bits(objective, ours, theirs):
    """Of the loss and of every gradient on two lists of documents."""
    mine, other = (trained(objective, documents, K) for documents in (ours, theirs))
    assert mine.loss == other.loss
    for name, gradient in other.grads.items():
        assert torch.equal(mine.grads[name], gradient), name


@pytest.mark.parametrize("codec", CODECS)
def test_encoded_states_train_to_the_bit_as_what_they_decode_to(documents, codec):
    shape, documents = documents
    objective = make_objective(shape, torch.float32)
    kept = [
        replace(d, aux=encode(d.attended_states, codec), last=encode(d.supervised_states, codec)) for d in documents
    ]
    decoded = [replace(d, aux=d.aux.decode(), last=d.last.decode()) for d in kept]
    for low in (False, True):  # batches are built within autocast, too
        with torch.autocast("cpu", torch.bfloat16, enabled=low):
            assert_same_bits(objective, kept, decoded)


def test_states_that_are_not_kept_change_nothing(documents):
    """Auxiliary states past the last slot, last states that teach nobody: garbage there is never read."""
    shape, documents = documents
    objective = make_objective(shape, torch.float32)
    documents = [replace(d, aux=d.aux.float(), last=d.last.float()) for d in documents]
    ruined = []
    for d in documents:
        aux, last = torch.full_like(d.aux, float("nan")), torch.full_like(d.last, float("nan"))
        aux[: d.attended] = d.aux[: d.attended]
        last[d.supervised] = d.last[d.supervised]
        ruined.append(replace(d, aux=aux, last=last))
    assert_same_bits(objective, ruined, documents)


@pytest.mark.parametrize("which", ["aux", "last"])
def test_every_state_that_is_kept_is_read(documents, which):
    shape, documents = documents
    objective = make_objective(shape, torch.float32)
    kept = torch.ones(shape.vocab_size, dtype=torch.bool)
    for d in documents:
        d = replace(d, aux=d.attended_states.float(), last=d.supervised_states.float())
        for row in range(len(getattr(d, which))):
            states = getattr(d, which).clone()
            states[row] = float("nan")
            batch = build_batch([replace(d, **{which: states})], K, kept, "mask")
            loss, _ = objective(batch, torch.full((K,), 0.1))
            assert loss.isnan(), (len(d), row)
