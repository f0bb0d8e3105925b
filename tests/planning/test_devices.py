"""What a plan assumes of the devices: what is given, else what this machine has."""

from types import SimpleNamespace

import pytest
import torch

from eagle31_train.config import PlanConfig
from eagle31_train.planning.devices import Devices, devices_to_plan, sheet


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


@pytest.mark.parametrize(
    ("name", "tflops", "bandwidth"),
    [
        ("NVIDIA A10", 125, 600),
        ("NVIDIA A10G", 70, 600),
        ("NVIDIA GB200", 2500, 8000),
        ("NVIDIA A100 80GB PCIe", 312, 1935),
        ("NVIDIA A100-SXM4-80GB", 312, 2039),
        ("NVIDIA B200", 2250, 8000),
        ("NVIDIA GeForce RTX 4090", 165, 1008),
        ("NVIDIA GH200 480GB", 989, 4000),
        ("NVIDIA H100 80GB HBM3", 989, 3350),
        ("NVIDIA H100 NVL", 835, 3900),
        ("NVIDIA H100 PCIe", 756, 2000),
        ("NVIDIA H200", 989, 4800),
        ("NVIDIA H200 NVL", 835, 4800),
        ("NVIDIA L4", 121, 300),
        ("NVIDIA L40S", 362, 864),
    ],
)
def test_devices_are_found_under_the_names_that_torch_gives_them(name, tflops, bandwidth):
    assert sheet(name) == (tflops, bandwidth)


@pytest.mark.parametrize("name", ["NVIDIA L40", "NVIDIA RTX A1000", "NVIDIA H200 MIG 1g.18gb"])
def test_other_devices_and_parts_of_one_do_not_count_as_a_listed_one(name):
    assert sheet(name) is None
