"""A writer of safetensors files for the store; the safetensors library reads them.

The library's own `save_file` writes under a random name and renames. A kill then leaves a file that nobody knows to
remove, and a full disk raises an error that says so only in its text.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from eagle31_train.store.codec import all_finite

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


def save_file(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """Write CPU tensors to `path`: the same bytes for the same tensors. OSError if the disk is full, for example.

    `metadata` describes the whole file; transformers refuses a file without {"format": "pt"}."""
    # Wide elements first, so that each is aligned to its size, and can be mapped.
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
            _write_all(file, _bytes(tensors[name]))


def checksum(tensors: Iterable[Tensor]) -> str:
    """Return the XXH3-64 of the bytes of CPU tensors, as hex."""
    digest = xxhash.xxh3_64()
    for tensor in tensors:
        digest.update(_bytes(tensor).data)
    return str(digest.hexdigest())


def _bytes(tensor: Tensor) -> NDArray[np.uint8]:
    return tensor.contiguous().flatten().view(torch.uint8).numpy()


def _write_all(file: Any, data: Any) -> None:
    rest = memoryview(data)
    while len(rest):  # a single write takes 2 GiB at most
        rest = rest[file.write(rest) :]


def wrong_shape(weights: Mapping[str, Tensor], vocab_size: int, hidden_size: int) -> str | None:
    """Describe the first of the target's weights that is missing or has a wrong type or size; None if there is none.

    Without lm_head, the embedding takes its place. With one, the embedding may have padding rows."""
    sizes = {"embed_tokens": (-1, hidden_size), "norm": (hidden_size,), "lm_head": (vocab_size, hidden_size)}
    if "lm_head" not in weights:
        sizes["embed_tokens"] = sizes.pop("lm_head")
    for name, size in sizes.items():
        weight = weights.get(name)
        if weight is None or not weight.is_floating_point():
            return f"lacks the weight {name}" if weight is None else f"holds {name} as {weight.dtype}"
        shape = list(weight.shape)
        if len(shape) != len(size) or any(n not in (-1, there) for n, there in zip(size, shape, strict=True)):
            return f"holds {name} {shape}, for {vocab_size} tokens of {hidden_size} values"
    return None


def first_not_finite(tensors: Mapping[str, Tensor]) -> str | None:
    """Return the name of a tensor that holds NaN or an infinity, or None.

    Embedding rows beyond lm_head's are padding that nobody reads, and are not checked."""
    if {"embed_tokens", "lm_head"} <= tensors.keys():
        tensors = {**tensors, "embed_tokens": tensors["embed_tokens"][: len(tensors["lm_head"])]}
    floats = ((name, tensor) for name, tensor in tensors.items() if tensor.is_floating_point())
    return next((name for name, tensor in floats if not all_finite(tensor)), None)
