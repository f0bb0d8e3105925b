"""A small target of DeepSeek's shape as checkpoints of Kimi come: inside a multimodal wrapper, and in INT4."""

import json
import re
import shutil

import torch
from safetensors.torch import load_file, save_file

MODEL, CONFIG = "model.safetensors", "config.json"
GROUP = 32  # input columns with one scale
QUANTIZED = re.compile(r"(shared_experts|layers\.0\.mlp)\.[a-z]+_proj|o_proj")
# As Kimi K2's, but that its experts are quantised and these are not: vLLM's need AMX on a CPU.
INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP, "dynamic": False}
LINEAR = {"targets": ["Linear"], "input_activations": None, "output_activations": None, "weights": INT4}
SCHEME = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "config_groups": {"group_0": LINEAR},
    "ignore": ["lm_head", "re:.*self_attn.[qk].*", r"re:.*mlp\.experts.*"],
}
VISION = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
PICTURES = {"patch_size": 14, "merge_kernel_size": 2, "image_mean": [0.5] * 3, "image_std": [0.5] * 3} | {
    "in_patch_limit": 64, "patch_limit_on_one_side": 64, "in_patch_limit_each_frame": 64, "in_patch_limit_video": None,
    "fixed_output_tokens": None, "temporal_merge_kernel_size": 4, "sample_fps": 2.0, "timestamp_mode": "hh:mm:ss.fff",
    "max_num_frames_each_video": None,
}  # fmt: skip


def wrapped(source, out):
    """The target as `language_model` of a Kimi K2.5, beside a bit of a vision tower that text does not need."""
    tensors = {f"language_model.{name}": tensor for name, tensor in load_file(source / MODEL).items()}
    tensors["vision_tower.patch_embed.proj.bias"] = torch.zeros(VISION["hidden_size"])
    text = {**json.loads((source / CONFIG).read_text()), "model_type": "kimi_k2"}
    config = {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "text_config": text,
        "vision_config": VISION,
        "image_token_id": text["vocab_size"] - 1,
        "tie_word_embeddings": False,
        "dtype": text["dtype"],
    }
    (_write(source, out, tensors, config) / "preprocessor_config.json").write_text(
        json.dumps({"media_proc_cfg": PICTURES})
    )
    return out


def quantized(source, out, plain):
    """`out`: the target with some matrices in packed INT4; `plain`: what they stand for, in bf16."""
    packed, meant = {}, {}
    for name, tensor in load_file(source / MODEL).items():
        if not QUANTIZED.search(name):
            packed[name] = meant[name] = tensor
            continue
        stem = name.removesuffix(".weight")
        packed[f"{stem}.weight_packed"], packed[f"{stem}.weight_scale"], meant[name] = _int4(tensor)
        packed[f"{stem}.weight_shape"] = torch.tensor(tensor.shape)
    config = json.loads((source / CONFIG).read_text())
    _write(source, plain, meant, config)
    return _write(source, out, packed, {**config, "quantization_config": SCHEME})


def _int4(weight):
    """[O, I] → eight 4-bit values in each int32 [O, I/8], scales [O, I/GROUP] bf16, and what they mean, in bf16."""
    rows = weight.shape[0]
    groups = weight.float().view(rows, -1, GROUP)
    scale = (groups.abs().amax(-1) / 7).bfloat16()
    values = (groups / scale.float()[..., None]).round().clamp(-8, 7)
    shifted = (values.view(rows, -1, 8).long() + 8) << (4 * torch.arange(8))
    return shifted.sum(-1).to(torch.int32), scale, (values * scale.float()[..., None]).view_as(weight).bfloat16()


def _write(source, out, tensors, config):
    shutil.copytree(source, out, ignore=shutil.ignore_patterns(MODEL, CONFIG, "manifest.json"))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, out / MODEL, metadata={"format": "pt"})
    (out / CONFIG).write_text(json.dumps(config))
    return out
