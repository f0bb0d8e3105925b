"""Decoding of a batch of prompts: plain, and by chain speculation, with the counts that vLLM makes.

As in vLLM 0.32, every verification is one draft. Counts include all tokens that it proposed, and all that the target
agreed with, **also those past the end-of-sequence token or past max_new_tokens**, which are then cut from the output.
Nothing is drafted after the token that ends the output. Drafts are not shortened near max_new_tokens; near the target's
last position vLLM does shorten them, so such prompts are not decoded here (`in_process.longest_prompt`).

In greedy decoding, and in sampling with greedy drafts (`sampling.py`), speculation gives plain decoding's output, token
for token. A sequence that has ended leaves its batch.
"""

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from eagle31_train.evaluation.sampling import Chooser, Sampling
from eagle31_train.model.decode import DraftDecoder
from eagle31_train.model.drafter import Drafter
from eagle31_train.targets.cached import CachedTarget

GREEDY = Sampling()


@dataclass(frozen=True)
class Limits:
    """Where an output ends: with a token of `end_ids`, or after `max_new_tokens`."""

    max_new_tokens: int
    end_ids: Collection[int]

    def append(self, output: list[int], new: list[int]) -> bool:
        """Append new tokens to an output up to its end, an end token included. Return whether it has ended."""
        for token in new:
            output.append(token)
            if token in self.end_ids or len(output) == self.max_new_tokens:
                return True
        return False


@dataclass
class Decoded:
    """One output and what it took.

    seconds: the batch's wall time until its last output ended, shared out evenly.
    accepted: how many tokens of each draft, in order, the target agreed with.
    beyond: if asked for, what the target would have written next.
    aux: if asked for, the target's auxiliary states, [len(prompt) + len(tokens) - 2, A, H].
    """

    tokens: list[int] = field(default_factory=list)
    seconds: float = 0.0
    accepted: list[int] = field(default_factory=list)
    beyond: list[int] = field(default_factory=list)
    aux: Tensor | None = None


def decode_plain(
    target: CachedTarget,
    prompts: Sequence[list[int]],
    limits: Limits,
    sampling: Sampling = GREEDY,
    seeds: Sequence[int] | None = None,
    beyond: int = 0,
    states: bool = False,
) -> list[Decoded]:
    """Decode one token of every prompt (token ids, at least one prompt) per forward pass.

    seeds: one per prompt, for its draws. beyond: how many tokens to decode past the end of each output. states: keep
    the target's auxiliary states."""
    began = _now(target)
    target.reset(len(prompts))
    chooser = Chooser(sampling, seeds or [0] * len(prompts))
    decoded = [Decoded() for _ in prompts]
    seen: list[list[Tensor]] = [[] for _ in prompts]
    batch = list(range(len(prompts)))  # prompts that go on
    ended = [False] * len(prompts)
    over = 0.0  # when the last output ended; tokens beyond it are not timed
    new = [list(prompt) for prompt in prompts]
    while batch:
        if states:
            aux, logits = target.read(new, 1)
            for row, index in enumerate(batch):
                seen[index].append(aux[row, aux.shape[1] - len(new[row]) :])
        else:
            logits = target.read_plain(new)
        tokens = chooser.next(logits)
        for index, token in zip(batch, tokens, strict=True):
            if ended[index]:
                decoded[index].beyond.append(token)
            else:
                ended[index] = limits.append(decoded[index].tokens, [token])
        if not over and all(ended):
            over = _now(target)
        going = [row for row, index in enumerate(batch) if not (ended[index] and len(decoded[index].beyond) == beyond)]
        batch, new = _leave(going, batch, target, chooser), [[tokens[row]] for row in going]
    for one, prompt, rows in zip(decoded, prompts, seen, strict=True):
        one.seconds = (over - began) / len(prompts)
        if states:
            one.aux = torch.cat(rows)[: len(prompt) + len(one.tokens) - 2].to(target.device)
    return decoded


def decode_speculative(
    target: CachedTarget,
    drafter: Drafter,
    target_ids: Tensor,
    prompts: Sequence[list[int]],
    draft_tokens: int,
    limits: Limits,
    sampling: Sampling = GREEDY,
    seeds: Sequence[int] | None = None,
) -> list[Decoded]:
    """Decode by verifying `draft_tokens` proposals of every prompt per forward pass.

    target_ids: [Vd] int64, the target's id of each of the drafter's tokens. Other arguments are `decode_plain`'s."""
    capacity = max(len(prompt) for prompt in prompts) + limits.max_new_tokens + draft_tokens
    drafts = DraftDecoder(drafter, target_ids, capacity, len(prompts))
    began = _now(target)
    target.reset(len(prompts))
    chooser = Chooser(sampling, seeds or [0] * len(prompts))
    decoded = [Decoded() for _ in prompts]
    batch = list(range(len(prompts)))

    aux, logits = target.read(prompts, 1)
    new = [[token] for token in chooser.next(logits)]  # the new tokens of every sequence
    # What the drafter has not read yet: states of positions, and the token that follows each.
    states = [aux[row, aux.shape[1] - len(prompt) :] for row, prompt in enumerate(prompts)]
    after = [[*prompt[1:], *tokens] for prompt, tokens in zip(prompts, new, strict=True)]
    while True:
        ended = [limits.append(decoded[index].tokens, tokens) for index, tokens in zip(batch, new, strict=True)]
        going = [row for row, over in enumerate(ended) if not over]
        if not going:
            break
        if len(going) < len(batch):
            drafts.select(going)
            states, after = [states[row] for row in going], [after[row] for row in going]
        batch = _leave(going, batch, target, chooser)

        tokens_after = torch.tensor([token for tokens in after for token in tokens], device=target.device)
        drafts.extend(torch.cat(states).to(target.device), tokens_after, [len(tokens) for tokens in after])
        proposed = drafts.propose(draft_tokens, chooser.draft)
        newest = torch.tensor([tokens[-1:] for tokens in after], device=proposed.device)
        aux, logits = target.read(torch.cat([newest, proposed], 1).tolist(), draft_tokens + 1)
        new = after = chooser.verify(logits, proposed, target_ids)
        # The target's own token follows the last draft that it agreed with. Forget the rest.
        target.forget([draft_tokens + 1 - len(tokens) for tokens in new])
        states = [aux[row, : len(tokens)] for row, tokens in enumerate(new)]
        for index, tokens in zip(batch, new, strict=True):
            decoded[index].accepted.append(len(tokens) - 1)
    seconds = (_now(target) - began) / len(decoded)
    for one in decoded:
        one.seconds = seconds
    return decoded


def _leave(going: list[int], batch: list[int], target: CachedTarget, chooser: Chooser) -> list[int]:
    """Remove rows that do not go on from target and chooser. Return the prompts of those that do."""
    if 0 < len(going) < len(batch):
        target.select(going)
        chooser.select(going)
    return [batch[row] for row in going]


def _now(target: CachedTarget) -> float:
    if target.device.type == "cuda":
        torch.cuda.synchronize(target.device)
    return time.perf_counter()
