"""The devices that a plan is for: those of plan.*, else this machine's GPUs, else eight H100."""

import re
from dataclasses import dataclass

import torch

from eagle31_train.config import PlanConfig

GIB = 2**30
# By the makers' data sheets: TFLOP/s of dense bf16 products, GB/s of memory. The first key in a name, as words, counts.
SHEETS = {
    "GB200": (2500.0, 8000.0),
    "B200": (2250.0, 8000.0),
    "GH200": (989.0, 4000.0),
    "H200 NVL": (835.0, 4800.0),
    "H200": (989.0, 4800.0),
    "H100 NVL": (835.0, 3900.0),
    "H100 PCIe": (756.0, 2000.0),
    "H100": (989.0, 3350.0),
    "A100-SXM4-80GB": (312.0, 2039.0),
    "A100 80GB": (312.0, 1935.0),
    "A100": (312.0, 1555.0),
    "A10": (125.0, 600.0),
    "A10G": (70.0, 600.0),
    "L40S": (362.0, 864.0),
    "L4": (121.0, 300.0),
    "RTX 4090": (165.0, 1008.0),
}


@dataclass(frozen=True)
class Devices:
    """Devices of one kind. gib: memory of one, in GiB; tflops: bf16 TFLOP/s of one, without sparsity; bandwidth: of its
    memory, in GB/s; origin: whose numbers hold where none are given."""

    count: int
    gib: float
    tflops: float
    bandwidth: float
    origin: str

    def __str__(self) -> str:
        each = f"{self.gib:.4g} GiB, {self.tflops:,g} TFLOP/s and {self.bandwidth:,g} GB/s" + " each" * (self.count > 1)
        return f"{self.count} device{'s' * (self.count != 1)} of {each}: {self.origin}, unless plan.* says otherwise"


def sheet(name: str) -> tuple[float, float] | None:
    """Return the TFLOP/s and GB/s of a GPU as torch names it, None for one that is not listed, or a part of one."""
    if " MIG " in name:
        return None
    return next((known for key, known in SHEETS.items() if re.search(rf"\b{key}\b", name)), None)  # an L40 is no L4


def devices_to_plan(given: PlanConfig) -> Devices:
    """Complete the numbers that are given. A GPU that is not listed counts as fast as an H100, and `origin` says so."""
    here = torch.cuda.device_count() if torch.cuda.is_available() else 0
    count, gib, rates, origin = 8, 80.0, SHEETS["H100"], "those of an H100 SXM"
    if here:
        gpus = [torch.cuda.get_device_properties(index) for index in range(here)]
        count, gib, origin = here, min(gpu.total_memory for gpu in gpus) / GIB, f"this machine's {gpus[0].name}"
        if known := sheet(gpus[0].name):
            rates = known
        else:
            origin += " with the speed of an H100 SXM, as its own is not listed"
    return Devices(
        given.devices or count,
        given.device_gib or gib,
        given.peak_tflops or rates[0],
        given.bandwidth_gbs or rates[1],
        origin,
    )
