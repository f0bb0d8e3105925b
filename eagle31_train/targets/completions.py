"""Requests for completions of token ids, the same for a model in this process (`targets/generate.py`) and for a server
(`data_prep/client.py`)."""

from typing import NamedTuple


class Request(NamedTuple):
    """A prompt's token ids, its temperature (0 is greedy) and the seed of its draws."""

    ids: list[int]
    temperature: float
    seed: int


class Sampling(NamedTuple):
    """The length limit, the nucleus, and where to stop: at a token of `end_ids`, which is part of the completion, or at
    `end_text`. top_k: how many of the likeliest tokens to draw from; None for all."""

    max_new_tokens: int
    top_p: float
    end_ids: list[int]
    end_text: str | None = None
    top_k: int | None = None


# Everything that a server would otherwise take from the target's generation_config.json, even at temperature 0.
WHOLE_DISTRIBUTION = {
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
Completion = tuple[list[int], str]  # token ids, including the end token, and why they end: "stop" or "length"
