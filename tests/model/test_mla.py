"""The reference of MLA attends as transformers does; mistakes, seen in trainers or easy to make, that it finds. That
training is the reference's: test_exactness.py."""

from dataclasses import replace
from itertools import chain, repeat

import pytest
import torch
from conftest import YARN, make_mla_shape
from model.test_recurrence import assert_same, trained, truth_of, variant
from reference_mla import ReferenceMla, magnitude, softmax_scale
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding

from eagle31_train.model import rope


@pytest.mark.parametrize("rank", [9, None])
@pytest.mark.parametrize("shares", [{"mscale": 1.0, "mscale_all_dim": 1.0}, {"mscale": 0.7, "mscale_all_dim": 1.0}])
def test_the_reference_attends_as_transformers_deepseek_v3_does(rank, shares):
    """Where the two agree with vLLM: both mscales given. Theirs has one epsilon, and an input as wide as its output."""
    shape = make_mla_shape(q_lora_rank=rank, rope_scaling={**YARN, **shares}, rms_norm_eps=1e-6)
    own = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "num_attention_heads")
    config = DeepseekV3Config(
        **{name: getattr(shape, name) for name in own},
        num_key_value_heads=shape.num_attention_heads,
        hidden_size=2 * shape.hidden_size,
        max_position_embeddings=64 * 4096,
        rope_parameters={**shape.rope_scaling, "rope_theta": shape.rope_theta},
        attn_implementation="eager",
    )
    torch.manual_seed(0)
    theirs = DeepseekV3Attention(config, 0).double()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, float(parameter.dim() == 1), 0.3)
    T = 9
    x = torch.randn(T, 2 * shape.hidden_size, dtype=torch.float64)
    turns = DeepseekV3RotaryEmbedding(config)(x, torch.arange(T)[None])
    mask = torch.full((T, T), float("-inf"), dtype=torch.float64).triu(1)[None, None]
    wanted, _ = theirs(x[None], turns, mask)

    weights = {f"midlayer.self_attn.{name}": p for name, p in theirs.named_parameters()}
    reference = ReferenceMla(shape, weights, None)
    rows = [reference.row(0, x[t], t) for t in range(T)]
    seen = torch.stack([reference.attend(0, x[t], t, rows[: t + 1]) for t in range(T)])
    assert theirs.scaling == pytest.approx(softmax_scale(shape), rel=1e-12)
    # Frequencies, sines and cosines are fp32 there.
    torch.testing.assert_close(seen @ theirs.o_proj.weight.T, wanted[0], rtol=1e-5, atol=1e-5)


# ---------------------------------------------------------------- mistakes, planted in an attention


def read_otherwise(**changes):
    """Frequencies made of other options than the drafter's."""

    def plant(attention):
        shape = make_mla_shape()
        scaling = {name: changes.get(name, value) for name, value in shape.rope_scaling.items()}
        theta = changes.get("rope_theta", shape.rope_theta)
        other = replace(shape, rope_scaling=changes.get("rope_scaling", scaling), rope_theta=theta)
        attention.rope.inv_freq = rope.frequencies(other, shape.qk_rope_head_dim)[0]

    return plant


def rotation_times(factor):
    """Other factors of sines and cosines."""
    return lambda attention: setattr(attention.rope, "factor", factor(attention.rope.factor))


def softmax_times(factor):
    """Another softmax scale, by a factor of the attention."""
    return lambda attention: setattr(attention, "scale", attention.scale * factor(attention))


def reordered(layer, columns):
    """What a layer gives has its columns in another order."""
    layer.register_forward_hook(lambda _layer, _inputs, rows: rows[..., columns])


def exchanged(layer, parts):
    """[a | b] of each head read as [b | a], with b's and a's widths."""
    reordered(layer, torch.arange(layer.out_features).view(-1, sum(parts)).roll(-parts[1], 1).flatten())


def all_keys_before_all_values(attention):
    """kv_b as [all heads' keys | all heads' values], where it is [key | value] of each head."""
    layer, heads = attention.kv_b_proj, attention.heads
    keys, values = torch.arange(layer.out_features).split([heads * width for width in attention.head_parts])
    reordered(layer, torch.cat([keys.view(heads, -1), values.view(heads, -1)], 1).flatten())


