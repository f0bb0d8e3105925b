"""The GPU's benchmark without a GPU: the same code at tiny shapes on the CPU, and what it does when things fail."""

import json
import os

import pytest
import torch

from benchmarks import gpu, gpu_report, gpu_step, gpu_worker
from benchmarks.gpu_step import GROUPS, group, search


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


def test_who_runs_out_of_memory_is_named_and_the_others_go_on(monkeypatch, tmp_path):
    full = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")
    right = gpu_step.Trainer.step

    def step(trainer, batch):
        if batch.tokens > 48 or not trainer.drafter.recompute:
            raise full
        return right(trainer, batch)

    monkeypatch.setattr(gpu_step.Trainer, "step", step)
    monkeypatch.setattr(gpu, "Worker", Here)
    results = gpu.run(gpu.options([*SMALL, str(tmp_path / "gpu"), "--cases", "tiny:1x32:1"]))
    assert results["steps"][0] == {"case": "tiny:1x32:1", "variant": "plain", "error": "out of memory"}
    assert results["steps"][1]["seconds"] > 0
    (found,) = results["longest"]
    assert (found["tokens"], found["step"]) == (48, 4)
    table = gpu_report.table(results)
    assert "tiny:1x32:1, plain" in table
    assert "out of memory" in table
    assert "4 more do not fit" in table


def test_a_process_that_dies_is_replaced():
    worker = gpu_worker.Worker()
    try:
        assert "crashed" in worker.do(os._exit, 3)["error"]
        assert worker.do(dict, [("fine", 1)]) == {"fine": 1}
        assert worker.do(int, "x")["error"].startswith("ValueError: invalid literal")
    finally:
        worker.close()


@pytest.mark.parametrize(("room", "found"), [(10, 0), (16, 16), (100, 96), (63, 60), (256, 256), (10**6, 256)])
def test_the_search_finds_the_longest_that_fits(room, found):
    tried = []

    def fits(tokens):
        tried.append(tokens)
        return tokens <= room

    best, step = search(fits, 16, 256)
    assert best == found
    assert len(set(tried)) == len(tried) <= 8
    assert step == 0 or best <= room < best + step


@pytest.mark.parametrize(
    ("kernel", "of"),
    [
        ("nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NNT", "gemm"),
        ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16>", "gemm"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_nt_n_tilesize128x128x64_warpgroupsize1x1x1", "gemm"),
        ("void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<cutlass::bfloat16_t>", "attention"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>", gpu_step.REST),
        ("void at::native::(anonymous namespace)::cunn_SoftMaxForward<4, float>", gpu_step.REST),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>", gpu_step.REST),
        ("triton_red_fused__log_softmax_exp_index_select_sub_0", gpu_step.REST),
        ("void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda>", "copy"),
        ("void at::native::(anonymous namespace)::CatArrayBatchedCopy<c10::BFloat16>", "copy"),
        ("Memcpy HtoD (Pinned -> Device)", "copy"),
        ("void at::native::(anonymous namespace)::indexSelectLargeIndex<c10::BFloat16>", "index"),
        ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor>", "optimizer"),
        ("something_new", "other"),
    ],
)
def test_kernels_are_known_by_their_names(kernel, of):
    assert group(kernel) == of
    assert of in GROUPS
