"""The fidelity gate: do the stored states rebuild the target's own logits?

Every silent error of an extraction (a state taken after the final norm, a norm of the form 1+w
read as w, soft-capped logits, a wrong mask) shows here, before hours are spent on it.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from eagle31_train.drafter.layer import rms_norm
from eagle31_train.schema import ExtractConfig, UserError
from eagle31_train.targets.hf import HiddenStateTarget

SAMPLE_EVERY = 10  # the first batch of one shard in so many is compared, until `gate_batches` were
ROWS = 256  # positions compared per batch

Figures = Sequence[float]  # of one batch: top-1 agreement, mean KL in nats, positions compared


def rebuilt_logits(target: HiddenStateTarget, last: Tensor, after_norm: bool = False, shift: float = 0.0) -> Tensor:
    """Stored last hidden states [n, H] → logits [n, V] fp32, the way training rebuilds them.

    `after_norm` and `shift` rebuild them wrongly on purpose, to name the cause of a failure.
    """
    weight, _ = target.norm_weight()
    normed = last.float() if after_norm else rms_norm(last.float(), weight + shift, target.norm_eps())
    head = target.head_weight()
    return (normed.to(head.dtype) @ head.T).float()


class Gate:
    """Compares rebuilt logits with the target's own: in a sample of shards, and where a run begins."""

    def __init__(self, target: HiddenStateTarget, config: ExtractConfig) -> None:
        self.target = target
        self.config = config
        self.passed = config.gate_batches == 0  # whether this run has compared anything yet

    def samples(self, number: int) -> bool:
        """Whether the store records a comparison for its shard of this number.

        A function of the number alone: a continued extraction records what an uninterrupted one does.
        """
        return number % SAMPLE_EVERY == 0 and number // SAMPLE_EVERY < self.config.gate_batches

    def check(self, tokens: Tensor, attention_mask: Tensor, last: Tensor) -> Figures:
        """Compare one batch: tokens and mask [B, T], stored states [B, T, H].

        Raises:
            UserError: the states do not rebuild the logits; the message names the likely cause.
        """
        # A padded batch is compared on its longest rows, of which one forward pass is enough.
        longest = attention_mask.sum(1).argsort(descending=True)[: max(1, ROWS // tokens.shape[1])]
        real = attention_mask[longest].bool()
        own = self.target.own_logits(tokens[longest], attention_mask[longest])[real][:ROWS]
        states = last[longest][real][:ROWS]
        agreement, kl = compare(own, rebuilt_logits(self.target, states))
        if agreement < self.config.gate_top1 or not kl <= self.config.gate_kl:
            raise UserError(
                f"fidelity gate: logits rebuilt from the stored states agree with the target's in {agreement:.1%} "
                f"of positions (KL {kl:.3g}); {self._cause(own, states)}"
            )
        self.passed = True
        return agreement, kl, len(own)

    def _cause(self, own: Tensor, states: Tensor) -> str:
        """Try the known mistakes and name the one that explains the failure."""
        config = getattr(self.target.model.config, "text_config", self.target.model.config)
        for name in ("final_logit_softcapping", "logit_scale", "logits_scaling"):
            if getattr(config, name, None) not in (None, 1, 1.0):
                return f"the target's config has {name}={getattr(config, name)}, which EAGLE 3's loss does not model"
        tried: dict[str, dict[str, Any]] = {
            "the last hidden state was taken after the final norm": {"after_norm": True},
            "the final norm is of the form (1 + w) but was read as w": {"shift": 1.0},
            "the final norm was read as (1 + w) but is w": {"shift": -1.0},
        }
        for cause, wrong in tried.items():
            if compare(own, rebuilt_logits(self.target, states, **wrong))[0] >= self.config.gate_top1:
                return f"likely cause: {cause}"
        return "no known mistake explains it: check target.dtype and whether the model changes its logits"


def report(figures: Sequence[Figures]) -> dict[str, Any]:
    """All comparisons of a store, for its manifest: the worst agreement and the worst KL."""
    return {
        "batches": len(figures),
        "positions": sum(n for _, _, n in figures),
        "top1_agreement": min((a for a, _, _ in figures), default=None),
        "kl": max((k for _, k, _ in figures), default=None),
    }


def summary(report: dict[str, Any]) -> str:
    """A report as one line for people."""
    if not report["batches"]:
        return "fidelity: not compared (extract.gate_batches=0)"
    top1, kl, positions = report["top1_agreement"], report["kl"], report["positions"]
    return f"fidelity: top-1 {top1:.2%}, KL {kl:.2g} over {positions} positions"


def compare(own: Tensor, rebuilt: Tensor) -> tuple[float, float]:
    """Top-1 agreement and mean KL(own || rebuilt) of logits [n, V] fp32.

    States are stored in bf16, whatever the target works in, and its rounding ties or swaps logits at
    the maximum; the rebuilt choice agrees if the target's own logits put it within one rounding step
    of their maximum.
    """
    best = own.max(-1).values
    chosen = own.gather(1, rebuilt.argmax(-1, keepdim=True))[:, 0]
    agreement = (chosen >= best - torch.finfo(torch.bfloat16).eps * best.abs()).float().mean().item()
    log_own = own.log_softmax(-1)
    kl = (log_own.exp() * (log_own - rebuilt.log_softmax(-1))).sum(-1).mean().item()
    return agreement, kl
