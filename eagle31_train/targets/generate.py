"""Answers of a target in this process: greedy and sampled rows side by side; new rows take the places of ended ones.

Shape suffixes: B rows, V vocabulary.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from eagle31_train.config import TargetConfig
from eagle31_train.targets.cached import CachedTarget, why_alone
from eagle31_train.targets.completions import Completion, Request, Sampling
from eagle31_train.targets.hf import load_model, positions, rope_by_length

NUCLEUS = 512  # candidates to try before a full sort; nearly every nucleus is smaller
PADDING_COUNTS = {"minimax"}  # models whose recurrent layers read padding on the left as text (transformers 5.23)
REFILL = 0.25  # share of the places that must be free before new rows join: each time, the keys of all are copied


@dataclass
class Row:
    """An answer in progress: its request, that request's index, and the tokens so far."""

    index: int
    request: Request
    ids: list[int] = field(default_factory=list)

    @cached_property
    def random(self) -> torch.Generator:
        """The random generator of this row's draws."""
        return torch.Generator().manual_seed(self.request.seed)


class Generator:
    def __init__(self, target: TargetConfig) -> None:
        """Load the target; UserError if it cannot be loaded."""
        self.model = load_model(target)
        self.limit = positions(self.model.config)

    def refusal(self, prompt_length: int, max_new_tokens: int) -> str | None:
        """Return why a prompt of so many tokens cannot be answered; None if it can."""
        if self.limit is None or prompt_length + max_new_tokens <= self.limit:
            return None
        return f"the prompt and {max_new_tokens} tokens of answer exceed the target's {self.limit} positions"

    @torch.inference_mode()
    def complete(
        self, requests: Sequence[Request], at_once: int, sampling: Sampling
    ) -> Iterator[tuple[int, Completion]]:
        """Complete prompts that `refusal` does not refuse, at most `at_once` together; yield each, with its index, as
        soon as it ends. A row's draws come from its own seed, whichever rows are beside it."""
        waiting = deque(Row(i, one) for i, one in enumerate(requests))
        ended = self._by_transformers if why_alone(self.model) else self._decode
        for row in ended(waiting, at_once, sampling):
            end = next((at for at, token in enumerate(row.ids) if token in sampling.end_ids), None)
            yield row.index, (row.ids, "length") if end is None else (row.ids[: end + 1], "stop")

    def _decode(self, waiting: deque[Row], at_once: int, sampling: Sampling) -> Iterator[Row]:
        """Yield the rows as they end."""
        target, rows = CachedTarget(self.model, None), list[Row]()
        most, end_ids = sampling.max_new_tokens, set(sampling.end_ids)
        while waiting or rows:
            free = at_once - len(rows)
            if waiting and free >= min(REFILL * at_once, len(waiting)):
                new = [waiting.popleft() for _ in range(min(free, len(waiting)))]
                joining = CachedTarget(self.model, None)
                joining.reset(len(new))
                extend(new, joining.read_plain([row.request.ids for row in new])[:, 0], sampling)
                if rows:
                    target.join(joining)
                else:
                    target = joining
                rows += new
            else:
                extend(rows, target.read_plain([row.ids[-1:] for row in rows])[:, 0], sampling)
            going = [at for at, row in enumerate(rows) if row.ids[-1] not in end_ids and len(row.ids) < most]
            if len(going) < len(rows):
                yield from (row for at, row in enumerate(rows) if at not in going)
                if going:
                    target.select(going)
                rows = [rows[at] for at in going]

    def _by_transformers(self, waiting: deque[Row], at_once: int, sampling: Sampling) -> Iterator[Row]:
        """Like `_decode`, for targets whose cache we cannot handle: a batch runs until its last row ends."""
        pad, config = min(sampling.end_ids), self.model.config.get_text_config()
        if rope_by_length(config) or config.model_type in PADDING_COUNTS:  # neighbours would change an answer
            at_once = 1
        # A configuration of our own: the target's may ask for sampling or penalties by default.
        self.model.generation_config = GenerationConfig(
            max_new_tokens=sampling.max_new_tokens,
            do_sample=False,
            eos_token_id=sorted(set(sampling.end_ids)),
            pad_token_id=pad,
        )
        while waiting:
            rows = [waiting.popleft() for _ in range(min(at_once, len(waiting)))]
            longest = max(len(row.request.ids) for row in rows)
            ids = [[pad] * (longest - len(row.request.ids)) + row.request.ids for row in rows]
            mask = [[int(at >= longest - len(row.request.ids)) for at in range(longest)] for row in rows]
            self.model.generate(
                input_ids=torch.tensor(ids, device=self.model.device),
                attention_mask=torch.tensor(mask, device=self.model.device),
                logits_processor=LogitsProcessorList([Extending(rows, sampling)]),
            )
            yield from rows


