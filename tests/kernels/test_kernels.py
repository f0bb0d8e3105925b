"""The fused kernels in Triton's interpreter, on the CPU, against plain torch in fp64; and compiled for GPUs."""

import importlib.util
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from unittest.mock import MagicMock, call

import pytest
import torch
from conftest import kept_mask, make_document, make_mla_shape, make_objective, make_shape
from hypothesis import given, settings
from hypothesis import strategies as st
from model.test_attention import PROBLEM, assert_within_16_bits, in_fp64, make, problems, run
from planting import instead_of
from torch.nn import functional as F

from eagle31_train.kernels import divergence as fused
from eagle31_train.kernels import own_keys, swiglu, trial
from eagle31_train.kernels import rms_norm as fused_norm
from eagle31_train.kernels.launching import launch
from eagle31_train.model import attention, loss
from eagle31_train.model.attention import unrolled_attention
from eagle31_train.model.batch import build_batch
from eagle31_train.model.layer import silu_times
from eagle31_train.model.norm import rms_norm

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are interpreted on the CPU only: see tests/gpu"),
    pytest.mark.filterwarnings("ignore:invalid value encountered"),  # NumPy's, of lanes past the end of a row
]
ROOT = Path(__file__).resolve().parents[2]
# By how much of itself a number is off once it is stored; of fp32, after sums of some ten terms. The interpreter cuts
# bf16's digits off, where a GPU rounds to the nearest.
STORED = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-11}
DTYPES = st.sampled_from(list(STORED))


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Rows of several blocks, at widths that an interpreter can do."""
    monkeypatch.setattr(fused, "BLOCK", 8)
    monkeypatch.setattr(fused_norm, "PROGRAMS", 3)
    monkeypatch.setattr(fused_norm, "WARPS", 3)
    monkeypatch.setattr(swiglu, "BLOCK", 16)


def both(pairs, positions, width, dtype, kind, lk, seed=0, device="cpu"):
    """(value, slope, arg-max) of the kernel, and in fp64 of the same logits; and the latter."""
    generator = torch.Generator(device).manual_seed(seed)
    random = partial(torch.randn, generator=generator, device=device)
    logits, teacher = ((random(n, width) * 3).to(dtype) for n in (pairs, positions))
    supervised = torch.randint(0, positions, (pairs,), generator=generator, device=device).sort().values
    weights = torch.rand(pairs, generator=generator, device=device) * 1e-4
    low = logits.clone()
    value, best = fused.fused_divergence(
        low, teacher, *fused.teacher_sums(teacher), supervised, weights, kind == "kl", lk
    )
    log_p = teacher.double().log_softmax(-1)
    truth = loss.divergence(logits.double(), log_p.exp(), (log_p.exp() * log_p).sum(-1), supervised, kind, lk)
    return (value, low, best), (truth[0], truth[1] * weights[:, None]), logits


@settings(derandomize=True)
@given(
    pairs=st.integers(0, 3),
    width=st.integers(1, 20),
    dtype=DTYPES,
    kind=st.sampled_from(["kl", "ce"]),
    lk=st.sampled_from([0.0, 0.3, 1.0]),
    seed=st.integers(0, 99),
)
def test_divergence_slope_and_arg_max_are_those_of_fp64(pairs, width, dtype, kind, lk, seed):
    (value, slope, best), (true_value, true_slope), logits = both(pairs, 3, width, dtype, kind, lk, seed)
    assert (value.dtype, slope.dtype, best.dtype) == (torch.float32, dtype, torch.int64)
    torch.testing.assert_close(value.double(), true_value, rtol=1e-5, atol=3e-6)
    # Each element to the rounding of what is stored, and of the two shares whose difference it is; in fp16 such small
    # numbers have fewer digits.
    near = STORED[dtype] * true_slope.abs() + 1e-10 + 2**-25 * (dtype == torch.float16)
    if lk != 1.0:
        assert ((slope.double() - true_slope).abs() <= near).all()
    else:  # divided by alpha, which may be small
        torch.testing.assert_close(slope.double(), true_slope, rtol=2 * STORED[dtype], atol=3e-8)
    assert torch.equal(best, logits.double().argmax(-1))


def test_of_equal_logits_the_first_is_the_arg_max_and_nan_stays_nan():
    """With NaN the step's loss is not finite, and the step is skipped."""
    logits = torch.tensor([[0.0] * 9 + [5.0] + [1.0] * 7 + [5.0] * 4, [2.0] * 21, [2.0] * 17 + [torch.nan] + [2.0] * 3])
    teacher, supervised, weights = torch.zeros(1, 21), torch.tensor([0, 0, 0]), torch.ones(3)
    value, best = fused.fused_divergence(logits, teacher, *fused.teacher_sums(teacher), supervised, weights, True, 0.0)
    assert best[:2].tolist() == [9, 0]
    assert 0 <= best[2] < 21
    assert value.isfinite().tolist() == logits.isfinite().all(-1).tolist() == [True, True, False]


