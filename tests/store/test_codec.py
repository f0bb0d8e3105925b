"""Codecs beside a slow reference that shares no code with them, and the bytes that they are for."""

import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from whole import encode

from eagle31_train.store import codec as codecs
from eagle31_train.store.codec import CODECS, concatenate

LOSSY = ("int8_channel", "fp8", "int8", "int4")
BLOCK = {"int8_channel": 128, "fp8": 128, "int8": 128, "int4": 32}  # others would be another format
WIDTHS = (1, 2, 33, 127, 128, 129, 300)

# ---------------------------------------------------------------- the reference


def bfloat16(value):
    """A number rounded to bf16, ties to even, from the bits of its fp32."""
    bits = int(np.float32(value).view(np.uint32))
    bits += 0x7FFF + (bits >> 16 & 1)
    return float(np.uint32(bits & 0xFFFF0000).view(np.float32))


def e4m3_numbers():
    """Every finite non-negative float8 e4m3fn, from the definition of the format."""
    numbers = [m / 8 * 2.0**-6 for m in range(8)]
    numbers += [(1 + m / 8) * 2.0 ** (e - 7) for e, m in product(range(1, 16), range(8)) if (e, m) != (15, 7)]
    return np.array(numbers)


E4M3 = e4m3_numbers()


def nearest_e4m3(value):
    """The nearest of them, ties to the even mantissa, saturated."""
    size = min(abs(value), 448.0)
    above = int(np.searchsorted(E4M3, size))
    candidates = [i for i in (above - 1, above) if 0 <= i < len(E4M3)]
    best = min(candidates, key=lambda i: (abs(E4M3[i] - size), i % 2))
    return math.copysign(E4M3[best], value)


def reference(rows, codec):
    """A document's states, rows of [W], as a codec gives them back, worked out number by number."""
    channels = [1.0] * len(rows[0])
    if codec == "int8_channel":
        for channel, column in enumerate(zip(*rows, strict=True)):
            mean = sum(map(abs, column)) / len(column)
            channels[channel] = 2.0 ** round(math.log2(mean)) if mean >= 2.0**-100 else 1.0
    return [of_row([v / c for v, c in zip(row, channels, strict=True)], channels, codec) for row in rows]


def of_row(row, channels, codec):
    decoded = []
    row = [float(np.float32(value)) for value in row]
    for begin in range(0, len(row), BLOCK[codec]):
        block = row[begin : begin + BLOCK[codec]]
        extreme = max(block, key=abs)  # the first of the largest
        largest = {"fp8": 448.0, "int4": -8.0}.get(codec, 127.0)
        scale = bfloat16(np.float32(extreme if codec == "int4" else abs(extreme)) / np.float32(largest))
        if abs(scale) < 2.0**-126:
            scale = 1.0
        for value in block:
            scaled = float(np.float32(value) / np.float32(scale))
            low, high = (-8, 7) if codec == "int4" else (-127, 127)
            rounded = min(max(float(np.round(scaled)), low), high)
            kept = nearest_e4m3(scaled) if codec == "fp8" else rounded
            decoded.append(bfloat16(np.float32(kept) * np.float32(scale)))
    return [value * channel for value, channel in zip(decoded, channels, strict=True)]


def states(kind, rows, width, seed):
    """[rows, width] fp32 of one of the kinds that a residual stream, or a mistake, brings."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, width, generator=generator)
    if kind == "outlier":
        x[:, seed % width] = 3000.0 * (1 if seed % 2 else -1)
    if kind == "zeros":
        x[:, : width // 2 + 1] = 0
    if kind == "denormal":
        x *= 1e-39
    if kind == "huge":
        x *= 1e37
    if kind == "mixed":
        x *= 10.0 ** torch.randint(-20, 20, (rows, width), generator=generator)
    return x


KINDS = ("normal", "outlier", "zeros", "denormal", "huge", "mixed")


@pytest.mark.core
@pytest.mark.parametrize("codec", LOSSY)
@pytest.mark.parametrize("kind", KINDS)
def test_a_codec_is_its_reference_bit_for_bit(codec, kind):
    assert encode(torch.empty(0, 3, 130), codec).decode().shape == (0, 3, 130)
    for width in WIDTHS:
        x = states(kind, 3, width, seed=width)
        ours = encode(x, codec).decode()
        assert ours.dtype == torch.bfloat16
        assert ours.shape == x.shape
        assert ours.tolist() == reference(x.tolist(), codec), (codec, kind, width)


@pytest.mark.core
def test_bf16_keeps_every_bit_of_every_number():
    every = torch.arange(-(2**15), 2**15).to(torch.int16)
    every = every[every.view(torch.bfloat16).isfinite()].view(2, -1)
    kept = encode(every.view(torch.bfloat16), "bf16").decode()
    assert torch.equal(kept.view(torch.int16), every)
    assert kept.numel() == 2 * (2**15 - 2**7)


@pytest.mark.parametrize("codec", CODECS)
def test_what_is_or_would_become_infinite_is_refused(codec):
    for value, width, at in product((math.nan, math.inf, -math.inf, 3.4e38), (1, 64, 130), (0, -1)):
        x = torch.randn(4, 2, width)
        x[2, 1, at] = value
        assert not codecs.encode(x, codec)[1]


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_neither_layout_nor_neighbours_change_a_row(codec, dtype):
    """But the neighbours that are of the same document, with codecs that scale its channels."""
    x = (torch.randn(6, 3, 130, generator=torch.Generator().manual_seed(0)) * 5).to(dtype)
    whole = encode(x, codec)
    assert whole.values.is_contiguous()
    assert whole.scale.is_contiguous()
    wanted = whole.decode()
    spread = torch.empty(130, 3, 12, dtype=dtype).permute(2, 1, 0)[::2].copy_(x)
    assert not spread.is_contiguous()
    assert torch.equal(encode(spread, codec).decode(), wanted)
    for row in range(6):
        if not CODECS[codec].channels:
            assert torch.equal(encode(x[row : row + 1], codec).decode(), wanted[row : row + 1])
        assert torch.equal(whole[row : row + 1].decode(), wanted[row : row + 1])
    order = torch.tensor([5, 0, 3, 3])
    assert torch.equal(whole[order].decode(), wanted[order])
    assert torch.equal(concatenate([whole[:2], whole[2:2], whole[2:]]).decode(), wanted)
    for layer, part in enumerate(whole.unbind()):
        assert torch.equal(part.decode(), wanted[:, layer])
    lying = replace(whole, values=whole.values.transpose(0, 1).contiguous().transpose(0, 1))
    assert torch.equal(lying.decode(), wanted)
