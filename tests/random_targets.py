"""Targets of other families than the tests' usual one: their sizes, and weights that are all random."""

import pipeline
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

SIZES = {**pipeline.SIZES, "head_dim": 8}
# Of DeepSeek's kind.
LATENT = {**pipeline.SIZES, "num_key_value_heads": 4}
LATENT |= {"q_lora_rank": 12, "kv_lora_rank": 8, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 10}
LATENT |= {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
LATENT["moe_intermediate_size"] = 16
LONG = {"rope_type": "longrope", "factor": 4.0, "rope_theta": 100.0, "original_max_position_embeddings": 16}
LONG |= {"short_factor": [1.0] * 4, "long_factor": [3.0, 5.0, 7.0, 9.0]}


def random_target(kind, sizes=SIZES, **more):
    """Of a kind as transformers calls it."""
    return randomised(AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**{**sizes, **more})))


def randomised(model):
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.3
    return model.eval()