@st.composite
def rows(draw):
    """A shape, and by how many values its rows lie further apart than they are wide."""
    leading = draw(st.sampled_from([(0,), (1,), (7,), (2, 3)]))
    return (*leading, draw(st.sampled_from([1, 5, 16, 33]))), draw(st.sampled_from([0, 3])) * (len(leading) == 1)


def normed(shape, apart, dtype, eps, seed=0, wants=True, device="cpu"):
    """(name, by the kernel, in fp64) of a norm and its gradients."""
    *leading, width = shape
    generator = torch.Generator(device).manual_seed(seed)
    whole = (torch.randn(*leading, width + apart, generator=generator, device=device) * 3).to(dtype)
    dout = torch.randn(*leading, width, generator=generator, device=device).to(dtype)
    weight = torch.rand(width, generator=generator, device=device) + 0.5
    results = []
    for exact in (False, True):
        x = (whole.double() if exact else whole)[..., :width].detach().requires_grad_(wants)
        scale = (weight.double() if exact else weight).clone().requires_grad_()
        out = rms_norm(x, scale, eps, fused=not exact)
        results.append([out, *torch.autograd.grad(out, [x, scale][1 - wants :], dout.to(out.dtype))])
    return zip(("out", *["dx"] * wants, "dweight"), *results, strict=True)


@settings(derandomize=True)
@given(shape=rows(), dtype=DTYPES, eps=st.sampled_from([1e-6, 1e-2]), seed=st.integers(0, 99), wants=st.booleans())
def test_norms_and_their_gradients_are_those_of_fp64(shape, dtype, eps, seed, wants):
    for name, ours, truth in normed(*shape, dtype, eps, seed, wants):
        near = 3e-6 if name == "dweight" else max(STORED[dtype], 3e-6)  # summed in fp32, and kept so
        torch.testing.assert_close(ours.double(), truth, rtol=near, atol=near * max(1.0, shape[0][0] ** 0.5))


def gated(shape, dtype, seed=0, device="cpu"):
    """SwiGLU and its gradients, by the kernel and in fp64."""
    generator = torch.Generator(device).manual_seed(seed)
    gate, up, dout = ((torch.randn(shape, generator=generator, device=device) * 4).to(dtype) for _ in range(3))
    results = []
    for function, exact in ((partial(silu_times, fused=True), False), (lambda g, u: F.silu(g) * u, True)):
        leaves = [(x.double() if exact else x).clone().requires_grad_() for x in (gate, up)]
        out = function(*leaves)
        results.append([out, *torch.autograd.grad(out, leaves, dout.to(out.dtype))])
    return zip(*results, strict=True)


@settings(derandomize=True)
@given(shape=st.sampled_from([(0, 4), (1, 1), (3, 50), (2, 3, 7)]), dtype=DTYPES, seed=st.integers(0, 99))
def test_swiglu_and_its_gradients_are_those_of_fp64(shape, dtype, seed):
    for ours, truth in gated(shape, dtype, seed):
        # silu's slope passes through zero as a difference of numbers of order one
        torch.testing.assert_close(ours.double(), truth, rtol=STORED[dtype], atol=1e-5)


def merged(problem, dtype):
    """What the kernels make of an attention problem, and a dense softmax in fp64 of the same numbers."""
    tensors, layout, direction = make(problem, dtype)
    ours = run(partial(unrolled_attention, fused=True), tensors, layout, direction)
    return ours, in_fp64(tensors, layout, direction)


@settings(derandomize=True, max_examples=8)
@given(problem=problems())
def test_own_keys_merge_into_one_dense_softmax(problem):
    for ours, truth in zip(*merged(problem, torch.float32), strict=True):
        torch.testing.assert_close(ours.double(), truth, rtol=1e-4, atol=1e-4)


def test_own_keys_in_bf16_stay_within_its_rounding():
    assert_within_16_bits(*merged(PROBLEM, torch.bfloat16))


