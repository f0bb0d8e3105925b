"""A published draft written otherwise: its folder, and spellings of config.json and tensors."""

import json

import torch
from safetensors.torch import save_file

from eagle31_train.checkpoint import contract


def random_tensors(shape):
    """All weights of a drafter."""
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(size, generator=generator) for name, size in contract.weight_shapes(shape).items()}


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


def speculators(config):
    """In the format of speculators: the layer's fields apart from the drafter's."""
    ours = ("draft_vocab_size", "target_hidden_size", "fc_norm", "norm_output", "norm_before_residual", "torch_dtype")
    ours += ("eagle_aux_hidden_state_layer_ids",)
    dropped = (*ours, "architectures", "num_aux_hidden_states", "target_model_name")
    layer = {k: v for k, v in config.items() if k not in dropped}
    verifier = {"name_or_path": "someone/a-target", "architectures": ["LlamaForCausalLM"]}
    methods = [{"proposal_type": "greedy", "speculative_tokens": 3}]
    return {
        **{k: config[k] for k in ours},
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_config": {"algorithm": "eagle3", "proposal_methods": methods, "verifier": verifier},
        "transformer_layer_config": layer,
    }
