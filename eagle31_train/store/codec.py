"""Codecs: how hidden states are stored in fewer bytes, and decoded on the device that trains.

    bf16          2 bytes a value, bit for bit
    int8_channel  1 byte, -127 to 127, one scale per token and block of 128 values, and one per document and channel
    fp8           1 byte, float8 e4m3, one scale per token and block of 128 values
    int8          1 byte, as int8_channel without the channel scales
    int4          half a byte, -8 to 7, one scale per block of 32; measured for auxiliary states only

A few channels of a target's states can be hundreds of times as large as the others. With int8, the other channels of
their block lose their precision; int8_channel first scales all channels of a document to about the same size.

A value decodes to `values * scale`: one product of two numbers that bf16 holds exactly, rounded once to bf16. Channel
scales are powers of two, so that multiplying by them rounds nothing. Every device therefore decodes the same bits.
docs/benchmarks.md has what each codec costs in fidelity and acceptance.

Shapes: N rows of D documents, [...] further axes, W the width of a state, B the width of a block.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor


@dataclass(frozen=True)
class Codec:
    """One way to store states: in blocks of `block` values, the largest of which is stored as `largest`."""

    dtype: torch.dtype
    block: int
    largest: float
    packed: int = 1  # values per element
    channels: bool = False  # whether each channel has a scale

    def row_bytes(self, width: int) -> int:
        """Return the bytes of one state of `width` values."""
        scales = 2 * -(-width // self.block) if self.block else 0
        return -(-width // self.packed) * self.dtype.itemsize + scales

    def document_bytes(self, width: int) -> int:
        """Return the bytes of one layer's channel scales, stored once per document."""
        return 2 * width if self.channels else 0


CODECS = {
    "bf16": Codec(torch.bfloat16, 0, 0.0),
    "int8_channel": Codec(torch.int8, 128, 127.0, channels=True),
    "fp8": Codec(torch.float8_e4m3fn, 128, 448.0),
    "int8": Codec(torch.int8, 128, 127.0),
    "int4": Codec(torch.uint8, 32, -8.0, packed=2),
}
LARGEST = 448  # the largest stored value of any codec with scales


@dataclass(frozen=True)
class Encoded:
    """States of N rows as a codec stores them; [N, ..., W] once decoded.

    values: [N, ..., w] in the codec's dtype; for bf16 (in tests, any float dtype) the states themselves.
    scale: [N, ..., blocks] bf16; blocks is 0 for the codec bf16.
    width: W.
    channels: [D, ..., W] bf16, the channel scales of each document; [D, ..., 0] for codecs without them.
    document: [N] int64, each row's document, as an index into D.
    """

    codec: str
    width: int
    values: Tensor
    scale: Tensor
    channels: Tensor
    document: Tensor

    def __len__(self) -> int:
        return len(self.values)

    @property
    def device(self) -> torch.device:
        return self.values.device

    def __getitem__(self, rows: "slice | Tensor") -> "Encoded":
        values = _plain_bytes(self.values)[rows].view(self.values.dtype)
        return replace(self, values=values, scale=self.scale[rows], document=self.document[rows])

    def of_document(self, index: int, rows: slice) -> "Encoded":
        """Return these rows, all of document `index`, with the channel scales of that document alone."""
        cut = self[rows]
        return replace(cut, channels=self.channels[index : index + 1], document=torch.zeros_like(cut.document))

    @property
    def finite(self) -> bool:
        """Whether every value decodes to a finite number."""
        values = self.values
        if values.dtype == torch.float8_e4m3fn:  # e4m3 has NaN but no infinity, and torch cannot compare its values
            values = torch.where((values.view(torch.uint8) & 127) == 127, torch.nan, 0.0)
        scales = (self.scale, self.channels)
        if not all(bool(all_finite(part)) for part in (values, *scales) if part.is_floating_point()):
            return False
        # An upper bound on the decoded values. They are decoded only if the bound itself is too large.
        most = LARGEST * math.prod(float(part.abs().max()) for part in scales if part.numel())
        return most < torch.finfo(torch.bfloat16).max or bool(all_finite(self.decode()))

    def unbind(self) -> list["Encoded"]:
        """Split [N, A, W] into A layers [N, W], so that they need not be decoded all at once."""
        layers = zip(self.values.unbind(1), self.scale.unbind(1), self.channels.unbind(1), strict=True)
        return [replace(self, values=values, scale=scale, channels=channels) for values, scale, channels in layers]

    def decode(self) -> Tensor:
        """Return the states [N, ..., W] in bf16; the codec bf16 returns its values as they are."""
        codec = CODECS[self.codec]
        if not codec.block:
            return self.values
        values = self.values
        if codec.packed == 2:
            values = torch.stack([values & 15, values >> 4], -1).flatten(-2)[..., : self.width].to(torch.int8) - 8
        decoded = _from_blocks(_blocks(values.bfloat16(), codec.block) * self.scale[..., None], self.width)
        return decoded * self.channels[self.document] if codec.channels else decoded


