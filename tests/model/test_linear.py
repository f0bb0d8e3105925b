"""Products by oneDNN against fp64, with every layout of their operands that training hands them."""

import itertools

import pytest
import torch

from eagle31_train.model.linear import ROWS, linear, product


def random(*size, dtype=torch.float32):
    return torch.randn(*size, generator=torch.Generator().manual_seed(sum(size)), dtype=dtype)


LAYOUTS = {
    "dense": lambda rows, columns: random(rows, columns),
    "turned": lambda rows, columns: random(columns, rows).T,
    "half of the columns": lambda rows, columns: random(rows, 2 * columns)[:, columns:],
    "every second row": lambda rows, columns: random(2 * rows, columns)[::2],
    "one row again and again": lambda rows, columns: random(1, columns).expand(rows, -1),
}


@pytest.mark.parametrize("sizes", [(1, 1, 1), (5, 7, 3), (64, 96, 33)])
def test_a_product_is_that_of_its_operands_whatever_their_layout(sizes):
    n, k, m = sizes
    for a, b in itertools.product(LAYOUTS, LAYOUTS):
        left, right = LAYOUTS[a](n, k), LAYOUTS[b](m, k)
        whole = left.double() @ right.double().T
        assert torch.allclose(product(left, right).double(), whole, rtol=1e-5, atol=1e-5), (a, b)


@pytest.mark.parametrize("shape", [(4 * ROWS + 1, 32), (3, 2 * ROWS - 1, 32), (5 * ROWS, 32), (2, 32)])
def test_rows_filled_up_for_bf16_change_no_value(shape):
    x, weight = random(*shape).requires_grad_(), random(48, 32).requires_grad_()
    direction = random(*shape[:-1], 48)

    def of(layer):
        with torch.autocast("cpu", torch.bfloat16):
            out = layer(x, weight)
        assert out.shape == direction.shape
        return out, *torch.autograd.grad((out * direction).sum(), (x, weight))

    for mine, other in zip(of(linear), of(torch.nn.functional.linear), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-2, atol=1e-2)
