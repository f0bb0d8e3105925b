"""The fidelity gate: do the stored states rebuild the target's own logits?

Every silent error of an extraction (a state taken after the final norm, a norm of the form 1+w
read as w, soft-capped logits, a wrong mask, mixed-up conversations) shows here, before hours are
spent on it. Right states must also survive the store's codec: a rounding that swaps two near-equal
tokens is no error, since `top1` is taken before it, but the distribution must stay what it was.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from eagle31_train.codec import encode
from eagle31_train.schema import ExtractConfig, UserError
from eagle31_train.targets.engine import Engine, Reference

SAMPLE_EVERY = 10  # one shard in so many is compared, until `gate_batches` were
COMPARED = 4  # conversations compared per shard, from the shortest to the longest
ROWS = 256  # positions compared per shard

Figures = Sequence[float]  # of one shard: top-1 agreement, mean KL in nats, positions compared


class Gate:
    """Compares rebuilt logits with the target's own: in a sample of shards, and where a run begins.

    Args:
        engine: what made the states.
        config: how many comparisons there are, and their bounds.
        codec: how the store keeps last hidden states.
    """

    def __init__(self, engine: Engine, config: ExtractConfig, codec: str = "bf16") -> None:
        self.engine = engine
        self.config = config
        self.codec = codec
        self.passed = config.gate_batches == 0  # whether this run has compared anything yet

    def samples(self, number: int) -> bool:
        """Whether the store records a comparison for its shard of this number.

        A function of the number alone: a continued extraction records what an uninterrupted one does.
        """
        return number % SAMPLE_EVERY == 0 and number // SAMPLE_EVERY < self.config.gate_batches

    def check(self, tokens: Sequence[Tensor], last: Sequence[Tensor]) -> Figures:
        """Compare some positions of conversations: tokens [T] and last hidden states [T, H] of each.

        Raises:
            UserError: the states do not rebuild the logits; the message names the likely cause.
        """
        own, states = [], []
        for row, rows in zip(tokens, last, strict=True):
            # The last position's distribution is of a token that nobody has written.
            positions = torch.linspace(0, len(row) - 2, min(ROWS // COMPARED, len(row) - 1)).round().long()
            own.append(self.engine.reference(row, positions))
            states.append(rows[positions.to(rows.device)])
        if not own:  # a shard of single tokens
            return 1.0, 0.0, 0
        # First whether they are the right states, whatever keeps them; then what the codec leaves of them.
        states = [rows.bfloat16() for rows in states]
        agreement, kl = self._compare(own, states)
        if agreement < self.config.gate_top1 or not kl <= self.config.gate_kl:
            raise UserError(
                f"fidelity gate: logits rebuilt from the hidden states agree with the target's in {agreement:.1%} "
                f"of positions (KL {kl:.3g}); {self._cause(own, states)}"
            )
        if self.codec != "bf16":
            agreement, kl = self._compare(own, [encode(rows, self.codec).decode() for rows in states])
        if not kl <= self.config.gate_kl:
            raise UserError(
                f"fidelity gate: store.last_codec={self.codec} keeps too little of the last hidden states (KL {kl:.3g} "
                f"to the target's distribution): use int8 or bf16 (extract.gate_kl={self.config.gate_kl} is the bound)"
            )
        self.passed = True
        return agreement, kl, sum(len(rows) for rows in states)

    def _compare(self, own: Sequence[Reference], states: Sequence[Tensor], **wrong: Any) -> tuple[float, float]:
        """Agreement and KL over all positions, one conversation's logits in memory at a time."""
        total = sum(len(rows) for rows in states)
        agreement = kl = 0.0
        for reference, rows in zip(own, states, strict=True):
            one = compare(reference, self.engine.readout.logits(rows, **wrong))
            agreement += one[0] * len(rows) / total
            kl += one[1] * len(rows) / total
        return agreement, kl

    def _cause(self, own: Sequence[Reference], states: Sequence[Tensor]) -> str:
        """Try the known mistakes and name the one that explains the failure."""
        if quirk := self.engine.readout.quirk:
            return f"the target's config has {quirk}, which EAGLE 3's loss does not model"
        tried: dict[str, dict[str, Any]] = {
            "the last hidden state was taken after the final norm": {"after_norm": True},
            "the final norm is of the form (1 + w) but was read as w": {"shift": 1.0},
            "the final norm was read as (1 + w) but is w": {"shift": -1.0},
        }
        for cause, wrong in tried.items():
            if self._explains(own, states, **wrong):
                return f"likely cause: {cause}"
        return "no known mistake explains it: check target.dtype and whether the model changes its logits"

    def _explains(self, own: Sequence[Reference], states: Sequence[Tensor], **wrong: Any) -> bool:
        return self._compare(own, states, **wrong)[0] >= self.config.gate_top1


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


def compare(reference: Reference, rebuilt: Tensor) -> tuple[float, float]:
    """Top-1 agreement and mean KL(own || rebuilt) with rebuilt logits [n, V] fp32.

    States are stored in bf16 or less, whatever the target works in, and its rounding ties or swaps
    logits at the maximum; the rebuilt choice agrees if the target's own logits put it within one
    rounding step of bf16 of their maximum.

    Where only the likeliest tokens' probabilities are known, the KL is that of the partition into
    each of these and all the others together: a lower bound of the whole, and nearly equal to it.
    """
    own = reference.own.to(rebuilt.device)
    choice = rebuilt.argmax(-1, keepdim=True)
    log_rebuilt = rebuilt.log_softmax(-1)
    if reference.ids is None:
        best, chosen = own.max(-1).values, own.gather(1, choice)[:, 0]
        size = best.abs()
        log_own = own.log_softmax(-1)
    else:
        ids = reference.ids.to(rebuilt.device)
        best = own.max(-1).values
        chosen = own.masked_fill(ids != choice, float("-inf")).max(-1).values
        size = rebuilt.gather(1, choice)[:, 0].abs()  # a log-probability does not tell its logit's size
        log_own, log_rebuilt = _with_rest(own), _with_rest(log_rebuilt.gather(1, ids))
    agreement = (chosen >= best - torch.finfo(torch.bfloat16).eps * size).float().mean().item()
    kl = (log_own.exp() * (log_own - log_rebuilt)).sum(-1).mean().item()
    return agreement, kl


def _with_rest(logs: Tensor) -> Tensor:
    """[n, k] log-probabilities → [n, k + 1], the last one of all tokens that are not among them."""
    rest = (1 - logs.exp().sum(-1, keepdim=True)).clamp_min(1e-6)  # below that it is rounding
    return torch.cat([logs, rest.log()], -1)


def choose(lengths: Sequence[int]) -> list[int]:
    """COMPARED conversations of a shard, evenly from the shortest to the longest; of a single token, none."""
    order = sorted((i for i, length in enumerate(lengths) if length > 1), key=lambda i: (lengths[i], i))
    if len(order) <= COMPARED:
        return order
    return [order[k * (len(order) - 1) // (COMPARED - 1)] for k in range(COMPARED)]
