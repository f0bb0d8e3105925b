"""Measure the trainer's own step on a GPU: time, memory, share of each kernel, and how long a document may be.

The step is that of train/: fp32 masters, bf16 autocast, forward, loss, backward, clipping, AdamW, and the single wait
for the device in which the host reads the results.
"""

import gc
import re
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.shapes import GAMMA, Case, turns
from eagle31_train.config import DrafterShape, TrainConfig
from eagle31_train.model.batch import Batch, build_batch
from eagle31_train.model.drafter import Drafter
from eagle31_train.model.loss import Objective, Teacher
from eagle31_train.planning.work import count_work, training_flops
from eagle31_train.store.document import Document
from train.build import choose_kernels
from train.loader import MicroBatch, StepTotals
from train.parallel import parallelise
from train.step import accumulate

TARGET_VOCABULARY = {"llama8b": 128256}  # V, if the draft vocabulary is a part of it
ROWS = 256  # positions whose states are drawn, then repeated: drawing 64k would take longer than the steps
TOP = 12  # kernels listed

# Groups of kernels by name; the first pattern that matches wins. CPU operators are for the dry run.
REST = "elementwise, reduction"
PATTERNS = [
    ("optimizer", r"multi_tensor_apply|fused_?adam|_foreach"),
    ("attention", r"flash|fmha|attention"),
    ("gemm", r"gemm|cutlass|nvjet|xmma|wgmma|cublas|splitk|s\d+816|aten::(add|b|addb)?mm|mkldnn"),
    ("copy", r"memcpy|memset|copy|catarray|aten::(cat|to|fill_|zero_)$"),
    ("index", r"index|gather|scatter|embedding"),
    (REST, r"elementwise|reduce|softmax|norm|scan|sort|arange"),
    (REST, r"aten::\w*(add|mul|sub|div|exp|sum|mean|pow|sqrt|silu|neg|cos|sin|max|min|log|lt|where|cumprod|square)"),
]
GROUPS = ["gemm", "attention", REST, "index", "copy", "optimizer", "other"]


def drafter_of(case: Case) -> DrafterShape:
    """The drafter's shape, over the target's whole vocabulary."""
    shape = case.drafter()
    return replace(shape, vocab_size=TARGET_VOCABULARY.get(case.shape, shape.vocab_size))


VARIANTS = ("fused", "fused+recompute", "plain", "plain+recompute")  # kernels, and activation checkpointing


