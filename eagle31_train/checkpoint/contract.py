"""What the tensors of a checkpoint must be so that vLLM serves it. For config.json, see `config_json.py`.

vLLM does not check completeness. A checkpoint without `lm_head.weight` or any norm loads silently, and its drafts are
never accepted. The drafter's own parameters have the names and shapes that vLLM 0.32 reads, and `check` compares a
checkpoint with all of them.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, fields
from functools import lru_cache

import torch

from eagle31_train.common.errors import UserError
from eagle31_train.config import MLA_WIDTHS, DrafterConfig, DrafterShape, check_value, mla_widths
from eagle31_train.model.drafter import Drafter
from eagle31_train.model.rope import check_rope, frequencies, rope_parameters, stretched, table_end

LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
# Target types for which SGLang 0.5.23 takes layer ids as outputs only if the first is 1, and otherwise as inputs.
_COUNTED_BY_THE_FIRST = ("deepseek", "kimi", "glm4_moe_lite", "glm_moe_dsa")
# Weights of a layer that vLLM also accepts joined along their rows.
_JOINED = {
    "self_attn.qkv_proj": [f"self_attn.{part}_proj" for part in "qkv"],
    "self_attn.fused_qkv_a_proj": ["self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"],
    "mlp.gate_up_proj": [f"mlp.{part}_proj" for part in ("gate", "up")],
}
# Options that take the target's value if they are not given (`targets.derive`).
REQUIRED = ("intermediate_size", "num_attention_heads", "rms_norm_eps", "rope_theta", "max_position_embeddings")
# A tensor, or its shape alone if only names and shapes are to be checked.
TensorOrShape = torch.Tensor | tuple[int, ...]


def weight_shapes(shape: DrafterShape) -> Mapping[str, tuple[int, ...]]:
    """Return the shape of every weight of a checkpoint, by its name in the file; both are those of the drafter's own
    parameters. Raise UserError for a RoPE that vLLM would read differently, or if MLA lacks a width."""
    return _weight_shapes(json.dumps(asdict(shape)))


@lru_cache  # a plan asks hundreds of times
def _weight_shapes(fields_of_shape: str) -> Mapping[str, tuple[int, ...]]:
    shape = DrafterShape(**json.loads(fields_of_shape))
    with torch.device("meta"):
        drafter = Drafter(shape, torch.empty(shape.vocab_size, shape.hidden_size))
    return {name: tuple(weight.shape) for name, weight in drafter.named_parameters()}


def canonical_name(name: str) -> str:
    """Return the name this project writes for one that vLLM accepts: `layers.0.` means `midlayer.`. Also drop the
    `model.` of trainers that write for SGLang: vLLM refuses it, but it can mean nothing else."""
    name = name.removeprefix("model.")
    return "midlayer." + name.removeprefix("layers.0.") if name.startswith("layers.0.") else name


def sglang_problems(shape: DrafterShape, target_type: str, target_layers: int) -> list[str]:
    """Return what SGLang 0.5.23 would leave out or read differently, mostly silently, one line each."""
    layers, first, last = f"aux_layers={shape.aux_layers}", min(shape.aux_layers), max(shape.aux_layers)
    lacking = ["qk_norm", "norm_before_residual", "attention_bias", "mlp_bias", "parallel"]
    own_embedding = not shape.share_embedding and shape.hidden_size == shape.target_hidden_size
    as_wide = len(shape.aux_layers) * shape.target_hidden_size == shape.hidden_size
    scaling = rope_parameters(shape)
    given = "attention_factor" in scaling and not _plain_yarn(shape)
    miscounted = first != 2 and target_type.startswith(_COUNTED_BY_THE_FIRST)
    problems = {
        **{f"it does not support drafters with {name}": getattr(shape, name) for name in lacking},
        "it applies RoPE scaling of type dynamic in short contexts, too": scaling["rope_type"] == "dynamic",
        "it ignores rope_scaling.attention_factor": given,
        "it does not support drafter.sliding_window=1": shape.sliding_window == 1,
        "it does not support MLA drafters of several layers": shape.architecture == "mla" and shape.num_layers > 1,
        "it replaces the drafter's own embedding with the target's": own_embedding,
        "it skips fc if the auxiliary states together are as wide as the drafter": as_wide,
        f"it provides neither the embedding nor the last output, but {layers} needs one": first == 0
        or last == target_layers,
        f"it miscounts the layers of a {target_type}: the first of {layers} must be 2": miscounted,
    }
    return [problem for problem, there in problems.items() if there]


def separate(tensors: Mapping[str, torch.Tensor], shape: DrafterShape) -> dict[str, torch.Tensor]:
    """Return a drafter's tensors by canonical names, with joined ones (`_JOINED`) split into views of their parts."""
    rows = {name: size[0] for name, size in weight_shapes(shape).items()}
    apart: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        module, _, kind = name.rpartition(".")
        joined = next((one for one in _JOINED if module.endswith(f".{one}")), "")
        layer = module.removesuffix(joined)
        parts = [f"{layer}{one}.{kind}" for one in _JOINED.get(joined, [])]
        sizes = [rows.get(part, 0) for part in parts]
        if sizes and all(sizes) and tensor.shape[:1] == (sum(sizes),):
            apart |= dict(zip(parts, tensor.split(sizes), strict=True))
        else:  # a joined one of another size stays as it is, and `check` names it
            apart[name] = tensor
    if "mask_hidden" in apart:  # vLLM takes it in any number of dimensions
        apart["mask_hidden"] = apart["mask_hidden"].reshape(1, -1)
    return apart


