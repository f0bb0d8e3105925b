"""Bytes of a micro-batch by formula, against what torch allocates on a CPU in a real step."""

import pytest
import torch
from plan_cases import MLA, SMALL_MLA, objective_and_batch, shape_of
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.shapes import turns
from eagle31_train.checkpoint.contract import weight_shapes
from eagle31_train.model.drafter import Drafter
from eagle31_train.model.loss import LOGITS
from eagle31_train.model.packing import MOST_COPIES
from eagle31_train.planning import footprint
from eagle31_train.planning.footprint import Step, activations
from eagle31_train.planning.work import count_work

BF16, FP32 = 2, 4


def measure(objective, batch, weights):
    """Bytes after the forward pass, and at the worst moment of it and of the backward pass."""
    objective(batch, weights)[0].backward()  # what is made once is there
    objective.zero_grad(set_to_none=True)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        with record_function("FORWARD"):
            loss = objective(batch, weights)[0]
        with record_function("BACKWARD"):
            loss.backward()
    events = recorded.profiler.kineto_results.events()
    backward = next(event.start_ns() for event in events if event.name() == "BACKWARD")
    begin = next(event.start_ns() for event in events if event.name() == "FORWARD")
    live = kept = peak = 0
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        live += event.nbytes() if event.start_ns() >= begin else 0
        kept = live if event.start_ns() < backward else kept
        peak = max(peak, live)
    return kept, peak


CASES = [
    ({}, BF16, False, "int8", 7),
    ({"num_key_value_heads": 8}, FP32, False, "bf16", 3),
    ({"norm_before_residual": True}, BF16, True, "fp8", 7),
    ({"norm_output": False, "fc_norm": False}, BF16, False, "bf16", 7),
    ({"draft_vocab_size": 2000, "num_key_value_heads": 8}, BF16, False, "bf16", 3),
    (SMALL_MLA, BF16, True, "bf16", 3),
    ({**SMALL_MLA, "norm_before_residual": True}, FP32, True, "int8", 3),
    ({"num_layers": 3, "norm_before_fc": True, "norm_output": False}, BF16, False, "bf16", 3),
    ({"num_layers": 2, "norm_before_fc": True, "fc_norm": False}, BF16, True, "int8", 3),
]


FAST = (5,)  # MLA with recomputation
TIERED = [pytest.param(*case, marks=() if i in FAST else pytest.mark.slow) for i, case in enumerate(CASES)]


@pytest.mark.parametrize(("changes", "value", "recompute", "codec", "unroll"), TIERED)
def test_activations_are_what_torch_allocates(changes, value, recompute, codec, unroll):
    """What is kept within 0.5 %, the worst moment within 10 %."""
    shape, masks = shape_of(**changes), [turns(512, 0.5), turns(300, 0.2), turns(200, 1.0)]
    low = torch.bfloat16 if value == BF16 else torch.float32
    objective, batch = objective_and_batch(shape, masks, unroll, low, codec)
    objective.autocast = torch.bfloat16 if value == BF16 else None
    objective.drafter.recompute = recompute
    kept, peak = measure(objective, batch, torch.full((unroll,), 1e-3))

    work = count_work([mask.numpy() for mask in masks], unroll)
    step = Step(value, decodes=codec != "bf16" or value == FP32, recompute=recompute, logits=LOGITS["cpu"], flash=False)
    reckoned = activations(shape, work, step)
    assert reckoned.after_forward == pytest.approx(kept, rel=0.005)
    assert reckoned.peak == pytest.approx(peak, rel=0.1)


def test_freezing_lm_head_saves_its_gradient_and_a_gpu_holds_as_many_logits_as_the_loss_says():
    work = count_work([turns(64, 0.5).numpy()], 3)
    shape = shape_of()
    trained, frozen = (activations(shape, work, Step(train_lm_head=trains)) for trains in (True, False))
    assert trained.head - frozen.head == FP32 * shape.draft_vocab_size * shape.hidden_size
    assert LOGITS["other"] == footprint.LOGITS
    assert MOST_COPIES == footprint.MOST_COPIES


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"fc_norm": False},
        {"share_embedding": False},
        {"hidden_size": 128},
        {"num_layers": 3, "norm_before_fc": True, "qk_norm": True},
        SMALL_MLA,
        {**SMALL_MLA, "num_layers": 2},
        MLA,
    ],
)
def test_parameters_are_those_of_the_drafter(changes):
    shape = shape_of(**changes)
    with torch.device("meta"):
        embedding = torch.empty(shape.vocab_size, shape.hidden_size)
        drafter = Drafter(shape, embedding)
    there = {name: tuple(parameter.shape) for name, parameter in drafter.named_parameters()}
    assert weight_shapes(shape) == there
    matrices = footprint.matrices(shape)
    assert sum(matrices.values()) == sum(p.numel() for p in drafter.parameters() if p.dim() == 2)
