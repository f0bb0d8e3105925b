"""The readout turns a target's last hidden states into its logits: embedding, final norm and lm_head.

The store keeps these weights beside the states. They are read from a loaded model, or from its checkpoint if another
engine holds the model.

Shapes: n rows; H hidden; V vocabulary.
"""

import copy
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from eagle31_train.common import foreign
from eagle31_train.common.errors import UserError, first_line
from eagle31_train.config import TargetConfig
from eagle31_train.model.linear import first_largest, soft_capped
from eagle31_train.model.norm import rms_norm
from eagle31_train.targets.description import read_raw
from eagle31_train.targets.packed_linear import PackedLinear
from eagle31_train.targets.pretrained import NOT_WHOLE, not_loaded

SOFT_CAP = "final_logit_softcapping"  # caps Gemma 2's logits
SCALE = "logit_scale"
DIVISOR = "logits_scaling"  # divides Granite's logits, and multiplies HyperCLOVA X's
MULTIPLIER = "output_multiplier"  # multiplies Muse's logits, before they are capped
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
EMBEDDING = "embed_tokens.weight"
SETTINGS = {"vocab_size": int, "hidden_size": int, "num_hidden_layers": int, "rms_norm_eps": float}  # see `_unknown`


class Parts(NamedTuple):
    """The modules of a causal LM that EAGLE reads."""

    decoder: nn.Module
    layers: nn.ModuleList
    norm: nn.Module
    embedding: Any
    head: Any


@dataclass(frozen=True)
class Readout:
    """Computes logits from last hidden states, and holds the weights for it.

    embedding: [V, H] in the target's dtype.
    norm: [H] fp32, the final RMSNorm's effective weight: w, or 1 + w as in Gemma.
    norm_kind: "w" or "1+w".
    eps: epsilon of that norm.
    head: [V, H] lm_head; the embedding itself if the target ties them. If the target divides or multiplies its logits
        by a number, so are these weights. A power of two changes no bit of the logits; any other number rounds the
        weights.
    depth: N, the number of decoder layers.
    soft_cap: c, if the target's logits x become c * tanh(x / c); else None.
    packed: lm_head in the layout that is fastest on a CPU, which sums in another order; None if there is none.
    """

    embedding: Tensor
    norm: Tensor
    norm_kind: str
    eps: float
    head: Tensor
    depth: int
    soft_cap: float | None = None
    packed: nn.Module | None = None

    @property
    def tied(self) -> bool:
        """Whether lm_head is the embedding."""
        return self.head.data_ptr() == self.embedding.data_ptr()

    @torch.no_grad()
    def logits(self, last: Tensor) -> Tensor:
        """Last hidden states [n, H] of any float dtype → logits [n, V] fp32, computed as in training."""
        return self._product(last).float()

    @torch.no_grad()
    def best(self, last: Tensor) -> Tensor:
        """Last hidden states [n, H] → [n] int64, the most likely token of the whole vocabulary."""
        return first_largest(self._product(last))

    def weights(self) -> dict[str, Tensor]:
        """What the store keeps: embed_tokens, norm and, unless tied, lm_head."""
        tensors = {"embed_tokens": self.embedding, "norm": self.norm}
        return tensors if self.tied else {**tensors, "lm_head": self.head}

    def to(self, device: torch.device) -> "Readout":
        """Move all that `logits` needs to a device; the embedding stays where it is, unless it is also the head."""
        head = self.head.to(device)
        embedding = head if self.tied else self.embedding
        packed = self.packed if head is self.head else None
        return replace(self, norm=self.norm.to(device), head=head, embedding=embedding, packed=packed)

    def _product(self, last: Tensor) -> Tensor:
        """[n, V] in lm_head's dtype."""
        normed = rms_norm(last.to(self.head.device).float(), self.norm, self.eps).to(self.head.dtype)
        return soft_capped(self.packed(normed) if self.packed is not None else normed @ self.head.T, self.soft_cap)


def readout_of(model: Any) -> Readout:
    """Return the readout of a loaded causal LM."""
    parts = find_parts(model)
    embedding, head = parts.embedding.weight.detach(), parts.head.weight.detach()
    readout = _readout(parts.norm, len(parts.layers), model.config, embedding, head)
    # In bf16, torch uses the same library with and without packing; in fp32 another one, which rounds differently.
    same = type(parts.head) is PackedLinear and head.dtype == torch.bfloat16 and readout.head is head
    return replace(readout, packed=parts.head) if same else readout


