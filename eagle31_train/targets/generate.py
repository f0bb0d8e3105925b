"""In-process answers of a target: batched transformers `generate`, greedy and sampled rows side by side.

Shape suffixes: B rows, L padded prompt length, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from eagle31_train.config import TargetConfig
from eagle31_train.targets.hf import load_model, positions

NUCLEUS = 512  # candidates looked at before a full sort; nearly every nucleus is smaller


@dataclass(frozen=True)
class Request:
    """One answer wanted: prompt token ids, temperature (0 is greedy) and the seed of its own draws."""

    ids: list[int]
    temperature: float
    seed: int


@dataclass(frozen=True)
class Generated:
    """Token ids without the end-of-turn token; `finish_reason` is "stop" or "length"."""

    ids: list[int]
    finish_reason: str


class Generator:
    def __init__(self, target: TargetConfig, end_ids: list[int]) -> None:
        """Load the target; `end_ids` are token ids that end an answer. UserError if it cannot be loaded."""
        self.model = load_model(target)
        self.end_ids = end_ids
        self.limit = positions(self.model.config)

    def refusal(self, prompt_length: int, max_new_tokens: int) -> str | None:
        """Why a prompt of so many tokens cannot be answered; None if it can."""
        if self.limit is None or prompt_length + max_new_tokens <= self.limit:
            return None
        return f"the prompt and {max_new_tokens} tokens of answer exceed the target's {self.limit} positions"

    @torch.inference_mode()
    def answer(
        self, requests: list[Request], max_new_tokens: int, top_p: float, end_ids: list[int] | None = None
    ) -> list[Generated]:
        """Answer one batch of prompts that `refusal` does not refuse; those of like length waste least. A row's draws
        come from its own seed, whichever rows share its batch."""
        longest = max(len(request.ids) for request in requests)
        device, end_ids = self.model.device, end_ids or self.end_ids
        pad = end_ids[0]
        rows = [[pad] * (longest - len(request.ids)) + request.ids for request in requests]
        masks = [[0] * (longest - len(request.ids)) + [1] * len(request.ids) for request in requests]
        # A configuration of our own: the target's may ask for sampling or penalties by default.
        self.model.generation_config = GenerationConfig(
            max_new_tokens=max_new_tokens, do_sample=False, eos_token_id=end_ids, pad_token_id=pad
        )
        output_BT = self.model.generate(
            input_ids=torch.tensor(rows, device=device),
            attention_mask=torch.tensor(masks, device=device),
            logits_processor=LogitsProcessorList([SeededSampling(requests, longest, max_new_tokens, top_p)]),
        )
        answers = []
        for ids in output_BT[:, longest:].tolist():
            end = next((position for position, token in enumerate(ids) if token in end_ids), None)
            answers.append(Generated(ids[:end], "length" if end is None else "stop"))
        return answers


class SeededSampling(LogitsProcessor):
    """Nucleus sampling with a seed per row, as a processor under greedy search: only the drawn token stays finite.
    `generate` has one global random state, with which a row's answer would depend on the rows beside it."""

    def __init__(self, requests: list[Request], prompt_length: int, max_new_tokens: int, top_p: float) -> None:
        self.prompt_length = prompt_length
        self.top_p = top_p
        self.rows = torch.tensor([i for i, request in enumerate(requests) if request.temperature > 0])
        sampled = [requests[i] for i in self.rows.tolist()]
        self.temperatures = torch.tensor([request.temperature for request in sampled])
        generators = [torch.Generator().manual_seed(request.seed) for request in sampled]
        draws = [torch.rand(max_new_tokens, generator=generator) for generator in generators]
        self.uniforms = torch.stack(draws) if draws else torch.empty(0, max_new_tokens)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """input_ids [B, L + step] int64, scores [B, V] float → scores with one token per sampled row."""
        if not len(self.rows):
            return scores
        device = scores.device
        step = input_ids.shape[1] - self.prompt_length
        rows = self.rows.to(device)
        logits = scores[rows].float() / self.temperatures.to(device)[:, None]
        chosen = draw(logits, self.uniforms[:, step].to(device), self.top_p)
        scores = scores.clone()
        scores[rows] = float("-inf")
        scores[rows, chosen] = 0.0
        return scores


def draw(logits_BV: Tensor, uniform_B: Tensor, top_p: float) -> Tensor:
    """Token ids [B] int64, sampled by inverse CDF over the nucleus: the fewest most likely tokens of mass `top_p`.
    logits_BV: [B, V] float32, temperature applied. uniform_B: [B] float32 in [0, 1)."""
    V = logits_BV.shape[1]
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


def _draw_from_top(logits_BV: Tensor, uniform_B: Tensor, top_p: float, size: int) -> tuple[Tensor, Tensor]:
    """As `draw`, from the `size` most likely tokens; also [B] bool: whether they hold the nucleus."""
    top_BK, index_BK = logits_BV.topk(size, dim=-1)
    mass_BK = (top_BK - logits_BV.logsumexp(-1, keepdim=True)).exp().cumsum(-1)
    whole_B = (mass_BK[:, -1] >= top_p) | torch.tensor(size == logits_BV.shape[1], device=logits_BV.device)
    # The nucleus ends with the first token at which the mass reaches top_p.
    last_B1 = (mass_BK < top_p).sum(-1, keepdim=True).clamp(max=size - 1)
    threshold_B1 = uniform_B[:, None] * mass_BK.gather(-1, last_B1)
    position_B1 = torch.searchsorted(mass_BK, threshold_B1, right=True).minimum(last_B1)
    return index_BK.gather(-1, position_B1)[:, 0], whole_B