class Extending(LogitsProcessor):
    """Chooses the tokens of rows within transformers' greedy search: only the chosen one stays finite. `generate`'s own
    sampling has one global random state, so a row's answer would depend on the rows beside it."""

    def __init__(self, rows: list[Row], sampling: Sampling) -> None:
        self.rows, self.sampling = rows, sampling

    def __call__(self, _input_ids: Tensor, scores: Tensor) -> Tensor:
        """scores [B, V] float → the same shape."""
        extend(self.rows, scores, self.sampling)
        chosen = torch.tensor([row.ids[-1] for row in self.rows], device=scores.device)
        return torch.full_like(scores, float("-inf")).scatter_(1, chosen[:, None], 0.0)


def extend(rows: Sequence[Row], logits_BV: Tensor, sampling: Sampling) -> None:
    """Append the next token to each row, the most likely or a drawn one; logits_BV [B, V] float."""
    chosen = logits_BV.argmax(-1)
    sampled = [at for at, row in enumerate(rows) if row.request.temperature]
    if sampled:
        device, these = logits_BV.device, [rows[at] for at in sampled]
        at = torch.tensor(sampled, device=device)
        temperatures = torch.tensor([row.request.temperature for row in these], device=device)
        uniforms = torch.cat([torch.rand(1, generator=row.random) for row in these]).to(device)
        chosen[at] = draw(logits_BV[at].float() / temperatures[:, None], uniforms, sampling.top_p, sampling.top_k)
    for row, token in zip(rows, chosen.tolist(), strict=True):
        row.ids.append(token)


def draw(logits_BV: Tensor, uniform_B: Tensor, top_p: float, top_k: int | None = None) -> Tensor:
    """Sample token ids [B] int64 by inverse CDF over the nucleus: the fewest most likely tokens of mass `top_p`, among
    the `top_k` likeliest if set. logits_BV: [B, V] float32, temperature applied. uniform_B: [B] float32 in [0, 1)."""
    V, logits_BV = logits_BV.shape[1], likeliest(logits_BV, top_k)
    if top_p == 1.0:  # all tokens, in any order: nothing is sorted
        mass_BV = logits_BV.softmax(-1).cumsum(-1)
        threshold_B1 = uniform_B[:, None] * mass_BV[:, -1:]
        return torch.searchsorted(mass_BV, threshold_B1, right=True).clamp(max=V - 1)[:, 0]
    # A full sort of V = 49,152 costs as much as the model's own step, hence the top few first.
    chosen_B, whole_B = _draw_from_top(logits_BV, uniform_B, top_p, min(NUCLEUS, V))
    if not bool(whole_B.all()):
        wide = ~whole_B
        chosen_B[wide] = _draw_from_top(logits_BV[wide], uniform_B[wide], top_p, V)[0]
    return chosen_B


def likeliest(logits_BV: Tensor, top_k: int | None) -> Tensor:
    """Return logits_BV [B, V] with -inf for all but the `top_k` greatest of each row and ties with the last of them, as
    vLLM cuts them before the nucleus; unchanged for None."""
    if top_k is None or top_k >= logits_BV.shape[1]:
        return logits_BV
    least_B1 = logits_BV.topk(top_k, dim=-1).values[:, -1:]
    return logits_BV.masked_fill(logits_BV < least_B1, float("-inf"))


def _draw_from_top(logits_BV: Tensor, uniform_B: Tensor, top_p: float, size: int) -> tuple[Tensor, Tensor]:
    """Like `draw`, but from the `size` most likely tokens; also return [B] bool: whether they hold the nucleus."""
    top_BK, index_BK = logits_BV.topk(size, dim=-1)
    mass_BK = (top_BK - logits_BV.logsumexp(-1, keepdim=True)).exp().cumsum(-1)
    whole_B = (mass_BK[:, -1] >= top_p) | torch.tensor(size == logits_BV.shape[1], device=logits_BV.device)
    # The nucleus ends with the first token at which the mass reaches top_p.
    last_B1 = (mass_BK < top_p).sum(-1, keepdim=True).clamp(max=size - 1)
    threshold_B1 = uniform_B[:, None] * mass_BK.gather(-1, last_B1)
    position_B1 = torch.searchsorted(mass_BK, threshold_B1, right=True).minimum(last_B1)
    return index_BK.gather(-1, position_B1)[:, 0], whole_B