def check(tensors: Mapping[str, TensorOrShape], shape: DrafterShape) -> list[str]:
    """Return every way in which a checkpoint of this shape breaks the contract, one line each. tensors: weights by
    their names, without the vocabulary's maps, or only their shapes (then values and types are not checked)."""
    if problems := check_shape(shape):
        return problems
    expected = weight_shapes(shape)
    lacking = "and vLLM would silently load the rest and draft badly"
    problems = [f"{name} is missing, {lacking}" for name in sorted(expected.keys() - tensors.keys())]
    beyond = "the options or config.json do not ask for it (fc_norm, draft_vocab_size, share_embedding, …)"
    problems += [f"{name} is unexpected: {beyond}" for name in sorted(tensors.keys() - expected.keys())]
    for name in sorted(expected.keys() & tensors.keys()):
        value = tensors[name]
        size = tuple(value.shape if isinstance(value, torch.Tensor) else value)
        if size != expected[name]:
            problems.append(f"{name} has shape {list(size)}, not {list(expected[name])}")
        elif isinstance(value, torch.Tensor):
            if not value.is_floating_point() or value.element_size() < 2:  # 8 bits and fewer are quantized
                problems.append(f"{name} is {value.dtype}, not a floating-point type of 16 bits or more")
            elif bad := int((~torch.isfinite(value)).sum()):
                problems.append(f"{name} holds {bad} NaN or infinite values")
    return problems


def require(tensors: Mapping[str, TensorOrShape], shape: DrafterShape, where: str) -> None:
    """Raise the first few problems of a checkpoint as one UserError that names it; see `check`."""
    if problems := check(tensors, shape):
        raise UserError(f"vLLM cannot serve the drafter in {where}: {'; '.join(problems[:3])}")


