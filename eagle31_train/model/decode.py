"""The drafter at serving time: drafts from a cache, by the recurrence that training unrolls.

As in vLLM, the row of position p reads the token at p+1 and the target's states at p, has RoPE position p, and predicts
the token at p+2; draft step j is at position p+j. The keys and values of these rows (step 0) stay in the cache of each
layer. Those of steps 1, 2, … follow them during one round; the next round's rows overwrite them after verification. An
autoregressive drafter computes these steps one after another. The rows of a parallel drafter do not depend on drafted
tokens, so it computes all of them in one pass.

Several sequences of different lengths are drafted for together.

Shapes: B sequences; n new rows, of all sequences; A auxiliary layers; H target hidden; D draft hidden;
g key/value heads; h query heads; d and dv widths of a key and a value.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from eagle31_train.model.drafter import Drafter
from eagle31_train.model.layer import Layer, applied_to
from eagle31_train.store.codec import plain

Attend = Callable[["Cache", Tensor], Tensor]  # a layer's cache and attention inputs → attention outputs
Choose = Callable[[int, Tensor], Tensor]  # step and logits [B, Vd] → chosen draft tokens [B] int64


def most_likely(_step: int, logits: Tensor) -> Tensor:
    return logits.argmax(-1)


class DraftDecoder:
    """Drafts for some sequences, one token at each depth, in the dtype of the drafter's weights.

    Args:
        target_ids: [Vd] int64, the target's id of each draft token.
        capacity: the most rows that a sequence's cache ever holds: its positions and the steps of one round.
    """

    def __init__(self, drafter: Drafter, target_ids: Tensor, capacity: int, sequences: int = 1) -> None:
        self.drafter = drafter
        self.target_ids = target_ids
        self.lengths = [0] * sequences  # positions with a step-0 row
        self._caches = [Cache(layer, sequences, capacity) for layer in drafter.stack]
        self._newest: tuple[Tensor, Tensor] | None = None  # the last layer's attention input and residual, [B, ...]

    @torch.no_grad()
    def extend(self, aux: Tensor, next_tokens: Tensor, counts: Sequence[int] | None = None) -> None:
        """Append the rows of positions that the target has verified.

        Args:
            aux: [n, A, H] the target's states at every sequence's next positions, one sequence after the other.
            next_tokens: [n] int64, the token after each of these positions; the last of a sequence is its newest
                token, which the target has not read yet.
            counts: number of rows of each sequence, at least one; default: there is one sequence.
        """
        counts, device = [len(aux)] if counts is None else list(counts), aux.device
        rows = torch.cat([torch.full((count,), row, device=device) for row, count in enumerate(counts)])
        ends = [length + count for length, count in zip(self.lengths, counts, strict=True)]
        spans = zip(self.lengths, ends, strict=True)
        positions = torch.cat([torch.arange(start, end, device=device) for start, end in spans])
        x, residual = self._through(
            self.drafter.embed(next_tokens),
            self.drafter.fuse(plain(aux)),
            rows,
            positions,
            partial(Cache.attend_each, positions=positions, counts=counts, ends=ends),
        )
        self.lengths = ends
        last = torch.tensor(counts, device=device).cumsum(0) - 1
        self._newest = x[last], residual[last]

    def select(self, sequences: Sequence[int]) -> None:
        """Keep only these sequences, in this order."""
        rows = list(sequences)
        self.lengths = [self.lengths[row] for row in rows]
        if self._newest is not None:
            self._newest = self._newest[0][rows], self._newest[1][rows]
        for cache in self._caches:
            cache.select(rows)

    def propose(self, count: int, choose: Choose = most_likely) -> Tensor:
        """Return the next tokens of every sequence, [B, count] int64 target ids."""
        tokens = [token for token, _ in self.unroll(count, choose)]
        return torch.stack(tokens, 1) if tokens else self.target_ids.new_empty(len(self.lengths), 0)

    @torch.no_grad()
    def unroll(self, count: int, choose: Choose = most_likely) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield for steps 0 .. count-1 of the newest rows drafted tokens [B] int64 (target ids) and z [B, D]."""
        assert self._newest is not None, "extend() gives the rows to draft from"
        drafter, top = self.drafter, self._caches[-1]
        x, residual = self._newest
        everyone, ends = torch.arange(len(x), device=x.device), torch.tensor(self.lengths, device=x.device)
        if drafter.shape.parallel and count:
            yield from self._all_at_once(count, choose, x, residual, ends)
            return
        positions, lengths = ends - 1, self.lengths
        for step in range(count):
            h = top.layer.finish(residual, top.attend(x, positions, lengths))
            z = drafter.norm(h)
            token = self.target_ids[choose(step, drafter.lm_head(z))]
            yield token, z
            if step + 1 < count:
                positions, lengths = positions + 1, [length + 1 for length in lengths]
                attend = partial(Cache.attend, positions=positions, lengths=lengths)
                x, residual = self._through(drafter.embed(token), drafter.feedback(h, z), everyone, positions, attend)

    def _all_at_once(
        self, count: int, choose: Choose, x: Tensor, residual: Tensor, ends: Tensor
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Run a parallel drafter's steps in one pass, with mask rows after the newest row of every sequence. x,
        residual: of the newest rows, [B, ...]; ends: [B] int64, the positions after them."""
        drafter, top, B, masks = self.drafter, self._caches[-1], len(x), count - 1
        steps = torch.arange(count, device=x.device)
        if masks:
            rows = torch.arange(B, device=x.device).repeat_interleave(masks)
            positions = (ends[:, None] + steps[:-1]).flatten()
            behind = [length + masks for length in self.lengths]
            attend = partial(Cache.attend_each, positions=positions, counts=[masks] * B, ends=behind)
            each = drafter.embed(drafter.mask_token()), drafter.mask_state()
            embedded, states = (one.expand(B * masks, -1) for one in each)
            later = self._through(embedded, states, rows, positions, attend)
            x, residual = (
                torch.cat([newest[:, None], others.unflatten(0, (B, masks))], 1).flatten(0, 1)
                for newest, others in zip((x, residual), later, strict=True)
            )
        positions = (ends[:, None] - 1 + steps).flatten()
        attended = top.attend_each(x, positions, [count] * B, [length + masks for length in self.lengths])
        z = drafter.norm(top.layer.finish(residual, attended)).unflatten(0, (B, count))
        logits = drafter.lm_head(z)
        for step in range(count):
            yield self.target_ids[choose(step, logits[:, step])], z[:, step]

    def _through(
        self, embedded: Tensor, state: Tensor, rows: Tensor, positions: Tensor, attend: Attend
    ) -> tuple[Tensor, Tensor]:
        """Run embeddings and states [n, D] through the layers below the last, and cache keys and values in all layers.
        Return the last layer's attention input [n, I] and residual [n, D]."""
        *below, top = self._caches
        for cache in below:
            x, residual = cache.layer.attention_input(embedded, state)
            cache.write(x, rows, positions)
            state = cache.layer.finish(residual, attend(cache, x))
        x, residual = top.layer.attention_input(embedded, state)
        top.write(x, rows, positions)
        return x, residual


class Cache:
    """Keys and values of one layer, of every sequence. I: width of the layer's attention inputs x."""

    def __init__(self, layer: Layer, sequences: int, capacity: int) -> None:
        self.layer = layer
        self._window = layer.self_attn.window
        self._sequences, self._capacity = sequences, capacity
        self._kept: list[Tensor] = []  # keys [B, capacity, g, d], values [.., dv]; made by the first write

    def select(self, rows: list[int]) -> None:
        self._sequences, self._kept = len(rows), [kept[rows] for kept in self._kept]

    def write(self, x: Tensor, rows: Tensor, positions: Tensor) -> None:
        """Write keys and values of attention inputs x [n, I] at their positions [n] in their sequences `rows` [n]."""
        made = self.layer.self_attn.keys_values(applied_to(x), positions)
        if not self._kept:  # zeros, since uninitialised memory may hold NaN, which no mask removes
            self._kept = [one.new_zeros(self._sequences, self._capacity, *one.shape[1:]) for one in made]
        for kept, one in zip(self._kept, made, strict=True):
            kept[rows, positions] = one

    def attend(self, x: Tensor, positions: Tensor, lengths: Sequence[int]) -> Tensor:
        """Inputs x [B, I], one at the last position of each sequence, attend to its lengths[b] rows → [B, h, dv]."""
        q = self.layer.self_attn.queries(applied_to(x), positions)
        longest, mask = max(lengths), None
        if min(lengths) < longest or self._window is not None:
            mask = self._seen(positions, longest)[:, None, None]
        keys, values = (kept[:, :longest].transpose(1, 2) for kept in self._kept)
        # All heads of a group share keys, and there is one query: heads can take the place of queries.
        grouped = q.unflatten(1, (keys.shape[1], -1))
        out = F.scaled_dot_product_attention(grouped, keys, values, mask, scale=self.layer.self_attn.scale)
        return out.flatten(1, 2)

    def attend_each(self, x: Tensor, positions: Tensor, counts: Sequence[int], ends: Sequence[int]) -> Tensor:
        """Inputs x [n, I] attend to the rows up to their own → [n, h, dv]. They are at the newest positions of every
        sequence: counts[b] of them, the last at ends[b] - 1."""
        q, scale, outputs = self.layer.self_attn.queries(applied_to(x), positions), self.layer.self_attn.scale, []
        pieces = zip(q.split(list(counts)), positions.split(list(counts)), ends, strict=True)
        for row, (queries, at, end) in enumerate(pieces):
            keys, values = (kept[row, :end].transpose(0, 1)[None] for kept in self._kept)
            if x.is_cuda and (shared := q.shape[1] // keys.shape[1]) > 1:
                # No CUDA kernel takes both a mask and shared keys, and plain products would hold all heads' scores.
                keys, values = (each.repeat_interleave(shared, 1) for each in (keys, values))
            block, seen = queries.transpose(0, 1)[None], self._seen(at, end)
            out = F.scaled_dot_product_attention(block, keys, values, seen, scale=scale, enable_gqa=True)
            outputs.append(out[0].transpose(0, 1))
        return torch.cat(outputs)

    def _seen(self, positions: Tensor, end: int) -> Tensor:
        """Return which rows each position [n] sees, [n, end] bool: those up to its own, within its window."""
        rows = torch.arange(end, device=positions.device)
        seen = rows <= positions[:, None]
        return seen if self._window is None else seen & (rows > positions[:, None] - self._window)
