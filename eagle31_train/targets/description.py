"""What a target's config.json says: its sizes, its RoPE, its layers. Read without its weights and without its code.

A drafter's shape (`derive`) and a plan follow from it. Imports no torch.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from transformers import CONFIG_MAPPING, PretrainedConfig
from typing_extensions import TypedDict

from eagle31_train.common import artifacts, foreign
from eagle31_train.common.errors import UserError, first_line
from eagle31_train.common.foreign import Count, Number, Positions, Theta, Width
from eagle31_train.config import MLA_WIDTHS, Config, TargetConfig, default_aux_layers
from eagle31_train.targets.pretrained import not_loaded, refuse_adapter, source

# Kinds that transformers does not know, but whose configuration is that of another kind.
KNOWN_AS = {"kimi_k2": "deepseek_v3"}
# Kinds of targets whose classes in vLLM 0.32 lack SupportsEagle3: vLLM does not start with an EAGLE 3 draft for them.
NO_EAGLE3 = {
    "aria", "axk1", "cohere2_vision", "ernie4_5_moe", "ernie4_5_vl_moe", "exaone", "exaone4", "exaone_moe", "gemma",
    "gemma2", "gemma3", "gemma3_text", "gemma3n", "gemma3n_text", "glm4", "glm4_moe", "glm4_moe_lite", "glm4v",
    "glm4v_moe", "glm_ocr", "granite4_vision", "granitemoe", "granitemoe_swa", "granitemoehybrid", "granitemoeshared",
    "hy_v3", "hy_v4", "hyperclovax", "idefics3", "internlm2", "internvl", "internvl_chat", "llava_next_video",
    "llava_onevision", "longcat_flash", "mixtral", "molmo2", "olmo_hybrid", "olmoe", "paddleocr_vl", "paligemma",
    "qianfan_ocr", "qwen2_moe", "qwen2_vl", "shieldgemma2", "smolvlm", "step3p7",
}  # fmt: skip
# Kinds without a class of their own in vLLM 0.32: by default it serves them with its wrapper of transformers' classes.
WRAPPED = {
    "arcee", "cwm", "flex_olmo", "glm", "hunyuan_v1_dense", "hunyuan_v1_moe", "mellum", "olmo2", "olmo3", "seed_oss",
    "smollm3", "vaultgemma",
}  # fmt: skip
# Kinds for which vLLM cannot provide the input of layer 0: it fails if a drafter asks for it.
NO_EMBEDDINGS = {"deepseek_v2", "deepseek_v3", "kimi_k2", *NO_EAGLE3, *WRAPPED}
# Kinds without the parts that EAGLE reads (`.layers`, an RMSNorm `.norm` with a weight), though some name an eps.
NO_PARTS = {
    "bamba", "falcon_h1", "hrm_text", "jamba", "lfm2", "lfm2_moe", "lfm3", "modernbert-decoder",
    "nanochat", "nemotron", "phimoe", "recurrent_gemma", "xlstm", "zamba", "zamba2",
}  # fmt: skip
# Kinds with untested layers: alternating dense and expert layers, attention in chunks, to images or to later tokens of
# the prompt, logits of only a part of the vocabulary's rows, divided by a number.
NOT_DERIVED = {"inkling_text", "inkling2_text", "llama4", "llama4_text", "mllama", "mllama_text_model", "paligemma"}
# Layer types that keep a state instead of keys for each token: they cannot go back over rejected tokens.
RECURRENT = {"linear_attention", "mamba", "conv", "hybrid", "hybrid_sliding"}
# Packages that transformers needs to read quantized weights: `quant_method` → packages.
PACKAGES = {
    "auto-round": ["auto_round"], "awq": ["gptqmodel"], "bitsandbytes": ["bitsandbytes"],
    "compressed-tensors": ["compressed_tensors"], "gptq": ["optimum", "gptqmodel"], "quark": ["quark"],
    "torchao": ["torchao"],
}  # fmt: skip
EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts")
CHOSEN = ("num_experts_per_tok", "experts_per_token", "moe_topk")
EXPERT_WIDTH = ("moe_intermediate_size", "intermediate_size")
# Shared experts: some number of them, each as wide as the others, or one with a width of its own.
SHARED = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "num_shared_expert")
SHARED_WIDTH = ("shared_expert_intermediate_size", "shared_intermediate_size")
DENSE = ("first_k_dense_replace", "mlp_only_layers", "num_dense_layers", "moe_layer_start_index")  # without experts
# Patterns of counts for which transformers makes as many list items or modules → limits that no model reaches.
MOST = {
    re.compile(r"^(n|num)_\w*(layer|expert|head|block|group)|layers$|depth$"): 4096,
    re.compile("num_labels"): 1 << 16,
}


class _Raw(TypedDict, total=False):
    model_type: str
    text_config: dict[str, Any] | None
    architectures: list[str] | None
    quantization_config: dict[str, Any] | None


COUNTS = ["num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", *EXPERTS]
COUNTS += ["decoder_sparse_step", "first_k_dense_replace", "num_dense_layers"]
WIDTHS = ["hidden_size", "vocab_size", "q_lora_rank", *MLA_WIDTHS, *SHARED_WIDTH]
TYPES: dict[str, Any] = {  # of the fields that are read from transformers' configuration
    **dict.fromkeys(COUNTS, Count),
    **dict.fromkeys(WIDTHS, Width),
    **dict.fromkeys(EXPERT_WIDTH, Width | list[Width]),  # a list has a value for each layer (Hunyuan-A13B)
    **dict.fromkeys([*CHOSEN, *SHARED], Count | list[Count]),
    **dict.fromkeys(["rms_norm_eps", "norm_eps"], Number),
    **dict.fromkeys(["rope_scaling", "rope_parameters"], dict[str, Any]),
    "moe_layer_start_index": Count | list[Count],
    "mlp_only_layers": list[Count],
    **dict.fromkeys(["layer_types", "mlp_layer_types"], list[str]),
    "max_position_embeddings": Positions,
    "rope_theta": Theta,
    "sliding_window": Positions | bool,
}


@dataclass(frozen=True)
class TargetDescription:
    """A target as its config.json describes it; for a multimodal target, its text model.

    Attributes:
        intermediate_size: the MLP width that a drafter takes over: that of the dense layers, or of all experts that one
            token uses (see `_mlp_width`).
        rope_scaling: as config.json has it, without theta; {} for none.
        mla: the widths of latent attention (`q_lora_rank` and `MLA_WIDTHS`); {} for other attention.
        sources: field → the config.json key that it comes from, where that is not the field's name.
        sliding_window: the window of every layer's attention, in tokens; None if any layer sees all.
    """

    model_type: str
    hidden_size: int
    vocab_size: int
    num_hidden_layers: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any]
    max_position_embeddings: int
    mla: dict[str, int | None] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    sliding_window: int | None = None


def read_raw(target: TargetConfig) -> dict[str, Any]:
    """Return the target's config.json; for a hub id, this one file is downloaded or found in the hub's cache. UserError
    if target.path has none, or one with impossible sizes, or is a drafter."""
    found_by, where, folder = source(target), f"target.path={target.path}", Path(target.path)
    refuse_adapter(target)
    try:
        _look_into(folder / "config.json")
        raw: dict[str, Any] = PretrainedConfig.get_config_dict(target.path, **found_by)[0]
        foreign.check_depth(raw)
    except Exception as error:  # of a file that others made
        raise not_loaded(target, error) from None
    if not raw.get("model_type"):
        raise UserError(f"{where} has no config.json with a model_type: is the checkpoint complete?")
    try:
        foreign.typed(_Raw, raw)
        foreign.typed(_Raw, raw.get("text_config") or {})
        _check_counts(raw)
    except ValueError as error:
        raise UserError(f"{where}: its config.json is invalid ({error}): copy it again") from None
    if "draft_vocab_size" in raw or any("eagle3" in name.lower() for name in raw.get("architectures") or ()):
        raise UserError(f"{where} is a drafter, not a target: set target.path to the model that it drafts for")
    return raw


def _look_into(file: Path) -> None:
    """Raise a ValueError that names `file` if it is there and is no JSON object: transformers reads it unchecked."""
    try:
        if file.exists():
            foreign.read_object(file)
    except ValueError as error:
        raise ValueError(f"{file.name}: {error}") from None


def _check_counts(value: Any, name: str = "config.json") -> None:
    """Raise a ValueError for a number of layers, experts, … for which transformers would make an endless list."""
    if isinstance(value, dict):
        for key, inner in value.items():
            _check_counts(inner, str(key))
    elif isinstance(value, int) and any(value > most for pattern, most in MOST.items() if pattern.search(name)):
        raise ValueError(f"{name} is larger than in any model")


def text_config(raw: dict[str, Any]) -> Any:
    """Return transformers' configuration of the text model, with its defaults, running none of the target's own code.
    For a kind that transformers does not know: what config.json says. UserError if transformers refuses it."""
    text = raw.get("text_config", raw)
    try:
        known = whole_config(raw) or whole_config(text)
        return known.get_text_config() if known is not None else PretrainedConfig.from_dict(text)
    except Exception as error:  # each class checks its fields in its own way
        nothing = f"transformers cannot read the config.json of a {raw['model_type']} ({first_line(error)})"
        raise UserError(f"{nothing}: correct it, or copy it again") from None


def whole_config(raw: dict[str, Any]) -> Any:
    """Return transformers' configuration of the whole target; None for a kind that transformers does not know."""
    name = raw.get("model_type", "")
    kind = KNOWN_AS.get(name, name)
    return CONFIG_MAPPING[kind].from_dict({**raw, "model_type": kind}) if kind in CONFIG_MAPPING else None


