"""The drafter at serving time: drafts from a cache, by the recurrence that training unrolls.

As vLLM aligns it: the row of position p holds the token at p+1 and the target's states of p, has
RoPE position p, and predicts the token at p+2; draft step j is at position p+j. The keys and
values of such rows (step 0) stay in the cache. Those of steps 1.. lie behind them during one round
and are overwritten by the next round's rows, once the target has spoken.

Several sequences are drafted for together, each of its own length.

Shapes: B sequences; n new rows, of all sequences; A auxiliary layers; H target hidden; D draft hidden;
g key/value heads; h query heads; d and dv widths of a key and a value.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from eagle31_train.model.drafter import Drafter
from eagle31_train.model.gqa import applied_to
from eagle31_train.store.codec import plain

Choose = Callable[[int, Tensor], Tensor]  # step and logits [B, Vd] → which draft tokens [B] int64


def most_likely(_step: int, logits: Tensor) -> Tensor:
    """Greedy drafting."""
    return logits.argmax(-1)


class DraftDecoder:
    """Chain drafting for some sequences.

    Args:
        drafter: any drafter module; drafts in the dtype of its weights.
        target_ids: [Vd] int64, the target's id of each draft token.
        capacity: most rows that a sequence's cache ever holds: its positions and the steps of one round.
        sequences: how many.
    """

    def __init__(self, drafter: Drafter, target_ids: Tensor, capacity: int, sequences: int = 1) -> None:
        self.drafter = drafter
        self.target_ids = target_ids
        self.capacity = capacity
        self.lengths = [0] * sequences  # positions with a step-0 row
        self._keys: Tensor | None = None  # [B, capacity, g, d], made when the first keys tell its shape
        self._values: Tensor | None = None  # [B, capacity, g, dv]
        self._newest: tuple[Tensor, Tensor] | None = None  # attention input [B, 2D] and residual [B, D]

    @torch.no_grad()
    def extend(self, aux: Tensor, next_tokens: Tensor, counts: Sequence[int] | None = None) -> None:
        """Take in what the target has verified.

        Args:
            aux: [n, A, H] the target's states of every sequence's next positions, one sequence after the other.
            next_tokens: [n] int64, the token that follows each of them; the last of a sequence is its newest
                token, which the target has not read yet.
            counts: how many rows each sequence has, at least one; default: all are those of the only one.
        """
        counts, device = [len(aux)] if counts is None else list(counts), aux.device
        rows = torch.cat([torch.full((count,), row, device=device) for row, count in enumerate(counts)])
        starts = zip(self.lengths, counts, strict=True)
        positions = torch.cat([torch.arange(start, start + count, device=device) for start, count in starts])
        layer = self.drafter.midlayer
        x, residual = layer.attention_input(self.drafter.embed(next_tokens), self.drafter.fuse(plain(aux)))
        self._write(x, rows, positions)
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]
        last = torch.tensor(counts, device=device).cumsum(0) - 1
        self._newest = x[last], residual[last]

    def select(self, sequences: Sequence[int]) -> None:
        """Keep these sequences alone, in this order."""
        rows = list(sequences)
        self.lengths = [self.lengths[row] for row in rows]
        if self._keys is not None and self._values is not None and self._newest is not None:
            self._keys, self._values = self._keys[rows], self._values[rows]
            self._newest = self._newest[0][rows], self._newest[1][rows]

    def draft(self, count: int) -> list[int]:
        """The next `count` tokens (target ids) that the drafter expects after the newest token of the only sequence."""
        return self.propose(count)[0].tolist()

    def propose(self, count: int, choose: Choose = most_likely) -> Tensor:
        """[B, count] int64, target ids: the next tokens of every sequence."""
        tokens = [token for token, _ in self.unroll(count, choose)]
        return torch.stack(tokens, 1) if tokens else self.target_ids.new_empty(len(self.lengths), 0)

    @torch.no_grad()
    def unroll(self, count: int, choose: Choose = most_likely) -> Iterator[tuple[Tensor, Tensor]]:
        """Steps 0 .. count-1 of the newest rows: drafted tokens [B] int64 (target ids), outputs z [B, D]."""
        assert self._newest is not None, "extend() gives the rows to draft from"
        drafter, layer, attention = self.drafter, self.drafter.midlayer, self.drafter.midlayer.self_attn
        x, residual = self._newest
        everyone, ends = torch.arange(len(x), device=x.device), torch.tensor(self.lengths, device=x.device)
        for step in range(count):
            positions = ends - 1 + step
            if step > 0:
                self._write(x, everyone, positions)
            q = attention.queries(applied_to(x), positions)
            h = layer.finish(residual, self._attend(q, step))
            z = drafter.norm(h)
            token = self.target_ids[choose(step, drafter.lm_head(z))]
            yield token, z
            x, residual = layer.attention_input(drafter.embed(token), drafter.feedback(h, z))

    def _write(self, x: Tensor, rows: Tensor, positions: Tensor) -> None:
        """Keys and values of attention inputs [n, 2D], at their positions [n] of their sequences `rows` [n]."""
        keys, values = self.drafter.midlayer.self_attn.keys_values(applied_to(x), positions)
        if self._keys is None or self._values is None:
            shape = len(self.lengths), self.capacity
            # Zeros, since a masked key of garbage may be NaN, which no mask undoes.
            self._keys = keys.new_zeros(*shape, *keys.shape[1:])
            self._values = values.new_zeros(*shape, *values.shape[1:])
        self._keys[rows, positions], self._values[rows, positions] = keys, values

    def _attend(self, q: Tensor, step: int) -> Tensor:
        """One query [B, h, d] of every sequence over all its rows, `step` own ones included → [B, h, dv]."""
        assert self._keys is not None
        assert self._values is not None
        lengths = [length + step for length in self.lengths]
        longest, mask = max(lengths), None
        if min(lengths) < longest:
            ends = torch.tensor(lengths, device=q.device)
            mask = (torch.arange(longest, device=q.device) < ends[:, None])[:, None, None]
        keys, values = self._keys[:, :longest].transpose(1, 2), self._values[:, :longest].transpose(1, 2)
        scale = self.drafter.midlayer.self_attn.scale
        # All heads of a group share keys, and there is one query: heads can stand where queries do.
        grouped = q.unflatten(1, (keys.shape[1], -1))
        return F.scaled_dot_product_attention(grouped, keys, values, mask, scale=scale).flatten(1, 2)
