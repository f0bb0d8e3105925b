"""Options of the drafter, joined with a target: what follows from what, and what is refused in one line."""

from dataclasses import replace

import pytest
from made import message_of

from eagle31_train.checkpoint.contract import drafter_shape
from eagle31_train.config import DrafterConfig

LLAMA = {"intermediate_size": 8, "num_attention_heads": 6}
LLAMA |= {"rms_norm_eps": 1e-5, "rope_theta": 1e4, "max_position_embeddings": 2048}
MLA = {**LLAMA, "architecture": "mla", "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 5}
NARROW = {**LLAMA, "hidden_size": 12, "share_embedding": False, "train_lm_head": False}
TARGET = {"hidden_size": 24, "vocab_size": 50, "draft_vocab_size": 20, "aux_layers": [1, 2, 3]}


def test_a_parallel_drafters_mask_token_is_the_targets_last_or_the_one_given():
    assert drafter_shape(DrafterConfig(**LLAMA), **TARGET).ptd_token_id is None
    assert drafter_shape(DrafterConfig(**LLAMA, parallel=True), **TARGET).ptd_token_id == 49
    assert drafter_shape(DrafterConfig(**LLAMA, parallel=True, ptd_token_id=0), **TARGET).ptd_token_id == 0


REFUSED = {
    "drafter.architecture": {**LLAMA, "architecture": "mqa"},
    "drafter.num_attention_heads": {**LLAMA, "num_attention_heads": 0},
    "drafter.head_dim=3 ": {**LLAMA, "num_attention_heads": 8},
    "drafter.kv_lora_rank": {**LLAMA, "kv_lora_rank": 8},
    "drafter.train_lm_head=false keeps the target's 24-wide lm_head, but the drafter is 12 wide": NARROW,
    "drafter.architecture=mla needs drafter.v_head_dim": {**MLA, "v_head_dim": None},
    "drafter.v_head_dim=0": {**MLA, "v_head_dim": 0},
    "drafter.q_lora_rank=0": {**MLA, "q_lora_rank": 0},
    "drafter.qk_rope_head_dim=3": {**MLA, "qk_rope_head_dim": 3},
    "drafter.parallel=true does not work with MLA": {**MLA, "parallel": True},
    "drafter.ptd_token_id=50 ": {**LLAMA, "parallel": True, "ptd_token_id": 50},
    "drafter.ptd_token_id=0 ": {**LLAMA, "ptd_token_id": 0},
}


@pytest.mark.parametrize(("named", "options"), REFUSED.items(), ids=REFUSED.keys())
def test_options_that_make_no_drafter_are_named_in_one_line(named, options):
    assert message_of(drafter_shape, DrafterConfig(**options), **TARGET).startswith(named)


def test_without_a_number_every_head_has_a_key_of_its_own_and_heads_share_the_width():
    shape = drafter_shape(DrafterConfig(**LLAMA), **TARGET)
    assert (shape.num_key_value_heads, shape.head_dim) == (6, 4)
    given = drafter_shape(DrafterConfig(**LLAMA, num_key_value_heads=2, head_dim=8), **TARGET)
    assert given == replace(shape, num_key_value_heads=2, head_dim=8)
