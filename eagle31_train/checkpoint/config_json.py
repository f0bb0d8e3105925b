"""Writes a drafter's config.json so that vLLM and transformers read what was trained. `published_config.py` reads it.

vLLM 0.32 reads an MLA drafter under `model_type: kimi_k2` through transformers' DeepseekV3Config. Every field for which
that class has a default must be written, even `q_lora_rank: null`: left out, it would be 1536. Another trap:
`attention_factor: 1.0` in the RoPE scaling takes mscale² out of vLLM's softmax scale.
"""

from collections.abc import Mapping
from typing import Any

from eagle31_train.checkpoint.contract import LAYER_IDS
from eagle31_train.common.errors import UserError
from eagle31_train.config import MLA_WIDTHS, DrafterShape

# Kind of drafter → its name in vLLM's registry, and the model_type of its config.json. A qwen3 is a drafter of
# `architecture: llama` with `qk_norm`.
WRITTEN = {
    "llama": ("LlamaForCausalLMEagle3", "llama"),
    "qwen3": ("Eagle3Qwen3ForCausalLM", "qwen3"),
    "mla": ("Eagle3DeepseekV2ForCausalLM", "kimi_k2"),
}
# What vLLM and transformers assume for fields that config.json leaves out.
MLA_DEFAULTS = dict(zip(("q_lora_rank", *MLA_WIDTHS), (1536, 512, 128, 64, 128), strict=True))
# Fields that vLLM ignores inside the transformer_layer_config of the speculators format.
SPECULATORS_OWN = ("draft_vocab_size", "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
# Fields with the same name in a DrafterShape and in config.json.
OURS = ["hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "attention_bias"]
OURS += ["rms_norm_eps", "max_position_embeddings", "rope_theta", "vocab_size", "draft_vocab_size"]
OURS += ["target_hidden_size", "fc_norm", "norm_output", "norm_before_residual"]
SLIDING = "sliding_attention"
YARN_DEFAULTS = {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 0.0}


def config_json(shape: DrafterShape, dtype: str, target_name: str) -> dict[str, Any]:
    """Return the checkpoint's config.json for weights in `dtype`. (vLLM uses the target's, and ignores target_name.)"""
    name, model_type = WRITTEN["qwen3" if shape.qk_norm else shape.architecture]
    scaling, attention = rope_scaling(shape), {"head_dim": shape.head_dim, "mlp_bias": shape.mlp_bias}
    if shape.architecture == "mla":  # in transformers, its head_dim is the rotated part alone
        attention = {name: getattr(shape, name) for name in MLA_DEFAULTS}
    if scaling and shape.architecture == "mla":
        scaling["type"] = scaling["rope_type"]  # where DeepSeek's own code looks
    # A sliding window in every layer: vLLM reads layer_types, and for a Qwen3 use_sliding_window, too.
    window = {"sliding_window": shape.sliding_window, "layer_types": [SLIDING] * shape.num_layers}
    return {
        "architectures": [name],
        "model_type": model_type,
        "target_model_name": target_name,
        "torch_dtype": dtype,  # transformers 4 and 5 both read this spelling
        "num_hidden_layers": shape.num_layers,
        **{name: getattr(shape, name) for name in OURS},
        **attention,
        "hidden_act": "silu",
        # transformers 5 reads rope_parameters; older readers, rope_theta and rope_scaling.
        "rope_scaling": scaling,
        "rope_parameters": {**(scaling or {"rope_type": "default"}), "rope_theta": shape.rope_theta},
        "tie_word_embeddings": False,
        "num_aux_hidden_states": len(shape.aux_layers),
        # At the top level: the one place that both of vLLM's model runners read.
        LAYER_IDS: sorted(shape.aux_layers),
        **({"norm_before_fc": True} if shape.norm_before_fc else {}),
        **({**window, "use_sliding_window": True} if shape.sliding_window is not None else {}),
        **({"ptd_token_id": shape.ptd_token_id} if shape.parallel else {}),
    }


def sglang_json(shape: DrafterShape, dtype: str, target_name: str) -> dict[str, Any]:
    """Return the same checkpoint's config.json for SGLang, which reads the layer ids in eagle_config, as outputs of
    layers. vLLM first reads those at the top level, as inputs, so it can serve the same folder."""
    ids = [layer - 1 for layer in sorted(shape.aux_layers)]
    return {
        **config_json(shape, dtype, target_name),
        "eagle_config": {LAYER_IDS: ids, "use_aux_hidden_state": True},
    }


def speculators_json(shape: DrafterShape, dtype: str, target_name: str, draft_tokens: int) -> dict[str, Any]:
    """Return the same checkpoint's config.json in the format of `speculators`, in which `vllm serve FOLDER` finds the
    target and the number of draft tokens per verification. `target_name`: hub id or folder, which vLLM loads. Raise
    UserError for what the library lacks. Its parallel drafters are refused, too: vLLM reads neither their fc_norm nor
    their norm_output.
    """
    if shape.parallel:
        raise UserError("export_format=speculators does not support drafter.parallel=true: use export_format=vllm")
    if shape.architecture == "mla" or (shape.fc_norm and shape.norm_before_fc):
        raise UserError(
            "export_format=speculators supports neither MLA nor fc_norm with norm_before_fc: use export_format=vllm"
        )
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "torch_dtype": dtype,
        "transformer_layer_config": config_json(shape, dtype, target_name),
        **{name: getattr(shape, name) for name in SPECULATORS_OWN},
        "target_hidden_size": shape.target_hidden_size,
        LAYER_IDS: sorted(shape.aux_layers),
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": draft_tokens}],
            "verifier": {"name_or_path": target_name, "architectures": []},
        },
    }


def rope_scaling(shape: DrafterShape) -> dict[str, Any] | None:
    """Return the scaling as config.json has it: in one spelling, with all fields of MLA's YaRN; None for plain RoPE."""
    scaling = one_spelling(shape.rope_scaling, shape.architecture)
    # vLLM's linear scaling takes a factor that is not a float for a list of factors.
    return scaling and {key: float(value) if key == "factor" else value for key, value in scaling.items()}


def one_spelling(parameters: Mapping[str, Any] | None, architecture: str) -> dict[str, Any] | None:
    """Return a RoPE scaling in one spelling: `rope_type`, no `type`, no base; None for plain RoPE."""
    scaling = {key: value for key, value in (parameters or {}).items() if key not in ("rope_theta", "type")}
    scaling.setdefault("rope_type", (parameters or {}).get("type", "default"))
    if scaling["rope_type"] == "default":
        return None
    return YARN_DEFAULTS | scaling if (architecture, scaling["rope_type"]) == ("mla", "yarn") else scaling