def describe_target(target: TargetConfig) -> TargetDescription:
    """Read `target.path`'s config.json; UserError if there is none, or it lacks a size."""
    raw = read_raw(target)
    return description_of(raw, text_config(raw), f"target.path={target.path}")


def changed_since(recorded: Mapping[str, Any], target: TargetDescription) -> str:
    """Return how a target differs from stage 1's record, as `artifacts.describe_change` says it, or ""."""
    now = {name: value for name, value in asdict(target).items() if name in recorded and name != "sources"}
    return artifacts.describe_change({name: recorded[name] for name in now}, now)


def description_of(raw: dict[str, Any], text: Any, where: str) -> TargetDescription:
    """Describe a target by config.json and transformers' reading of it. UserError that names `where` if a size is
    missing or below 1, or no drafter can be made for the target."""
    if NOT_DERIVED.intersection(kinds(raw)):
        raise UserError(f"{where} is a {raw['model_type']}, for which eagle31 makes no drafter: it has not been tried")
    if (streams := getattr(text, "hc_mult", None)) not in (None, 1):
        why = f"its layers pass on {streams} streams of states, but EAGLE reads one"
        raise UserError(f"{where} is a {raw['model_type']}, for which eagle31 makes no drafter: {why}")
    try:
        text = _checked(text, where)
        theta, scaling = _rope(text)
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"{where}: its config.json is invalid ({error}): copy it again") from None
    eps = next((e for name in ("rms_norm_eps", "norm_eps") if (e := getattr(text, name, None))), None)
    if eps is None or NO_PARTS.intersection(kinds(raw)):  # extraction would refuse it, after hours of answers
        why = "its config.json names no rms_norm_eps" if eps is None else "transformers' class has none"
        reads = "EAGLE reads the input of an RMSNorm named .norm, beside .layers"
        raise UserError(f"{where} is a {raw['model_type']}, for which eagle31 makes no drafter: {reads}, but {why}")

    def size(name: str, *others: str) -> int:
        value = next((v for key in (name, *others) if isinstance(v := most(getattr(text, key, None)), int)), None)
        if value is None or value < 1:
            raise UserError(f"{where}: its config.json does not say {name}, which a drafter needs")
        return value

    sources: dict[str, str] = {}
    heads, hidden = size("num_attention_heads"), size("hidden_size")
    mla = {name: getattr(text, name, None) for name in ("q_lora_rank", *MLA_WIDTHS)}
    if not all(isinstance(mla[name], int) for name in MLA_WIDTHS):
        mla = {}
    kv_heads, head_dim = getattr(text, "num_key_value_heads", None) or heads, getattr(text, "head_dim", None)
    if mla:  # a Llama drafter's heads are as wide as the values
        kv_heads, head_dim, sources["head_dim"] = heads, mla["v_head_dim"], "v_head_dim"
    elif not head_dim:
        head_dim, sources["head_dim"] = hidden // heads, "hidden_size / num_attention_heads"
    width, sources["intermediate_size"] = _mlp_width(text, size)
    attentions = set(getattr(text, "layer_types", None) or ["sliding_attention"])
    return TargetDescription(
        model_type=kinds(raw)[-1],
        hidden_size=hidden,
        vocab_size=size("vocab_size"),
        num_hidden_layers=size("num_hidden_layers"),
        intermediate_size=width,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=int(head_dim or 0),
        rms_norm_eps=float(eps),
        rope_theta=theta,
        rope_scaling=scaling,
        max_position_embeddings=size("max_position_embeddings"),
        mla=mla,
        sources=sources,
        # vLLM's own test for targets whose layers all have a window.
        sliding_window=getattr(text, "sliding_window", None) if attentions == {"sliding_attention"} else None,
    )


