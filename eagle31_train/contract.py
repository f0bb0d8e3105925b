"""What a checkpoint must be so that vLLM serves it: names, shapes and config.json, once.

vLLM checks no completeness. A checkpoint without `lm_head.weight`, `d2t` or `fc_norm.*` loads in
silence and is never accepted, so everything that vLLM 0.32 reads is written down here and
`check` compares a checkpoint with all of it.

Letters: A auxiliary layers, D and H hidden sizes of drafter and target, I MLP width, V and Vd
target and draft vocabulary.
"""

from collections.abc import Collection, Mapping
from typing import Any

import torch

from eagle31_train import vocab
from eagle31_train.schema import DrafterShape, UserError, require_available

ARCHITECTURE = "LlamaForCausalLMEagle3"
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
# Names under which vLLM's registry finds the same Llama-style drafter. Before the name of any other kind of model it
# puts Eagle3 first: LlamaForCausalLM, which drafters of EAGLE 1 and 2 carry too, is one of them.
_LLAMA_STYLE = (
    ARCHITECTURE,
    "Eagle3LlamaForCausalLM",
    "Eagle3MiniMaxM2ForCausalLM",
    "Eagle3Qwen2_5vlForCausalLM",
    "Eagle3Qwen3vlForCausalLM",
)
# Weights that vLLM also takes joined, row after row.
_JOINED = {
    "midlayer.self_attn.qkv_proj.weight": [f"midlayer.self_attn.{part}_proj.weight" for part in "qkv"],
    "midlayer.mlp.gate_up_proj.weight": [f"midlayer.mlp.{part}_proj.weight" for part in ("gate", "up")],
}
# Tables of RoPE that old trainers saved, and vLLM passes over.
_TABLES = ("rotary_emb.inv_freq", "rotary_pos_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")
# A tensor, or its shape alone where only names and shapes are to be checked.
TensorOrShape = torch.Tensor | tuple[int, ...]


# ---------------------------------------------------------------- tensors


def expected_tensors(shape: DrafterShape) -> dict[str, tuple[int, ...]]:
    """Every weight of a checkpoint, by its name in the file, with its shape."""
    require_available(shape.architecture)
    return weight_shapes(shape)


def weight_shapes(shape: DrafterShape) -> dict[str, tuple[int, ...]]:
    """`expected_tensors`, also of drafters that can be planned but not yet trained: those with MLA."""
    D, H, A = shape.hidden_size, shape.target_hidden_size, len(shape.aux_layers)
    I = shape.intermediate_size  # noqa: E741
    attention = _mla_shapes(shape) if shape.architecture == "mla" else _llama_shapes(shape)
    tensors: dict[str, tuple[int, ...]] = {
        "fc.weight": (D, A * H),
        "midlayer.input_layernorm.weight": (D,),
        "midlayer.hidden_norm.weight": (D,),
        **{f"midlayer.self_attn.{name}.weight": size for name, size in attention.items()},
        "midlayer.post_attention_layernorm.weight": (D,),
        "midlayer.mlp.gate_proj.weight": (I, D),
        "midlayer.mlp.up_proj.weight": (I, D),
        "midlayer.mlp.down_proj.weight": (D, I),
        "norm.weight": (D,),
        "lm_head.weight": (shape.draft_vocab_size, D),
    }
    if shape.fc_norm:
        tensors |= {f"fc_norm.{i}.weight": (H,) for i in range(A)}
    if not shape.share_embedding:
        tensors["embed_tokens.weight"] = (shape.vocab_size, D)
    return tensors


def _llama_shapes(shape: DrafterShape) -> dict[str, tuple[int, ...]]:
    """Grouped-query attention; it reads cat(embedding, state), hence 2 D."""
    D = shape.hidden_size
    queries, keys = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
    return {"q_proj": (queries, 2 * D), "k_proj": (keys, 2 * D), "v_proj": (keys, 2 * D), "o_proj": (D, queries)}


def _mla_shapes(shape: DrafterShape) -> dict[str, tuple[int, ...]]:
    """DeepSeek's latent attention on the same input; without q_lora_rank queries are of full rank.

    Raises:
        UserError: a width of it is not given.
    """
    widths = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    latent, nope, rope, value = (getattr(shape, name) or 0 for name in widths)
    if missing := [f"drafter.{name}" for name in widths if not getattr(shape, name)]:
        raise UserError(
            f"drafter.architecture=mla needs {', '.join(missing)}: set them, as configs/experiment/kimi does"
        )
    D, heads, rank = shape.hidden_size, shape.num_attention_heads, shape.q_lora_rank
    full = heads * (nope + rope)
    query = (
        {"q_a_proj": (rank, 2 * D), "q_a_layernorm": (rank,), "q_b_proj": (full, rank)}
        if rank
        else {"q_proj": (full, 2 * D)}
    )
    return {
        **query,
        "kv_a_proj_with_mqa": (latent + rope, 2 * D),
        "kv_a_layernorm": (latent,),
        "kv_b_proj": (heads * (nope + value), latent),
        "o_proj": (D, heads * value),
    }


