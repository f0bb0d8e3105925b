"""Safetensors files, written and mapped as the store wants it; the library reads what is written here.

The library's own `save_file` writes under a random name and renames: a kill leaves a file that nobody knows to
remove, readable by its owner alone, and a full disk comes as an error that says so only in its text. And it maps a
file page by page, where all of it is wanted at once.
"""

import json
import math
import mmap
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPES = {name: dtype for dtype, name in NAMES.items()}
POPULATE = 22  # MADV_POPULATE_READ of Linux


def save_file(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """Write tensors of the CPU at `path`: the same bytes for the same tensors.

    `metadata`: of the whole file, for its readers; transformers refuses a file without {"format": "pt"}.

    Raises:
        OSError: the disk is full, or another error of the file system.
    """
    # Wide elements first, so that each stands at a multiple of its size, where it can be mapped.
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    entries: dict[str, dict[str, Any]] = {"__metadata__": metadata} if metadata else {}
    end = 0
    for name in order:
        tensor, begin = tensors[name], end
        end += tensor.numel() * tensor.element_size()
        entries[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    with path.open("wb", buffering=0) as file:
        _write_all(file, len(header).to_bytes(8, "little") + header)
        for name in order:
            _write_all(file, tensors[name].contiguous().flatten().view(torch.uint8).numpy())


class FormatError(ValueError):
    """A file is no safetensors file."""


def map_bytes(path: Path, whole: bool) -> Tensor:
    """[bytes] uint8: a file's bytes in memory, copied only when they are used.

    Args:
        path: the file.
        whole: read all of it from the disk at once, and not each page when it is first used.

    Raises:
        FormatError: it is empty.
    """
    with path.open("rb") as file:
        try:
            # A private mapping: nothing done to a tensor of it reaches the file.
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except ValueError:
            raise FormatError("it is empty") from None
    if whole:
        with suppress(OSError):  # a kernel before 5.14 cannot: ten times as slow
            mapped.madvise(POPULATE)
    return torch.frombuffer(mapped, dtype=torch.uint8)


def tensors_in(data: Tensor) -> dict[str, Tensor]:
    """The tensors of a safetensors file, given its bytes.

    Raises:
        FormatError: it is none.
    """
    found = {}
    try:
        base = 8 + int.from_bytes(bytes(data[:8].tolist()), "little")
        for name, entry in json.loads(bytes(data[8:base].numpy())).items():
            if name != "__metadata__":
                dtype, (begin, end) = DTYPES[entry["dtype"]], entry["data_offsets"]
                size = math.prod(entry["shape"]) * dtype.itemsize
                if not 0 <= begin <= end <= len(data) - base or end - begin != size:
                    raise ValueError("a tensor lies outside of it")
                found[name] = data[base + begin : base + end].view(dtype).view(entry["shape"])
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError, OverflowError) as error:
        raise FormatError(f"it is no safetensors file ({error})") from None
    return found


def _write_all(file: Any, data: Any) -> None:
    rest = memoryview(data)
    while len(rest):  # a single write takes 2 GiB at most
        rest = rest[file.write(rest) :]
