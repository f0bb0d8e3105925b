"""A transformers model as the engine of extraction.

Shapes: as in `engine.py`.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from eagle31_train.config import TargetConfig
from eagle31_train.targets.engine import Reference
from eagle31_train.targets.hf import (
    DTYPES,
    HiddenStateTarget,
    load_model,
    pick_device,
    positions,
)
from eagle31_train.targets.readout import Readout, readout_from_checkpoint

LENGTH_ROPES = {"longrope", "dynamic", "su"}
PADS = 8  # padding that makes the gate's own forward pass take the model's masked path


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

    def run(self, tokens: Sequence[Tensor]) -> Iterator[tuple[int, Tensor, Tensor]]:
        """See `Engine.run`."""
        device = self.target.device
        lengths = [len(row) for row in tokens]
        for batch in batches_by_length(lengths, 1 if self._alone else self.batch_tokens):
            self._forget_lengths()
            padded = pad_sequence([tokens[i] for i in batch], batch_first=True).to(device)
            lengths_B1 = torch.tensor([[len(tokens[i])] for i in batch], device=device)
            mask = (torch.arange(padded.shape[1], device=device) < lengths_B1).long()
            states = self.target.states(padded, None if self._causal else mask)
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


def load_engine(config: TargetConfig, batch_tokens: int) -> TransformersEngine:
    """The target, loaded; weights that a device map left on the disk are read from its checkpoint.

    Raises:
        UserError: it cannot be loaded or read.
    """
    target = HiddenStateTarget(load_model(config), config.aux_layers)
    offloaded = any(module.weight.is_meta for module in (target.embedding, target.final_norm, target.head))
    readout = readout_from_checkpoint(config, DTYPES[config.dtype]) if offloaded else target.readout
    device = pick_device(config.device) if offloaded else target.head.weight.device
    return TransformersEngine(target, readout.to(device), batch_tokens)


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
