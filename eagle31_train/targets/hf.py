"""Hidden states from a transformers model: hooks on the wanted layers, and nothing else kept.

Auxiliary layer i means the **input of layer i** (0 = embeddings, N = output of the last layer,
before the final norm), which is vLLM's convention. The last hidden state is the input of the final
norm. Both come from forward pre-hooks, since `hidden_states[N]` of transformers is after that norm.

Shapes: B sequences padded to T; A auxiliary layers; H hidden; V vocabulary.
"""

import inspect
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from eagle31_train.schema import TargetConfig, UserError
from eagle31_train.targets.readout import Readout, find_parts, not_loaded, readout_of

# Kinds of targets of which vLLM has no input of layer 0: it fails at the first token where a drafter asks for it.
NO_EMBEDDINGS = {"deepseek_v2", "deepseek_v3", "kimi_k2"}
# Kinds of targets whose classes in vLLM 0.32 lack SupportsEagle3: it starts with no EAGLE 3 draft for them.
NO_EAGLE3 = {
    "ernie4_5_moe", "exaone4", "exaone_moe", "gemma", "gemma2", "gemma3", "gemma3_text", "gemma3n", "gemma3n_text",
    "glm4", "glm4_moe", "glm4_moe_lite", "glm4v", "glm4v_moe", "granitemoe", "granitemoehybrid", "granitemoeshared",
    "hy_v3", "internvl", "longcat_flash", "mixtral", "olmoe", "qwen2_moe", "qwen2_vl",
}  # fmt: skip
STRETCHED = {"linear", "dynamic"}  # RoPE of which max_position_embeddings is the length before its factor
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def pick_device(name: str) -> torch.device:
    """The device of a config: `auto` is CUDA where there is one; of several processes, each takes its own.

    Raises:
        UserError: no such device here, or the same one for several processes.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    device = _device(name if name != "auto" else "cuda" if count else "cpu")
    if device.type != "cuda":
        return device
    if not count:
        raise UserError(f"target.device={name}: this machine has no CUDA device; use target.device=cpu or auto")
    if device.index is not None:
        if device.index >= count:
            raise UserError(f"target.device={name}: this machine has {count} CUDA devices, numbered from 0")
        # A launcher may show each process one device, its own: then all may name the same.
        if ranks() > 1 and count > 1:
            raise UserError(
                f"target.device={name}: each of {ranks()} processes would load the target there; "
                "with target.device=auto each takes a device of its own"
            )
        return device
    if ranks() == 1:
        return device
    local = int(os.environ.get("LOCAL_RANK", 0))
    if local >= count:
        raise UserError(
            f"process {local} finds only {count} CUDA devices here: start as many processes as there are devices, "
            "or set target.device=cuda:0 where each process sees one device, its own"
        )
    return torch.device("cuda", local)


def _device(name: str) -> torch.device:
    """A device of torch's by its name."""
    try:
        device = torch.device(name)
        if device.type != "cuda":
            torch.empty(0, device=device)  # of other kinds only torch knows whether they are here
    except (RuntimeError, AssertionError, NotImplementedError):
        raise UserError(f"target.device={name} is no device here: use cpu, cuda, cuda:N or auto") from None
    return device


def ranks() -> int:
    """How many processes a launcher (accelerate, torchrun) started together; 1 without one."""
    return int(os.environ.get("WORLD_SIZE", 1))


def pick_dtype(name: str) -> torch.dtype:
    """A torch dtype by its name."""
    if name not in DTYPES:
        raise UserError(f"dtype {name!r} is not one of {', '.join(DTYPES)}")
    return DTYPES[name]