def unnormed(name):
    def plant(attention):
        norm = getattr(attention, name)
        norm.forward = lambda x: x * norm.weight

    return plant


def of_the_input(change):
    """What kv_a_proj gives, latent and shared key [n, ·] each, is changed before it is used."""

    def plant(attention):
        def changed(project):
            return lambda layer: torch.cat(change(*project(layer).split(attention.latent_parts, -1)), -1)

        right = attention.keys_values
        attention.keys_values = lambda project, positions: right(changed(project), positions)

    return plant


def rms(x):
    return (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()


def shared_key_not_turned(attention):
    right = attention.rope.forward
    attention.rope.forward = lambda x, positions: right(x, positions) if x.shape[1] > 1 else x


def late(method, steps):
    """Queries, or keys and values, of other positions: by so much at step 0, and at later ones."""

    def plant(attention):
        right, moved = getattr(attention, method), chain([steps[0]], repeat(steps[1]))
        setattr(attention, method, lambda project, positions: right(project, positions + next(moved)))

    return plant


MISTAKES = {
    "rope_theta lost in YaRN": read_otherwise(rope_theta=10000.0),
    "YaRN left out": read_otherwise(rope_scaling=None),
    "beta_fast ignored": read_otherwise(beta_fast=32.0),
    "beta_slow ignored": read_otherwise(beta_slow=1.0),
    "the original length taken for the new one": read_otherwise(original_max_position_embeddings=64 * 4096),
    "another factor": read_otherwise(factor=32.0),
    "mscale² left out of the softmax scale": softmax_times(lambda a: 1 / a.rope.softmax_factor),
    "mscale once instead of twice": softmax_times(lambda a: a.rope.softmax_factor**-0.5),
    "mscale where mscale_all_dim belongs": softmax_times(lambda a: magnitude(64, 1.0) ** 2 / a.rope.softmax_factor),
    "sines and cosines not magnified": rotation_times(lambda _: 1.0),
    "sines and cosines magnified by m(factor)": rotation_times(lambda _: magnitude(64, 1.0)),
    "magnified the other way round": rotation_times(lambda right: 1 / right),
    "half-split instead of interleaved RoPE": lambda a: setattr(a.rope, "interleaved", False),
    "rope and nope exchanged in the query": lambda a: exchanged(a.q_b_proj, a.query_parts),
    "kv_b split [value | key]": lambda a: exchanged(a.kv_b_proj, a.head_parts),
    "kv_b split over all heads at once": all_keys_before_all_values,
    "softmax scaled by the part without position": softmax_times(
        lambda a: (a.query_parts[0] / sum(a.query_parts)) ** -0.5
    ),
    "softmax scaled by the value's width": softmax_times(lambda a: (a.head_parts[1] / sum(a.query_parts)) ** -0.5),
    "queries not normed": unnormed("q_a_layernorm"),
    "latent not normed": unnormed("kv_a_layernorm"),
    "kv_a split [rope | latent]": of_the_input(lambda latent, shared: (shared, latent)),
    "the latent's norm over the shared key too": of_the_input(
        lambda latent, shared: (latent, shared / rms(torch.cat([latent, shared], -1)))
    ),
    "the shared key normed": of_the_input(lambda latent, shared: (latent, shared / rms(shared))),
    "the shared key not turned": shared_key_not_turned,
    "queries one position late": late("queries", (1, 1)),
    "keys one position late": late("keys_values", (1, 1)),
    "own keys of a step one position early": late("keys_values", (0, -1)),
    "own keys of a step one position late": late("keys_values", (0, 1)),
}


@pytest.mark.parametrize("mistake", [None, *MISTAKES])
def test_a_planted_mistake_is_caught(mistake):
    """Frequencies are fp32, as the drafter makes them: angles to 1e-7 of themselves."""
    objective, documents, unroll = variant("MLA", exact=False)
    if mistake is None:
        assert_same(trained(objective, documents, unroll), truth_of("MLA"), 1e-5)
        return
    MISTAKES[mistake](objective.drafter.midlayer.self_attn)
    with pytest.raises(AssertionError, match="not close"):
        assert_same(trained(objective, documents, unroll), truth_of("MLA"), 1e-5)