def readout_from_checkpoint(target: TargetConfig, dtype: torch.dtype) -> Readout:
    """Read the readout without loading the model or running its code: its skeleton tells which tensors to read.

    If transformers has no causal LM for the model (Kimi-K2.6: a wrapper around DeepSeek-V3), config.json must do.
    UserError if there is no checkpoint, or it does not hold these tensors plainly (e.g. quantized).
    """
    raw = read_raw(target)  # refuses a missing folder, and sizes that would make a huge skeleton
    folder = checkpoint_folder(target)
    try:
        foreign.check_folder(folder)
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except Exception as error:  # other people's files may raise anything
        settings = raw.get("text_config") or raw
        if all(isinstance(settings.get(name), kind) for name, kind in SETTINGS.items()):
            return _unknown(folder, settings, dtype)
        raise not_loaded(target, error) from None
    parts = find_parts(model)
    names = {id(p): name for name, p in model.named_parameters()}
    modules: tuple[Any, ...] = (parts.norm, parts.embedding, parts.head)
    weights = {id(module.weight): module.weight for module in modules}  # only two if the head is tied
    tensors = _read(folder, {names[key]: tuple(weight.shape) for key, weight in weights.items()}, dtype)
    norm = copy.deepcopy(parts.norm).to_empty(device="cpu")
    norm.weight = nn.Parameter(tensors[0], requires_grad=False)
    return _readout(norm, len(parts.layers), config, tensors[1], tensors[-1])


def _readout(norm: nn.Module, depth: int, config: Any, embedding: Tensor, head: Tensor) -> Readout:
    config = config.get_text_config()
    divisor = (getattr(config, DIVISOR, None) or 1) / (getattr(config, MULTIPLIER, None) or 1)
    if config.model_type == "hyperclovax":
        divisor = 1 / divisor
    head = head if divisor == 1 else head / divisor
    _refuse({SCALE: getattr(config, SCALE, None)})
    return Readout(embedding, *read_norm(norm), head, depth, getattr(config, SOFT_CAP, None))


def _refuse(settings: dict[str, Any]) -> None:
    """UserError for settings that change the logits in a way that EAGLE 3's loss does not model."""
    for name, value in settings.items():
        if value not in (None, 1, 1.0):
            raise UserError(f"the target's config has {name}={value}, which EAGLE 3's loss does not model")


def _unknown(folder: Path, settings: dict[str, Any], dtype: torch.dtype) -> Readout:
    """Read the readout of a model without a class, assuming the usual names and an ordinary RMSNorm.

    If the norm is another (1 + w), the fidelity gate refuses the store.
    """
    V, H = settings["vocab_size"], settings["hidden_size"]
    shapes: dict[str, tuple[int, ...]] = {"model.norm.weight": (H,), "model.embed_tokens.weight": (V, H)}
    if any(key.endswith("lm_head.weight") for key in _files(folder)):  # else it is the embedding
        shapes["lm_head.weight"] = (V, H)
    tensors = _read(folder, shapes, dtype)
    # Nobody here knows what such a model does with a number of this name.
    _refuse({name: settings.get(name) for name in (SOFT_CAP, SCALE, DIVISOR, MULTIPLIER)})
    depth, eps = settings["num_hidden_layers"], settings["rms_norm_eps"]
    return Readout(tensors[1], tensors[0].float(), "w", eps, tensors[-1], depth)


def checkpoint_folder(target: TargetConfig) -> Path:
    """Return the folder of a target's checkpoint; a hub id is downloaded, or found in the hub's cache."""
    if Path(target.path).is_dir():
        return Path(target.path)
    from huggingface_hub import snapshot_download

    try:
        kinds = ["*.safetensors", "*.json", "*.py", "*.model", "*.txt", "*.jinja"]
        again = ["original/*", "consolidated*"]  # the same weights in their makers' own format
        folder = snapshot_download(target.path, revision=target.revision, allow_patterns=kinds, ignore_patterns=again)
        return Path(folder)
    except (OSError, ValueError) as error:
        raise not_loaded(target, error) from None


