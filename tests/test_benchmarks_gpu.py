"""The GPU's benchmark without a GPU: the same code at tiny shapes on the CPU, and what it does when things fail."""

import json

import pytest
import torch

from benchmarks import gpu

SMALL = ["--device", "cpu", "--quick", "--repeats", "2", "--first", "32", "--ceiling", "64", "--out"]


def test_a_dry_run_measures_steps_kernels_and_lengths(tmp_path):
    out = tmp_path / "gpu"
    results = gpu.run(gpu.options([*SMALL, str(out), "--cases", "tiny:2x32:0.5"]))
    written = json.loads(out.with_name("gpu.json").read_text())
    plain, recomputed = results["steps"]
    assert plain["case"] == "tiny:2x32:0.5"
    assert (plain["tokens"], plain["assistant_tokens"]) == (64, 32)
    assert len(plain["all_seconds"]) == 2
    assert plain["losses"][-1] < plain["losses"][0]  # the steps learn, with the optimizer
    torch.testing.assert_close(plain["losses"], recomputed["losses"], rtol=1e-3, atol=1e-3)
    assert plain["of_measured"] == pytest.approx(plain["flops_per_second"] / results["device"]["measured_rate"])
    assert plain["kernels"]["groups"]["gemm"] > 0
    assert sum(plain["kernels"]["groups"].values()) == pytest.approx(1)
    assert [found["tokens"] for found in results["longest"]] == [64]
    assert written == results
    table = gpu.table(results)
    assert "tiny:2x32:0.5, plain+recompute" in table
    assert "longer ones were not tried" in table
