"""What a target is asked for where it writes: to go on from token ids. The same of a model in this process and of a
server (`targets/generate.py`, `data_prep/client.py`)."""

from typing import NamedTuple


class Request(NamedTuple):
    """A prompt's token ids, a temperature (0 is greedy) and the seed of its own draws."""

    ids: list[int]
    temperature: float
    seed: int


class Sampling(NamedTuple):
    """How many tokens at most, of which nucleus, and up to where: a token of `end_ids`, which is written too, or a
    text. top_k: drawn from so many of the likeliest; None: from all."""

    max_new_tokens: int
    top_p: float
    end_ids: list[int]
    end_text: str | None = None
    top_k: int | None = None


# All that a server would else take from the target's generation_config.json, even at temperature 0.
WHOLE_DISTRIBUTION = {
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
Completion = tuple[list[int], str]  # token ids, with the one that ends them, and why they end: "stop" or "length"