def _checked(text: Any, where: str) -> SimpleNamespace:
    """Return those fields of TYPES that transformers' configuration has. ValueError for a value of the wrong type;
    UserError, naming `where`, for one that differs among the layers (Gemma 4's head_dim)."""
    checked = SimpleNamespace()
    for name, kind in TYPES.items():
        try:
            value = getattr(text, name, None)
        except RuntimeError:  # raised by transformers where there is no single value
            raise UserError(f"{where}: its layers differ in {name}, so eagle31 makes no drafter for it") from None
        if value is not None:
            try:
                setattr(checked, name, foreign.typed(kind, value))
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
    return checked


def most(value: Any) -> Any:
    """Return the greatest value of a list with one for each layer; any other value as it is."""
    return max(value) if isinstance(value, list) and value else value


def _mlp_width(text: Any, size: Any) -> tuple[int, str]:
    """Return the MLP width that a drafter takes over, and where it comes from: the dense layers if there are any
    (DeepSeek, Kimi: the first), else one expert's width times the experts of a token, shared ones included."""

    def first(keys: Sequence[str]) -> str | None:
        return next((key for key in keys if getattr(text, key, None)), None)

    experts, dense = first(EXPERTS), first(DENSE) or "dense" in (getattr(text, "mlp_layer_types", None) or ())
    dense = dense or (getattr(text, "decoder_sparse_step", None) or 1) > 1
    if experts is None or getattr(text, experts) <= 1 or dense:
        return size("intermediate_size"), "intermediate_size"
    shared, key = first(SHARED), first(EXPERT_WIDTH) or EXPERT_WIDTH[0]
    active = size(*CHOSEN) + (size(shared) if shared else 0)
    width, source = active * size(key), f"{active} experts of a token × {key}"
    beside = first(SHARED_WIDTH)
    return (width + size(beside), f"{source} + {beside}") if beside else (width, source)


