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
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from eagle31_train.schema import TargetConfig, UserError
from eagle31_train.targets.readout import Readout, find_parts, readout_of

# Kinds of targets of which vLLM has no input of layer 0: it fails at the first token where a drafter asks for it.
NO_EMBEDDINGS = {"deepseek_v2", "deepseek_v3", "kimi_k2"}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def pick_device(name: str) -> torch.device:
    """The device of a config: `auto` is CUDA where there is one; of several processes, each takes its own."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        local = int(os.environ.get("LOCAL_RANK", 0)) if ranks() > 1 else 0
        if local >= count > 0:
            raise UserError(
                f"process {local} finds only {count} CUDA devices here: start as many processes as there are devices"
            )
        name = ("cuda" if ranks() == 1 else f"cuda:{local}") if count else "cpu"
    if name.startswith("cuda") and not count:
        raise UserError(f"target.device={name}: this machine has no CUDA device; use target.device=cpu or auto")
    return torch.device(name)


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
        UserError: there is none at target.path, or it cannot be placed as asked.
    """
    require_path(config)
    if config.device_map and ranks() > 1:
        raise UserError(
            "target.device_map spreads one target over the devices, and each of several processes would: "
            "start one process, or leave target.device_map out"
        )
    if config.device_map and config.device != "auto":
        raise UserError("target.device_map places the target: leave target.device=auto")
    try:
        model = AutoModelForCausalLM.from_pretrained(
            config.path,
            revision=config.revision,
            dtype=pick_dtype(dtype or config.dtype),
            trust_remote_code=config.trust_remote_code,
            **({"device_map": config.device_map} if config.device_map else {}),
        )
    except (OSError, ValueError) as error:
        raise UserError(f"target.path={config.path} cannot be loaded: {str(error).splitlines()[0]}") from None
    if not config.device_map:
        model.to(pick_device(config.device))  # type: ignore[arg-type]  # its decorator hides the signature
    return model.eval().requires_grad_(False)


def read_config(config: TargetConfig) -> Any:
    """The configuration of the target's text model, as transformers reads it.

    Raises:
        UserError: there is none at target.path.
    """
    require_path(config)
    options = {"revision": config.revision, "trust_remote_code": config.trust_remote_code}
    try:
        return AutoConfig.from_pretrained(config.path, **options).get_text_config()
    except (OSError, ValueError) as error:
        raise UserError(f"target.path={config.path} cannot be loaded: {str(error).splitlines()[0]}") from None


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
