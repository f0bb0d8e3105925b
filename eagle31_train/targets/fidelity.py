"""The fidelity gate: do the stored states rebuild the target's own distribution?

It compares finished documents as they go into a shard. So every silent error of an extraction (a state taken after the
final norm, a norm of the form 1+w read as w, soft-capped logits, a wrong mask, mixed-up conversations, rows of other
positions) shows here, before hours are spent on it. `top1` is taken before the codec rounds, and must be the target's
choice. The distribution of the stored states must stay the same, though rounding may swap two near-equal tokens.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from eagle31_train.common.errors import UserError
from eagle31_train.config import ExtractConfig
from eagle31_train.store.document import Document
from eagle31_train.targets.hf import Engine, Reference

COMPARED = 4  # conversations compared per shard, from the shortest to the longest
ROWS = 256  # positions compared per shard
AGAIN = 4  # times as many are compared before a shard is refused: 256 positions in bf16 may well have three near ties
MOSTLY = 0.5  # agreement that states blurred by a codec still reach, and states of other positions do not

Figures = Sequence[float]  # of one shard: top-1 agreement, mean KL in nats, positions compared


class Gate:
    """Compares stored states with the target's own logits, in a sample of the shards and where a run begins.

    sampled: numbers of the shards whose comparison the store records, spread over the store. They follow from the plan
    alone, so a resumed extraction records what an uninterrupted one does. passed: whether any shard of this run has
    passed, or none is to be compared.
    """

    def __init__(self, engine: Engine, config: ExtractConfig, shards: int) -> None:
        self.engine = engine
        self.config = config
        self.passed = config.gate_batches == 0
        self.sampled = {k * shards // config.gate_batches for k in range(config.gate_batches)}

    def check(self, documents: Sequence[Document]) -> Figures:
        """Compare some supervised positions of some of a shard's documents, as they are stored. Return agreement, KL in
        nats and the number of positions; UserError if they do not match what the target says there."""
        for more in (1, AGAIN):
            own, states, top1 = [], [], []
            chosen = choose(documents, more * COMPARED)
            each = more * ROWS // max(COMPARED, len(chosen))
            for document in chosen:
                supervised, stored = document.supervised, document.last
                rows = torch.linspace(0, len(supervised) - 1, min(each, len(supervised))).round().long()
                own.append(self.engine.reference(document.tokens, supervised[rows]))
                states.append(stored[rows.to(stored.device)].decode())
                top1.append(document.top1[supervised[rows]])
            if not own:  # nothing in this shard is supervised
                return 1.0, 0.0, 0
            agreement, kl = self._compare(own, states, top1)
            if agreement >= self.config.gate_top1 and kl <= self.config.gate_kl:
                self.passed = True
                return agreement, kl, sum(len(rows) for rows in states)
        raise self._failure(own, states, agreement, kl, documents[0].last.codec)

    def _compare(
        self, own: Sequence[Reference], states: Sequence[Tensor], top1: Sequence[Tensor] | None = None
    ) -> tuple[float, float]:
        """Return agreement and KL over all positions, with one conversation's logits in memory at a time."""
        total = sum(len(rows) for rows in states)
        agreement = kl = 0.0
        for index, (reference, rows) in enumerate(zip(own, states, strict=True)):
            one = compare(reference, self.engine.readout.logits(rows), top1[index] if top1 else None)
            agreement += one[0] * len(rows) / total
            kl += one[1] * len(rows) / total
        return agreement, kl

    def _failure(
        self, own: Sequence[Reference], states: Sequence[Tensor], agreement: float, kl: float, codec: str
    ) -> UserError:
        """Return the error for states that do not pass; it tells whether the codec is to blame."""
        right = agreement >= self.config.gate_top1
        if right and codec != "bf16" and self._compare(own, states)[0] >= MOSTLY:
            finer = "bf16" if codec == "int8_channel" else "int8_channel or bf16"
            lost = f"loses too much (KL {kl:.3g}, extract.gate_kl={self.config.gate_kl})"
            return UserError(f"fidelity gate: store.last_codec={codec} {lost}: use {finer}")
        differ = f"top-1 tokens agree in {agreement:.1%} of positions, KL {kl:.3g}"
        return UserError(
            f"fidelity gate: {differ}: check target.dtype and whether the model changes its logits or norms"
        )


def report(figures: Sequence[Figures]) -> dict[str, Any]:
    """Summarize a store's comparisons for its manifest: the worst agreement and the worst KL."""
    return {
        "batches": len(figures),
        "positions": sum(n for _, _, n in figures),
        "top1_agreement": min((a for a, _, _ in figures), default=None),
        "kl": max((k for _, k, _ in figures), default=None),
    }


def compare(reference: Reference, rebuilt: Tensor, top1: Tensor | None = None) -> tuple[float, float]:
    """Return the agreement of choices top1 [n], and the mean KL(own || rebuilt) of rebuilt logits [n, V] fp32.

    Without top1 the choices are those of the rebuilt logits; -1 is no choice, and agrees with nothing. Targets mostly
    run in bf16, whose rounding ties or swaps logits at the maximum. So a choice agrees if the target's own logit for it
    is within one bf16 rounding step of the maximum.

    Where only the likeliest tokens' probabilities are known, all other tokens count as one. That KL is a lower bound of
    the whole, and nearly equal to it.
    """
    own = reference.own.to(rebuilt.device)
    chose = (rebuilt.argmax(-1) if top1 is None else top1.to(rebuilt.device))[:, None]
    choice = chose.clamp_min(0)
    best, log_rebuilt = own.max(-1).values, rebuilt.log_softmax(-1)
    if reference.ids is None:
        chosen = own.gather(1, choice)[:, 0]
        size = best.abs()
        log_own = own.log_softmax(-1)
    else:
        ids = reference.ids.to(rebuilt.device)
        chosen = own.masked_fill(ids != choice, float("-inf")).max(-1).values
        size = rebuilt.gather(1, choice)[:, 0].abs()  # a log-probability does not tell its logit's size
        log_own, log_rebuilt = _with_rest(own), _with_rest(log_rebuilt.gather(1, ids))
    agrees = (chosen >= best - torch.finfo(torch.bfloat16).eps * size) & (chose[:, 0] >= 0)
    agreement = agrees.float().mean().item()
    kl = (log_own.exp() * (log_own - log_rebuilt)).sum(-1).mean().item()
    return agreement, kl


def _with_rest(logs: Tensor) -> Tensor:
    """[n, k] log-probabilities → [n, k + 1]: the last is that of all other tokens together."""
    rest = (1 - logs.exp().sum(-1, keepdim=True)).clamp_min(1e-6)  # below that it is rounding
    return torch.cat([logs, rest.log()], -1)


def choose(documents: Sequence[Document], count: int) -> list[Document]:
    """Return up to `count` documents with a supervised position, spread evenly from the shortest to the longest."""
    order = sorted((document for document in documents if len(document.supervised)), key=len)
    if len(order) <= count:
        return order
    return [order[k * (len(order) - 1) // (count - 1)] for k in range(count)]
