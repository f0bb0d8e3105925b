"""Hidden states from a transformers model: hooks on the wanted layers, and nothing else kept.

Auxiliary layer i means the **input of layer i** (0 = embeddings, N = output of the last layer,
before the final norm), which is vLLM's convention. The last hidden state is the input of the final
norm. Both come from forward pre-hooks, since `hidden_states[N]` of transformers is after that norm.

Shapes: B sequences padded to T; A auxiliary layers; H hidden; V vocabulary.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from eagle31_train.schema import TargetConfig, UserError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def pick_device(name: str) -> torch.device:
    """The device of a config: `auto` is CUDA where there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise UserError(f"target.device={name}: this machine has no CUDA device; use target.device=cpu or auto")
    return torch.device(name)


def pick_dtype(name: str) -> torch.dtype:
    """A torch dtype by its name."""
    if name not in DTYPES:
        raise UserError(f"dtype {name!r} is not one of {', '.join(DTYPES)}")
    return DTYPES[name]


def load_model(config: TargetConfig, dtype: str | None = None) -> Any:
    """The target as a transformers causal LM in eval mode, on its device."""
    if not Path(config.path).exists() and config.path.startswith(("/", ".", "models/")):
        raise UserError(
            f"target.path={config.path} does not exist: for the embedded target run "
            "`python -m eagle31_train.targets.embedded` first"
        )
    try:
        model = AutoModelForCausalLM.from_pretrained(
            config.path,
            revision=config.revision,
            dtype=pick_dtype(dtype or config.dtype),
            trust_remote_code=config.trust_remote_code,
        )
    except (OSError, ValueError) as error:
        raise UserError(f"target.path={config.path} cannot be loaded: {str(error).splitlines()[0]}") from None
    model.to(pick_device(config.device))  # type: ignore[arg-type]  # its decorator hides the signature
    return model.eval().requires_grad_(False)


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
        self.decoder, layers, self.final_norm = find_decoder(model)
        self.head = model.get_output_embeddings()
        self.embedding = model.get_input_embeddings()
        self.layers = list(aux_layers) if aux_layers is not None else default_aux_layers(len(layers))
        if self.layers != sorted(set(self.layers)) or not self.layers:
            raise UserError(f"target.aux_layers={self.layers} must ascend without repeats: set target.aux_layers=[…]")
        if self.layers[0] < 0 or self.layers[-1] > len(layers):
            raise UserError(f"target.aux_layers={self.layers}: the target has layers 0 to {len(layers)}")
        if getattr(self.head, "bias", None) is not None:
            raise UserError("the target's lm_head has a bias, which an EAGLE 3 draft head cannot carry")
        # Input of layer N is the input of the final norm.
        self._taps = [layers[i] if i < len(layers) else self.final_norm for i in self.layers]

    @torch.no_grad()
    def states(self, tokens: Tensor, attention_mask: Tensor) -> States:
        """Run the decoder, without lm_head, on tokens [B, T] int64, padded at the end by mask 0."""
        with self._tapped([*self._taps, self.final_norm]) as caught:
            self.decoder(input_ids=tokens, attention_mask=attention_mask, use_cache=False)
        aux = torch.stack([caught[i] for i in range(len(self._taps))], dim=2)
        return States(aux, caught[len(self._taps)])

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
    def own_logits(self, tokens: Tensor, attention_mask: Tensor) -> Tensor:
        """[B, T, V] fp32, the target's own way: its forward pass with its own norm and lm_head."""
        return self.model(input_ids=tokens, attention_mask=attention_mask, use_cache=False).logits.float()

    def norm_weight(self) -> tuple[Tensor, str]:
        """The final norm's effective weight [H] fp32, and its kind: "w", or "1+w" as in Gemma.

        The kind is read off the norm's answer to a vector of ones, not off the model's name.
        """
        weight = self.final_norm.weight
        assert isinstance(weight, Tensor)
        with torch.no_grad():
            answer = self.final_norm(torch.ones_like(weight)[None])[0].float()
        for kind, effective in (("w", weight.float()), ("1+w", 1.0 + weight.float())):
            if torch.allclose(answer, effective, rtol=0.02, atol=0.02):
                return effective, kind
        raise UserError(f"the target's final norm ({type(self.final_norm).__name__}) is not an RMSNorm")

    def norm_eps(self) -> float:
        """Epsilon of the final norm."""
        for name in ("variance_epsilon", "eps", "epsilon"):
            if isinstance(value := getattr(self.final_norm, name, None), float):
                return value
        raise UserError(f"the target's final norm ({type(self.final_norm).__name__}) names no epsilon")

    def head_weight(self) -> Tensor:
        """[V, H] lm_head in the target's dtype."""
        return self.head.weight

    def tied(self) -> bool:
        """Whether lm_head is the embedding."""
        return self.head.weight.data_ptr() == self.embedding.weight.data_ptr()


def find_decoder(model: Any) -> tuple[nn.Module, nn.ModuleList, nn.Module]:
    """The decoder stack of a causal LM: module, its layers, its final norm."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model.model
    decoder = getattr(decoder, "language_model", decoder)
    layers, norm = getattr(decoder, "layers", None), getattr(decoder, "norm", None)
    if not isinstance(layers, nn.ModuleList) or not isinstance(norm, nn.Module):
        raise UserError(f"{type(model).__name__} has no .layers and .norm where its decoder should: not supported")
    return decoder, layers, norm


def _catch(caught: dict[int, Tensor], index: int) -> Any:
    def hook(_module: nn.Module, args: tuple, kwargs: dict) -> None:
        caught[index] = args[0] if args else kwargs["hidden_states"]

    return hook
