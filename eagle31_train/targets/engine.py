"""Engines: what runs the target over conversations and gives its hidden states.

`transformers` runs it here; `vllm` (see `vllm_engine.py`) takes quantized and very large targets.
Both give the same states within the target's own rounding, in the same conventions: auxiliary layer
i is the input of layer i, the last hidden state is before the final norm.

Shapes: T tokens of one conversation; A auxiliary layers; H hidden; V vocabulary.
"""

import importlib.util
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from eagle31_train.schema import Config, UserError
from eagle31_train.targets.hf import HiddenStateTarget, load_model, pick_device, pick_dtype, positions, serving_doubt
from eagle31_train.targets.readout import Readout, readout_from_checkpoint

ENGINES = ("transformers", "vllm")
LENGTH_ROPES = {"longrope", "dynamic", "su"}
PADS = 8  # padding that makes the gate's own forward pass take the model's masked path


@dataclass(frozen=True)
class Reference:
    """The target's own next-token distribution at n positions, computed its own way.

    own: [n, V] fp32 logits; or, with `ids`, [n, k] fp32 log-probabilities of those tokens.
    ids: [n, k] int64, the most likely tokens among others; None where all are there.
    """

    own: Tensor
    ids: Tensor | None = None


class Engine(Protocol):
    """What extraction asks of an engine.

    longest: tokens of the longest conversation that it takes; None where it sets no bound.
    longer: what to do about a longer one.
    """

    name: str
    readout: Readout
    layers: list[int]

    @property
    def longest(self) -> int | None: ...

    @property
    def longer(self) -> str: ...

    def run(self, tokens: Sequence[Tensor]) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Conversations [T] int64 → (index, aux [T, A, H], last [T, H]) of each, in any order.

        In the target's dtype, on any device. Raises UserError for one that the engine cannot take.
        """
        ...

    def reference(self, tokens: Tensor, positions: Tensor) -> Reference:
        """What the target itself says at some positions, none of them the last, of a conversation [T]."""
        ...


def make_engine(config: Config) -> Engine:
    """The engine that `extract.engine` names, with the target loaded.

    Raises:
        UserError: no such engine, it is not installed, or it cannot load the target.
    """
    name = config.extract.engine
    if name not in ENGINES:
        raise UserError(f"extract.engine={name!r} is not one of {', '.join(ENGINES)}")
    if name == "vllm":
        if importlib.util.find_spec("vllm") is None:
            raise UserError(
                "extract.engine=vllm needs vLLM in this environment: pip install vllm (on a CPU: "
                "tests/vllm/install.sh DIR makes an environment, DIR/bin/python -m eagle31_train.extract runs in it)"
            )
        from eagle31_train.targets.vllm_engine import VllmEngine

        return VllmEngine(config)
    if config.extract.engine_args:
        raise UserError(
            f"extract.engine_args={config.extract.engine_args} are vLLM's: use extract.engine=vllm, or leave them out"
        )
    if int(os.environ.get("RANK", 0)) == 0 and (doubt := serving_doubt(config.target)):
        print(f"target: {doubt}")
    target = HiddenStateTarget(load_model(config.target), config.target.aux_layers)
    offloaded = any(module.weight.is_meta for module in (target.embedding, target.final_norm, target.head))
    readout = readout_from_checkpoint(config.target, pick_dtype(config.target.dtype)) if offloaded else target.readout
    device = pick_device(config.target.device) if offloaded else target.head.weight.device
    return TransformersEngine(target, readout.to(device), config.extract.batch_tokens)


class TransformersEngine:
    """A transformers model in this process, in batches of conversations of similar length.

    Args:
        target: the model with its taps.
        readout: its readout; default: read off the model.
        batch_tokens: padded tokens in one forward pass.
    """

    name = "transformers"

    def __init__(self, target: HiddenStateTarget, readout: Readout | None = None, batch_tokens: int = 4096) -> None:
        self.target = target
        self.readout = target.readout if readout is None else readout
        self.layers = target.layers
        self.batch_tokens = batch_tokens
        self._causal = causal(target.model.config)
        self._alone = rope_by_length(target.model.config)

    @property
    def longest(self) -> int | None:
        """See `Engine`. Beyond its positions a model still computes something, which no serving engine would."""
        return positions(self.target.model.config)

    @property
    def longer(self) -> str:
        """See `Engine`."""
        return f"cut the data by data.max_length={self.longest} (the target itself has no more positions)"

    def run(self, tokens: Sequence[Tensor]) -> Iterator[tuple[int, Tensor, Tensor]]:
        """See `Engine.run`."""
        device = self.target.device
        lengths = [len(row) for row in tokens]
        for batch in batches_by_length(lengths, 1 if self._alone else self.batch_tokens):
            self._forget_lengths()
            padded = pad_sequence([tokens[i] for i in batch], batch_first=True).to(device)
            states = self.target.states(padded, None if self._causal else self._mask(tokens, batch, device))
            for row, index in enumerate(batch):
                length = len(tokens[index])
                yield index, states.aux[row, :length], states.last[row, :length]

    def reference(self, tokens: Tensor, positions: Tensor) -> Reference:
        """See `Engine.reference`. The model's ordinary call, norm, lm_head and attention mask included."""
        device = self.target.device
        self._forget_lengths()
        padded = torch.nn.functional.pad(tokens, (0, 0 if self._alone else PADS))[None].to(device)
        mask = (torch.arange(padded.shape[1], device=device) < len(tokens)).long()[None]
        return Reference(self.target.own_logits(padded, mask, positions)[0])

    def _forget_lengths(self) -> None:
        """Let a RoPE that follows the length follow the next conversation's alone: it keeps the longest one's."""
        if not self._alone:
            return
        for module in self.target.model.modules():
            for name in [name for name in vars(module) if name.endswith("max_seq_len_cached")]:
                setattr(module, name, 0)

    @staticmethod
    def _mask(tokens: Sequence[Tensor], batch: list[int], device: Any) -> Tensor:
        return pad_sequence([torch.ones_like(tokens[i]) for i in batch], batch_first=True).to(device)


def causal(config: Any) -> bool:
    """Whether no token of a target sees a later one.

    Padding at the end is then never seen by a real token, and need not be masked: without a mask,
    torch's attention takes its causal fast path instead of reading a [T, T] mask.
    """
    config = config.get_text_config()
    if getattr(config, "is_causal", True) is False:
        return False
    return not getattr(config, "use_bidirectional_attention", None)


def rope_by_length(config: Any) -> bool:
    """Whether a target's RoPE follows the length of a batch, padding included: such conversations run alone."""
    config = config.get_text_config()
    found = [getattr(config, name, None) or {} for name in ("rope_parameters", "rope_scaling")]
    found += [value for each in found for value in each.values() if isinstance(value, dict)]  # by type of layer
    return any(each.get(key) in LENGTH_ROPES for each in found for key in ("rope_type", "type"))


def too_long(engine: Engine, length: int) -> UserError:
    """That an engine does not take a conversation of so many tokens."""
    return UserError(
        f"a conversation of {length} tokens is too long for extract.engine={engine.name}, which takes "
        f"{engine.longest} here: {engine.longer}"
    )


def batches_by_length(lengths: Sequence[int], batch_tokens: int) -> list[list[int]]:
    """Group samples of similar length so that padded batches stay under `batch_tokens`."""
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: (lengths[i], i)):
        # Ascending lengths: the newest sample is the longest, and sets the padded width.
        if batches and (len(batches[-1]) + 1) * lengths[index] <= batch_tokens:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches
