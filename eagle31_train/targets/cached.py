"""A target that decodes: transformers' key/value cache, and the taps of `hf.py` on the new tokens only.

Shapes: n new tokens; A auxiliary layers; H hidden; V vocabulary. Batch 1 throughout.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from eagle31_train.targets.hf import HiddenStateTarget


class CachedTarget(HiddenStateTarget):
    """One sequence at a time: `reset`, then `read` new tokens, and `forget` those that were rejected."""

    def __init__(self, model: Any, aux_layers: Sequence[int] | None) -> None:
        super().__init__(model, aux_layers)
        self.reset()

    def reset(self) -> None:
        """Forget the sequence."""
        # Without a config every layer keeps all its positions: a sliding window's layer that had
        # dropped the oldest could not go back. Which keys are seen is the mask's business either way.
        self._cache = DynamicCache()

    @torch.no_grad()
    def read(self, tokens: Sequence[int], logit_rows: int) -> tuple[Tensor, Tensor]:
        """Read new tokens.

        Returns:
            aux [n, A, H] of the new tokens and logits [logit_rows, V] fp32 of the last of them.
        """
        with self._tapped(self._taps) as caught:
            logits = self._forward(tokens, logit_rows)
        return self._stacked(caught)[0], logits

    @torch.no_grad()
    def read_plain(self, tokens: Sequence[int]) -> Tensor:
        """As `read`, without taps: logits [V] fp32 of the last token."""
        return self._forward(tokens, 1)[0]

    def forget(self, count: int) -> None:
        """Forget the newest `count` tokens."""
        if count:
            self._cache.crop(-count)

    def _forward(self, tokens: Sequence[int], logit_rows: int) -> Tensor:
        ids = torch.tensor([list(tokens)], device=self.device)
        output = self.model(input_ids=ids, past_key_values=self._cache, use_cache=True, logits_to_keep=logit_rows)
        return output.logits[0].float()