def map_tensors(shape: DrafterShape) -> dict[str, tuple[int, ...]]:
    """The vocabulary maps of a checkpoint: `d2t` int64 offsets, `t2d` bool.

    None with the whole vocabulary: vLLM then has no parameter to put d2t into, and refuses it.
    """
    if shape.draft_vocab_size == shape.vocab_size:
        return {}
    return {"d2t": (shape.draft_vocab_size,), "t2d": (shape.vocab_size,)}


def canonical_name(name: str) -> str:
    """The name this project writes for a name that vLLM accepts: `layers.0.` means `midlayer.`.

    Trainers that write for SGLang put `model.` before it, which vLLM refuses, but which means nothing else.
    """
    name = name.removeprefix("model.")
    return "midlayer." + name.removeprefix("layers.0.") if name.startswith("layers.0.") else name


def is_table(name: str) -> bool:
    """Whether a tensor is no weight but a table that every reader makes for itself."""
    return any(table in name for table in _TABLES)


def separate(tensors: Mapping[str, torch.Tensor], shape: DrafterShape) -> dict[str, torch.Tensor]:
    """A draft's tensors, canonical names, with `qkv_proj` and `gate_up_proj` taken apart into views of their parts."""
    rows = {name: size[0] for name, size in expected_tensors(shape).items()}
    apart: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        sizes = [rows[part] for part in _JOINED.get(name, ())]
        if sizes and sum(sizes) == len(tensor):
            apart |= dict(zip(_JOINED[name], tensor.split(sizes), strict=True))
        else:  # one of another size stays what it is, and `check` names it
            apart[name] = tensor
    return apart


def check(tensors: Mapping[str, TensorOrShape], shape: DrafterShape) -> list[str]:
    """Every way in which a checkpoint breaks the contract, one line each; empty if it keeps it.

    Args:
        tensors: name in the file → tensor, or only its shape (then values and types are not checked).
        shape: what the checkpoint is to be.
    """
    expected = expected_tensors(shape) | map_tensors(shape)
    problems = check_shape(shape)
    if prefixed := sorted(name for name in tensors if name.startswith("model.")):
        problems.append(f"{prefixed[0]} has the prefix 'model.', which vLLM adds itself and then does not find")
    for name in sorted(expected.keys() - tensors.keys()):
        problems.append(f"{name} is missing{_WHY_MISSING.get(name.split('.')[0], '')}")
    for name in sorted(tensors.keys() - expected.keys() - set(prefixed)):
        problems.append(f"{name} is superfluous{_why_superfluous(name)}")
    for name in sorted(expected.keys() & tensors.keys()):
        problems += _check_tensor(name, tensors[name], expected[name])
    return problems + _check_maps(tensors, expected)


_WHY_MISSING = {
    "lm_head": ": vLLM would silently use the target's, and accept nothing",
    "fc_norm": " though fc_norm is on: vLLM would silently leave it at one",
    "d2t": " though the vocabulary is pruned: vLLM would silently propose the wrong tokens",
}


def _why_superfluous(name: str) -> str:
    if name.startswith("fc_norm."):
        return ": fc_norm is off, or there are fewer auxiliary layers"
    if name in ("d2t", "t2d"):
        return ": the draft vocabulary is the target's, and vLLM has no place for a map"
    if name == "embed_tokens.weight":
        return ": share_embedding is on"
    return ""


def check_shape(shape: DrafterShape) -> list[str]:
    """What no tensor can mend: shapes that vLLM or transformers reads otherwise than it was trained."""
    problems = []
    if shape.aux_layers != sorted(set(shape.aux_layers)):
        problems.append(f"aux_layers {shape.aux_layers} do not ascend: vLLM gives states in ascending order, each once")
    if shape.share_embedding and shape.hidden_size != shape.target_hidden_size:
        problems.append(
            f"share_embedding is on, but vLLM shares no embedding of width {shape.target_hidden_size} "
            f"with a drafter of width {shape.hidden_size}"
        )
    if shape.hidden_size % shape.num_attention_heads:
        problems.append(
            f"hidden_size {shape.hidden_size} is no multiple of {shape.num_attention_heads} heads: "
            "transformers refuses the config.json"
        )
    return problems


