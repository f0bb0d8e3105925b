"""Our own step. The packed batch is built beforehand, as by the trainer's background thread."""

from collections.abc import Sequence

import torch
from torch import Tensor

from benchmarks.shapes import GAMMA, Material
from eagle31_train.model import drafter as drafter_module
from eagle31_train.model import linear
from eagle31_train.model.batch import build_batch
from eagle31_train.model.drafter import Drafter
from eagle31_train.model.loss import Objective, Teacher
from eagle31_train.model.packing import Layout


class Ours:
    """fp32 (or under the caller's autocast), one document; `unroll`: K; `kind`: "kl" or "ce".

    Args:
        train_lm_head: speculators freezes its head, SpecForge trains it.
        onednn: False leaves fp32 products to the library that torch chooses (for the whole process).
        eager: use `eager_attention` (for the whole process).
        weights: [K] weight of each step's summed loss; by default GAMMA^k over the step's pairs.
        low: dtype of the frozen embedding and teacher: bf16 if a trainer would train in bf16.
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
            linear._asks_onednn = lambda a, b: False  # noqa: ARG005 (their names are its)
        if eager:
            drafter_module.unrolled_attention = eager_attention  # type: ignore[assignment]  # it has no window
        drafter = Drafter(material.shape, material.embedding.to(low))
        drafter.load_state_dict(material.weights, assign=True)
        drafter.lm_head.weight.requires_grad_(train_lm_head)
        teacher = Teacher(material.norm, material.shape.rms_norm_eps, material.head_rows.to(low), material.target_ids)
        self.objective = Objective(drafter, teacher, kind)
        self.batch = build_batch([material.document], unroll, material.kept)
        if weights is None:
            weights = torch.tensor([GAMMA**k / max(n, 1) for k, n in enumerate(self.batch.trained.tolist())])
        self.weights = weights

    def loss(self) -> Tensor:
        """Return Σ_k weights[k] times the summed divergence of step k's pairs."""
        total, _ = self.objective(self.batch, self.weights)
        return total

    def parameters(self) -> dict[str, Tensor]:
        """Return the trained parameters by the checkpoint's names, which are ours."""
        return {name: p for name, p in self.objective.drafter.named_parameters() if p.requires_grad}

    def logits(self) -> Tensor:
        """Return [K, T, Vd]; NaN where there is no slot, or no token to read."""
        drafter, slots, T = self.objective.drafter, self.batch.layout.slots, len(self.batch.ids)
        with torch.no_grad():
            found = drafter.lm_head(drafter(self.batch)[0])
        logits = found.new_full((len(found), T, found.shape[-1]), float("nan"))
        for k, step in enumerate(found):
            reads = slots + 1 + k < T
            logits[k, slots[reads]] = step[reads]
        return logits


def eager_attention(
    q: Tensor,
    k0: Tensor,
    v0: Tensor,
    own_k: Sequence[Tensor],
    own_v: Sequence[Tensor],
    layout: Layout,
    scale: float,
    **_: object,
) -> Tensor:
    """Compute attention as most public trainers of MLA drafters do: all scores of a step at once, kept by autograd.
    Replaces `unrolled_attention` for one document without a window: q [S, h, d] over k0 [N, g, d] and the slots' own
    keys → [S, h, dv]. Slots, loss and projections stay ours, so that only merged, linear-memory attention is measured.
    """
    repeat = q.shape[1] // k0.shape[1]

    def by_head(x: Tensor) -> Tensor:
        return x.repeat_interleave(repeat, 1).transpose(0, 1)  # [h, rows, width]

    queries = q.transpose(0, 1)
    hidden = torch.arange(len(k0), device=q.device) > layout.slots[:, None]
    scores = (queries @ by_head(k0).mT * scale).masked_fill(hidden, float("-inf"))  # [h, S, N]
    own = [(queries * by_head(key)).sum(-1, keepdim=True) * scale for key in own_k]
    shares = torch.cat([scores, *own], -1).softmax(-1)
    out = shares[..., : len(k0)] @ by_head(v0)
    for step, value in enumerate(own_v, len(k0)):
        out = out + shares[..., step : step + 1] * by_head(value)
    return out.transpose(0, 1)
