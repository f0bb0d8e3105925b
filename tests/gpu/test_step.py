"""The training step on a CUDA device: equal to the CPU's, MLA in bf16 too, and never waited for inside. And drafts."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from conftest import kept_mask, make_document, make_mla_shape, make_objective, make_shape
from model.test_exactness import keep_sizes
from planting import watched

from eagle31_train.common.transfers import each_tensor
from eagle31_train.config import TrainConfig
from eagle31_train.model import context_attention
from eagle31_train.model.batch import build_batch
from eagle31_train.model.decode import DraftDecoder
from eagle31_train.model.loss import add_product
from train import step as arithmetic
from train.loader import MicroBatch, StepTotals
from train.metrics import fetch
from train.optimizer import make_optimizer
from train.parallel import parallelise

K = 4


def documents_of(shape, lengths=(9, 1, 160, 5, 70)):
    generator = torch.Generator().manual_seed(1)
    return [make_document(shape, length, generator) for length in lengths]


@pytest.fixture
def waits_are_errors():
    """What follows in the test raises where the host would wait for the device."""
    yield lambda: torch.cuda.set_sync_debug_mode("error")
    torch.cuda.set_sync_debug_mode("default")


@pytest.fixture(autouse=True)
def fresh_accelerator(monkeypatch):
    """One process on the GPU."""
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "ACCELERATE_USE_CPU"):
        monkeypatch.delenv(name, raising=False)
    AcceleratorState._reset_state(True)
    yield
    AcceleratorState._reset_state(True)


def gradients(objective, documents, device, unroll=K):
    """Gradients by name, loss and measures."""
    packed = build_batch(documents, unroll, kept_mask(objective.cpu()))
    objective = objective.to(device)
    objective.zero_grad()
    weights = (0.8 ** torch.arange(unroll) / packed.trained).to(device, next(objective.parameters()).dtype)
    loss, measured = objective(packed.to(device), weights)
    loss.backward()
    # Cloned: moving the objective moves its gradients in place.
    found = {name: p.grad.cpu().clone() for name, p in objective.drafter.named_parameters()}
    return {**found, "loss": loss.detach().cpu(), "measured": measured.cpu()}


SHAPES = {"llama": make_shape(), "mla": make_mla_shape(), "mla, full rank": make_mla_shape(q_lora_rank=None)}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-4)])
def test_loss_and_gradients_equal_the_cpus(shape, dtype, tolerance):
    documents = [d.to(dtype) for d in documents_of(shape)]
    objective = make_objective(shape, dtype)
    theirs = gradients(objective, documents, "cpu")
    ours = gradients(objective, documents, "cuda")
    for name in theirs:
        near = max(tolerance, 1e-5) if name == "measured" else tolerance  # reported in fp32
        torch.testing.assert_close(ours[name], theirs[name], rtol=near, atol=near, msg=lambda m, n=name: f"{n}: {m}")


def wide_mla():
    """An objective with Kimi's heads, keys 128 + 64 wide and values 128, and documents, in fp32."""
    heads = {"num_attention_heads": 4, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    sizes = {"hidden_size": 256, "target_hidden_size": 256, "intermediate_size": 512, "q_lora_rank": 96}
    shape = make_mla_shape(**heads, **sizes, kv_lora_rank=64, vocab_size=300, draft_vocab_size=200)
    objective = make_objective(shape, torch.float32)
    keep_sizes(objective)
    return objective, [d.to(torch.float32) for d in documents_of(shape, (300, 1, 450, 260))]


@pytest.mark.parametrize("recompute", [False, True])
def test_mla_in_bf16_is_no_further_from_fp32_than_on_the_cpu(recompute, monkeypatch):
    """By the flash kernel. Twice the CPU's distance, and at least 1 %: other kernels round elsewhere."""
    objective, documents = wide_mla()
    objective.drafter.recompute = recompute
    truth = gradients(objective, documents, "cpu", 7)
    del truth["measured"]
    objective.autocast = torch.bfloat16
    cpus = gradients(objective, documents, "cpu", 7)
    asked = watched(monkeypatch, context_attention, "_cuda_forward")
    ours = gradients(objective, documents, "cuda", 7)
    assert [q.shape[-1] for q, *_ in asked] == [192] * 7
    for name, wanted in truth.items():
        error, theirs = ((each[name].double() - wanted.double()).norm() / wanted.norm() for each in (ours, cpus))
        assert error < max(2 * theirs, 0.01), name


def test_drafts_are_the_cpus():
    objective, [d, *_] = wide_mla()
    drafted = []
    for device in ("cpu", "cuda"):
        objective.to(device)
        decoder = DraftDecoder(objective.drafter, objective.teacher.target_ids, capacity=128)
        decoder.extend(d.all_aux[:100].to(device), d.tokens[1:101].to(device))
        drafted.append(torch.cat([z for _, z in decoder.unroll(5)]).cpu())
    torch.testing.assert_close(*drafted, rtol=1e-3, atol=1e-3)


def test_the_heads_gradient_is_added_up_unrounded():
    generator = torch.Generator().manual_seed(0)
    sizes = ((100, 48), (70, 100), (70, 48))
    total, logits, states = (torch.randn(*size, generator=generator).cuda() for size in sizes)
    logits, states = logits.bfloat16(), states.bfloat16()
    expected = total.double() + logits.double().T @ states.double()
    add_product(total, logits, states, 256)
    torch.testing.assert_close(total.double(), expected, rtol=1e-5, atol=1e-4)


def assert_pinned(batch):
    def check(tensor):
        assert tensor.is_pinned() or not tensor.numel()  # no memory, nothing to pin
        return tensor

    each_tensor(batch, check)


def one_step(precision, kernels="plain", optimizer="adamw"):
    """A function that queues one whole step, the moving of its batches included; the results stay on the device."""
    shape = make_shape(hidden_size=32, target_hidden_size=32, head_dim=16, num_attention_heads=2)
    objective = make_objective(shape, torch.float32)
    documents, kept = documents_of(shape), kept_mask(objective)
    objective.autocast = torch.bfloat16 if precision == "bf16" else None
    if kernels == "fused":
        objective.fuse_kernels()
    spread = parallelise(Accelerator(), objective, TrainConfig(weight_decay=0.1, optimizer=optimizer))
    batches = [build_batch(part, K, kept).pinned() for part in (documents[:3], documents[3:])]
    for batch in batches:
        assert_pinned(batch)
    packed = torch.cat([sum(batch.population for batch in batches), torch.zeros(1, dtype=torch.int64)]).pin_memory()
    micro_batches = [MicroBatch(batch, True) for batch in batches]

    def step():
        sums, totals = arithmetic.accumulate(spread, micro_batches, StepTotals(packed), 0.8)
        norm = spread.clip()
        spread.optimizer.step()
        spread.optimizer.zero_grad(set_to_none=True)
        return norm, totals.packed, sums

    return step


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize(("kernels", "optimizer"), [("plain", "adamw"), ("fused", "adamw"), ("plain", "muon")])
def test_a_step_never_waits_for_the_device(precision, kernels, optimizer, waits_are_errors):
    step = one_step(precision, kernels, optimizer)
    step()  # libraries are loaded, workspaces and the optimizer's state are made
    waits_are_errors()
    results = step()
    torch.cuda.set_sync_debug_mode("default")
    norm, counts, sums = fetch(*results)
    assert torch.isfinite(norm)
    assert counts[:-1].min() > 0
    assert torch.isfinite(sums).all()


def updated(device, precision):
    """A matrix after three of Muon's updates."""
    generator = torch.Generator().manual_seed(0)
    layer = torch.nn.Linear(48, 20, bias=False)
    layer.weight.data.copy_(torch.randn(20, 48, generator=generator))
    layer.to(device)
    muon = make_optimizer(layer, TrainConfig(optimizer="muon", lr=0.1, weight_decay=0.1, precision=precision))
    for _ in range(3):
        layer.weight.grad = torch.randn(20, 48, generator=generator).to(device)
        muon.step()
    return layer.weight.detach().cpu()


@pytest.mark.parametrize(("precision", "tolerance"), [("no", 1e-4), ("bf16", 2e-2)])
def test_muons_updates_are_the_cpus(precision, tolerance):
    ours, theirs = updated("cuda", precision), updated("cpu", precision)
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


STEPS = """
from train.launch import make_deterministic
make_deterministic()
from test_step import fetch, one_step
step = one_step("bf16", "fused")
for _ in range(3):
    results = fetch(*step())
print([result.tolist() for result in results])
"""


def test_deterministic_steps_have_the_same_bits():
    here = Path(__file__).parent
    paths = os.pathsep.join([str(here), str(here.parent), str(here.parent.parent)])
    words, environment = [sys.executable, "-c", STEPS], {**os.environ, "PYTHONPATH": paths}
    first, again = (subprocess.run(words, env=environment, capture_output=True, text=True, check=True) for _ in "ab")
    assert first.stdout == again.stdout != ""


def test_a_planted_wait_is_found(waits_are_errors, monkeypatch):
    step, right = one_step("no"), arithmetic.step_weights
    step()
    monkeypatch.setattr(arithmetic, "step_weights", lambda counts, gamma: right(counts, gamma) * counts.sum().item())
    waits_are_errors()
    with pytest.raises(RuntimeError, match="synchroniz"):
        step()
