"""Our own step: the packed batch is built beforehand, as the trainer's background thread builds it."""

import torch
from torch import Tensor

from benchmarks.contenders.eager import eager_attention
from benchmarks.shapes import GAMMA, Material
from eagle31_train.model import drafter as drafter_module
from eagle31_train.model import linear
from eagle31_train.model.batch import build_batch
from eagle31_train.model.drafter import Drafter
from eagle31_train.model.loss import Objective, Teacher


class Ours:
    """fp32 (or under the caller's autocast), one document.

    Args:
        material: weights and document.
        unroll: K.
        train_lm_head: speculators freezes its head, SpecForge trains it.
        onednn: False leaves fp32 products to the library that torch chooses (for the whole process).
        eager: attention with all scores at once (for the whole process), see eager.py.
        kind: "kl" or "ce".
        weights: [K] weight of each step's summed loss; by default GAMMA^k over the step's pairs.
        low: dtype of what is frozen, embedding and teacher: bf16 where a trainer would train in bf16.
    """

    def __init__(
        self,
        material: Material,
        unroll: int,
        train_lm_head: bool = True,
        onednn: bool = True,
        eager: bool = False,
        kind: str = "kl",
        weights: Tensor | None = None,
        low: torch.dtype = torch.float32,
    ) -> None:
        if not onednn:
            linear._asks_onednn = lambda _a, _b: False
        if eager:
            drafter_module.unrolled_attention = eager_attention
        drafter = Drafter(material.shape, material.embedding.to(low))
        drafter.load_state_dict(material.weights, assign=True)
        drafter.lm_head.weight.requires_grad_(train_lm_head)
        teacher = Teacher(material.norm, material.shape.rms_norm_eps, material.head_rows.to(low), material.target_ids)
        self.objective = Objective(drafter, teacher, kind)
        self.batch = build_batch([material.document], unroll, material.kept, "mask")
        if weights is None:
            weights = torch.tensor([GAMMA**k / max(n, 1) for k, n in enumerate(self.batch.trained.tolist())])
        self.weights = weights

    def loss(self) -> Tensor:
        """Σ_k weights[k] times the summed divergence of step k's pairs."""
        total, _ = self.objective(self.batch, self.weights)
        return total

    def parameters(self) -> dict[str, Tensor]:
        """By the checkpoint's names, which are ours."""
        return {name: p for name, p in self.objective.drafter.named_parameters() if p.requires_grad}

    def logits(self) -> Tensor:
        """[K, T, Vd]; NaN where there is no slot, or no token to read."""
        drafter, slots, T = self.objective.drafter, self.batch.layout.slots, len(self.batch.ids)
        with torch.no_grad():
            found = drafter.lm_head(drafter(self.batch)[0])
        logits = found.new_full((len(found), T, found.shape[-1]), float("nan"))
        for k, step in enumerate(found):
            reads = slots + 1 + k < T
            logits[k, slots[reads]] = step[reads]
        return logits
