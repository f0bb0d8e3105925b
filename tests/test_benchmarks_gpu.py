"""The GPU's benchmark without a GPU: the same code at tiny shapes on the CPU, and what it does when things fail."""

import json

import pytest
import torch

from benchmarks import gpu, gpu_report, gpu_worker


class Here:
    """Stands where the worker process stands, without one."""

    def do(self, task, *words):
        return gpu_worker.guarded(task, *words)

    def close(self):
        pass


SMALL = ["--device", "cpu", "--quick", "--repeats", "2", "--first", "32", "--ceiling", "64", "--out"]


@pytest.fixture(scope="module")
def dry_run(tmp_path_factory):
    """A small dry run in this process: its results, and what it wrote."""
    out = tmp_path_factory.mktemp("bench") / "gpu"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(gpu, "Worker", Here)
        results = gpu.run(gpu.options([*SMALL, str(out), "--cases", "tiny:2x32:0.5"]))
    return results, json.loads(out.with_name("gpu.json").read_text())


def test_a_dry_run_measures_steps_kernels_and_lengths(dry_run):
    results, written = dry_run
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
    table = gpu_report.table(results)
    assert "tiny:2x32:0.5, recompute" in table
    assert "longer ones were not tried" in table
