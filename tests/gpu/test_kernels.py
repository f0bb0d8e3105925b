"""The fused kernels on a GPU, at the widths of real drafters, against plain torch in fp64."""

from functools import partial

import pytest
import torch
from torch.nn import functional as F

from eagle31_train.kernels import missing
from eagle31_train.kernels.divergence import fused_divergence, teacher_sums
from eagle31_train.model import loss
from eagle31_train.model.layer import silu_times
from eagle31_train.model.norm import rms_norm

CUDA = torch.device("cuda")
LACK = missing(CUDA) if torch.cuda.is_available() else None
pytestmark = pytest.mark.skipif(LACK is not None, reason=f"no fused kernels: {LACK}")
# By how much of itself a number is off once it is stored; of fp32, after sums of thousands of terms.
STORED = {torch.float32: 1e-5, torch.bfloat16: 2**-8}


@pytest.mark.parametrize("dtype", STORED)
@pytest.mark.parametrize("width", [1000, 32000, 163840])
@pytest.mark.parametrize("lk", [0.0, 0.3])
def test_divergence_slope_and_arg_max(dtype, width, lk):
    torch.manual_seed(0)
    logits, teacher = ((torch.randn(n, width, device=CUDA) * 3).to(dtype) for n in (64, 16))
    supervised = torch.arange(64, device=CUDA) // 4
    weights = torch.rand(64, device=CUDA) * 1e-4
    low = logits.clone()
    value, best = fused_divergence(low, teacher, *teacher_sums(teacher), supervised, weights, True, lk)
    log_p = teacher.double().log_softmax(-1)
    negentropy = (log_p.exp() * log_p).sum(-1)
    truth, slope = loss.divergence(logits.double(), log_p.exp(), negentropy, supervised, "kl", lk)
    torch.testing.assert_close(value.double(), truth, rtol=1e-5, atol=1e-5)
    slope = slope * weights[:, None]
    assert (low.double() - slope).norm() < STORED[dtype] * slope.norm()
    assert torch.equal(logits.gather(1, best[:, None])[:, 0], logits.amax(-1))


@pytest.mark.parametrize("dtype", STORED)
def test_swiglu_and_its_gradients(dtype):
    torch.manual_seed(0)
    gate, up, dout = ((torch.randn(3000, 14336, device=CUDA)).to(dtype) for _ in range(3))
    results = []
    for function, exact in ((partial(silu_times, fused=True), False), (lambda g, u: F.silu(g) * u, True)):
        leaves = [(x.double() if exact else x).clone().requires_grad_() for x in (gate, up)]
        out = function(*leaves)
        results.append([out, *torch.autograd.grad(out, leaves, dout.to(out.dtype))])
    for ours, truth in zip(*results, strict=True):
        assert (ours.double() - truth).norm() < STORED[dtype] * truth.norm()


@pytest.mark.parametrize("dtype", STORED)
@pytest.mark.parametrize(("rows", "width"), [(1, 512), (3000, 4096), (9000, 7168)])
def test_norms_and_their_gradients(dtype, rows, width):
    torch.manual_seed(0)
    x, dout = ((torch.randn(rows, width, device=CUDA)).to(dtype) for _ in range(2))
    weight = torch.rand(width, device=CUDA) + 0.5
    results = []
    for exact in (False, True):
        leaves = [(t.double() if exact else t).clone().requires_grad_() for t in (x, weight)]
        out = rms_norm(*leaves, 1e-5, fused=not exact)
        results.append([out, *torch.autograd.grad(out, leaves, dout.to(out.dtype))])
    for ours, truth in zip(*results, strict=True):
        assert (ours.double() - truth).norm() < STORED[dtype] * truth.norm()
