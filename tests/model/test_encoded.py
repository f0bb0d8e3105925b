"""Encoded states train exactly as the bf16 states that they decode to."""

from dataclasses import replace

import pytest
import torch
from conftest import make_document, make_objective, make_shape
from model.test_recurrence import trained
from whole import encoded

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
            ours, theirs = (trained(objective, some, 4) for some in (kept, decoded))
        assert ours.loss == theirs.loss
        assert all(torch.equal(ours.grads[name], gradient) for name, gradient in theirs.grads.items())
