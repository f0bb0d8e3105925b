"""Measurements on the held-out split while a run trains: teacher-forced metrics, and real acceptance.

Acceptance is what real decoding would accept of the drafter as it is now. It needs no target: extraction stored the
target's own answers (`evaluation/trajectories.py`). The drafter is the one that stage 4 would load: weights rounded to
the target's dtype, and run in `evaluate.dtype`.
"""

from typing import Any

import torch
from torch import Tensor

from eagle31_train.common import order
from eagle31_train.config import Config, TrainConfig
from eagle31_train.evaluation.measurement import acceptance
from eagle31_train.evaluation.trajectories import reached
from eagle31_train.evaluation.unrolled import Trajectory
from eagle31_train.model.batch import build_batch
from eagle31_train.model.context_parallel import Mesh
from eagle31_train.model.drafter import Drafter
from eagle31_train.model.loss import MEASURES
from eagle31_train.store import Store, StoreSplit
from train.metrics import reduce_sums, summarise
from train.parallel import Parallel


@torch.no_grad()
def evaluate(parallel: Parallel, split: StoreSplit, t: TrainConfig, keep_mask: Tensor, count: int) -> dict[str, Any]:
    """Return `summarise` of `count` conversations, spread over the split. keep_mask: as `build_batch` takes it."""
    accelerator = parallel.accelerator
    chosen = [i * len(split) // count for i in range(count)]  # some data is ordered by source
    lengths = [split.lengths[i] for i in chosen]
    mesh = Mesh(accelerator.num_processes, accelerator.process_index, t.context_parallel)
    # As large as training's micro-batches, which fit in memory; or as the longest conversation, which fits without
    # gradients. How batches are cut does not change the numbers.
    assert t.batch_tokens is not None, "open options are filled in by now"
    size = max([t.batch_tokens // (mesh.replicas * t.gradient_accumulation_steps), *lengths])
    batches = order.global_batches(lengths, size, seed=0, epoch=0)
    sums = torch.zeros(len(MEASURES), t.ttt_length, device=accelerator.device)
    weights = torch.zeros(t.ttt_length, device=accelerator.device)
    for first in range(0, len(batches), mesh.replicas):
        # Every rank runs the model equally often, since weights and keys may be gathered from all. A rank without a
        # batch runs the first one of the round again, and does not count it.
        real = first + mesh.replica < len(batches)
        samples = [chosen[i] for i in batches[first + mesh.replica if real else first]]
        batch = build_batch(split.read_all(samples), t.ttt_length, keep_mask, part=mesh.part)
        sums += parallel.model(batch.to(accelerator.device), weights)[1] * float(real)
    return summarise(reduce_sums(accelerator, sums))


class AcceptanceMeter:
    """Measures the acceptance of the drafter that `parallel` trains. Ranks share the trajectories, of which there is at
    least one. Each goes on for at least evaluate.num_speculative_tokens - 1 tokens past its output."""

    def __init__(self, config: Config, parallel: Parallel, store: Store, trajectories: list[Trajectory]) -> None:
        self.parallel, device, shape = parallel, parallel.accelerator.device, parallel.objective.drafter.shape
        ranks, rank = parallel.accelerator.num_processes, parallel.accelerator.process_index
        self.trajectories = trajectories[rank::ranks]
        self.target_ids = parallel.objective.teacher.target_ids.to(device)  # [Vd] int64
        self.draft_tokens = config.evaluate.num_speculative_tokens
        self.served_in = getattr(torch, store.inputs["target"]["dtype"])
        self.dtype = getattr(torch, config.evaluate.dtype)
        self.embedding: Tensor | None = None
        if shape.share_embedding:
            # Training's own copy, unless it is rounded: stage 4 uses the target's.
            ours, theirs = parallel.objective.drafter.shared_embedding, store.target["embed_tokens"]
            exact = torch.promote_types(ours.dtype, theirs.dtype) == ours.dtype
            self.embedding = ours if exact else theirs[: shape.vocab_size].to(device)

    @torch.no_grad()
    def measure(self) -> dict[str, Any]:
        """Return acceptance_length and acceptance_at_depth, as stage 4 counts them. Collective; equal on all ranks."""
        device = self.target_ids.device
        with torch.device("meta"):  # it has weights only during a measurement
            drafter = Drafter(self.parallel.objective.drafter.shape, self.embedding)
        weights = {  # gathered from all ranks if they are sharded
            name: whole.to(self.served_in, copy=True).to(device, self.dtype) for name, whole in self.parallel.weights()
        }
        drafter.load_state_dict(weights, assign=True)
        counts = reached(drafter.to(device).eval(), self.target_ids, self.trajectories, self.draft_tokens)
        summed = reduce_sums(self.parallel.accelerator, torch.tensor(counts, device=device))
        drafts, *per_position = summed.tolist()
        shares = acceptance(drafts, per_position)
        return {name: shares[name] for name in ("acceptance_length", "acceptance_at_depth")}
