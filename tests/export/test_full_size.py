"""Kimi's drafter at its full size, but on the meta device: every weight, and the published config.json."""

import pytest
import torch
from published_targets import recipe

from eagle31_train.checkpoint import config_json, contract
from eagle31_train.cli import load_config
from eagle31_train.model.drafter import Drafter
from eagle31_train.targets.derive import planned_drafter
from eagle31_train.targets.description import describe_target

H, V = 7168, 163840
# Of lightseekorg/kimi-k2.6-eagle3.1-mla, written out from its table.
TENSORS = {
    "fc.weight": (7168, 21504),
    "fc_norm.0.weight": (7168,),
    "fc_norm.1.weight": (7168,),
    "fc_norm.2.weight": (7168,),
    "midlayer.input_layernorm.weight": (7168,),
    "midlayer.hidden_norm.weight": (7168,),
    "midlayer.self_attn.q_a_proj.weight": (1536, 14336),
    "midlayer.self_attn.q_a_layernorm.weight": (1536,),
    "midlayer.self_attn.q_b_proj.weight": (12288, 1536),
    "midlayer.self_attn.kv_a_proj_with_mqa.weight": (576, 14336),
    "midlayer.self_attn.kv_a_layernorm.weight": (512,),
    "midlayer.self_attn.kv_b_proj.weight": (16384, 512),
    "midlayer.self_attn.o_proj.weight": (7168, 8192),
    "midlayer.post_attention_layernorm.weight": (7168,),
    "midlayer.mlp.gate_proj.weight": (18432, 7168),
    "midlayer.mlp.up_proj.weight": (18432, 7168),
    "midlayer.mlp.down_proj.weight": (7168, 18432),
    "norm.weight": (7168,),
    "lm_head.weight": (163840, 7168),
}


@pytest.fixture(scope="module")
def shape():
    config = load_config(recipe("kimi"))
    assert config.data.draft_vocab_size is None  # the whole vocabulary
    return planned_drafter(config, describe_target(config.target), V)[0]


def test_the_drafter_has_the_published_weights(shape):
    with torch.device("meta"):
        drafter = Drafter(shape, torch.empty(V, H))
    weights = {name: tuple(tensor.shape) for name, tensor in drafter.state_dict().items()}
    assert weights == TENSORS == contract.weight_shapes(shape)
    assert contract.check(weights, shape) == []
    assert drafter.midlayer.self_attn.scale == pytest.approx(192**-0.5 * 1.4158883083359671**2, rel=1e-12)


def test_the_config_json_is_the_published_one(shape):
    """Its fields are those of a small one of this kind, see test_config_json.py."""
    yarn = {"factor": 64.0, "original_max_position_embeddings": 4096, "mscale": 1.0, "mscale_all_dim": 1.0}
    yarn |= {"rope_type": "yarn", "type": "yarn", "beta_fast": 1.0, "beta_slow": 1.0}
    wanted = {"architectures": ["Eagle3DeepseekV2ForCausalLM"], "model_type": "kimi_k2", "rms_norm_eps": 1e-5}
    wanted |= {"hidden_size": H, "target_hidden_size": H, "vocab_size": V, "draft_vocab_size": V}
    wanted |= {"num_attention_heads": 64, "num_key_value_heads": 64, "intermediate_size": 18432}
    wanted |= {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
    wanted |= {"v_head_dim": 128, "max_position_embeddings": 262144, "rope_theta": 50000.0, "rope_scaling": yarn}
    wanted |= {"num_aux_hidden_states": 3, "eagle_aux_hidden_state_layer_ids": [2, 30, 58]}
    wanted |= {"fc_norm": True, "norm_output": True, "norm_before_residual": False}
    config = config_json.config_json(shape, "bfloat16", "Kimi-K2.6")
    assert {name: config[name] for name in wanted} == wanted
