"""Four gloo ranks that share documents, and one process, do the same optimizer step; test_context_parallel.py compares.

Each rank takes every step of CASES, and those with planted mistakes, updates matrices by Muon, measures memory, and
writes its results to a file.
"""

import os
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import launching
import plan_cases
import pytest
import torch
from conftest import kept_mask, make_document, make_mla_shape, make_objective, make_shape
from forking import print_to
from made import Documents
from planting import instead_of
from torch import distributed as dist

from benchmarks.shapes import turns
from eagle31_train.config import TrainConfig
from eagle31_train.model import context_parallel
from eagle31_train.model.context_parallel import Mesh, Places
from eagle31_train.model.packing import make_layout
from train import loader, optimizer
from train import step as arithmetic

RANKS, K = 4, 3
# Length → what the assistant wrote of it (None: a random half).
RAGGED = {24: None, 19: [4, 5, 6], 15: [], 33: range(20, 33), 8: range(2, 8), 21: [10]}
SHAPES = {
    "gqa": make_shape(),
    "mla": make_mla_shape(),
    "layers": make_shape(num_layers=2, norm_before_fc=True, norm_output=False),
    "windowed layers": make_shape(num_layers=2, sliding_window=7),
    "parallel": make_shape(parallel=True, ptd_token_id=49),
}
# Name → shape, documents, options of the training.
STEPS = {name: (name, RAGGED, {}) for name in SHAPES}
STEPS |= {
    "recomputed": ("mla", RAGGED, {"activation_checkpointing": True}),
    "windowed layers, recomputed": ("windowed layers", RAGGED, {"activation_checkpointing": True}),
    "in three parts": ("gqa", RAGGED, {"gradient_accumulation_steps": 3}),  # of four ranks, more than documents
    "some slots": ("gqa", RAGGED, {"slots_per_batch": 20}),
    "some slots, in three parts": ("gqa", RAGGED, {"slots_per_batch": 20, "gradient_accumulation_steps": 3}),
    "one document": ("gqa", {37: None}, {}),
    "one position": ("layers", {4: [2]}, {"oov": "keep"}),  # three ranks have no slot, no position and no token
    "nothing to train": ("mla", {15: [], 9: []}, {}),
    "fp32": ("gqa", RAGGED, {"precision": "no"}),
    "bf16": ("gqa", RAGGED, {"precision": "bf16"}),
}
# What four ranks that share might do otherwise than two: keys reach more of them, and some have nothing.
BY_FOUR = {"gqa", "mla", "layers", "windowed layers", "one position", "nothing to train", "parallel", "bf16"}
UNSHARED = {"gqa", "in three parts", "some slots", "some slots, in three parts", "fp32", "nothing to train"}
WHO = {1: UNSHARED, 2: STEPS, 4: BY_FOUR}
CASES = [(name, context) for context, names in WHO.items() for name in STEPS if name in names]
# Steps that are to be as if they were not in parts.
WHOLE = {"in three parts": "gqa", "some slots, in three parts": "some slots"}


def reduced(value, reduction="sum"):
    """The sum over all ranks, if there are several."""
    value = value.clone()
    if dist.is_initialized():
        dist.all_reduce(value)
    return value


def split_of(shape, answers):
    """Documents of these lengths, and what the assistant wrote of each."""
    generator = torch.Generator().manual_seed(3)
    return Documents([make_document(shape, length, generator, answer) for length, answer in answers.items()])


def step(name, mesh, group=None):
    """One optimizer step's gradients over all ranks, by name, and what it measured [MEASURES, K]."""
    kind, answers, more = STEPS[name]
    more = {"precision": None, **more}
    dtype = torch.float64 if more["precision"] is None else torch.float32
    objective, split = make_objective(SHAPES[kind], dtype), split_of(SHAPES[kind], answers)
    objective.autocast = torch.bfloat16 if more["precision"] == "bf16" else None
    objective.drafter.recompute, objective.drafter.context_group = more.get("activation_checkpointing", False), group
    t = TrainConfig(ttt_length=K, num_workers=0, context_parallel=mesh.context, **more)
    ranks = {"num_processes": mesh.ranks, "process_index": mesh.rank}
    accelerator = SimpleNamespace(**ranks, device=torch.device("cpu"), reduce=reduced)
    parallel = SimpleNamespace(
        accelerator=accelerator,
        model=objective,
        micro_batch=lambda last: nullcontext(),
        backward=lambda loss: loss.backward(),
    )
    samples = [list(range(len(split.lengths)))]
    [batch] = loader.load(split, samples, 0, t, 0, kept_mask(objective, t.oov), accelerator)
    sums, _ = arithmetic.accumulate(parallel, batch.micro_batches, batch.totals, t.gamma)
    named = [(name, p) for name, p in objective.drafter.named_parameters() if p.requires_grad]
    return {name: reduced(p.grad) / mesh.ranks for name, p in named}, sums.detach()


# ---------------------------------------------------------------- planted mistakes


def of_part(change):
    """The batch of a part is another one."""

    @instead_of(loader, "build_batch")
    def plant(right, *arguments, **named):
        batch = right(*arguments, **named)
        return replace(batch, **change(batch, *arguments)) if batch.shared is not None else batch

    return plant


