"""What a plan assumes of the devices: what is given, else what this machine has."""

from types import SimpleNamespace

import pytest
import torch

from eagle31_train.config import PlanConfig
from eagle31_train.planning.devices import SHEETS, Devices, devices_to_plan, sheet


@pytest.fixture
def gpus(monkeypatch):
    """A machine with two GPUs, the second of which has 1 GiB less."""

    def of(name):
        properties = [SimpleNamespace(name=name, total_memory=gib * 2**30) for gib in (40, 39)]
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        monkeypatch.setattr(torch.cuda, "get_device_properties", properties.__getitem__)

    return of


def test_a_machine_plans_for_its_own_gpus_unless_others_are_given(gpus):
    gpus("NVIDIA A100-SXM4-40GB")
    assert devices_to_plan(PlanConfig()) == Devices(2, 39.0, 312.0, 1555.0, "this machine's NVIDIA A100-SXM4-40GB")
    given = devices_to_plan(PlanConfig(devices=16, device_gib=1024, peak_tflops=900, bandwidth_gbs=4800))
    assert (given.count, given.gib, given.tflops, given.bandwidth) == (16, 1024, 900, 4800)
    assert str(given).startswith("16 devices of 1024 GiB, 900 TFLOP/s and 4,800 GB/s each: ")
    one = str(devices_to_plan(PlanConfig(devices=1)))
    assert one.startswith("1 device of 39 GiB, 312 TFLOP/s and 1,555 GB/s: this machine's ")


def test_a_gpu_that_is_not_listed_counts_as_an_h100_and_the_plan_says_so(gpus):
    gpus("Chip of 2030")
    planned = devices_to_plan(PlanConfig())
    assert (planned.count, planned.gib, planned.tflops, planned.bandwidth) == (2, 39.0, 989.0, 3350.0)
    assert "Chip of 2030 with the speed of an H100 SXM" in str(planned)


# What torch calls a GPU → under which name it is listed.
NAMES = {
    f"NVIDIA {name}": name for name in ("A10", "A10G", "B200", "GB200", "H100 NVL", "H100 PCIe", "H200", "H200 NVL")
}
NAMES |= {f"NVIDIA {name}": name for name in ("L4", "L40S", "A100-SXM4-80GB")}
NAMES |= {"NVIDIA A100 80GB PCIe": "A100 80GB", "NVIDIA GH200 480GB": "GH200", "NVIDIA H100 80GB HBM3": "H100"}
NAMES |= {"NVIDIA GeForce RTX 4090": "RTX 4090"}
NAMES |= dict.fromkeys(("NVIDIA L40", "NVIDIA RTX A1000", "NVIDIA H200 MIG 1g.18gb"))


@pytest.mark.parametrize("name", NAMES)
def test_no_device_counts_as_another_nor_a_part_of_one_as_the_whole(name):
    assert sheet(name) == (NAMES[name] and SHEETS[NAMES[name]])