def load_model(config: TargetConfig, dtype: str | None = None) -> Any:
    """The target as a transformers causal LM in eval mode, on its device or spread over several.

    Raises:
        UserError: there is none at target.path, some of its weights are not, or it cannot be placed as asked.
    """
    require_path(config)
    if config.device_map and ranks() > 1:
        raise UserError(
            "target.device_map spreads one target over the devices, and each of several processes would: "
            "start one process, or leave target.device_map out"
        )
    if config.device_map and config.device != "auto":
        raise UserError("target.device_map places the target: leave target.device=auto")
    device = None if config.device_map else pick_device(config.device)
    torch_dtype = pick_dtype(dtype or config.dtype)
    kind = _model_class(_whole_config(config))
    try:
        model, loaded = kind.from_pretrained(
            config.path,
            revision=config.revision,
            dtype=torch_dtype,
            trust_remote_code=config.trust_remote_code,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # refused below, by name
            **({"device_map": config.device_map} if config.device_map else {}),
        )
    except (OSError, ValueError, ImportError, RuntimeError, SafetensorError) as error:
        raise not_loaded(config, error) from None
    _refuse_random(config, loaded)
    if device is not None:
        model.to(device)
    return model.eval().requires_grad_(False)


def _model_class(config: Any) -> Any:
    """Which of transformers' classes loads a target.

    Of some multimodal targets (Mistral 3, Qwen3-VL) it has no causal LM, only the whole, with the decoder in it.
    """
    if type(config) in AutoModelForCausalLM._model_mapping:
        return AutoModelForCausalLM
    whole = type(config) in AutoModelForImageTextToText._model_mapping
    return AutoModelForImageTextToText if whole else AutoModelForCausalLM  # which may know code of the target's own


def _refuse_random(config: TargetConfig, loaded: dict[str, Any]) -> None:
    """Refuse a model of which transformers made up weights.

    Nothing later could notice: states, fidelity gate and evaluation would all be of the same wrong target.
    """
    wrong = sorted({*loaded["missing_keys"], *(key for key, *_ in loaded["mismatched_keys"])})
    if wrong:
        raise UserError(
            f"target.path={config.path}: {len(wrong)} of its weights are missing or of another size ({wrong[0]}"
            f"{', …' if len(wrong) > 1 else ''}), and transformers would make up random ones: is the checkpoint whole, "
            "and of the architecture that its config.json names?"
        )


def read_config(config: TargetConfig) -> Any:
    """The configuration of the target's text model, as transformers reads it.

    Raises:
        UserError: there is none at target.path.
    """
    return _whole_config(config).get_text_config()


def _whole_config(config: TargetConfig) -> Any:
    require_path(config)
    options = {"revision": config.revision, "trust_remote_code": config.trust_remote_code}
    try:
        return AutoConfig.from_pretrained(config.path, **options)
    except (OSError, ValueError, ImportError) as error:
        raise not_loaded(config, error) from None


def positions(config: Any) -> int | None:
    """How many positions a target has, by its configuration and as vLLM counts them; None where it sets no bound."""
    config = config.get_text_config()
    found: int | None = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if found and rope.get("rope_type", rope.get("type")) in STRETCHED and "gemma3" not in config.model_type:
        return int(found * (rope.get("factor") or 1))
    return found


def serving_doubt(config: TargetConfig) -> str | None:
    """What speaks against spending hours on a drafter for this target; None if nothing is known."""
    kind = _whole_config(config).model_type
    if kind not in NO_EAGLE3:
        return None
    return (
        f"vLLM 0.32's own class for {kind} takes no EAGLE 3 draft, so that a drafter for {config.path} can be trained "
        "and measured here, but not served; whether `vllm serve --model-impl transformers` serves it was not tried"
    )


def require_path(config: TargetConfig) -> None:
    """Refuse a folder that is not there, before it is looked for on the hub."""
    if not Path(config.path).exists() and config.path.startswith(("/", ".", "models/")):
        raise UserError(
            f"target.path={config.path} does not exist: for the embedded target run "
            "`python -m eagle31_train.targets.embedded` first"
        )


def pick_layers(aux_layers: Sequence[int] | None, depth: int, kind: str = "") -> list[int]:
    """The auxiliary layers of a target of N layers and of a model_type; by default vLLM's choice.

    Raises:
        UserError: layers that it does not have or that vLLM could not give, or not in ascending order.
    """
    layers = list(aux_layers) if aux_layers is not None else default_aux_layers(depth)
    if layers != sorted(set(layers)) or not layers:
        raise UserError(f"target.aux_layers={layers} must ascend without repeats: set target.aux_layers=[…]")
    if layers[0] < 0 or layers[-1] > depth:
        raise UserError(f"target.aux_layers={layers}: the target has layers 0 to {depth}")
    if layers[0] == 0 and kind in NO_EMBEDDINGS:
        raise UserError(f"target.aux_layers={layers}: vLLM cannot give the input of layer 0 of a {kind}: take another")
    return layers