class Trainer:
    """Drafter, teacher and optimizer on a device, as train/ makes them, and its step. The states of batches are random;
    arg-maxes are in the draft vocabulary, so that every pair counts."""

    def __init__(self, shape: DrafterShape, variant: str, device: str) -> None:
        self.shape = shape
        self.accelerator = Accelerator(cpu=device == "cpu")
        torch.manual_seed(0)
        H, Vd = shape.target_hidden_size, shape.draft_vocab_size
        self.ids = torch.arange(Vd) * (shape.vocab_size // Vd)
        with torch.device(self.accelerator.device):  # which draws half a billion random weights quickly
            drafter = Drafter(shape, torch.randn(shape.vocab_size, shape.hidden_size, dtype=torch.bfloat16))
            rows = torch.randn(Vd, H, dtype=torch.bfloat16).mul_(H**-0.5)
            teacher = Teacher(torch.ones(H), shape.rms_norm_eps, rows, self.ids.to(rows.device))
        kernels, _, recompute = variant.partition("+")
        drafter.recompute = bool(recompute)
        objective = Objective(drafter, teacher, "kl")
        objective.autocast = torch.bfloat16
        self.uses = choose_kernels(objective, TrainConfig(kernels=kernels), self.accelerator.device)
        self.drafter = drafter
        self.parallel = parallelise(self.accelerator, objective, TrainConfig(lr=1e-5))

    def batch(self, masks: list[Tensor], unroll: int, pin: bool) -> Batch:
        """Pack documents with these loss masks; `pin`: in page-locked memory, as the trainer's loader does."""
        H, A = self.shape.target_hidden_size, len(self.shape.aux_layers)
        generator = torch.Generator().manual_seed(1)
        states = torch.randn(ROWS, A + 1, H, generator=generator).bfloat16()

        def document(mask: Tensor) -> Document:
            T = len(mask)
            rows = states[torch.arange(T) % ROWS]
            tokens = torch.randint(0, self.shape.vocab_size, (T,), generator=generator)
            top1 = self.ids[torch.randint(0, len(self.ids), (T,), generator=generator)]
            return Document.of(tokens, mask, top1, rows[:, :A], rows[:, A])

        kept = torch.zeros(self.shape.vocab_size, dtype=torch.bool)
        kept[self.ids] = True
        batch = build_batch([document(mask) for mask in masks], unroll, kept)
        return batch.pinned() if pin and self.accelerator.device.type == "cuda" else batch

    def step(self, batch: Batch) -> float:
        """Run one optimizer step, including the transfer of the batch. The host waits once, for the loss."""
        totals = StepTotals(torch.cat([batch.population, batch.population.new_zeros(1)]))
        sums, totals = accumulate(self.parallel, [MicroBatch(batch, True)], totals, GAMMA)
        norm, totals, sums = self.parallel.update(1e-5, totals, sums)
        if not torch.isfinite(norm):
            raise FloatingPointError("the gradient is not finite")
        return float(sums[0].sum() / totals.pairs.sum())

    def close(self) -> None:
        """Release what Accelerate prepared, as it keeps references."""
        self.accelerator.free_memory()


def free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def start_peak() -> None:
    """Reset the high-water marks of device memory."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def peak() -> dict[str, int] | None:
    """Return the most bytes in use, and the most taken from the device, since `start_peak`; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    return {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}


def wait(device: str) -> None:
    """Wait until the device has done all that is queued."""
    if device == "cuda":
        torch.cuda.synchronize()


def measure(case: Case, variant: str, device: str, repeats: int) -> dict[str, Any]:
    """Time `repeats` steps after two warm-up steps, then profile one more."""
    shape, masks = drafter_of(case), case.masks
    trainer = Trainer(shape, variant, device)
    try:
        batch = trainer.batch(masks, case.unroll, pin=True)
        step = partial(trainer.step, batch)
        losses = [step() for _ in range(2)]
        start_peak()
        all_seconds = []
        for _ in range(repeats):
            wait(device)
            start = time.perf_counter()
            losses.append(step())
            wait(device)
            all_seconds.append(time.perf_counter() - start)
        memory = peak()
        seen = kernels(step, device)
    finally:
        trainer.close()
    seconds = statistics.median(all_seconds)
    parts = training_flops(shape, count_work([mask.numpy() for mask in masks], case.unroll))
    tokens, assistant = sum(map(len, masks)), int(sum(mask.sum() for mask in masks))
    return {
        "tokens": tokens,
        "assistant_tokens": assistant,
        "slots": len(batch.layout.slots),
        "seconds": seconds,
        "all_seconds": all_seconds,
        "tokens_per_second": tokens / seconds,
        "assistant_tokens_per_second": assistant / seconds,
        "memory": memory,
        "flops": parts,
        "flops_per_second": sum(parts.values()) / seconds,
        "losses": losses,
        "uses": trainer.uses,
        "kernels": seen,
    }


def kernels(step: Callable[[], Any], device: str) -> dict[str, Any]:
    """Return where a step's device time goes: seconds in all, share of each group, the TOP kernels by their own time.
    `window`: seconds of this step by the host's clock. While no kernel runs, the device waits for host or profiler."""
    activity = ProfilerActivity.CUDA if device == "cuda" else ProfilerActivity.CPU
    kind = DeviceType.CUDA if device == "cuda" else DeviceType.CPU
    wait(device)
    with profile(activities=[activity]) as seen:
        start = time.perf_counter()
        step()
        wait(device)
        window = time.perf_counter() - start
    times: dict[str, tuple[float, int]] = {}
    for event in seen.key_averages():
        own = event.self_device_time_total if device == "cuda" else event.self_cpu_time_total
        if event.device_type == kind and own > 0 and not getattr(event, "is_user_annotation", False):
            before = times.get(event.key, (0.0, 0))
            times[event.key] = (before[0] + own / 1e6, before[1] + event.count)
    total = sum(own for own, _ in times.values())
    groups = dict.fromkeys(GROUPS, 0.0)
    for name, (own, _) in times.items():
        groups[group(name)] += own / total
    top = sorted(times.items(), key=lambda item: -item[1][0])[:TOP]
    return {
        "seconds": total,
        "window": window,
        "groups": groups,
        "top": [{"name": name, "seconds": own, "calls": calls, "group": group(name)} for name, (own, calls) in top],
    }


def group(kernel: str) -> str:
    return next((name for name, pattern in PATTERNS if re.search(pattern, kernel, re.IGNORECASE)), "other")


def matrix_rate(device: str, size: int, repeats: int) -> float:
    """Return the FLOP/s of one large bf16 product: the median over `repeats`, after three to warm up."""
    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    seconds = []
    for _ in range(3 + repeats):
        wait(device)
        start = time.perf_counter()
        left @ right
        wait(device)
        seconds.append(time.perf_counter() - start)
    return 2 * size**3 / statistics.median(seconds[3:])


def longest(case: Case, device: str, first: int, ceiling: int) -> dict[str, Any]:
    """Find the longest single document that a whole step takes, with activations recomputed: by doubling from `first`
    up to `ceiling`, then by bisection.

    Returns:
        tokens (0 if `first` does not fit), step (the difference at which bisection ended), and every try.
    """
    kernels = "fused" if device == "cuda" else "plain"
    trainer = Trainer(drafter_of(case), f"{kernels}+recompute", device)
    # The first step allocates the optimizer's moments, so that memory is then as in training.
    trainer.step(trainer.batch([turns(16, 1.0)], case.unroll, pin=False))
    tries: list[dict[str, Any]] = []

    def fits(tokens: int) -> bool:
        # Not page-locked: such memory would stay cached on the host, and only the device's is measured.
        batch = trainer.batch([turns(tokens, case.share)], case.unroll, pin=False)
        start_peak()
        wait(device)
        start = time.perf_counter()
        enough = False
        with suppress(torch.OutOfMemoryError):
            trainer.step(batch)
            enough = True
        wait(device)
        seconds = time.perf_counter() - start
        tries.append({"tokens": tokens, "fits": enough, "seconds": seconds, "memory": peak()})
        trainer.parallel.optimizer.zero_grad(set_to_none=True)  # of a step that failed halfway
        free()
        return enough

    try:
        best, step = search(fits, first, ceiling)
    finally:
        trainer.close()
    return {"tokens": best, "step": step, "ceiling": ceiling, "tries": tries}


def search(fits: Callable[[int], bool], first: int, ceiling: int) -> tuple[int, int]:
    """Return the largest number that fits, to within an eighth (0 if `first` does not), and the last difference."""
    good, bad = 0, None
    tokens = first
    while bad is None and tokens <= ceiling:
        if fits(tokens):
            good, tokens = tokens, tokens * 2
        else:
            bad = tokens
    if bad is None or not good:
        return good, 0
    step = good // 8
    while bad - good > step:
        middle = (good + bad) // 2 // step * step
        good, bad = (middle, bad) if fits(middle) else (good, middle)
    return good, step
