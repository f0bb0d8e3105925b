"""What both peers share: a drafter's layer as a transformers config, and how logits are read."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from eagle31_train.config import DrafterShape


def llama_config(shape: DrafterShape, **more: Any) -> LlamaConfig:
    """Describe one Llama layer of this shape; `more`: further fields that a peer reads."""
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


def logits_of(head: nn.Module, step: Callable[[], Tensor], length: int) -> Tensor:
    """Return [K, T, Vd], the outputs of a peer's lm_head in a step on a document of `length` = T tokens. Row i is slot
    i; NaN in the last rows, which read padding."""
    found: list[Tensor] = []
    hook = head.register_forward_hook(lambda _module, _inputs, output: found.append(output[0]))
    with torch.no_grad():
        step()
    hook.remove()
    logits = found[0].new_full((len(found), length, found[0].shape[-1]), float("nan"))
    for k, rows in enumerate(found):
        logits[k, : length - 1 - k] = rows[: length - 1 - k]
    return logits