def default_aux_layers(layers: int) -> list[int]:
    """vLLM's choice for a target of N layers: 2, N//2, N-3."""
    return [2, layers // 2, layers - 3]


@dataclass(frozen=True)
class States:
    """aux [B, T, A, H] and last [B, T, H], in the target's dtype; padding rows are meaningless."""

    aux: Tensor
    last: Tensor


class HiddenStateTarget:
    """A transformers model with taps on its residual stream.

    Raises:
        UserError: layer ids that the model does not have, or parts that EAGLE cannot read
            (no RMSNorm before lm_head, a biased lm_head).
    """

    def __init__(self, model: Any, aux_layers: Sequence[int] | None) -> None:
        self.model = model
        parts = find_parts(model)
        self.decoder, self.final_norm = parts.decoder, parts.norm
        self.head, self.embedding, self.depth = parts.head, parts.embedding, len(parts.layers)
        self.layers = pick_layers(aux_layers, len(parts.layers), model.config.get_text_config().model_type)
        # Input of layer N is the input of the final norm.
        self._taps = [parts.layers[i] if i < len(parts.layers) else self.final_norm for i in self.layers]

    @property
    def device(self) -> torch.device:
        """Where tokens go in: the embedding's device, or another part's where a device map left that on the disk."""
        parameters = (self.embedding.weight, *self.model.parameters())
        return next((p.device for p in parameters if not p.is_meta), torch.device("cpu"))

    @cached_property
    def readout(self) -> Readout:
        """What turns the last hidden states into logits.

        Raises:
            UserError: the final norm is not an RMSNorm.
        """
        return readout_of(self.model)

    @torch.no_grad()
    def states(self, tokens: Tensor, attention_mask: Tensor | None) -> States:
        """Run the decoder, without lm_head, on tokens [B, T] int64, padded at the end by mask 0.

        Without a mask, rows padded at the end are right all the same in a causal decoder
        (see `engine.causal`), and attention takes its fast path.
        """
        with self._tapped([*self._taps, self.final_norm]) as caught:
            self.decoder(input_ids=tokens, attention_mask=attention_mask, use_cache=False)
        return States(self._stacked(caught), caught[len(self._taps)])

    def _stacked(self, caught: dict[int, Tensor]) -> Tensor:
        """What the auxiliary taps caught, [B, T, A, H], on the device of the newest."""
        # Layers of one target may lie on several devices (target.device_map).
        device = caught[max(caught)].device
        return torch.stack([caught[i].to(device) for i in range(len(self._taps))], dim=2)

    @contextmanager
    def _tapped(self, taps: Sequence[nn.Module]) -> Iterator[dict[int, Tensor]]:
        """While it lasts, the input of taps[i] of the newest forward pass is caught under i."""
        caught: dict[int, Tensor] = {}
        handles = [
            module.register_forward_pre_hook(_catch(caught, index), with_kwargs=True)
            for index, module in enumerate(taps)
        ]
        try:
            yield caught
        finally:
            for handle in handles:
                handle.remove()

    @torch.no_grad()
    def own_logits(self, tokens: Tensor, attention_mask: Tensor, positions: Tensor | None = None) -> Tensor:
        """[B, T, V] fp32, or [B, n, V] of n positions: its own forward pass, norm and lm_head included."""
        inputs = {"input_ids": tokens, "attention_mask": attention_mask, "use_cache": False}
        if positions is None:
            return self.model(**inputs).logits.float()
        if "logits_to_keep" in inspect.signature(self.model.forward).parameters:
            return self.model(**inputs, logits_to_keep=positions.to(tokens.device)).logits.float()
        return self.model(**inputs).logits[:, positions].float()  # code that came with an older target


def _catch(caught: dict[int, Tensor], index: int) -> Any:
    def hook(_module: nn.Module, args: tuple, kwargs: dict) -> None:
        caught[index] = args[0] if args else kwargs["hidden_states"]

    return hook
