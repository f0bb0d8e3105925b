"""The reference of MLA attends as transformers does; mistakes, seen in trainers or easy to make, that it finds. That
training is the reference's: test_exactness.py."""

from dataclasses import replace

import pytest
import torch
from conftest import YARN, make_mla_shape
from model.test_recurrence import assert_same, trained, truth_of, variant
from planting import instead_of
from reference_mla import ReferenceMla, magnitude, softmax_scale
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding

from eagle31_train.model import drafter, rope
from eagle31_train.model.layer import LatentAttention
from eagle31_train.model.rope import Rope


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


# ---------------------------------------------------------------- ways to plant


def read_otherwise(**changes):
    """Frequencies made of other options than the drafter's."""

    @instead_of(rope, "frequencies")
    def plant(right, shape, width):
        scaling = {**shape.rope_scaling, **{name: x for name, x in changes.items() if name in shape.rope_scaling}}
        theta = changes.get("rope_theta", shape.rope_theta)
        return right(replace(shape, rope_scaling=changes.get("rope_scaling", scaling), rope_theta=theta), width)

    return plant


def factors(change):
    """Other factors of (sines and cosines, softmax) than YaRN's."""
    return instead_of(rope, "mla_factors")(lambda right, shape: change(shape, *right(shape)))


def made(change):
    """An attention that is changed once it is made."""

    @instead_of(LatentAttention, "__init__")
    def plant(right, self, shape, inputs):
        right(self, shape, inputs)
        change(self)

    return plant


def of_the_input(change):
    """What kv_a_proj gives, latent and shared key [n, ·] each, is changed before it is used."""

    @instead_of(LatentAttention, "keys_values")
    def plant(right, self, project, positions):
        def changed(layer):
            return torch.cat(change(*project(layer).split(self.latent_parts, -1)), -1)

        return right(self, changed, positions)

    return plant


def at(method, change):
    """Queries, or keys and values, of other positions."""

    @instead_of(LatentAttention, method)
    def plant(right, self, project, positions):
        return right(self, project, change(positions))

    return plant


# ---------------------------------------------------------------- mistakes


def half_split(attention):
    attention.rope.interleaved = False


def scaled_by_the_part_without_position(attention):
    attention.scale *= (attention.query_parts[0] / sum(attention.query_parts)) ** -0.5


def scaled_by_the_value(attention):
    attention.scale *= (attention.head_parts[1] / sum(attention.query_parts)) ** -0.5


def exchanged(parts):
    """[a | b] of each head read as [b | a], with b's and a's widths."""

    def hook(_layer, _inputs, rows):
        heads, b = rows.unflatten(-1, (-1, sum(parts))), parts[1]
        return torch.cat([heads[..., b:], heads[..., :b]], -1).flatten(-2)

    return hook


def all_keys_before_all_values(attention):
    """kv_b as [all heads' keys | all heads' values], where it is [key | value] of each head."""
    heads, (nope, value) = attention.heads, attention.head_parts

    def hook(_layer, _inputs, rows):
        keys, values = rows.split([heads * nope, heads * value], -1)
        return torch.cat([keys.unflatten(-1, (heads, nope)), values.unflatten(-1, (heads, value))], -1).flatten(-2)

    attention.kv_b_proj.register_forward_hook(hook)


def unnormed(name):
    def change(attention):
        norm = getattr(attention, name)
        norm.forward = lambda x: x * norm.weight

    return change


def rms(x):
    return (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()


@instead_of(Rope, "forward")
def shared_key_not_turned(right, self, x, positions):
    return right(self, x, positions) if x.shape[1] > 1 else x


def own_keys_at(change):
    """The keys of steps 1, 2, … stand elsewhere; those of step 0 where they should."""

    @instead_of(drafter.AttendingLayer, "_ask")
    def plant(right, self, states, read, positions, own):
        q, residual, *key_value = right(self, states, read, positions, own)
        if own:
            normed = self._layer.state_norm(states)
            key_value = self._layer.self_attn.keys_values(read(normed), change(positions))
        return q, residual, *key_value

    return plant


MISTAKES = {
    "rope_theta lost in YaRN": read_otherwise(rope_theta=10000.0),
    "YaRN left out": read_otherwise(rope_scaling=None),
    "beta_fast ignored": read_otherwise(beta_fast=32.0),
    "beta_slow ignored": read_otherwise(beta_slow=1.0),
    "the original length taken for the new one": read_otherwise(original_max_position_embeddings=64 * 4096),
    "another factor": read_otherwise(factor=32.0),
    "mscale² left out of the softmax scale": factors(lambda shape, turn, soft: (turn, 1.0)),
    "mscale once instead of twice": factors(lambda shape, turn, soft: (turn, soft**0.5)),
    "mscale where mscale_all_dim belongs": factors(lambda shape, turn, soft: (turn, magnitude(64, 1.0) ** 2)),
    "sines and cosines not magnified": factors(lambda shape, turn, soft: (1.0, soft)),
    "sines and cosines magnified by m(factor)": factors(lambda shape, turn, soft: (magnitude(64, 1.0), soft)),
    "magnified the other way round": factors(lambda shape, turn, soft: (1 / turn, soft)),
    "half-split instead of interleaved RoPE": made(half_split),
    "rope and nope exchanged in the query": made(lambda a: a.q_b_proj.register_forward_hook(exchanged(a.query_parts))),
    "kv_b split [value | key]": made(lambda a: a.kv_b_proj.register_forward_hook(exchanged(a.head_parts))),
    "kv_b split over all heads at once": made(all_keys_before_all_values),
    "softmax scaled by the part without position": made(scaled_by_the_part_without_position),
    "softmax scaled by the value's width": made(scaled_by_the_value),
    "queries not normed": made(unnormed("q_a_layernorm")),
    "latent not normed": made(unnormed("kv_a_layernorm")),
    "kv_a split [rope | latent]": of_the_input(lambda latent, shared: (shared, latent)),
    "the latent's norm over the shared key too": of_the_input(
        lambda latent, shared: (latent, shared / rms(torch.cat([latent, shared], -1)))
    ),
    "the shared key normed": of_the_input(lambda latent, shared: (latent, shared / rms(shared))),
    "the shared key not turned": shared_key_not_turned,
    "queries one position late": at("queries", lambda positions: positions + 1),
    "keys one position late": at("keys_values", lambda positions: positions + 1),
    "own keys of a step one position early": own_keys_at(lambda positions: positions - 1),
    "own keys of a step one position late": own_keys_at(lambda positions: positions + 1),
}


def compare():
    """With the frequencies as the drafter makes them, in fp32: angles to 1e-7 of themselves."""
    assert_same(trained(*variant("MLA", exact=False)), truth_of("MLA"), 1e-5)


def test_without_a_mistake_they_agree():
    compare()


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES.keys())
def test_a_planted_mistake_is_caught(mistake, monkeypatch):
    truth_of("MLA")  # before anything is planted
    mistake(monkeypatch)
    with pytest.raises(AssertionError, match="not close"):
        compare()
