"""A device decodes the bits that the CPU decodes, and a batch travels encoded."""

import pytest
import torch
from conftest import kept_mask, make_document, make_objective, make_shape

from eagle31_train.model.batch import build_batch
from eagle31_train.store.codec import CODECS, encode

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("width", [1, 33, 128, 576, 4096])
def test_a_device_encodes_and_decodes_the_same_bits(codec, width):
    generator = torch.Generator().manual_seed(width)
    sizes = torch.tensor([1e-3, 1.0, 300.0])[:, None]
    states = (torch.randn(64, 3, width, generator=generator) * sizes).bfloat16()
    here = encode(states, codec)
    there = encode(states.cuda(), codec)
    assert torch.equal(here.decode().view(torch.int16), there.decode().view(torch.int16).cpu())


def test_a_batch_travels_encoded():
    shape = make_shape()
    objective = make_objective(shape, torch.float32)
    d = make_document(shape, 20, torch.Generator().manual_seed(0))
    kept = type(d)(d.tokens, d.loss_mask, d.top1, encode(d.attended_states, "int8"), encode(d.supervised_states, "fp8"))
    batch = build_batch([kept], 3, kept_mask(objective), "mask").to("cuda")
    assert (batch.aux.values.dtype, batch.teacher.values.dtype) == (torch.int8, torch.float8_e4m3fn)
    assert all(tensor.is_cuda for tensor in (batch.aux.values, batch.aux.scale, batch.teacher.values))