def check_shape(shape: DrafterShape) -> list[str]:
    """Return what is wrong with the shape itself: what vLLM or transformers would read differently from training."""
    problems = []
    if shape.aux_layers != sorted(set(shape.aux_layers)):
        problems.append(
            f"aux_layers {shape.aux_layers} must ascend: vLLM passes the states in ascending order, each once"
        )
    if shape.share_embedding and shape.hidden_size != shape.target_hidden_size:
        theirs = f"the target's {shape.target_hidden_size}"
        problems.append(
            f"drafter.hidden_size={shape.hidden_size} differs from {theirs}: set drafter.share_embedding=false"
        )
    D, heads, mla = shape.hidden_size, shape.num_attention_heads, shape.architecture == "mla"
    llama_only = ("qk_norm", "norm_before_fc", "sliding_window", "attention_bias", "mlp_bias")
    if mla and (given := [name for name in llama_only if getattr(shape, name)]):
        problems.append(f"vLLM does not serve MLA drafters with {given[0]}")
    if shape.qk_norm and shape.mlp_bias:
        problems.append("vLLM does not serve drafters with both qk_norm and mlp_bias")
    if mla and shape.parallel:
        problems.append("drafter.parallel=true does not work with MLA: vLLM 0.32's MLA drafters have no mask_hidden")
    if shape.parallel and shape.ptd_token_id not in range(shape.vocab_size):
        problems.append(
            f"drafter.ptd_token_id={shape.ptd_token_id} is not among the target's {shape.vocab_size} tokens"
        )
    if not mla and not shape.qk_norm and D % heads:
        keys = shape.num_key_value_heads
        fitting = [n for n in range(1, heads) if D % n == 0 and (keys == heads or n % keys == 0)]
        problems.append(
            f"hidden_size {D} is not a multiple of {heads} heads, and transformers rejects such a config.json: set "
            f"drafter.qk_norm=true{f' or drafter.num_attention_heads={fitting[-1]}' if fitting else ''}"
        )
    if mla and (shape.num_key_value_heads, shape.head_dim) != (heads, sum(mla_widths(shape)[1:3])):
        problems.append(
            f"with MLA, num_key_value_heads must be {heads}, and head_dim qk_nope_head_dim + qk_rope_head_dim"
        )
    if heads % (keys := shape.num_key_value_heads):
        problems.append(f"drafter.num_attention_heads={heads} is not a multiple of num_key_value_heads={keys}")
    try:
        check_rope(shape)
    except UserError as error:
        return [*problems, str(error)]
    yarn = shape.rope_scaling or {}
    mscale, all_dim = yarn.get("mscale", 1.0), yarn.get("mscale_all_dim", 0.0)
    # Given one without the other, transformers ignores both, and vLLM uses the one that is given.
    if mla and yarn.get("factor", 1) > 1 and not (mscale and all_dim) and (mscale, all_dim) != (1, 0):
        problems.append(
            "vLLM and transformers read mscale and mscale_all_dim differently: set both above 0, or remove both"
        )
    return problems


def drafter_shape(
    d: DrafterConfig, hidden_size: int, vocab_size: int, draft_vocab_size: int, aux_layers: list[int]
) -> DrafterShape:
    """Return the drafter's architecture: the options `d`, completed by `targets.derive.complete`, joined with the
    target's H, V and auxiliary layers (inputs of layer i). Raise UserError for what vLLM could not serve."""
    for field in fields(d):
        check_value(f"drafter.{field.name}", getattr(d, field.name), field.metadata)
    if missing := [name for name in REQUIRED if getattr(d, name) is None]:
        raise UserError(f"drafter.{missing[0]} is not set, and does not follow from the target: set it")
    D, heads = d.hidden_size or hidden_size, d.num_attention_heads or 0
    if not d.train_lm_head and hidden_size != D:  # a random lm_head would stay random
        wide = f"the target's {hidden_size}-wide lm_head, but the drafter is {D} wide"
        raise UserError(f"drafter.train_lm_head=false keeps {wide}: set drafter.train_lm_head=true")
    if d.architecture == "mla":
        _, nope, rope, _ = mla_widths(d)
        keys, width = heads, nope + rope
        for name, value in {"num_key_value_heads": heads, "head_dim": width}.items():
            if (given := getattr(d, name)) not in (None, value):
                raise UserError(f"drafter.{name}={given}: with MLA it is always {value} here: remove it")
    else:
        keys, width = d.num_key_value_heads or heads, d.head_dim or D // heads
        if given := [name for name in ("q_lora_rank", *MLA_WIDTHS) if getattr(d, name) is not None]:
            raise UserError(
                f"drafter.{given[0]} applies only to MLA: set drafter.architecture=mla, or remove the option"
            )
    if d.ptd_token_id is not None and not d.parallel:
        raise UserError(
            f"drafter.ptd_token_id={d.ptd_token_id} applies only to drafter.parallel=true: set that, or remove it"
        )
    mask_token = vocab_size - 1 if d.ptd_token_id is None else d.ptd_token_id
    joined = {
        "ptd_token_id": mask_token if d.parallel else None,
        "hidden_size": D,
        "target_hidden_size": hidden_size,
        "aux_layers": aux_layers,
        "vocab_size": vocab_size,
        "draft_vocab_size": draft_vocab_size,
        "num_key_value_heads": keys,
        "head_dim": width,
        "rope_scaling": d.rope_scaling or None,
    }
    own = {field.name for field in fields(d)} & {field.name for field in fields(DrafterShape)}
    shape = DrafterShape(**{name: getattr(d, name) for name in own} | joined)
    if problems := check_shape(shape):  # what vLLM would not serve is not worth training
        raise UserError(problems[0])
    return shape