def whole(name):
    right = loader.build_batch
    return of_part(lambda batch, *arguments: {name: getattr(right(*arguments[:4]), name)})


@instead_of(context_parallel.dist, "reduce_scatter_tensor")
def drop_remote_gradients(_, mine, everyone, group):
    mine.copy_(everyone.chunk(group.size())[dist.get_rank(group)])


@instead_of(context_parallel._Gathered, "backward")
def detach_remote_keys(right, ctx, *grads):
    return *(0 * grad for grad in right(ctx, *grads)[:2]), None, None


own_offsets = of_part(lambda batch, *_: {"layout": make_layout(batch.layout.documents, batch.slot_rows)})
own_positions = of_part(lambda batch, *_: {"positions": torch.arange(len(batch.positions))})


# Positions of all ranks are taken for those of rank 0, then those of rank 1.
in_rank_order = of_part(lambda batch, *_: {"shared": Places(batch.shared.rows.sort().values, batch.shared.most)})


@instead_of(arithmetic, "reduce_sums")
def count_own_pairs(right, accelerator, value):
    return value if value.dtype == torch.int64 else right(accelerator, value)


# What is wrong where two share → the step that it is planted in, and how.
PLANTED = {
    "remote key gradients dropped": ("gqa", drop_remote_gradients),
    "no key gradients": ("gqa", detach_remote_keys),
    "causal offset among a rank's own positions": ("gqa", own_offsets),
    "keys in the order of ranks": ("gqa", in_rank_order),
    "RoPE positions of the part": ("gqa", own_positions),
    "N_k of each rank": ("gqa", count_own_pairs),
    "N_k of the whole on every rank": ("gqa", whole("population")),
    "eligible pairs of the whole on every rank": ("gqa", whole("eligible")),
}


# ---------------------------------------------------------------- Muon, and memory

MATRICES = [(4, 6), (12, 30), (30, 12), (12, 12), (5, 5)]


def muon(count):
    """So many matrices after two updates, and the sizes of those that this rank worked out."""
    generator, mine = torch.Generator().manual_seed(0), set()
    module = torch.nn.ModuleList(torch.nn.Linear(n, m, bias=False) for m, n in MATRICES[:count])
    updater = optimizer.make_optimizer(module, TrainConfig(optimizer="muon", lr=0.01, weight_decay=0.1))
    right = optimizer.orthogonal
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator)
    with patch.object(optimizer, "orthogonal", lambda matrix: mine.add(tuple(matrix.shape)) or right(matrix)):
        for _ in range(2):
            for parameter in module.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=generator)
            updater.step()
    return [parameter.data for parameter in module.parameters()], mine


LONG = {"gqa": plan_cases.shape_of(), "mla": plan_cases.shape_of(**plan_cases.SMALL_MLA)}
DEEP = 3
MASKS = [turns(600, 0.5), turns(350, 0.3)]


def memory(kind, mesh, group=None):
    """Bytes after the forward pass, and at the worst moment, of two long conversations."""
    objective, batch = plan_cases.objective_and_batch(LONG[kind], MASKS, DEEP, part=mesh.part)
    objective.drafter.context_group, objective.drafter.recompute = group, kind == "mla"
    with lasting("all_gather_into_tensor"), lasting("reduce_scatter_tensor"):
        return plan_cases.measure(objective, batch, torch.full((DEEP,), 1e-3))


def lasting(name):
    """An exchange by buffers that stay: gloo's thread may be the last to free its own, where the profiler misses it."""
    right, buffers = getattr(dist, name), {}

    def exchange(output, given, group):
        theirs, ours = buffers.setdefault(
            (output.shape, output.dtype), (torch.empty_like(output), torch.empty_like(given))
        )
        right(theirs, ours.copy_(given), group=group)
        output.copy_(theirs)

    return patch.object(context_parallel.dist, name, exchange)


# ---------------------------------------------------------------- the ranks


def rank(index, folder):
    """One of them."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=index, world_size=RANKS)
    groups = {1: None, 2: dist.new_subgroups(2)[0], 4: dist.group.WORLD}
    meshes = {context: Mesh(RANKS, index, context) for context in groups}
    found = {}
    for name, context in CASES:
        found[name, context] = step(name, meshes[context], groups[context])
    found["muon"] = {count: muon(count) for count in (3, 5)}
    with patch.object(dist, "broadcast"):
        found["muon of each alone"] = muon(5)
    for mistake, (name, plant) in PLANTED.items():
        with pytest.MonkeyPatch.context() as patches:
            plant(patches)
            found[mistake] = step(name, meshes[2], groups[2])
    for kind in LONG if index < 2 else ():
        found["memory", kind] = memory(kind, meshes[2], groups[2])
    torch.save(found, Path(folder) / f"rank{index}.pt")
    dist.barrier()
    dist.destroy_process_group()


def all_ranks(folder, output):
    """Four forks of this process, which ends as the worst of them."""
    print_to(output)
    os.environ.update(launching.environment("ddp"))
    ranks = []
    for index in range(RANKS):
        if not (child := os.fork()):
            rank(index, folder)
            os._exit(0)
        ranks.append(child)
    sys.exit(max(abs(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])) for child in ranks))