def find_parts(model: Any) -> Parts:
    """Return the parts of a causal LM; UserError if it has no .layers and .norm, or a biased lm_head."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model.model
    decoder = getattr(decoder, "language_model", decoder)
    layers, norm = getattr(decoder, "layers", None), getattr(decoder, "norm", None)
    if not isinstance(layers, nn.ModuleList) or not isinstance(norm, nn.Module):
        raise UserError(f"{type(model).__name__} is not supported: its decoder has no .layers and .norm")
    head = model.get_output_embeddings()
    if getattr(head, "bias", None) is not None:
        raise UserError("the target's lm_head has a bias, which an EAGLE 3 draft head cannot carry")
    return Parts(decoder, layers, norm, model.get_input_embeddings(), head)


def read_norm(norm: nn.Module) -> tuple[Tensor, str, float]:
    """Return a final norm's effective weight [H] fp32, kind ("w", or "1+w" as in Gemma; tested on ones) and epsilon."""
    norms = f"the target's final norm ({type(norm).__name__})"
    epsilons = [getattr(norm, name, None) for name in ("variance_epsilon", "eps", "epsilon")]
    weight, eps = getattr(norm, "weight", None), next((one for one in epsilons if isinstance(one, float)), None)
    if not isinstance(weight, Tensor) or eps is None:
        raise UserError(f"{norms} lacks the weight or the epsilon of an RMSNorm")
    weight = weight.detach()
    with torch.no_grad():
        answer = norm(torch.ones_like(weight)[None])[0].float()
    for kind, effective in (("w", weight.float()), ("1+w", 1.0 + weight.float())):
        if torch.allclose(answer, effective, rtol=0.02, atol=0.02):
            return effective, kind, eps
    raise UserError(f"{norms} is not an RMSNorm")


def _read(folder: Path, shapes: dict[str, tuple[int, ...]], dtype: torch.dtype) -> list[Tensor]:
    """Read tensors of a checkpoint by their names in the model."""
    files, tensors = _files(folder), []
    for name, shape in shapes.items():
        key = _key(name, files)
        try:
            with safe_open(folder / files[key], framework="pt") as file:
                tensor = file.get_tensor(key)
        except (OSError, *foreign.NO_TENSORS) as error:
            raise _broken(folder, error) from None
        if tuple(tensor.shape) != shape or not tensor.is_floating_point() or tensor.itemsize < 2:  # FP8 has scales
            held = f"{key} as {list(tensor.shape)} {tensor.dtype}, but the model has {list(shape)}"
            raise UserError(f"{folder / files[key]} holds {held}: use extract.engine=transformers if it is quantized")
        tensors.append(tensor.to(dtype))
    return tensors


def _files(folder: Path) -> dict[str, str]:
    """Return the file of a checkpoint that holds each tensor."""
    try:
        if (folder / INDEX).is_file():
            weight_map = foreign.typed(dict[str, str], foreign.read_object(folder / INDEX)["weight_map"])
            return {name: Path(file).name for name, file in weight_map.items()}
        with safe_open(folder / SINGLE, framework="pt") as file:
            return dict.fromkeys(file.keys(), SINGLE)
    except (OSError, *foreign.NO_TENSORS) as error:
        raise _broken(folder, error) from None


def _broken(folder: Path, error: Exception) -> UserError:
    return UserError(f"{folder} is not a complete safetensors checkpoint ({first_line(error)}): {NOT_WHOLE}")


def _key(name: str, keys: Collection[str]) -> str:
    """Return the checkpoint's name of a model's parameter; checkpoints of wrapped models have other prefixes."""
    if name in keys:
        return name
    tail = name.split(".")[-2:]
    alike = [key for key in keys if key.split(".")[-2:] == tail and ".layers." not in key]
    if len(alike) > 1:  # a vision tower's norm has the same ending; the decoder's stands beside its embedding
        stems = [key.removesuffix(EMBEDDING) for key in keys if key.endswith(EMBEDDING)]
        alike = [key for key in alike if key.removesuffix(".".join(tail)) in stems] or alike
    if len(alike) != 1:
        raise UserError(f"the checkpoint has {len(alike)} tensors for {name}, not one: use extract.engine=transformers")
    return alike[0]
