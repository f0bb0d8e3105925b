"""Greedy decoding of one sequence: plain, and by chain speculation, with the counts that vLLM makes.

What vLLM 0.32 counts, and so does this module: every verification is one draft, from the prompt's
own forward pass onwards; all tokens that it proposed and all that the target agreed with, **also
those past the end-of-sequence token or past max_new_tokens**, which are then cut from the output.
Nothing is drafted after the token that ends the output. Drafts are not shortened near
max_new_tokens; near the target's last position vLLM does shorten them, so such prompts are not
decoded here (`evaluate.py`).
"""

import time
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from eagle31_train.targets.cached import CachedTarget


class Drafts(Protocol):
    """What speculation asks of a drafter; `DraftDecoder` is the real one."""

    def extend(self, aux: Tensor, next_tokens: Tensor) -> None:
        """Take in the states [n, A, H] of n verified positions and the token [n] after each."""

    def draft(self, count: int) -> list[int]:
        """Propose the next `count` tokens."""


@dataclass(frozen=True)
class Limits:
    """Where an output ends: with a token of `end_ids`, or after `max_new_tokens`."""

    max_new_tokens: int
    end_ids: Collection[int]

    def append(self, output: list[int], new: list[int]) -> bool:
        """Add new tokens to an output up to its end, an end token included; whether it has ended."""
        for token in new:
            output.append(token)
            if token in self.end_ids or len(output) == self.max_new_tokens:
                return True
        return False


@dataclass
class Decoded:
    """One output and what it took.

    seconds: wall time, the prompt's own forward pass included; accepted: for each draft, in order, how
    many of its tokens the target agreed with; proposed: tokens drafted in all.
    """

    tokens: list[int] = field(default_factory=list)
    seconds: float = 0.0
    accepted: list[int] = field(default_factory=list)
    proposed: int = 0

    def accepted_per_position(self, draft_tokens: int) -> list[int]:
        """At index i: drafts whose first i+1 tokens the target agreed with."""
        return [sum(count > position for count in self.accepted) for position in range(draft_tokens)]


def decode_plain(target: CachedTarget, prompt: list[int], limits: Limits) -> Decoded:
    """Greedy decoding, one token per forward pass."""
    began = _now(target)
    target.reset()
    output: list[int] = []
    new = prompt
    ended = False
    while not ended:
        new = [int(target.read_plain(new).argmax())]
        ended = limits.append(output, new)
    return Decoded(output, _now(target) - began)


def decode_speculative(
    target: CachedTarget, drafter: Drafts, prompt: list[int], draft_tokens: int, limits: Limits
) -> Decoded:
    """Greedy decoding in which the target verifies `draft_tokens` proposals per forward pass."""
    began = _now(target)
    target.reset()
    device = target.embedding.weight.device
    result = Decoded()

    aux, logits = target.read(prompt, 1)
    newest = int(logits[0].argmax())
    drafter_reads = [*prompt[1:], newest]
    ended = limits.append(result.tokens, [newest])
    while not ended:
        drafter.extend(aux, torch.tensor(drafter_reads, device=device))
        proposed = drafter.draft(draft_tokens)
        aux, logits = target.read([newest, *proposed], len(proposed) + 1)
        chosen: list[int] = logits.argmax(-1).tolist()
        accepted = agreeing(proposed, chosen)

        result.accepted.append(accepted)
        result.proposed += len(proposed)
        # The target's own token follows the last that it agreed with; the rest never happened.
        drafter_reads = chosen[: accepted + 1]
        newest = drafter_reads[-1]
        target.forget(len(proposed) - accepted)
        aux = aux[: accepted + 1]
        ended = limits.append(result.tokens, drafter_reads)
    result.seconds = _now(target) - began
    return result


def agreeing(proposed: list[int], chosen: list[int]) -> int:
    """How many proposals, from the first on, are the target's own choice."""
    for index, (ours, theirs) in enumerate(zip(proposed, chosen, strict=False)):
        if ours != theirs:
            return index
    return len(proposed)


def first_difference(plain: list[int], speculative: list[int]) -> int | None:
    """The first position at which two outputs differ, or at which only one goes on; None if they are equal."""
    if plain == speculative:
        return None
    pairs = zip(plain, speculative, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(plain), len(speculative)))


def logit_gap(target: CachedTarget, prefix: list[int], plain: int, speculative: int) -> float:
    """By how much the target prefers one token to another after `prefix`, read in one forward pass."""
    target.reset()
    logits = target.read_plain(prefix)
    return float(logits[plain] - logits[speculative])


def _now(target: CachedTarget) -> float:
    device = target.embedding.weight.device
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
