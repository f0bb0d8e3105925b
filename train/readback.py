"""Files that count as written only when the disk gives back what was meant.

A write that returns without an error has reached the machine's memory; what is read right after it comes from there
as well. So each file is forced to the disk, forgotten by the machine where it can be asked to, and read again.
"""

import errno
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
import xxhash
from torch import Tensor

from eagle31_train import artifacts
from eagle31_train.store.sealed import digest
from eagle31_train.store.tensors import NAMES, save_file

CHUNK = 1 << 22


def write_bytes(data: bytes, path: Path) -> dict[str, Any]:
    """Write a small file; returns its size and checksum, {"bytes", "checksum"}.

    Raises:
        OSError: the disk is full, fails, or gives back anything else.
    """
    path.write_bytes(data)
    with _from_disk(path) as file:
        if file.read() != data:
            raise _unlike(path, "its text")
    return {"bytes": len(data), "checksum": digest(data)}


def write_tensors(tensors: Mapping[str, Tensor], path: Path) -> dict[str, Any]:
    """The same for tensors of the CPU, as safetensors; takes no memory worth mentioning."""
    save_file(dict(tensors), path)
    return read_back(tensors, path)


def read_back(tensors: Mapping[str, Tensor], path: Path) -> dict[str, Any]:
    """Compare a written safetensors file, bit by bit, with the tensors meant; returns its size and checksum.

    Raises:
        OSError: it holds anything else, or cannot be read.
    """
    hashed, buffer = xxhash.xxh3_128(), np.empty(CHUNK, np.uint8)  # as `sealed.checksum` does
    with _from_disk(path) as file:
        length = file.read(8)
        header = file.read(min(int.from_bytes(length, "little"), os.fstat(file.fileno()).st_size))
        hashed.update(length + header)
        for name in _listed(header, tensors, path):
            wanted = tensors[name].contiguous().flatten().view(torch.uint8).numpy()
            for begin in range(0, len(wanted), CHUNK):
                piece = wanted[begin : begin + CHUNK]
                found = buffer[: file.readinto(buffer[: len(piece)])]  # type: ignore[attr-defined]
                if not np.array_equal(found, piece):
                    raise _unlike(path, name)
                hashed.update(found.data)
        if file.read(1):
            raise _unlike(path, "its end")
        return {"bytes": file.tell(), "checksum": hashed.hexdigest()}


def _listed(header: bytes, tensors: Mapping[str, Tensor], path: Path) -> list[str]:
    """The tensors in the order of the file, where its header says of each what is right."""
    with suppress(ValueError):
        entries = json.loads(header)
        right: dict[str, dict[str, Any]] = {}
        end = 0
        for name in entries if isinstance(entries, dict) and entries.keys() == tensors.keys() else ():
            tensor, begin = tensors[name], end
            end += tensor.numel() * tensor.element_size()
            right[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
        if entries == right:
            return list(right)
    raise _unlike(path, "its header")


@contextmanager
def _from_disk(path: Path) -> Iterator[BinaryIO]:
    """Open a file that has just been written, so that it is read from the disk and not from memory."""
    artifacts.fsync_path(path)
    with path.open("rb") as file:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        yield file


def _unlike(path: Path, part: str) -> OSError:
    return OSError(errno.EIO, f"{part} in {path.name} did not read back as it was written: check the disk")