def _rope(text: Any) -> tuple[float, dict[str, Any]]:
    """Return theta and scaling; if layers differ, those of full attention, or of the others if full attention has no
    RoPE (Beam). transformers 5: both in rope_parameters."""
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    rope = rope.get("full_attention") or rope.get("sliding_attention") or rope
    rope = dict(foreign.typed(foreign.Scaling, rope))
    theta = rope.pop("rope_theta", None) or getattr(text, "rope_theta", None) or 10000.0
    foreign.typed(Theta, theta)
    kind = rope.pop("type", None), rope.pop("rope_type", None)
    name = foreign.typed(str, kind[1] or kind[0] or "default")
    return float(theta), {} if name == "default" else {"rope_type": name, **rope}


def kinds(raw: dict[str, Any]) -> list[str]:
    """Return the target's kind, and its text model's if that differs: vLLM serves a multimodal target as a whole."""
    text = (raw.get("text_config") or raw).get("model_type") or raw["model_type"]
    return [raw["model_type"]] + [text] * (text != raw["model_type"])


def layer_types(text: Any) -> set[str]:
    """Return the layer types of transformers' configuration, in any release; empty if it lists none (all are alike)."""
    return set(getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None) or ())


def doubts(config: Config) -> dict[str, str]:
    """Return warnings to read before hours are spent on a drafter for this target, by topic: SERVING, LOADING of its
    weights here, its CONFIG, and EVALUATION by `evaluate.backend`."""
    target = config.target
    doubts, raw = {}, read_raw(target)
    if kind := class_without_eagle3(target):
        doubts["SERVING"] = (
            f"vLLM 0.32's own class for {kind} takes no EAGLE 3 draft: serve {target.path} with the class that wraps "
            "transformers' (--model-impl transformers); docs/targets.md lists the kinds tried with it"
        )
        if (raw.get("text_config") or raw).get("logits_scaling", 1) != 1:
            left_out = "by its source it leaves out logits_scaling: greedy answers are right, sampled ones are not"
            doubts["SERVING"] += f"; {left_out}"
    method = str(quantization(raw).get("quant_method"))
    lacking = " and ".join(name for name in PACKAGES.get(method, ()) if find_spec(name) is None)
    by_vllm = {
        "data.generate.server=vllm": bool(config.regenerate) and not config.data.generate.server,
        "extract.engine=vllm": config.extract.engine == "transformers",
        "evaluate.backend=vllm": config.evaluate.backend == "transformers",
    }
    if lacking and any(by_vllm.values()):
        remedy = " ".join(option for option, here in by_vllm.items() if here)
        doubts["LOADING"] = (
            f"transformers needs {lacking} to read {method} weights: install it, or let vLLM run the target: {remedy}"
        )
    engines = {"extract.engine_args": config.extract.engine_args, "evaluate.vllm_args": config.evaluate.vllm_args}
    overriding = {"hf_overrides", "hf-overrides"}
    if changed := " and ".join(name for name, given in engines.items() if overriding & given.keys()):
        doubts["CONFIG"] = (
            f"{changed}.hf_overrides affect only vLLM, but the drafter's RoPE and positions follow from config.json: "
            "write the overrides into a copy of it"
        )
    if config.evaluate.backend != "vllm" and (types := RECURRENT & layer_types(text_config(raw))):
        layers = f"layers of type {', '.join(sorted(types))}"
        doubts["EVALUATION"] = f"stage 4 cannot decode with the target's {layers}: set evaluate.backend=vllm"
    return doubts


