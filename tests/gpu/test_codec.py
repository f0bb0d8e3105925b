"""A device decodes the bits that the CPU decodes, and a batch travels encoded."""

import pytest
import torch

from eagle31_train.store.codec import CODECS, encode


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("width", [1, 33, 128, 576, 4096])
def test_a_device_encodes_and_decodes_the_same_bits(codec, width):
    generator = torch.Generator().manual_seed(width)
    sizes = torch.tensor([1e-3, 1.0, 300.0])[:, None]
    states = (torch.randn(64, 3, width, generator=generator) * sizes).bfloat16()
    here = encode(states, codec)
    there = encode(states.cuda(), codec)
    assert torch.equal(here.decode().view(torch.int16), there.decode().view(torch.int16).cpu())
