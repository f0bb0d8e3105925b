"""Encoded states train exactly as the bf16 states that they decode to."""

from dataclasses import replace

import pytest
import torch
from conftest import make_document, make_objective, make_shape
from model.test_recurrence import trained
from whole import encoded

from eagle31_train.model.batch import build_batch
from eagle31_train.store.codec import CODECS, plain

K = 4


@pytest.fixture
def documents():
    shape = make_shape()
    generator = torch.Generator().manual_seed(3)
    return shape, [make_document(shape, length, generator) for length in (9, 1, 14, 5, 2)]


@pytest.mark.parametrize("codec", CODECS)
def test_encoded_states_train_to_the_bit_as_what_they_decode_to(documents, codec):
    shape, documents = documents
    objective = make_objective(shape, torch.float32)
    kept = [encoded(d, codec, codec) for d in documents]
    decoded = [replace(d, aux=plain(d.aux.decode()), last=plain(d.last.decode())) for d in kept]
    for low in (False, True):  # batches are built within autocast, too
        with torch.autocast("cpu", torch.bfloat16, enabled=low):
            ours, theirs = (trained(objective, some, K) for some in (kept, decoded))
        assert ours.loss == theirs.loss
        assert all(torch.equal(ours.grads[name], gradient) for name, gradient in theirs.grads.items())


@pytest.mark.parametrize("which", ["aux", "last"])
def test_every_state_that_is_kept_is_read(documents, which):
    shape, documents = documents
    objective = make_objective(shape, torch.float32)
    kept = torch.ones(shape.vocab_size, dtype=torch.bool)
    for d in documents:
        d = d.to(torch.float32)
        for row in range(len(getattr(d, which))):
            states = getattr(d, which).values.clone()
            states[row] = float("nan")
            batch = build_batch([replace(d, **{which: plain(states)})], K, kept, "mask")
            loss, _ = objective(batch, torch.full((K,), 0.1))
            assert loss.isnan(), (len(d), row)