def _check_tensor(name: str, value: TensorOrShape, expected: tuple[int, ...]) -> list[str]:
    """Shape, type and finiteness of one tensor."""
    found = tuple(value.shape) if isinstance(value, torch.Tensor) else tuple(value)
    if found != expected:
        return [f"{name} has shape {list(found)}, not {list(expected)}"]
    if not isinstance(value, torch.Tensor):
        return []
    if name in ("d2t", "t2d"):
        wanted = torch.int64 if name == "d2t" else torch.bool
        return [] if value.dtype == wanted else [f"{name} is {value.dtype}, not {wanted}"]
    if not value.is_floating_point():
        return [f"{name} is {value.dtype}, not a floating-point type"]
    if bad := int((~torch.isfinite(value)).sum()):
        return [f"{name} holds {bad} NaN or infinite values"]
    return []


def _check_maps(tensors: Mapping[str, TensorOrShape], expected: Mapping[str, tuple[int, ...]]) -> list[str]:
    """d2t must be offsets, and say the same as t2d."""
    d2t, t2d = tensors.get("d2t"), tensors.get("t2d")
    if not isinstance(d2t, torch.Tensor) or not isinstance(t2d, torch.Tensor) or "d2t" not in expected:
        return []
    if d2t.dtype != torch.int64 or t2d.dtype != torch.bool or tuple(t2d.shape) != expected["t2d"]:
        return []  # reported with the tensor itself
    try:
        vocab.from_maps(d2t.numpy(), t2d.numpy())
    except UserError as error:
        return [str(error)]
    return []


# ---------------------------------------------------------------- config.json


def config_json(shape: DrafterShape, dtype: str, target_name: str) -> dict[str, Any]:
    """The checkpoint's config.json.

    Args:
        shape: the drafter.
        dtype: precision of the weights in the file; vLLM itself takes the target's.
        target_name: for people and other tools; vLLM does not read it.
    """
    require_available(shape.architecture)
    scaling = _scaling(shape.rope_scaling)
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "target_model_name": target_name,
        "torch_dtype": dtype,  # transformers 4 and 5 both read this spelling
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": shape.rms_norm_eps,
        "max_position_embeddings": shape.max_position_embeddings,
        # transformers 5 reads rope_parameters; readers older than that, rope_theta and rope_scaling.
        "rope_theta": shape.rope_theta,
        "rope_scaling": scaling,
        "rope_parameters": {**(scaling or {"rope_type": "default"}), "rope_theta": shape.rope_theta},
        "tie_word_embeddings": False,
        "vocab_size": shape.vocab_size,
        "draft_vocab_size": shape.draft_vocab_size,
        "target_hidden_size": shape.target_hidden_size,
        "num_aux_hidden_states": len(shape.aux_layers),
        # At the top level: the one place that both of vLLM's model runners read.
        "eagle_aux_hidden_state_layer_ids": sorted(shape.aux_layers),
        "fc_norm": shape.fc_norm,
        "norm_output": shape.norm_output,
        "norm_before_residual": shape.norm_before_residual,
    }


def shape_from_config(
    config: Mapping[str, Any], tensor_names: Collection[str] = (), target_layers: int | None = None
) -> DrafterShape:
    """Read a checkpoint's config.json as vLLM does: its spellings, and its defaults for what is missing.

    Args:
        config: of this project, of other EAGLE 3 trainers, or in the format of `speculators`.
        tensor_names: the checkpoint's tensors, canonical; they alone say whether it has an embedding.
        target_layers: layers of the target, for a config that leaves the auxiliary layers to vLLM.

    Raises:
        UserError: a config that is no single-layer Llama-style EAGLE 3 drafter, or says too little.
    """
    layer, flags, residual_default = _flatten(config)
    _refuse_other_kinds(layer, flags)
    try:
        D, heads = int(layer["hidden_size"]), int(layer["num_attention_heads"])
        V, I = int(layer["vocab_size"]), int(layer["intermediate_size"])  # noqa: E741
    except KeyError as error:
        raise UserError(f"config.json does not say {error}: it is not the config of a drafter") from None
    except (TypeError, ValueError) as error:
        raise UserError(f"config.json gives a size that is no number ({error})") from None
    aux_layers = _aux_layers(flags, target_layers)
    count = flags.get("num_aux_hidden_states")
    if count is not None and count != len(aux_layers):
        raise UserError(f"config.json has num_aux_hidden_states {count}, but the layer ids {aux_layers}")
    theta, scaling = _rope(layer)
    return DrafterShape(
        architecture="llama",
        hidden_size=D,
        target_hidden_size=flags.get("target_hidden_size") or D,
        aux_layers=aux_layers,
        vocab_size=V,
        draft_vocab_size=flags.get("draft_vocab_size") or V,
        intermediate_size=I,
        num_attention_heads=heads,
        num_key_value_heads=layer.get("num_key_value_heads") or heads,
        head_dim=layer.get("head_dim") or D // heads,
        rms_norm_eps=layer.get("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        max_position_embeddings=layer.get("max_position_embeddings", 2048),
        fc_norm=bool(flags.get("fc_norm", False)),
        norm_output=bool(flags.get("norm_output", False)),
        norm_before_residual=bool(flags.get("norm_before_residual", residual_default)),
        share_embedding="embed_tokens.weight" not in tensor_names,
    )


def leaves_layers_open(config: Mapping[str, Any]) -> bool:
    """Whether a config.json names no auxiliary layers, so that vLLM takes its default of the target's layers."""
    return not _layer_ids(_flatten(config)[1])


def _flatten(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any], bool]:
    """Where the Llama fields are, where the EAGLE fields are, and the default of norm_before_residual."""
    if "speculators_model_type" not in config:
        return config, config, False
    if config["speculators_model_type"] != "eagle3":
        raise UserError(f"a speculators checkpoint of kind {config['speculators_model_type']!r} is no EAGLE 3 drafter")
    layer = config.get("transformer_layer_config") or {}
    return {"architectures": [ARCHITECTURE], "num_hidden_layers": 1, **layer}, config, True


