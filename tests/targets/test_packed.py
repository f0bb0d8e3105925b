"""Packed linear layers of a target on a CPU."""

import pytest
import torch
from pipeline import HIDDEN, tiny_llama
from torch import nn

from eagle31_train.targets import packed_linear
from eagle31_train.targets.packed_linear import PackedLinear, pack_linears
from eagle31_train.targets.readout import readout_of


@pytest.mark.parametrize("rows", [(1,), (4,), (2, 3), (0,), (1500,)])
@pytest.mark.parametrize("bias", [False, True])
def test_a_packed_layer_computes_what_a_linear_one_does(rows, bias):
    linear = nn.Linear(48, 80, bias=bias).requires_grad_(False)
    x = torch.randn(*rows, 48)
    exact = linear.double()(x.double())
    answer = PackedLinear(linear.float())(x)
    assert answer.shape == exact.shape
    torch.testing.assert_close(answer.double(), exact, rtol=1e-5, atol=1e-6)


def test_all_linear_layers_are_packed_and_weights_stay_shared_but_of_other_dtypes_and_large_models(monkeypatch):
    model = nn.Sequential(nn.Embedding(32, 16), nn.Linear(16, 16), nn.Linear(16, 32, bias=False)).requires_grad_(False)
    model[2].weight = model[0].weight
    names = list(model.state_dict())
    pack_linears(model)
    assert [type(module) for module in model[1:]] == [PackedLinear] * 2
    assert list(model.state_dict()) == names
    assert model[2].weight is model[0].weight
    x = torch.randn(3, 16, requires_grad=True)
    model[1](x).sum().backward()
    assert x.grad is not None
    assert model.double()[1](x.double()).dtype == torch.float64
    half, large = nn.Sequential(nn.Linear(16, 16).half()), nn.Sequential(nn.Linear(16, 16))
    pack_linears(half)
    monkeypatch.setattr(packed_linear, "MOST_BYTES", large[0].weight.nbytes - 1)
    pack_linears(large)
    assert type(half[0]) is type(large[0]) is nn.Linear


@pytest.mark.skipif(not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="this CPU has no bf16 products")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_logits_of_a_packed_head_are_the_same_but_for_the_order_of_their_sums(dtype):
    """In fp32 the packed head is not taken. In bf16 a sum in another order may be rounded to the next number."""
    near = {"rtol": 2**-7, "atol": 1e-5} if dtype == torch.bfloat16 else {"rtol": 0, "atol": 0}
    model = tiny_llama().to(dtype)
    plain = readout_of(model)
    pack_linears(model)
    packed = readout_of(model)
    assert plain.packed is None
    assert (packed.packed is not None) == (dtype == torch.bfloat16)
    for rows in (0, 1, 2, 7, 33, 200):
        last = torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(rows)).to(dtype)
        torch.testing.assert_close(packed.logits(last), plain.logits(last), **near)
        assert torch.equal(packed.best(last), packed.logits(last).argmax(-1))
    assert packed.to(torch.device("cpu")).packed is packed.packed
    assert packed.to(torch.device("meta")).packed is None
    model.config.logits_scaling = 8.0  # by which a packed head does not divide
    assert torch.equal(readout_of(model).logits(last), plain.logits(last) / 8)
