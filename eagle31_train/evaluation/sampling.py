"""How the target's and the drafter's tokens are chosen: greedily, or drawn.

A draw is an exponential race: for probabilities p[v] and independent exponentials e[v], the token with the greatest
p[v] / e[v] is distributed as p. The exponentials of token i of an output depend on the prompt's seed and on i alone.
So plain decoding and every way of drafting draw the same output, and a greedy draft is accepted if and only if it is
that token. Rounding hardly affects a race, but would affect draws by the inverse of the cumulative distribution.

Drafts that are drawn (`probabilistic`) are accepted with probability min(1, p/q), and otherwise replaced by a draw
from max(p - q, 0), renormalised (arXiv 2211.17192). The output is then distributed as plain sampling's, but is
another draw.

As in vLLM 0.32, logits are divided by the temperature; the target's are then cut to the top_k likeliest and to the
nucleus of top_p, the drafter's are not. Both are renormalised. See its v1/sample/rejection_sampler.py and
v1/spec_decode/llm_base_proposer.py.

Shapes: B sequences; n positions; K drafted tokens; V and Vd target and draft vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from eagle31_train.targets.generate import likeliest

NUCLEUS = 512  # candidates looked at before a full sort; nearly every nucleus is smaller
TARGET, DRAFT, ACCEPT = range(3)  # what a stream of random numbers is for


@dataclass(frozen=True)
class Sampling:
    """How tokens are sampled: greedily at temperature 0.

    drafts: "greedy" or "probabilistic", as vLLM's draft_sample_method. top_k: None is all."""

    temperature: float = 0.0
    top_p: float = 1.0
    drafts: str = "greedy"
    top_k: int | None = None

    @property
    def drawn_drafts(self) -> bool:
        return self.drafts == "probabilistic" and self.temperature > 0

    def of_target(self, logits: Tensor) -> Tensor:
        """Return the distribution [B, V] fp64 of the target's tokens, whoever drafts, from its logits [B, V]."""
        return probabilities(logits, self.temperature, self.top_p, self.top_k)


class Chooser:
    """Chooses the tokens of some sequences. What is drawn depends on a sequence's seed and its number of tokens."""

    def __init__(self, sampling: Sampling, seeds: Sequence[int]) -> None:
        self.sampling = sampling
        self.seeds = list(seeds)
        self.numbers = [0] * len(self.seeds)  # of each sequence's next token
        self._drafted: list[Tensor] = []  # [B, Vd] each: distributions that the current drafts were drawn from

    def select(self, sequences: Sequence[int]) -> None:
        self.seeds = [self.seeds[row] for row in sequences]
        self.numbers = [self.numbers[row] for row in sequences]

    def next(self, logits: Tensor) -> list[int]:
        """Return the target's next token of every sequence, from logits [B, 1, V]."""
        tokens = self._targets(logits)[:, 0].tolist()
        self.numbers = [number + 1 for number in self.numbers]
        return tokens

    def draft(self, step: int, logits: Tensor) -> Tensor:
        """Draft a token for every sequence: [B] int64 of the draft vocabulary, from the drafter's logits [B, Vd]."""
        if not self.sampling.drawn_drafts:
            return logits.argmax(-1)
        q = probabilities(logits, self.sampling.temperature, 1.0)
        self._drafted.append(q)
        return self._draw(q, DRAFT, step)

    def verify(self, logits: Tensor, proposed: Tensor, target_ids: Tensor) -> list[list[int]]:
        """Return the new tokens of each sequence: the drafts that the target accepts, then a token of its own.

        logits: [B, K+1, V], the target's, before each proposed token and after the last. proposed: [B, K] int64, target
        ids. target_ids: [Vd] int64."""
        if self.sampling.drawn_drafts:
            tokens = self._reject(logits, proposed, target_ids)
        else:
            pairs = zip(proposed.tolist(), self._targets(logits).tolist(), strict=True)
            tokens = [chosen[: agreeing(ours, chosen) + 1] for ours, chosen in pairs]
        self.numbers = [number + len(new) for number, new in zip(self.numbers, tokens, strict=True)]
        return tokens

    def _targets(self, logits: Tensor) -> Tensor:
        """Return the target's choices [B, n] int64 at n positions, from each sequence's next token on."""
        if self.sampling.temperature == 0:
            return logits.argmax(-1)
        chosen = []
        for offset, here in enumerate(logits.unbind(1)):
            p = self.sampling.of_target(here)
            chosen.append(self._draw(p, TARGET, offset))
        return torch.stack(chosen, 1)

    def _reject(self, logits: Tensor, proposed: Tensor, target_ids: Tensor) -> list[list[int]]:
        """Apply rejection sampling to drafts that were drawn from the distributions in `_drafted`."""
        tokens: list[list[int]] = [[] for _ in logits]
        going = [True] * len(logits)
        for offset, here in enumerate(logits.unbind(1)):
            p = self.sampling.of_target(here)
            own, accepted = p, [False] * len(p)  # after the last draft, the target's own token
            if offset < proposed.shape[1]:
                q = torch.zeros_like(p).index_copy_(1, target_ids, self._drafted[offset])
                chances = acceptance(p, q, proposed[:, offset])
                uniforms = [each.random() for each in self._streams(ACCEPT, offset)]
                accepted = [u < chance for u, chance in zip(uniforms, chances.tolist(), strict=True)]
                own = residual(p, q)
            instead = self._draw(own, TARGET, offset).tolist()
            for row in [row for row, goes in enumerate(going) if goes]:
                tokens[row].append(int(proposed[row, offset]) if accepted[row] else instead[row])
                going[row] = accepted[row]
        self._drafted.clear()
        return tokens

    def _draw(self, weights: Tensor, purpose: int, offset: int) -> Tensor:
        """Draw tokens [B] int64 by weights [B, V], which need not sum to one; offset 0 is a sequence's next token."""
        rows = [each.standard_exponential(weights.shape[1]) for each in self._streams(purpose, offset)]
        return (weights / torch.from_numpy(np.stack(rows)).to(weights.device)).argmax(-1)

    def _streams(self, purpose: int, offset: int) -> list[np.random.Generator]:
        return [stream(s, n + offset, purpose) for s, n in zip(self.seeds, self.numbers, strict=True)]