def quantization(raw: dict[str, Any]) -> dict[str, Any]:
    """Return how the weights are quantized according to config.json; empty if they are not."""
    return raw.get("quantization_config") or (raw.get("text_config") or {}).get("quantization_config") or {}


def class_without_eagle3(target: TargetConfig) -> str | None:
    """Return the target's kind if vLLM 0.32's own class for it takes no EAGLE 3 draft.

    None if that class takes one, or if config.json cannot be read.
    """
    try:
        return next((kind for kind in kinds(read_raw(target)) if kind in NO_EAGLE3), None)
    except UserError:
        return None


def pick_layers(aux_layers: Sequence[int] | None, depth: int, kinds: Iterable[str] = ()) -> list[int]:
    """Return the auxiliary layers of a target of `depth` layers and these `kinds`; by default `default_layers`.
    UserError for layers that it lacks, that vLLM could not provide, or that do not ascend."""
    layers = list(aux_layers) if aux_layers is not None else default_layers(depth)
    if layers != sorted(set(layers)) or not layers:
        raise UserError(f"target.aux_layers={layers} must ascend without repeats: set target.aux_layers=[…]")
    if layers[0] < 0 or layers[-1] > depth:
        raise UserError(
            f"target.aux_layers={layers}: the target has layers 0 to {depth}: choose among these, or null for vLLM's "
            "choice"
        )
    if layers[0] == 0 and (kind := next((kind for kind in kinds if kind in NO_EMBEDDINGS), None)):
        raise UserError(f"target.aux_layers={layers}: vLLM cannot provide the input of layer 0 of a {kind}: remove 0")
    return layers


def default_layers(depth: int) -> list[int]:
    """Return vLLM's choice for a target of N layers: 2, N//2, N-3; of fewer than seven, as far apart as possible."""
    if depth >= 7:
        return default_aux_layers(depth)
    return sorted({1, (depth + 1) // 2, depth - 1 if depth > 3 else depth})
