"""What a disk gives back is compared with what was meant, bit by bit."""

import os

import pytest
import torch
from checkpointing import newest, same, save, snapshot

from eagle31_train.store.sealed import checksum
from train import readback


@pytest.fixture(autouse=True)
def no_power_is_lost(monkeypatch):
    """So that files need not reach the disk, which takes its time."""
    monkeypatch.setattr(os, "fsync", lambda _: None)
    monkeypatch.delattr(os, "posix_fadvise", raising=False)


def test_reading_back_finds_any_bit_and_any_length(tmp_path):
    file, meant = tmp_path / "x.safetensors", snapshot(1).weights
    readback.write_tensors(meant, file)
    whole = file.read_bytes()
    for place in range(len(whole)):
        spoilt = bytearray(whole)
        spoilt[place] ^= 1 << place % 8
        file.write_bytes(spoilt)
        with pytest.raises(OSError, match="did not read back as it was written"):
            readback.read_back(meant, file)
    for spoilt in (whole[:-1], whole[:9], whole[:3], b"", whole + b"\0"):
        file.write_bytes(spoilt)
        with pytest.raises(OSError, match="did not read back as it was written"):
            readback.read_back(meant, file)
    file.write_bytes(whole)
    assert readback.read_back(meant, file) == {"bytes": len(whole), "checksum": checksum(file)}
    for other in (
        {**meant, "more": torch.zeros(1)},
        {"fc.weight": meant["fc.weight"]},
        {**meant, "norm.weight": meant["norm.weight"].view(2, 2)},
        {**meant, "norm.weight": meant["norm.weight"].view(torch.int32)},
    ):
        with pytest.raises(OSError, match=r"its header in x\.safetensors did not read back"):
            readback.read_back(other, file)


def test_large_tensors_are_read_back_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(readback, "CHUNK", 7)
    save(tmp_path, snapshot(1))
    assert same(newest(tmp_path), snapshot(1))
