"""The drafter at serving time: drafts from a cache, by the recurrence that training unrolls.

As vLLM aligns it: the row of position p holds the token at p+1 and the target's states of p, has
RoPE position p, and predicts the token at p+2; draft step j is at position p+j. The keys and
values of such rows (step 0) stay in the cache. Those of steps 1.. lie behind them during one round
and are overwritten by the next round's rows, once the target has spoken.

Shapes: n new rows; A auxiliary layers; H target hidden; D draft hidden; g key/value heads;
d and dv widths of a key and a value.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from eagle31_train.codec import plain
from eagle31_train.drafter.gqa import Project
from eagle31_train.drafter.model import Drafter


class DraftDecoder:
    """Greedy chain drafting for one sequence.

    Args:
        drafter: any drafter module; drafts in the dtype of its weights.
        target_ids: [Vd] int64, the target's id of each draft token.
        capacity: most rows that the cache ever holds: positions of the sequence and the steps of one round.
    """

    def __init__(self, drafter: Drafter, target_ids: Tensor, capacity: int) -> None:
        self.drafter = drafter
        self.target_ids = target_ids
        self.capacity = capacity
        self.length = 0  # positions with a step-0 row
        self._keys: Tensor | None = None  # [capacity, g, d], made when the first keys tell its shape
        self._values: Tensor | None = None  # [capacity, g, dv]
        self._newest: tuple[Tensor, Tensor] | None = None  # attention input [1, 2D] and residual [1, D]

    @torch.no_grad()
    def extend(self, aux: Tensor, next_tokens: Tensor) -> None:
        """Take in what the target has verified.

        Args:
            aux: [n, A, H] the target's states of the next n positions.
            next_tokens: [n] int64, the token that follows each of them; the last is the newest token,
                which the target has not read yet.
        """
        positions = torch.arange(self.length, self.length + len(aux), device=aux.device)
        layer = self.drafter.midlayer
        x, residual = layer.attention_input(self.drafter.embed(next_tokens), self.drafter.fuse(plain(aux)))
        self._write(x, positions)
        self.length += len(aux)
        self._newest = x[-1:], residual[-1:]

    def draft(self, count: int) -> list[int]:
        """The next `count` tokens (target ids) that the drafter expects after the newest token."""
        tokens = [token for token, _ in self.unroll(count)]
        return torch.cat(tokens).tolist() if tokens else []

    @torch.no_grad()
    def unroll(self, count: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Steps 0 .. count-1 of the newest row: drafted token [1] int64 (target id), output z [1, D]."""
        assert self._newest is not None, "extend() gives the row to draft from"
        drafter, layer, attention = self.drafter, self.drafter.midlayer, self.drafter.midlayer.self_attn
        x, residual = self._newest
        for step in range(count):
            position = torch.tensor([self.length - 1 + step], device=x.device)
            if step > 0:
                self._write(x, position)
            q = attention.queries(_applied_to(x), position)
            h = layer.finish(residual, self._attend(q, self.length + step))
            z = drafter.norm(h)
            token = self.target_ids[drafter.lm_head(z).argmax(-1)]
            yield token, z
            x, residual = layer.attention_input(drafter.embed(token), drafter.feedback(h, z))

    def _write(self, x: Tensor, positions: Tensor) -> None:
        """Keys and values of attention inputs [n, 2D], into the rows of their positions [n]."""
        keys, values = self.drafter.midlayer.self_attn.keys_values(_applied_to(x), positions)
        if self._keys is None or self._values is None:
            self._keys = keys.new_empty(self.capacity, *keys.shape[1:])
            self._values = values.new_empty(self.capacity, *values.shape[1:])
        self._keys[positions], self._values[positions] = keys, values

    def _attend(self, q: Tensor, rows: int) -> Tensor:
        """One query [1, h, d] over the first `rows` rows of the cache → [1, h, dv]; all are in its past."""
        assert self._keys is not None
        assert self._values is not None
        keys, values = self._keys[:rows].transpose(0, 1), self._values[:rows].transpose(0, 1)
        scale = self.drafter.midlayer.self_attn.scale
        # All heads of a group share keys, and there is one query: heads can stand where queries do.
        grouped = q.view(len(keys), -1, q.shape[-1])
        return F.scaled_dot_product_attention(grouped, keys, values, scale=scale).reshape(1, q.shape[1], -1)


def _applied_to(x: Tensor) -> Project:
    """Projections of the attention input x [n, 2D] itself."""
    return lambda layer: layer(x)
