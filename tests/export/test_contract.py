"""The contract's table, and every fault that vLLM would load in silence."""

import re
from dataclasses import replace

import pytest
from spelling import random_tensors

from eagle31_train.checkpoint import contract
from eagle31_train.reporting import card
from tests.export.conftest import SHARPENED, TINY, TINY_MLA, YARN

pytestmark = pytest.mark.core

FACTOR = YARN | {"attention_factor": 1.0}
OLDEST = [
    (TINY, {}, "0.22"),
    (TINY, {"sliding_window": 12}, "0.22"),
    (TINY, {"qk_norm": True}, "0.24"),
    (TINY, {"qk_norm": True, "sliding_window": 12}, "0.26"),
    (TINY, {"rope_scaling": YARN}, "0.22"),
    (TINY, {"rope_scaling": FACTOR}, "0.31"),
    (TINY, {"rope_scaling": {"type" if key == "rope_type" else key: value for key, value in FACTOR.items()}}, "0.31"),
    (TINY, {"rope_scaling": SHARPENED}, "0.31"),
    (TINY, {"rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 0.0}}, "0.22"),
    (TINY_MLA, {"fc_norm": False, "norm_output": False, "rope_scaling": None}, "0.28"),
    (TINY_MLA, {"fc_norm": False, "norm_output": False, "rope_scaling": YARN}, "0.22"),
    (TINY_MLA, {"rope_scaling": None}, "0.28"),
    (TINY_MLA, {"rope_scaling": YARN}, "0.23"),
]


@pytest.mark.parametrize(("shape", "change", "oldest"), OLDEST)
def test_the_oldest_vllm_is_the_first_that_reads_all_switches(shape, change, oldest):
    """As older ones were seen to do, or by their sources would: docs/serving.md."""
    assert contract.oldest_vllm(replace(shape, **change)) == oldest


def test_a_state_that_vllm_may_write_over_is_told_of():
    assert "without --enforce-eager" in contract.caveats(replace(TINY, aux_layers=[0, 2]))[-1]


@pytest.mark.parametrize(
    ("target", "said", "told"),
    [
        ({"model_type": "gpt_oss"}, "Send reasoning_effort=high with each request", True),
        ({"model_type": "llama"}, "Send reasoning_effort", False),
        ({"sliding_window": 64, "max_position_embeddings": 65}, "drafter.sliding_window=64", True),
        ({"sliding_window": 64, "max_position_embeddings": 64}, "drafter.sliding_window", False),  # it sees all
    ],
)
def test_the_effort_of_a_gpt_oss_and_a_window_in_every_layer_are_told_of(target, said, told):
    assert (said in " ".join(card.caveats_of(TINY, {"target": target}, effort="high"))) is told


def test_contexts_are_compared_as_far_as_a_linear_rope_stretches_them():
    """128 positions, stretched twice, are those of a target of 256, and fewer than those of one of 128 times four."""
    short = replace(TINY, max_position_embeddings=128)
    linear = replace(short, rope_scaling={"rope_type": "linear", "factor": 2.0})

    def said(shape, positions, factor=1.0):
        target = {"max_position_embeddings": positions, "rope_scaling": {"rope_type": "linear", "factor": factor}}
        sentences = card.caveats_of(shape, {"target": target})
        return [re.search(r"contexts of up to (\S+) tokens", one)[1] for one in sentences if "contexts" in one]

    assert (said(short, 128), said(short, 256)) == ([], ["128"])
    assert (said(linear, 256), said(linear, 257), said(linear, 128, 2.0)) == ([], ["256"], [])
    assert (said(linear, 128, 4.0), said(short, 64, 4.0)) == (["256"], ["128"])
    wide = {"max_position_embeddings": 256}
    gemma = {**wide, "model_type": "gemma3_text", "rope_scaling": {"factor": 8.0, "type": "linear"}}
    assert card.caveats_of(linear, {"target": gemma}) == card.caveats_of(linear, {"target": wide})


# GLM-4.5, of 8 heads of keys.
GLM = {"hidden_size": 5120, "num_attention_heads": 96, "num_key_value_heads": 8, "target_hidden_size": 5120}


@pytest.mark.parametrize(
    ("kind", "change", "named"),
    [
        ("llama", {"aux_layers": [2, 1]}, "ascend"),
        ("llama", {"aux_layers": [1, 2, 2]}, "aux_layers [1, 2, 2]"),
        ("llama", {"hidden_size": 8}, "share_embedding"),
        ("llama", {"num_attention_heads": 3}, "not a multiple"),
        ("llama", {"num_key_value_heads": 3}, "is not a multiple of num_key_value_heads=3"),
        ("llama", {"qk_norm": True, "mlp_bias": True}, "not serve drafters with both qk_norm and mlp_bias"),
        ("llama", GLM, "set drafter.qk_norm=true or drafter.num_attention_heads=80"),
        ("llama", {"parallel": True, "ptd_token_id": 39}, "mask_hidden is missing"),
        ("llama", {"parallel": True}, "ptd_token_id=None is not among"),
        ("mla", {"num_key_value_heads": 1}, "with MLA, num_key_value_heads must be "),
        ("mla", {"head_dim": 16}, "and head_dim qk_nope_head_dim + qk_rope_head_dim"),
        ("mla", {"norm_before_fc": True}, "not serve MLA drafters with norm_before_fc"),
        ("mla", {"attention_bias": True}, "attention_bias"),
        ("mla", {"max_position_embeddings": 129}, "beyond the 128 positions"),
    ],
)
def test_shapes_that_vllm_reads_otherwise_are_named(kind, change, named):
    shape = {"llama": TINY, "mla": TINY_MLA}[kind]
    assert any(named in problem for problem in contract.check(random_tensors(shape), replace(shape, **change)))


def test_everything_that_vllm_would_leave_as_it_is_made_is_missed():
    for shape in (TINY, TINY_MLA):
        whole = random_tensors(shape)
        for name in whole:
            [problem] = contract.check({n: t for n, t in whole.items() if n != name}, shape)
            assert problem.startswith(f"{name} is missing")