def test_torch_knows_the_operators():
    """Their schema, and what they do to fake tensors."""
    x, y, dout, weight = *torch.randn(3, 4, 9), torch.rand(9)
    sizes = ((3, 4, 6), (3, 4, 5), (3, 4), (2, 3, 2, 6), (2, 3, 2, 5))
    q, out, lse, keys, values = (torch.randn(size) for size in sizes)
    teacher, supervised = torch.randn(2, 9), torch.tensor([0, 1, 1])
    pairs = (torch.randn(3, 9), teacher, torch.rand(2), torch.rand(2), supervised, torch.rand(3), True, 0.3)
    for operator, arguments in [
        (fused_norm.norm_rows, (x, weight, 1e-5)),
        (fused_norm.norm_rows_backward, (dout, x, weight, torch.rand(4), True)),
        (swiglu.silu_times, (x, y)),
        (swiglu.silu_times_backward, (dout, x, y)),
        (own_keys.merge_own_keys, (q, out, lse, keys, values, 0.4)),
        (own_keys.merge_own_keys_backward, (out, q, out, lse, keys, values, q, 0.4)),
        (fused.teacher_sums, (teacher,)),
        (fused.fused_divergence, pairs),
    ]:
        torch.library.opcheck(operator, arguments)


def test_a_kernel_is_launched_on_the_device_of_its_first_tensor(monkeypatch):
    """It need not be the current one, where Triton itself would launch."""
    cuda = MagicMock()
    monkeypatch.setattr(torch.cuda, "device_of", cuda.device_of)
    for grid in ((2, 3), (0, 3)):  # CUDA refuses an empty one
        launch({(2, 3): cuda.kernel}, grid, "tensor", 7, BLOCK=8)
    within, launched = call.device_of("tensor"), call.kernel("tensor", 7, BLOCK=8)
    assert cuda.mock_calls == [within, within.__enter__(), launched, within.__exit__(None, None, None)]


def test_what_keeps_triton_from_launching_is_said_in_a_line(monkeypatch):
    assert trial(torch.device("cpu")) is None  # interpreted

    def without_compiler(*_):
        raise RuntimeError("Failed to find C compiler.\nPlease specify one")

    monkeypatch.setattr(swiglu, "silu_times", without_compiler)
    assert trial(torch.device("cpu")) == "Triton cannot launch a kernel: Failed to find C compiler."


def losses_and_gradients(objective, batch):
    objective.zero_grad()
    total, measured = objective(batch, torch.full((3,), 0.1))
    total.backward()
    return [total.detach(), measured, *(p.grad.clone() for p in objective.drafter.parameters())]


@pytest.mark.parametrize("shape", [make_shape(), make_mla_shape(), make_shape(parallel=True, ptd_token_id=49)])
def test_a_fused_objective_is_the_plain_one(shape):
    objective, generator = make_objective(shape, torch.float32), torch.Generator().manual_seed(1)
    objective.lk = 0.3
    documents = [make_document(shape, length, generator).to(torch.float32) for length in (6, 1, 8)]
    batch = build_batch(documents, 3, kept_mask(objective))
    plain = losses_and_gradients(objective, batch)
    objective.fuse_kernels()
    torch.testing.assert_close(losses_and_gradients(objective, batch), plain, rtol=1e-4, atol=1e-5)


def test_planted_mistakes_are_found():
    def other_sums(lse, negentropy):
        return instead_of(fused, "teacher_sums")(lambda right, x: tuple(map(torch.add, right(x), (lse, negentropy))))

    for plant in (other_sums(1e-3, 0), other_sums(0, 1e-3)):
        with pytest.MonkeyPatch.context() as patch:
            plant(patch)
            (value, _, _), (truth, _), _ = both(5, 3, 20, torch.float32, "kl", 0.0)
        assert (value.double() - truth).abs().max() > 3e-4

    plant = instead_of(attention, "merge_own_keys")(lambda right, q, out, lse, *rest: right(q, out, lse + 1e-2, *rest))
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        ours, truth = merged(PROBLEM, torch.float32)
    assert (ours[0].double() - truth[0]).abs().max() > 1e-3


def test_the_kernels_compile_for_gpus_that_are_not_here_and_hardly_spill(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    words = [sys.executable, "-m", "benchmarks.kernel_resources", "--architectures", "90"]
    words += ["--out", str(tmp_path / "found")]
    done = subprocess.run(words, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())["kernels"]
    assert len(found) == 15
    for name, made in found.items():
        assert made["90"]["registers"] <= 128, name
        assert made["90"]["stack"] <= 32, name
