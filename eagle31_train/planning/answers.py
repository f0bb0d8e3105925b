"""What the target's own answers take, the largest part of most runs: how many tokens, and how long at the fastest.

A decode step reads the weights once, whatever is answered together, and each answer's keys and values. So it takes no
less than these bytes at the memory's bandwidth, nor less than its FLOPs at the peak rate. That is the floor. What is
reached of it is an assumption, `plan.decode_utilisation`.
"""

from dataclasses import dataclass

from eagle31_train.config import Config
from eagle31_train.planning.inputs import Target, writes_prompts

OF_USE = 0.75  # share of the target's own prompts that are: 24 of 32 of SmolLM2-135M, docs/log.md
CACHE_BYTES = 2  # of a value of the KV cache


@dataclass(frozen=True)
class Answering:
    """What the target is to write, and the least that it takes.

    batch, devices: answers under way at once, and on how many devices. prompts: to be answered, held-out ones too.
    written: tokens of prompts that the target writes itself, refused ones too, with the answers between them.
    answers: tokens. weights, cache: bytes that one decode step reads. step: its seconds. seconds, flops: of
    everything that is written, with every step full, and each prompt read once.
    """

    batch: int
    devices: int
    prompts: float
    written: float
    answers: float
    weights: float
    cache: float
    step: float
    seconds: float
    flops: float


def answering(config: Config, target: Target, conversations: float, prompt: float, answer: float) -> Answering:
    """For so many conversations, of both splits, of so many tokens of prompts and answers."""
    p, generate, own = config.plan, config.data.generate, config.data.self_prompts
    sizes, t = target.sizes, target.description
    # A server is taken to have all planned devices; this process has one.
    batch, devices = (generate.concurrency, p.devices) if generate.server else (generate.batch_size, 1)
    prompts, answers, written = conversations / generate.samples, conversations * answer, 0.0
    if writes_prompts(config):
        turn = min(own.max_new_tokens, prompt / own.turns)
        # A later turn is written after an answer, which is not kept.
        written = prompts * (own.turns * turn / OF_USE + (own.turns - 1) / own.turns * answer)
    context = prompt + answer / 2  # answers are half written on average, and each gets a token in every step
    # Of experts those that some token of the step is sent to.
    weights = target.weight_bytes * (sizes.dense + sizes.experts * (1 - (1 - sizes.chosen) ** batch))
    # Values that a layer keeps of a token: keys and values of every head, or MLA's latent and rotated key.
    cached = 2 * t.num_key_value_heads * t.head_dim
    if t.mla:
        cached = int(t.mla["kv_lora_rank"] or 0) + int(t.mla["qk_rope_head_dim"] or 0)
    cache = batch * context * CACHE_BYTES * t.num_hidden_layers * cached
    token = 2 * sizes.active + 4 * t.num_hidden_layers * t.hidden_size * context
    bandwidth, rate = p.bandwidth_gbs * 1e9 * devices, p.peak_tflops * 1e12 * devices
    step = max((weights + cache) / bandwidth, batch * token / rate)
    reading = 2 * sizes.active * prompt * conversations
    seconds = (written + answers) / batch * step + reading / rate
    flops = (written + answers) * token + reading
    return Answering(batch, devices, prompts, written, answers, weights, cache, step, seconds, flops)