def _refuse_other_kinds(layer: Mapping[str, Any], flags: Mapping[str, Any]) -> None:
    kind = (layer.get("architectures") or [""])[0]
    if "Deepseek" in kind:
        require_available("mla")
    registered = kind if kind.startswith("Eagle3") or kind.endswith("Eagle3") else f"Eagle3{kind}"
    if registered not in _LLAMA_STYLE and "speculators_model_type" not in flags:
        raise UserError(f"config.json is of {kind or 'no architecture'}: {ARCHITECTURE} is needed")
    eagle = flags.get("eagle_config") or {}
    rope = layer.get("rope_scaling") or layer.get("rope_parameters") or {}
    unsupported = {
        "model_type": layer.get("model_type", "llama") != "llama",
        "num_hidden_layers": layer.get("num_hidden_layers", 1) != 1,
        "hidden_act": layer.get("hidden_act", "silu") != "silu",
        "attention_bias": bool(layer.get("attention_bias")),
        "mlp_bias": bool(layer.get("mlp_bias")),
        "norm_before_fc": bool(eagle.get("norm_before_fc", flags.get("norm_before_fc"))),
        "use_aux_hidden_state": not eagle.get("use_aux_hidden_state", True),
        "logit_scale": layer.get("logit_scale", 1.0) != 1.0,
        "partial_rotary_factor": rope.get("partial_rotary_factor", layer.get("partial_rotary_factor")) not in (None, 1),
        "layer_types": "sliding_attention" in (layer.get("layer_types") or []),
        "quantization_config": bool(layer.get("quantization_config") or flags.get("quantization_config")),
    }
    if wrong := [name for name, refused in unsupported.items() if refused]:
        raise UserError(
            f"config.json sets {', '.join(wrong)}: only one Llama layer of full attention on auxiliary states, "
            "unquantized, without biases or norm_before_fc, is supported"
        )


def _aux_layers(flags: Mapping[str, Any], target_layers: int | None) -> list[int]:
    """The layer ids in vLLM's places, in its order of preference, or its default."""
    ids = _layer_ids(flags)
    if not ids and target_layers is None:
        raise UserError(f"config.json has no {LAYER_IDS}: say how many layers the target has")
    if not ids:
        assert target_layers is not None
        ids = [2, target_layers // 2, target_layers - 3]
    return sorted({int(i) for i in ids})


def _layer_ids(flags: Mapping[str, Any]) -> list[Any]:
    """The ids that a config.json names, if any."""
    eagle = flags.get("eagle_config") or {}
    return flags.get(LAYER_IDS) or eagle.get(LAYER_IDS) or eagle.get("layer_ids") or []


def _rope(layer: Mapping[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """rope_theta and the scaling; as in transformers, rope_scaling wins over rope_parameters."""
    parameters = dict(layer.get("rope_scaling") or layer.get("rope_parameters") or {})
    theta = parameters.get("rope_theta", layer.get("rope_theta", 10000.0))
    return float(theta), _scaling(parameters)


def _scaling(parameters: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """A RoPE scaling in one spelling: `rope_type`, no `type`, no base; None for plain RoPE."""
    scaling = {key: value for key, value in (parameters or {}).items() if key not in ("rope_theta", "type")}
    scaling.setdefault("rope_type", (parameters or {}).get("type", "default"))
    return None if scaling["rope_type"] == "default" else scaling
