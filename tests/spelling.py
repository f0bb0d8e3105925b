"""A published draft written otherwise: its folder, and spellings of config.json and tensors."""

import json

import torch
from safetensors.torch import save_file


def write(folder, config, tensors):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def same(value):
    return value


def layers_0(tensors):
    return {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}


def joined(tensors):
    """Fused as vLLM fuses them."""
    tensors = dict(tensors)
    for fused, parts in {
        "self_attn.qkv_proj": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
        "self_attn.fused_qkv_a_proj": ["self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"],
        "mlp.gate_up_proj": ["mlp.gate_proj", "mlp.up_proj"],
    }.items():
        if (names := [f"midlayer.{part}.weight" for part in parts])[0] in tensors:
            tensors[f"midlayer.{fused}.weight"] = torch.cat([tensors.pop(name) for name in names])
    return tensors
