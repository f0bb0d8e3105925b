"""Reads a drafter's config.json as vLLM does, whoever wrote it. What is not supported is refused by name."""

from collections.abc import Callable, Collection, Mapping
from typing import Annotated, Any

from pydantic import Field
from typing_extensions import TypedDict

from eagle31_train.checkpoint.config_json import MLA_DEFAULTS, SLIDING, SPECULATORS_OWN, WRITTEN, one_spelling
from eagle31_train.checkpoint.contract import LAYER_IDS
from eagle31_train.common import foreign
from eagle31_train.common.errors import UserError
from eagle31_train.common.foreign import Count, Positions, Scaling, Theta, Width
from eagle31_train.config import DrafterShape, default_aux_layers
from eagle31_train.model.rope import ORIGINAL

Fields = Mapping[str, Any]
FULL = "full_attention"  # a layer without a window
QUANTIZED = "quantization_config"
# Names of drafters in vLLM's registry. vLLM puts Eagle3 before any other name, such as LlamaForCausalLM, which drafters
# of EAGLE 1 and 2 have, too.
KINDS = {
    "LlamaForCausalLMEagle3": "llama",
    "Eagle3LlamaForCausalLM": "llama",
    "Eagle3MiniMaxM2ForCausalLM": "llama",
    "Eagle3Qwen2_5vlForCausalLM": "llama",
    "Eagle3Qwen3vlForCausalLM": "llama",
    "Eagle3Qwen3ForCausalLM": "qwen3",
    "Eagle3DeepseekV2ForCausalLM": "mla",
    "Eagle3DeepseekV3ForCausalLM": "mla",
}
# model_type → max_position_embeddings if config.json does not say. vLLM takes deepseek_v3 for a layer of DeepSeek's own
# MTP and refuses it, but trainers write it, and it means the same.
MODEL_TYPES = {
    "llama": {"llama": 2048},
    "qwen3": {"qwen3": 32768},
    "mla": {"kimi_k2": 4096, "deepseek_v2": 2048, "deepseek_v3": 4096},
}
# How a config.json may count auxiliary layers: i means the input of layer i, or its output.
COUNTED = ("inputs", "outputs")
# Fields in which vLLM looks for a parallel drafter's mask token, in this order; EAGLE 3's own is the last.
MASK_TOKENS = ("mask_token_id", "pard_token", "ptd_token_id")

Size = Annotated[Width, Field(ge=1)]
LayerIds = Annotated[list[Count], Field(max_length=1024)] | None


class _Rope(TypedDict, total=False):
    rope_type: str | None
    type: str | None
    rope_theta: Theta | None


class _Eagle(TypedDict, total=False):
    eagle_aux_hidden_state_layer_ids: LayerIds
    layer_ids: LayerIds


class _Fields(TypedDict, total=False):
    """The types of fields at the top level and in transformer_layer_config."""

    architectures: list[str] | None
    model_type: str | None
    hidden_size: Size
    target_hidden_size: Width | None
    vocab_size: Size
    draft_vocab_size: Width | None
    intermediate_size: Size
    num_hidden_layers: Annotated[int, Field(ge=1, le=64)]  # no drafter has more
    num_attention_heads: Annotated[int, Field(ge=1, le=1 << 16)]
    num_key_value_heads: Count | None
    head_dim: Count | None
    q_lora_rank: Size | None
    kv_lora_rank: Size
    qk_nope_head_dim: Size
    qk_rope_head_dim: Size
    v_head_dim: Size
    rms_norm_eps: Annotated[float, Field(gt=0, lt=1)]
    rope_theta: Theta | None
    rope_scaling: _Rope | None
    rope_parameters: _Rope | None
    max_position_embeddings: Annotated[Positions, Field(ge=1)]
    mask_token_id: Width | None
    pard_token: Width | None
    ptd_token_id: Width | None
    layer_types: list[str] | None
    sliding_window: Annotated[Positions, Field(ge=1)] | None
    max_window_layers: Count | None
    num_aux_hidden_states: Count | None
    eagle_config: _Eagle | None
    eagle_aux_hidden_state_layer_ids: LayerIds
    target_model_name: str | None
    speculators_config: dict[str, Any] | None
    transformer_layer_config: dict[str, Any] | None


