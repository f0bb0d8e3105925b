"""Drafters with int8 weights, in the format of the library compressed-tensors, W8A8: the one of 8 bits that vLLM 0.32
serves on CPUs and on GPUs (of fp8 and of int8 weights beside 16-bit inputs it has no products on CPUs).

A matrix W [out, in] is kept as int8 numbers q [out, in] and a scale s [out, 1] for each row, W ≈ q s. vLLM rounds the
input of each product to int8 as well, one scale for each token (`model/linear.py` does the same). Norms and embeddings
stay as they are.

The scales that are written have bfloat16's 8 bits, so that 127 s is exact: what was rounded once is not changed by
rounding it again.
"""

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from eagle31_train.common.errors import UserError
from eagle31_train.model.linear import Linear

SCALE = ".weight_scale"
LARGEST = 127
_WEIGHTS = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True, "dynamic": False}
_INPUTS = {"num_bits": 8, "type": "int", "strategy": "token", "symmetric": True, "dynamic": True}
QUANTIZED = "quantization_config"  # of config.json
# lm_head is no Linear in vLLM, and is named.
_GROUP = {"targets": ["Linear", "re:.*lm_head"], "weights": _WEIGHTS, "input_activations": _INPUTS}
QUANTIZATION = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "config_groups": {"group_0": _GROUP},
    "ignore": [],
}


def is_int8(quantization: Any) -> bool:
    """Whether a config.json's quantization_config is of this kind, and says nothing that changes other numbers."""
    try:
        (group,) = quantization["config_groups"].values()
        weights, inputs = group["weights"], group["input_activations"]
        rounded = {name: weights.get(name) for name in _WEIGHTS} | {"dynamic": bool(weights.get("dynamic"))}
        entering = {name: inputs.get(name) for name in _INPUTS}
        kind = {name: quantization.get(name) for name in ("quant_method", "format")}
        more = [quantization.get(name) for name in ("transform_config", "kv_cache_scheme")]
        more.append(group.get("output_activations"))
    except (AttributeError, KeyError, TypeError, ValueError):  # it has other fields, or of other types
        return False
    return QUANTIZATION | kind == QUANTIZATION and (rounded, entering) == (_WEIGHTS, _INPUTS) and not any(more)


def quantized(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A drafter's tensors as the checkpoint has them: q [out, in] int8, to the nearest and to even, and s [out, 1]
    float32, one where a row is zero, for every matrix but an embedding."""
    stored = dict(tensors)
    for name, tensor in tensors.items():
        if name.endswith(".weight") and tensor.dim() == 2 and name != "embed_tokens.weight":
            wide = tensor.float()
            scale = (wide.abs().amax(1, keepdim=True) / LARGEST).bfloat16().float()
            scale[scale == 0] = 1.0
            stored[name] = (wide / scale).round().clamp(-LARGEST, LARGEST).to(torch.int8)
            stored[name.removesuffix(".weight") + SCALE] = scale
    return stored


def dequantized(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], frozenset[str]]:
    """The tensors of a checkpoint, with q s in float32 for every q; and the names of these. UserError for int8 numbers
    without their scales, or scales without numbers."""
    scales = {name.removesuffix(SCALE) + ".weight" for name in tensors if name.endswith(SCALE)}
    numbers = {name for name, tensor in tensors.items() if tensor.dtype == torch.int8}
    for name in scales ^ numbers:
        raise UserError(f"{name} has int8 numbers or their scales, and not both: get it again")
    plain = {name: tensor for name, tensor in tensors.items() if not name.endswith(SCALE)}
    for name in numbers:
        tensor, scale = tensors[name], tensors[name.removesuffix(".weight") + SCALE]
        if tensor.dim() != 2 or scale.shape != (len(tensor), 1) or not scale.is_floating_point():
            raise UserError(f"{name} has scales {list(scale.shape)} {scale.dtype}, not one a row: get it again")
        plain[name] = tensor.float() * scale.float()
    return plain, frozenset(numbers)


def serve_rounded(drafter: nn.Module, tensors: Mapping[str, Tensor], names: Collection[str]) -> None:
    """Make a drafter compute as vLLM does with int8 weights: numbers and scales are multiplied in float32 and the sum
    is rounded to the drafter's dtype, never q s, of which bfloat16 would drop most. tensors: its weights, q s in
    float32; names: of those that are int8."""
    for name in names:
        layer = drafter.get_submodule(name.removesuffix(".weight"))
        assert isinstance(layer, Linear)
        layer.weight.data = tensors[name].to(layer.weight.device)
        layer.int8_inputs = True
