"""CUDA's flash kernel, merged with the slots' own keys, against one dense softmax in fp64."""

from functools import partial

import pytest
import torch
from model.test_attention import assert_within_16_bits, make, run
from reference import dense_attention
from torch.nn import attention

from eagle31_train.common.transfers import each_tensor
from eagle31_train.model import context_attention, flash
from eagle31_train.model.attention import unrolled_attention
from eagle31_train.model.packing import make_layout

LENGTHS = [300, 1, 450, 260]
SLOTS = {
    "answers": [*range(100, 280), *range(320, 470), *range(500, 740), 800, *range(900, 1000)],
    "scattered": list(range(1, sum(LENGTHS), 3)),
}


def problem_on_gpu(lengths, slots, *sizes):
    """As `make` makes it, with scores of a model's size: softer than one key taking all."""
    (q, *others), layout, direction = make((lengths, slots, *sizes, 0), torch.bfloat16)
    tensors = [q * q.shape[-1] ** -0.5, *others]
    return tensors, each_tensor(layout, lambda x: x.to("cuda")), direction.to("cuda")


def moved(tensors, dtype):
    return [
        x.detach().to("cuda", dtype).requires_grad_() if isinstance(x, torch.Tensor) else moved(x, dtype)
        for x in tensors
    ]


@pytest.mark.parametrize("slots", SLOTS.keys())
@pytest.mark.parametrize(("d", "dv"), [(64, 64), (128, 128), (192, 128)])
@pytest.mark.parametrize(("own", "fused"), [(0, False), (3, False), (3, True)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", [None, 70, 2])
def test_output_and_gradients_stay_within_the_rounding_of_16_bits(slots, d, dv, own, fused, dtype, window):
    """As on the CPU. The shorter window leaves all but own keys out."""
    tensors, layout, direction = problem_on_gpu(LENGTHS, SLOTS[slots], 2, 4, own, d, dv)
    assert (layout.segments.key_rows is None) == (slots == "scattered")
    low, exact = moved(tensors, dtype), moved(tensors, torch.float64)
    assert context_attention.takes_flash(low[0], low[2])
    ours = run(partial(unrolled_attention, fused=fused, window=window), low, layout, direction.to(dtype))
    truth = run(partial(dense_attention, window=window), exact, layout, direction.double())
    assert_within_16_bits(ours, truth)


@pytest.mark.parametrize("name", ["FA3", "FA4"])
@pytest.mark.parametrize("slots", SLOTS.keys())
@pytest.mark.parametrize(("d", "dv"), [(128, 128), (192, 128)])
@pytest.mark.parametrize("window", [None, 70])
def test_what_torch_can_switch_to_is_as_right(name, slots, d, dv, window):
    """Where it is installed and made for this GPU."""
    major, _ = torch.cuda.get_device_capability()
    if name not in flash.NAMES.get(major, ()):
        pytest.skip(f"{name} is not for this GPU")
    try:
        attention.activate_flash_attention_impl(name)
    except (AttributeError, ImportError) as error:
        pytest.skip(str(error))
    try:
        test_output_and_gradients_stay_within_the_rounding_of_16_bits(slots, d, dv, 3, False, torch.bfloat16, window)
    finally:
        flash.restore_flash()


@pytest.mark.parametrize("lengths", [[40] * 30, [1] * 50])
def test_runs_of_one_slot_with_shared_keys(lengths):
    """At one query per run the kernel would turn to an algorithm for decoding, were it told of no more than one."""
    slots = [sum(lengths[: i + 1]) - 1 for i in range(len(lengths))]  # each document's last position
    tensors, layout, direction = problem_on_gpu(lengths, slots, 2, 4, 3, 64, 64)
    ours = run(unrolled_attention, moved(tensors, torch.bfloat16), layout, direction)
    truth = run(dense_attention, moved(tensors, torch.float64), layout, direction.double())
    assert_within_16_bits(ours, truth)


@pytest.mark.parametrize("g", [1, 4])
def test_many_slots_are_as_right_as_few(g):
    """Tens of thousands of slots: past 65,535 small products in one call, where kernels of some versions go wrong."""
    documents, length = 9000, 8
    slots = list(range(documents * length))
    tensors, layout, direction = problem_on_gpu([length] * documents, slots, g, 1, 3, 64, 64)
    ours = run(unrolled_attention, moved(tensors, torch.bfloat16), layout, direction)
    for first in (0, documents - 4):
        rows = slice(first * length, (first + 4) * length)
        some = [x[rows] if isinstance(x, torch.Tensor) else [y[rows] for y in x] for x in tensors]
        few = make_layout([(i * length, (i + 1) * length) for i in range(4)], torch.arange(4 * length))
        few = each_tensor(few, lambda x: x.to("cuda"))
        truth = run(dense_attention, moved(some, torch.float64), few, direction[rows].double())
        assert_within_16_bits([mine[rows] for mine in ours], truth)