def shape_from_config(
    config: Fields,
    tensor_names: Collection[str] = (),
    target_layers: Callable[[], int] | None = None,
    counted: str | None = None,
) -> DrafterShape:
    """Read the config.json of any EAGLE 3 trainer with vLLM's spellings and defaults. Fields of DeepSeek's experts are
    ignored: the drafter is dense. Raise UserError if it is not an EAGLE 3 drafter of a known kind, or if a field is
    missing, of the wrong type, or of no realistic size.

    Args:
        tensor_names: canonical names of the checkpoint's tensors; only they tell whether it has an embedding.
        target_layers: returns the target's number of layers, for a config that leaves the auxiliary layers to vLLM.
        counted: one of COUNTED, for a config that does not say which.
    """
    _check_types(config)
    layer, flags = _flatten(config)
    kind = _kind(layer)
    architecture = "mla" if kind == "mla" else "llama"
    _refuse_unsupported(layer, flags, kind)
    needed = ("hidden_size", "num_attention_heads", "vocab_size", "intermediate_size")
    if lacking := [name for name in needed if name not in layer]:
        raise UserError(f"config.json lacks {lacking[0]}")
    D, heads, V = layer["hidden_size"], layer["num_attention_heads"], layer["vocab_size"]
    aux_layers = _aux_layers(config, flags, target_layers, counted)
    mask_token = _mask_token(layer, tensor_names)
    positions = layer.get("max_position_embeddings", MODEL_TYPES[kind][layer.get("model_type", "llama")])
    theta, scaling = _rope(layer, architecture, positions)
    if kind == "mla":  # as many key heads as query heads, whatever config.json says of their number
        widths = {name: layer.get(name, default) for name, default in MLA_DEFAULTS.items()}
        keys, head_dim = heads, widths["qk_nope_head_dim"] + widths["qk_rope_head_dim"]
    else:
        widths, keys = {}, layer.get("num_key_value_heads") or heads
        head_dim = layer.get("head_dim") or (128 if kind == "qwen3" else D // heads)
    return DrafterShape(
        architecture=architecture,
        hidden_size=D,
        target_hidden_size=flags.get("target_hidden_size") or D,
        aux_layers=aux_layers,
        vocab_size=V,
        draft_vocab_size=flags.get("draft_vocab_size") or V,
        intermediate_size=layer["intermediate_size"],
        num_attention_heads=heads,
        num_key_value_heads=keys,
        head_dim=head_dim,
        rms_norm_eps=layer.get("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        max_position_embeddings=positions,
        fc_norm=bool(flags.get("fc_norm", False)),
        norm_output=bool(flags.get("norm_output", False)),
        norm_before_residual=bool(flags.get("norm_before_residual", False)),
        # As in vLLM, eagle_config takes precedence.
        norm_before_fc=bool({**flags, **(flags.get("eagle_config") or {})}.get("norm_before_fc", False)),
        num_layers=layer.get("num_hidden_layers", 1),
        qk_norm=kind == "qwen3",
        sliding_window=_sliding_window(layer, kind, plain=layer is config),
        attention_bias=bool(layer.get("attention_bias", False)),
        mlp_bias=bool(layer.get("mlp_bias", False)) and kind != "qwen3",  # vLLM's Qwen3 has none
        parallel=mask_token is not None,
        ptd_token_id=mask_token,
        share_embedding="embed_tokens.weight" not in tensor_names,
        **widths,
    )


def _check_types(config: Fields) -> None:
    try:
        for layer in (config, config.get("transformer_layer_config") or {}):
            foreign.typed(_Fields, layer)
            for name in ("rope_scaling", "rope_parameters"):
                foreign.typed(Scaling | None, layer.get(name))
    except ValueError as error:
        raise UserError(f"config.json gives {error}: get it again, or correct it") from None


def check_served(config: Fields) -> None:
    """Raise UserError for a drafter with Python code of its own, or a Llama or MLA one that vLLM 0.32 cannot load: vLLM
    does not count layer ids at the top level."""
    _check_types(config)
    layer, flags = _flatten(config)
    nested = config.get("transformer_layer_config") or {}
    code = [one.get("auto_map") for one in (config, nested)]
    if any(isinstance(one, dict) and "AutoConfig" in one for one in code):
        raise UserError(
            "config.json names its own Python code (auto_map), which vLLM would run if the target's is allowed "
            "(target.trust_remote_code): remove auto_map from a copy of it"
        )
    ids, inner = flags.get(LAYER_IDS), (flags.get("eagle_config") or {}).get(LAYER_IDS)
    count = flags.get("num_aux_hidden_states") or (len(inner) if inner else 3)
    if ids and count != len(ids) and _kind(layer) != "qwen3":
        raise UserError(
            f"config.json has {len(ids)} layer ids, but vLLM 0.32 would build fc for {count} states: add "
            f'"num_aux_hidden_states": {len(ids)} beside the sizes of the layer'
        )


def target_name(config: Fields) -> str | None:
    """Return path or hub id of the target that the drafter was made for, if config.json names it."""
    verifier = (config.get("speculators_config") or {}).get("verifier")
    name = config.get("target_model_name") or (isinstance(verifier, dict) and verifier.get("name_or_path"))
    return name if isinstance(name, str) else None


def _flatten(config: Fields) -> tuple[Fields, Fields]:
    """Return the layer's fields and the EAGLE fields, which the speculators format keeps apart."""
    if "speculators_model_type" not in config:
        return config, config
    if config["speculators_model_type"] != "eagle3":
        raise UserError(
            f"a speculators checkpoint of kind {config['speculators_model_type']!r} is not an EAGLE 3 drafter"
        )
    layer = config.get("transformer_layer_config") or {}
    named = WRITTEN.get(layer.get("model_type", "llama"), WRITTEN["llama"])[0]
    flags = {name: value for name, value in layer.items() if name not in SPECULATORS_OWN}
    flags["norm_before_residual"] = True  # unless config.json says otherwise
    flags |= {name: config[name] for name in SPECULATORS_OWN if name in config}
    flags |= {name: config[name] for name in ("target_hidden_size", LAYER_IDS, QUANTIZED) if config.get(name)}
    return {"num_hidden_layers": 1, **layer, "architectures": [named]}, flags


def _kind(layer: Fields) -> str:
    name = (layer.get("architectures") or [""])[0]
    registered = name if name.startswith("Eagle3") or name.endswith("Eagle3") else f"Eagle3{name}"
    if registered not in KINDS:
        needed = " or ".join(written for written, _ in WRITTEN.values())
        raise UserError(f"the architecture in config.json is {name or 'missing'}: it must be {needed}")
    return KINDS[registered]


def _refuse_unsupported(layer: Fields, flags: Fields, kind: str) -> None:
    eagle = flags.get("eagle_config") or {}
    rope = layer.get("rope_scaling") or layer.get("rope_parameters") or {}
    known = layer.get("model_type", "llama") in MODEL_TYPES[kind]
    unsupported = {
        f"model_type {layer.get('model_type')}": not known,
        "hidden_act": layer.get("hidden_act", "silu") != "silu",
        "bias": bool(layer.get("bias")),
        "use_aux_hidden_state": not eagle.get("use_aux_hidden_state", True),
        "logit_scale": layer.get("logit_scale", 1.0) != 1.0,
        "partial_rotary_factor": rope.get("partial_rotary_factor", layer.get("partial_rotary_factor")) not in (None, 1),
        "layer_types": bool(set(layer.get("layer_types") or []) - {FULL, SLIDING}),
        QUANTIZED: bool(layer.get(QUANTIZED) or flags.get(QUANTIZED)),
    }
    if kind == "mla":
        # Half-split RoPE, which vLLM would interleave; DeepSeek's sparse attention; attention to later tokens.
        unsupported["rope_interleave"] = layer.get("rope_interleave", True) is False
        unsupported["index_topk"] = "index_topk" in layer
        unsupported["is_causal"] = layer.get("is_causal", True) is False
    if wrong := [name for name, refused in unsupported.items() if refused]:
        only = "unquantized, dense, causal layers of Llama, Qwen3 or MLA"
        raise UserError(f"config.json sets {', '.join(wrong)}: only {only} are supported")


def _sliding_window(layer: Fields, kind: str, plain: bool) -> int | None:
    """Return the window of every layer, as vLLM finds it. `plain`: transformers' Qwen3Config processes the fields."""
    count, window, kinds = layer.get("num_hidden_layers", 1), layer.get("sliding_window"), layer.get("layer_types")
    if plain and kind == "qwen3":
        window = window if layer.get("use_sliding_window", False) else None
        first = count if window is None else layer.get("max_window_layers", 28)
        kinds = kinds or [SLIDING if number >= first else FULL for number in range(count)]
    elif kind == "llama" and not kinds and window is not None and layer.get("use_sliding_window", True):
        advice = 'remove it if the drafter was trained without, or add layer_types ["sliding_attention"]'
        raise UserError(f"config.json has sliding_window {window} without layer_types, which vLLM ignores: {advice}")
    slide = {name == SLIDING for name in (kinds or [FULL])[:count]}
    if slide == {True, False}:
        raise UserError("config.json gives only some layers a sliding window, which vLLM 0.32 does not support here")
    if slide == {True} and window is None:
        raise UserError("config.json has layers of sliding_attention but no sliding_window, or no use_sliding_window")
    return window if slide == {True} else None


def _aux_layers(
    config: Fields, flags: Fields, target_layers: Callable[[], int] | None, counted: str | None
) -> list[int]:
    """Return the layer ids as inputs of layers, or vLLM's default. vLLM takes those at the top level, else those in
    eagle_config, as inputs. But SGLang, SpecForge and ModelOpt write outputs in eagle_config; TorchSpec, anywhere."""
    eagle = flags.get("eagle_config") or {}
    top, inner = flags.get(LAYER_IDS), eagle.get(LAYER_IDS) or eagle.get("layer_ids")
    if ids := (inner or top if counted == "outputs" else top or inner):
        if counted is None and (not top or "_torchspec_version" in config):
            raise UserError(
                f"config.json has the layer ids {ids}, which may count inputs (as vLLM does) or outputs (SGLang, "
                "TorchSpec): add @inputs or @outputs to the drafter's name, whichever `eagle31 compare` finds better"
            )
        layers = sorted({layer + (counted == "outputs") for layer in ids})
    elif target_layers is not None:
        layers = sorted(set(default_aux_layers(target_layers())))
    else:
        raise UserError(f"config.json has no {LAYER_IDS}: pass the number of the target's layers")
    count = flags.get("num_aux_hidden_states")
    if count not in (None, len(layers)):
        raise UserError(f"config.json has num_aux_hidden_states {count}, but the layer ids {layers}")
    return layers


def _mask_token(layer: Fields, tensor_names: Collection[str]) -> int | None:
    """Return the mask token of a parallel drafter, None of another: its mask_token_id may be the tokenizer's."""
    if "mask_hidden" not in tensor_names and layer.get(MASK_TOKENS[-1]) is None:
        return None
    tokens = [layer[name] for name in MASK_TOKENS if layer.get(name) is not None]
    if not tokens:
        raise UserError(f"config.json lacks {MASK_TOKENS[-1]}, the token that goes with mask_hidden")
    return int(tokens[0])


def _rope(layer: Fields, architecture: str, positions: int) -> tuple[float, dict[str, Any] | None]:
    """Return rope_theta and the scaling. As in transformers, rope_scaling takes precedence over rope_parameters."""
    parameters = layer.get("rope_scaling") or layer.get("rope_parameters") or {}
    theta = parameters.get("rope_theta") or layer.get("rope_theta") or 10000.0
    scaling = one_spelling({key: value for key, value in parameters.items() if value is not None}, architecture)
    if scaling is not None and scaling["rope_type"] in ("yarn", "llama3"):
        scaling.setdefault(ORIGINAL, positions)  # as transformers does
        if scaling["rope_type"] == "yarn" and isinstance(layer.get(ORIGINAL), int):  # vLLM prefers it
            scaling[ORIGINAL] = layer[ORIGINAL]
    return float(theta), scaling
