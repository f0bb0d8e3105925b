"""The fused kernels on a GPU, at the widths of real drafters, against plain torch in fp64."""

import pytest
import torch
from kernels.test_kernels import both, gated, normed

from eagle31_train.kernels import missing

CUDA = torch.device("cuda")
LACK = missing(CUDA) if torch.cuda.is_available() else None
pytestmark = pytest.mark.skipif(LACK is not None, reason=f"no fused kernels: {LACK}")
# By how much of itself a number is off once it is stored; of fp32, after sums of thousands of terms.
STORED = {torch.float32: 1e-5, torch.bfloat16: 2**-8}


def assert_near(ours, truth, dtype):
    assert (ours.double() - truth).norm() < STORED[dtype] * truth.norm()


@pytest.mark.parametrize("dtype", STORED)
@pytest.mark.parametrize("width", [1000, 32000, 163840])
@pytest.mark.parametrize("lk", [0.0, 0.3])
def test_divergence_slope_and_arg_max(dtype, width, lk):
    (value, slope, best), (true_value, true_slope), logits = both(64, 16, width, dtype, "kl", lk, device=CUDA)
    torch.testing.assert_close(value.double(), true_value, rtol=1e-5, atol=1e-5)
    assert_near(slope, true_slope, dtype)
    assert torch.equal(logits.gather(1, best[:, None])[:, 0], logits.amax(-1))


@pytest.mark.parametrize("dtype", STORED)
def test_swiglu_and_its_gradients(dtype):
    for ours, truth in gated((3000, 14336), dtype, device=CUDA):
        assert_near(ours, truth, dtype)


@pytest.mark.parametrize("dtype", STORED)
@pytest.mark.parametrize(("rows", "width"), [(1, 512), (3000, 4096), (9000, 7168)])
def test_norms_and_their_gradients(dtype, rows, width):
    for _, ours, truth in normed((rows, width), 0, dtype, 1e-5, device=CUDA):
        assert_near(ours, truth, dtype)
