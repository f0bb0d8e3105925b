"""Kimi's drafter at its full size, but on the meta device: every weight."""

import torch
from published_targets import recipe

from eagle31_train.checkpoint import contract
from eagle31_train.compose import load_config
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


def test_the_drafter_has_the_published_weights():
    config = load_config(recipe("kimi"))
    assert config.data.draft_vocab_size is None  # the whole vocabulary
    shape, _ = planned_drafter(config, describe_target(config.target), V)
    with torch.device("meta"):
        drafter = Drafter(shape, torch.empty(V, H))
    weights = {name: tuple(tensor.shape) for name, tensor in drafter.state_dict().items()}
    assert weights == TENSORS == contract.weight_shapes(shape)
    assert (shape.norm_output, shape.norm_before_residual, shape.aux_layers) == (True, False, [2, 30, 58])
    assert (shape.max_position_embeddings, shape.rope_theta, shape.rms_norm_eps) == (262144, 50000.0, 1e-5)
    yarn = {"factor": 64.0, "original_max_position_embeddings": 4096, "beta_fast": 1.0, "beta_slow": 1.0}
    yarn |= {"mscale": 1.0, "mscale_all_dim": 1.0}  # what they do to attention: model/test_rope.py
    assert yarn.items() <= shape.rope_scaling.items()
