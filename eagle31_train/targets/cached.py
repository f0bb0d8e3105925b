"""A target that decodes: transformers' key/value cache, and the taps of `hf.py` on the new tokens only.

Several sequences are read together. Their keys are right-aligned in the cache: a shorter sequence is padded on its
left, as when transformers generates. When a sequence forgets its last tokens, the rest of its row shifts right over
them.

Shapes: B sequences; n new tokens; A auxiliary layers; H hidden; V vocabulary.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import DynamicCache, cache_utils

from eagle31_train.common.errors import UserError
from eagle31_train.targets.description import RECURRENT, layer_types
from eagle31_train.targets.hf import HiddenStateTarget, rope_by_length

TOGETHER = {"full_attention", "sliding_attention"}  # layer types tested with rows of unequal length
INDEXED = "indexed_attention"  # a layer that chooses its keys, by other keys of its own that the cache holds, too
FEW = 32  # queries per head; more of them fill the kernel's blocks by themselves


class CachedTarget(HiddenStateTarget):
    """A target that decodes a batch of sequences: `reset`, then `read` new tokens and `forget` the rejected ones."""

    def __init__(self, model: Any, aux_layers: Sequence[int] | None) -> None:
        super().__init__(model, aux_layers)
        self.reset()

    @cached_property
    def _cache_argument(self) -> str:
        """The name of the forward pass's cache argument. transformers 5.24 changed it; code of older models did not."""
        return "cache" if "cache" in inspect.signature(self.model.forward).parameters else "past_key_values"

    def reset(self, rows: int = 1) -> None:
        """Empty the cache for `rows` new sequences. UserError if the target cannot forget, or take several."""
        if states := layer_types(self.model.config.get_text_config()) & RECURRENT:
            kinds = ", ".join(sorted(states))
            raise UserError(f"layers of type {kinds} cannot forget rejected tokens: set evaluate.backend=vllm")
        if rows > 1 and (why := why_alone(self.model)):
            raise UserError(f"the target has {why}, so it decodes one sequence at a time: set evaluate.batch_size=1")
        # Without a config every layer keeps all its positions: a sliding-window layer that had dropped the oldest
        # could not go back. Either way, the mask decides which keys are seen.
        self._cache = DynamicCache()
        if INDEXED in layer_types(self.model.config.get_text_config()):
            self._cache.layer_class_to_replicate = cache_utils.DynamicIndexedLayer
        self.lengths = [0] * rows

    @torch.no_grad()
    def read(self, rows: Sequence[Sequence[int]], logit_rows: int) -> tuple[Tensor, Tensor]:
        """Read the new tokens of every sequence. Return their aux [B, n, A, H], and logits [B, logit_rows, V] fp32 of
        the last ones. Rows have equal length, except in the first call: the left of a shorter one is meaningless."""
        with self._tapped(self._taps) as caught:
            logits = self._forward(rows, logit_rows)
        return self._stacked(caught), logits

    @torch.no_grad()
    def read_plain(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """Like `read` without taps: return logits [B, 1, V] fp32 of the last token."""
        return self._forward(rows, 1)

    def forget(self, counts: Sequence[int]) -> None:
        """Forget the newest counts[b] tokens of every sequence."""
        self.lengths = [length - count for length, count in zip(self.lengths, counts, strict=True)]
        least = min(counts)
        if least:
            self._cache.crop(-least)
        shifts = [(row, count - least) for row, count in enumerate(counts) if count > least]
        for layer in self._filled():
            for states in (layer.keys, layer.values):
                for row, shift in shifts:
                    states[row, ..., shift:, :] = states[row, ..., :-shift, :].clone()
        self._narrow()

    def select(self, rows: Sequence[int]) -> None:
        """Keep only these sequences, in this order."""
        self.lengths = [self.lengths[row] for row in rows]
        self._cache.batch_select_indices(torch.tensor(list(rows)))
        self._narrow()

    def join(self, other: "CachedTarget") -> None:
        """Append the sequences of `other`, which has the same model."""
        if more := max(self.lengths) - max(other.lengths):
            narrow = other if more > 0 else self
            for layer in narrow._filled():
                layer.keys, layer.values = (pad(states, (0, 0, abs(more), 0)) for states in (layer.keys, layer.values))
        for ours, theirs in zip(self._filled(), other._filled(), strict=True):
            ours.keys, ours.values = torch.cat([ours.keys, theirs.keys]), torch.cat([ours.values, theirs.values])
        self.lengths += other.lengths

    def _narrow(self) -> None:
        """Drop the columns that are padding in every row."""
        width = max(self.lengths)
        for layer in self._filled():
            layer.keys, layer.values = layer.keys[..., -width:, :], layer.values[..., -width:, :]

    def _filled(self) -> list[Any]:
        """Return the cache's layers that hold keys; a layer that shares another's keys stays empty."""
        layers: list[Any] = self._cache.layers
        return [layer for layer in layers if layer.is_initialized]

    def _forward(self, rows: Sequence[Sequence[int]], logit_rows: int) -> Tensor:
        n = max(len(row) for row in rows)
        assert not any(self.lengths) or all(len(row) == n for row in rows), "padding stays on the left"
        self.lengths = [length + len(row) for length, row in zip(self.lengths, rows, strict=True)]
        inputs = {"input_ids": torch.tensor([[0] * (n - len(row)) + list(row) for row in rows], device=self.device)}
        if len(rows) > 1:  # one row has no padding: the model's fastest path
            ends = torch.tensor(self.lengths, device=self.device)
            positions = torch.arange(int(max(self.lengths)), device=self.device) - (ends.max() - ends)[:, None]
            inputs["attention_mask"] = (positions >= 0).long()
            inputs["position_ids"] = positions[:, -n:].clamp(min=0)
        cache = {self._cache_argument: self._cache}
        with shared_keys() if self.device.type == "cpu" else nullcontext():
            return self.model(**inputs, **cache, use_cache=True, logits_to_keep=logit_rows).logits.float()


def why_alone(model: Any) -> str | None:
    """Return why a target can only read one sequence at a time; None if it can read several."""
    if others := layer_types(model.config.get_text_config()) - TOGETHER:
        return f"layers of type {', '.join(sorted(others))}"
    if rope_by_length(model.config.get_text_config()):
        return "a RoPE that follows the longest sequence of a batch"
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return "code that takes no position_ids"
    return None


@contextmanager
def shared_keys() -> Iterator[None]:
    """Within this context, attention reads keys that heads share once, not once per head (see `_attend`)."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface  # takes seconds

    usual = ALL_ATTENTION_FUNCTIONS["sdpa"]
    AttentionInterface.register("sdpa", partial(_attend, usual))
    try:
        yield
    finally:
        AttentionInterface.register("sdpa", usual)


def _attend(
    usual: Callable[..., tuple[Tensor, None]],
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Compute attention as transformers does (`usual`), without copying the keys that heads share.

    Torch's CPU kernel takes as long for one query as for 32. So where queries are few, those of all heads with the
    same keys become the queries of one head.

    Args:
        query: [B, heads, n, D]. key, value: [B, shared heads, T, D].
        attention_mask: [B, 1, n, T], true where a query sees a key; or None.

    Returns: [B, n, heads, D], and None in place of the weights.
    """
    B, heads, n, _ = query.shape
    share = heads // key.shape[1]
    plain = (attention_mask is None and n == 1) or (attention_mask is not None and attention_mask.shape[1] == 1)
    if share == 1 or not plain or options.get("position_bias") is not None:
        return usual(module, query, key, value, attention_mask, **options)
    how: dict[str, Any] = {"scale": options.get("scaling"), "enable_gqa": n > FEW}
    if n <= FEW:
        query = query.reshape(B, -1, share * n, query.shape[-1])
        if attention_mask is not None:
            attention_mask = attention_mask.expand(-1, share, -1, -1).flatten(1, 2)[:, None]
    attended = scaled_dot_product_attention(query, key, value, attn_mask=attention_mask, **how)
    return attended.reshape(B, heads, n, -1).transpose(1, 2).contiguous(), None
