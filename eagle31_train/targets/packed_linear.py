"""Linear layers of a target on a CPU, with weights laid out for oneDNN once. Torch repeats that layout for every
product of more than one row, so that verifying four tokens costs half as much again as decoding one (docs/log.md)."""

from typing import Any

import torch
from torch import Tensor, nn

PACKED_ROWS = 48  # rows that the packed layout is made for; it is as good for one row and for a thousand
MOST_BYTES = 4 * 2**30  # larger weights are not held twice


class PackedLinear(nn.Linear):
    """A linear layer with a second, packed copy of its weight; the weight must not change."""

    def __init__(self, linear: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), PACKED_ROWS)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., inputs] → [..., outputs]."""
        if x.requires_grad or x.dtype != self._packed.dtype:  # the model may have been converted since
            return super().forward(x)
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")


def pack_linears(model: Any) -> None:
    """Pack a model's linear layers in place, if all are on a CPU, oneDNN has their dtype and they are small enough."""
    linears = {name: module for name, module in model.named_modules() if type(module) is nn.Linear}
    if not all(_packable(linear.weight) for linear in linears.values()):
        return
    if sum(linear.weight.nbytes for linear in linears.values()) > MOST_BYTES:
        return
    for name, linear in linears.items():
        model.set_submodule(name, PackedLinear(linear))


def _packable(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32