def stream(seed: int, number: int, purpose: int) -> np.random.Generator:
    """Return the random numbers of one token of one output, for one purpose: a function of the arguments alone."""
    key, counter = np.array([seed % 2**64, number], np.uint64), np.array([0, 0, 0, purpose], np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter))


def acceptance(p: Tensor, q: Tensor, drafts: Tensor) -> Tensor:
    """Return the probabilities [B] that drafts [B], drawn from q [B, V], are accepted as draws from p [B, V]."""
    at = drafts[:, None]
    return (p.gather(1, at) / q.gather(1, at)).clamp(max=1)[:, 0]


def residual(p: Tensor, q: Tensor) -> Tensor:
    """Return weights [B, V], not renormalised: what is left of p to draw from after a draw from q was rejected."""
    return (p - q).clamp(min=0)


def probabilities(logits: Tensor, temperature: float, top_p: float, top_k: int | None = None) -> Tensor:
    """Return probabilities [B, V] fp64 from logits [B, V] at a temperature.

    They are cut to the top_k likeliest tokens if set, then to the fewest of these whose mass reaches top_p."""
    p = (likeliest(logits, top_k).double() / temperature).softmax(-1)
    if top_p >= 1:
        return p
    size = min(NUCLEUS, p.shape[-1])
    top = p.topk(size, -1).values
    if bool((top.sum(-1) < top_p).any()):
        top = p.sort(-1, descending=True).values
    # The nucleus ends with the first token at which the mass reaches top_p.
    last = (top.cumsum(-1) < top_p).sum(-1, keepdim=True).clamp(max=top.shape[-1] - 1)
    p = p.where(p >= top.gather(-1, last), 0.0)
    return p / p.sum(-1, keepdim=True)


def agreeing(proposed: list[int], chosen: list[int]) -> int:
    """Return how many proposals, from the first on, are the target's own choice."""
    pairs = zip(proposed, chosen, strict=False)
    return next((at for at, (ours, theirs) in enumerate(pairs) if ours != theirs), min(len(proposed), len(chosen)))
