"""Acceptance during training: what real decoding would accept of the drafter as it is now, on held-out prompts.

It needs no target: extraction stored the target's own answers (`evaluation/trajectories.py`). The drafter is the one
that stage 4 would load: weights rounded to the target's dtype, and run in `evaluate.dtype`.
"""

from typing import Any

import torch
from torch import Tensor

from eagle31_train.config import Config, DrafterShape
from eagle31_train.evaluation.measurement import acceptance
from eagle31_train.evaluation.trajectories import reached
from eagle31_train.evaluation.unrolled import Trajectory
from eagle31_train.model.drafter import Drafter
from eagle31_train.store import Store
from train.metrics import reduce_sums
from train.parallel import Parallel


class AcceptanceMeter:
    """Measures the drafter that `parallel` trains, on every rank with a share of the trajectories.

    Args:
        shape: of the drafter. target_ids: [Vd] int64, the target's id of each draft token.
        trajectories: at least one, with at least evaluate.num_speculative_tokens - 1 tokens beyond.
    """

    def __init__(
        self,
        config: Config,
        parallel: Parallel,
        store: Store,
        shape: DrafterShape,
        target_ids: Tensor,
        trajectories: list[Trajectory],
    ) -> None:
        self.parallel, device = parallel, parallel.accelerator.device
        ranks, rank = parallel.accelerator.num_processes, parallel.accelerator.process_index
        self.trajectories, self.target_ids = trajectories[rank::ranks], target_ids.to(device)
        self.draft_tokens = config.evaluate.num_speculative_tokens
        self.served_in = getattr(torch, store.inputs["target"]["dtype"])
        self.dtype = getattr(torch, config.evaluate.dtype)
        with torch.random.fork_rng(devices=[]):  # initial weights, which nobody reads, are drawn
            drafter = Drafter(shape, torch.empty(0) if shape.share_embedding else None)
        # The weights come with each measurement and go with it.
        for parameter in drafter.parameters():
            parameter.data = torch.empty(0)
        self.drafter = drafter.to(device, self.dtype).eval().requires_grad_(False)
        if shape.share_embedding:
            # Training's own copy, unless that is rounded: stage 4 has the target's.
            ours, theirs = parallel.objective.drafter.shared_embedding, store.target["embed_tokens"]
            exact = torch.promote_types(ours.dtype, theirs.dtype) == ours.dtype
            self.drafter.shared_embedding = ours if exact else theirs[: shape.vocab_size].to(device)

    @torch.no_grad()
    def measure(self) -> dict[str, Any]:
        """acceptance_length and acceptance_at_depth, as stage 4 counts them; the same on every rank, and collective."""
        mine = dict(self.drafter.named_parameters())
        for name, whole in self.parallel.weights():  # from all ranks, where they are sharded
            mine[name].data = whole.to(self.served_in, copy=True).to(mine[name].device, self.dtype)
        counts = reached(self.drafter, self.target_ids, self.trajectories, self.draft_tokens)
        for parameter in mine.values():
            parameter.data = parameter.data.new_empty(0)
        summed = reduce_sums(self.parallel.accelerator, torch.tensor(counts, device=self.target_ids.device))
        drafts, *per_position = summed.tolist()
        shares = acceptance(drafts, per_position)
        return {name: shares[name] for name in ("acceptance_length", "acceptance_at_depth")}
