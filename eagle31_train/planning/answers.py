"""What the target's own answers take, the largest part of most runs: how many tokens, and how long at the fastest.

A decode step reads the weights once, whatever is answered together, and each answer's keys and values. So it takes no
less than these bytes at the memory's bandwidth, nor less than its FLOPs at the peak rate. That is the floor. What is
reached of it is an assumption, `plan.decode_utilisation`.
"""

from dataclasses import dataclass

from eagle31_train.config import Config
from eagle31_train.planning.inputs import Target, writes_prompts
from eagle31_train.targets.description import TargetDescription

OF_USE = 0.75  # share of the target's own prompts that are: 24 of 32 of SmolLM2-135M, docs/log.md
CACHE_BYTES = 2  # of a value of the KV cache


@dataclass(frozen=True)
class Engine:
    """Who answers: words, how many answers are under way at once, and on how many devices."""

    name: str
    batch: int
    devices: int


@dataclass(frozen=True)
class Answering:
    """Tokens that the target is to write, and the average conversation around them.

    prompts: to be answered, held-out ones too. written: tokens of prompts that the target writes itself, refused ones
    too, with the answers between them. answers: tokens. prompt, answer: tokens of an average conversation.
    """

    prompts: float
    written: float
    answers: float
    prompt: float
    answer: float

    @property
    def tokens(self) -> float:
        """That are generated."""
        return self.written + self.answers


@dataclass(frozen=True)
class Floor:
    """The least that answering takes.

    weights, cache: bytes that one decode step reads. step: its seconds. seconds, flops: of everything that is written,
    with every step full, and each prompt read once.
    """

    weights: float
    cache: float
    step: float
    seconds: float
    flops: float


def engine_of(config: Config) -> Engine:
    """The server, taken to have all planned devices; or this process, which has one."""
    generate = config.data.generate
    if generate.server:
        return Engine("a server", generate.concurrency, config.plan.devices)
    return Engine("this process", generate.batch_size, 1)


def answering(config: Config, conversations: float, prompt: float, answer: float) -> Answering:
    """What there is to write for so many conversations, of both splits, of so many tokens of prompts and answers."""
    prompts, own, written = conversations / config.data.generate.samples, config.data.self_prompts, 0.0
    if writes_prompts(config):
        turns = own.turns
        turn = min(own.max_new_tokens, prompt / turns)
        # A later turn is written after an answer, which is not kept.
        written = prompts * (turns * turn / OF_USE + (turns - 1) / turns * answer)
    return Answering(prompts, written, conversations * answer, prompt, answer)


def floor(config: Config, target: Target, what: Answering, engine: Engine) -> Floor:
    """Of answers that are half written on average, `engine.batch` of which get a token in each step."""
    p, sizes, t = config.plan, target.sizes, target.description
    context = what.prompt + what.answer / 2
    # Of experts those that some token of the step is sent to.
    weights = target.weight_bytes * (sizes.dense + sizes.experts * (1 - (1 - sizes.chosen) ** engine.batch))
    cache = engine.batch * context * CACHE_BYTES * cached_values(t)
    token = 2 * sizes.active + 4 * t.num_hidden_layers * t.hidden_size * context
    bandwidth, rate = p.bandwidth_gbs * 1e9 * engine.devices, p.peak_tflops * 1e12 * engine.devices
    step = max((weights + cache) / bandwidth, engine.batch * token / rate)
    reading = 2 * sizes.active * what.prompt * what.answers / what.answer
    seconds = what.tokens / engine.batch * step + reading / rate
    return Floor(weights, cache, step, seconds, what.tokens * token + reading)


def cached_values(target: TargetDescription) -> int:
    """Values that all layers keep of a token: keys and values of every head, or MLA's latent and rotated key."""
    width = 2 * target.num_key_value_heads * target.head_dim
    if target.mla:
        width = int(target.mla["kv_lora_rank"] or 0) + int(target.mla["qk_rope_head_dim"] or 0)
    return target.num_hidden_layers * width