def caveats(shape: DrafterShape, target_positions: int | None = None, target_window: int | None = None) -> list[str]:
    """Return what can be trained and exported but does not run everywhere, a sentence each. target_positions: length of
    the target's longest context, if known. target_window: tokens that every layer of the target sees, if each has a
    window."""
    sentences = []
    if shape.parallel:
        sentences.append("vLLM 0.32 drafts in parallel only on its V1 runner: leave VLLM_USE_V2_MODEL_RUNNER unset")
    positions = stretched(shape.max_position_embeddings, shape.rope_scaling)
    if target_positions is None or target_positions > positions:
        v2 = "" if shape.parallel else "; V2 (used on GPUs) has no such limit"
        sentences.append(f"vLLM 0.32's V1 runner (used on CPUs) drafts in contexts of up to {positions:,} tokens{v2}")
    end = table_end(check_rope(shape))
    if end is not None and (target_positions is None or target_positions > end):
        sentences.append(
            f"vLLM's table for its YaRN scaling ends at {end:,.0f} positions: serve with no larger --max-model-len"
        )
    if 0 in shape.aux_layers:
        sentences.append("vLLM's kernels overwrite the input of layer 0: serve this drafter without --enforce-eager")
    return [*sentences, *window_caveat(shape, target_window, target_positions), *unserved(shape)]


def oldest_vllm(shape: DrafterShape) -> str:
    """Return the first version of vLLM that reads everything in a drafter's config.json (docs/serving.md). Older ones
    fail to load it, or silently serve it badly."""
    needed = {
        "0.22": True,  # fc_norm and norm_output
        "0.23": shape.architecture == "mla" and (shape.fc_norm or shape.norm_output),
        "0.24": shape.qk_norm,
        "0.26": shape.qk_norm and shape.sliding_window is not None,
        "0.28": shape.architecture == "mla" and shape.rope_scaling is None,
        "0.31": shape.architecture == "llama" and not _plain_yarn(shape),
    }
    return max(version for version, there in needed.items() if there)


def _plain_yarn(shape: DrafterShape) -> bool:
    """Return whether a Llama drafter's YaRN, if any, multiplies cos and sin by its default, 0.1 ln(factor) + 1."""
    scaling = rope_parameters(shape)
    if scaling["rope_type"] != "yarn":
        return True
    return math.isclose(frequencies(shape, shape.head_dim)[1], 0.1 * math.log(scaling["factor"]) + 1)


def window_caveat(shape: DrafterShape, target_window: int | None, target_positions: int | None) -> list[str]:
    """Return a caveat if all layers of the target have a sliding window and the drafter has none; else nothing."""
    everywhere = target_window is None or (target_positions is not None and target_window >= target_positions)
    if everywhere or shape.sliding_window is not None:
        return []
    sees = f"every layer of the target sees {target_window:,} tokens"
    return [f"{sees}, and in vLLM 0.32 the drafter sees no more: train it with drafter.sliding_window={target_window}"]


def unserved(shape: DrafterShape) -> list[str]:
    """Return the worst caveats, to be known before hours of training: what vLLM does not serve at all."""
    if shape.architecture == "mla" and shape.q_lora_rank is None:
        return ["vLLM 0.32 fails to load an MLA drafter without drafter.q_lora_rank"]
    return []
