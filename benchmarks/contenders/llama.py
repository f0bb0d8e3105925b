"""The one layer of a drafter as transformers describes it, which both peers build theirs from."""

from typing import Any

from transformers import LlamaConfig

from eagle31_train.config import DrafterShape


def llama_config(shape: DrafterShape, **more: Any) -> LlamaConfig:
    """One Llama layer of this shape; `more` are fields that a peer reads besides."""
    return LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=1,
        num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_key_value_heads,
        head_dim=shape.head_dim,
        rms_norm_eps=shape.rms_norm_eps,
        max_position_embeddings=shape.max_position_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        pad_token_id=None,
        **more,
    )
