"""An EAGLE 3.1 drafter with latent attention (MLA), written apart from the project: one slot, one head, one number.

As vLLM 0.32 decodes it (models/deepseek_v2.py, layers/mla.py, layers/attention/mla_attention.py, and
layers/rotary_embedding/deepseek_scaling_rope.py): the cache keeps a latent and a rotated key per position, and every
head reads them through its own part of kv_b, where the project makes keys and values of every head.
"""

import math

import torch
from reference import ReferenceDrafter, norm, weighted

BETA_FAST, BETA_SLOW, MSCALE, MSCALE_ALL_DIM = 32, 1, 1, 0  # what vLLM takes where the draft's config says nothing


def magnitude(factor, share):
    """YaRN's growth of attention with the context: 1 + 0.1 share ln(factor)."""
    return 0.1 * share * math.log(factor) + 1 if factor > 1 else 1.0


def of(shape, name, default):
    return (shape.rope_scaling or {}).get(name, default)


def is_yarn(shape):
    return of(shape, "rope_type", "default") != "default"


def frequencies(shape):
    """[rope / 2] fp64: radians per position of each pair."""
    d, theta = shape.qk_rope_head_dim, shape.rope_theta
    plain = [theta ** (-2 * i / d) for i in range(d // 2)]
    if not is_yarn(shape):
        return torch.tensor(plain, dtype=torch.float64)

    def pair_that_turns(times):
        """Which pair turns so often over the length that the model first learnt."""
        learnt = shape.rope_scaling["original_max_position_embeddings"]
        return d * math.log(learnt / (times * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair_that_turns(of(shape, "beta_fast", BETA_FAST))), 0)
    high = min(math.ceil(pair_that_turns(of(shape, "beta_slow", BETA_SLOW))), d - 1)
    if low == high:
        high += 0.001
    mixed = []
    for i, frequency in enumerate(plain):
        slowed = min(max((i - low) / (high - low), 0.0), 1.0)  # fast pairs turn on as they did
        mixed.append(slowed * frequency / shape.rope_scaling["factor"] + (1 - slowed) * frequency)
    return torch.tensor(mixed, dtype=torch.float64)


def rotation_factor(shape):
    """What cos and sin are multiplied by."""
    if not is_yarn(shape):
        return 1.0
    factor = shape.rope_scaling["factor"]
    up, down = of(shape, "mscale", MSCALE), of(shape, "mscale_all_dim", MSCALE_ALL_DIM)
    return magnitude(factor, up) / magnitude(factor, down)


def softmax_scale(shape):
    """One over the root of the key's width, times YaRN's mscale²."""
    scale = (shape.qk_nope_head_dim + shape.qk_rope_head_dim) ** -0.5
    if not is_yarn(shape):
        return scale
    return scale * magnitude(shape.rope_scaling["factor"], of(shape, "mscale_all_dim", MSCALE_ALL_DIM)) ** 2


def rotate_pairs(x, position, shape):
    """Interleaved RoPE of x [rope]: entries 2i and 2i + 1 are one complex number."""
    angles = position * frequencies(shape).to(x.dtype)
    turn = torch.polar(torch.full_like(angles, rotation_factor(shape)), angles)
    turned = torch.complex(x[0::2], x[1::2]) * turn
    return torch.stack([turned.real, turned.imag], 1).flatten()


class ReferenceMla(ReferenceDrafter):
    """weights: checkpoint tensors by name; embedding [V, D]."""

    def row(self, layer, x, position):
        """The normed latent [kv_lora] and the rotated key [rope] that all heads share."""
        rank = self.s.kv_lora_rank
        both = self.attention_weight(layer, "kv_a_proj_with_mqa") @ x
        latent = norm(both[:rank], self.attention_weight(layer, "kv_a_layernorm"), self.s.rms_norm_eps)
        return latent, rotate_pairs(both[rank:], position, self.s)

    def attend(self, layer, x, position, rows):
        s = self.s
        if s.q_lora_rank:
            low = self.attention_weight(layer, "q_a_proj") @ x
            low = norm(low, self.attention_weight(layer, "q_a_layernorm"), s.rms_norm_eps)
            queries = self.attention_weight(layer, "q_b_proj") @ low
        else:
            queries = self.attention_weight(layer, "q_proj") @ x
        nope, width = s.qk_nope_head_dim, s.qk_nope_head_dim + s.qk_rope_head_dim
        kv_b, seen = self.attention_weight(layer, "kv_b_proj"), []
        for head in range(s.num_attention_heads):
            query = queries[head * width : (head + 1) * width]
            asked, turned = query[:nope], rotate_pairs(query[nope:], position, s)
            begin = head * (nope + s.v_head_dim)
            read = kv_b[begin : begin + nope + s.v_head_dim]  # its own part
            keys, values = read[:nope], read[nope:]
            scores = [(keys.T @ asked) @ latent + turned @ rotated for latent, rotated in rows]
            seen.append(values @ weighted(torch.stack(scores) * softmax_scale(s), [latent for latent, _ in rows]))
        return torch.cat(seen)


def reference_for(shape):
    """The reference of a drafter's kind."""
    return ReferenceMla if shape.architecture == "mla" else ReferenceDrafter