def encode(states: Tensor, codec: str) -> tuple[Encoded, Tensor]:
    """Encode the states [N, ..., W] of one document, of any float dtype.

    Also return whether all of them are finite in bf16: [] bool on their device, so that the host need not wait."""
    how = CODECS[codec]
    width = states.shape[-1]
    if not how.block:
        encoded = plain(states.bfloat16())
        return encoded, all_finite(encoded.values)
    states = states.float()
    channels = states.new_empty(1, *states.shape[1:-1], 0, dtype=torch.bfloat16)
    finite = torch.ones((), dtype=torch.bool, device=states.device)
    if how.channels:
        finite = all_finite((states * (1 + 1 / how.largest)).bfloat16())  # no value decodes to more
        channels = _channel_scales(states)
        states = states / channels.float()
    blocks = _blocks(states, how.block)
    if codec == "int4":  # the extreme value itself becomes -8, so that all sixteen levels are used
        extreme = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))
    else:
        extreme = blocks.abs().amax(-1, keepdim=True)
    scale = (extreme / how.largest).bfloat16()
    finite = finite & all_finite((scale * how.largest).bfloat16())  # what the extreme value decodes to
    scale = torch.where(scale.abs() < torch.finfo(scale.dtype).tiny, 1.0, scale)  # a block of zeros, or nearly
    scaled = _from_blocks(blocks / scale.float(), width)
    if codec == "fp8":
        values = scaled.clamp(-448, 448).to(how.dtype)
    elif how.dtype == torch.int8:
        values = scaled.round().clamp(-127, 127).to(how.dtype)
    else:
        nibbles = (scaled.round().clamp(-8, 7) + 8).to(how.dtype)
        pairs = torch.nn.functional.pad(nibbles, (0, width % 2)).unflatten(-1, (-1, 2))
        values = pairs[..., 0] | pairs[..., 1] << 4
    document = torch.zeros(len(values), dtype=torch.int64, device=values.device)
    encoded = Encoded(codec, width, values.contiguous(), scale[..., 0].contiguous(), channels, document)
    return encoded, finite


def _channel_scales(states: Tensor) -> Tensor:
    """Return a document's channel scales, [1, ..., W] bf16.

    A scale is the power of two nearest to the channel's mean absolute value over the rows, or 1 if that is zero or
    nearly. The mean is a compromise between the few rows in which a channel is very large (often a document's first
    token) and all others. A median would cost precision in the other channels of the former, a mean square in this
    channel of the latter.
    """
    mean = states.abs().sum(0, keepdim=True) / max(1, len(states))
    known = mean >= 2.0**-100
    return torch.where(known, mean, 1.0).log2().round().clamp(max=126).exp2().bfloat16()


def all_finite(values: Tensor) -> Tensor:
    """Return whether all values are finite: [] bool, on their device."""
    if not values.numel():
        return torch.ones((), dtype=torch.bool, device=values.device)
    return torch.stack(values.aminmax()).isfinite().all()  # forty times as fast as isfinite of each value


def plain(states: Tensor) -> Encoded:
    """Wrap states [N, ..., W] as they are."""
    document = torch.zeros(len(states), dtype=torch.int64, device=states.device)
    return Encoded("bf16", states.shape[-1], states, states[..., :0], states[:1, ..., :0], document)


def concatenate(parts: Sequence[Encoded]) -> Encoded:
    """Join the rows of several documents, all of one codec and width."""
    joined = torch.cat([_plain_bytes(part.values) for part in parts]).view(parts[0].values.dtype)
    before = [0, *accumulate(len(part.channels) for part in parts)]
    return replace(
        parts[0],
        values=joined,
        scale=torch.cat([part.scale for part in parts]),
        channels=torch.cat([part.channels for part in parts]),
        document=torch.cat([part.document + first for part, first in zip(parts, before, strict=False)]),
    )


def _plain_bytes(values: Tensor) -> Tensor:
    """View fp8 as bytes: torch 2.9 can neither index it on a CPU nor join it under autocast, as it is too narrow."""
    return values.view(torch.uint8) if values.dtype == torch.float8_e4m3fn else values


def _blocks(values: Tensor, block: int) -> Tensor:
    """[..., W] → [..., blocks, B], the last block padded with zeros."""
    filled = torch.nn.functional.pad(values, (0, -values.shape[-1] % block))
    return filled.unflatten(-1, (-1, block))


def _from_blocks(blocks: Tensor, width: int) -> Tensor:
    """[..., blocks, B] → [..., W]."""
    return blocks.flatten(-2)[..., :width]
