"""The EAGLE 3.1 drafter and its unrolled training pass. Symbols as in docs/recurrence.md.

    g_0   = fc(concat(fc_norm_i(aux_i)))       with norm_before_fc, concat(aux_i) is normed first
    h_k   = layers(embed(x[t+1+k]), g_k)       attention as in attention.py, in each of them
    z_k   = norm(h_k)                          what lm_head reads
    g_k+1 = z_k with norm_output (EAGLE 3.1), h_k without (EAGLE 3)

Steps 1, 2, … of a parallel drafter read a learnt state and the mask token instead, the same in every slot. They depend
on earlier steps through keys and values only.

    g_k   = fuse(mask_hidden),  embed(ptd_token_id) in place of x[t+1+k]      for k > 0

Nothing is detached: gradients flow through every step's state, keys and values.

At step 0 every position needs a key and a value in every layer. So the layers below the last compute all positions at
step 0, and only slots from step 1 on. The last layer, usually the only one, computes only slots.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from eagle31_train.config import DrafterShape
from eagle31_train.model.attention import unrolled_attention
from eagle31_train.model.batch import Batch
from eagle31_train.model.context_parallel import gather_keys
from eagle31_train.model.layer import Layer, Project, applied_to
from eagle31_train.model.linear import Linear, compute_dtype, linear
from eagle31_train.model.norm import RMSNorm
from eagle31_train.model.packing import Layout
from eagle31_train.model.recompute import checkpointed, recomputed
from eagle31_train.store.codec import Encoded, plain

Read = Callable[[Tensor], Project]  # normed states [n, D] → projections of the attention's input (token and state)


class Drafter(nn.Module):
    """A drafter of one or more layers. Parameters have the checkpoint's names. embedding: [V, D] the target's embedding
    rows. With `shape.share_embedding` they are frozen and not in the checkpoint; otherwise they initialise the
    drafter's own, if the widths agree."""

    # Activation checkpointing: keep only states, queries, keys, values and attention outputs; recompute the rest.
    recompute = False
    fused = False  # see `unrolled_attention`
    # One factor per auxiliary layer. If no norm precedes fc, fc trains on states times these factors, while checkpoints
    # hold its weights for unscaled states. Without the factors, an update would move fc's output for states with an RMS
    # of 20 by 20 times as much as in EAGLE 3.1 (docs/log.md). They are powers of two, so that nothing is rounded.
    fc_input_scale: Sequence[float] = ()
    context_group: ProcessGroup | None = None  # ranks that share documents (context parallelism), for `batch.shared`

    def __init__(self, shape: DrafterShape, embedding: Tensor | None = None) -> None:
        super().__init__()
        self.shape = shape
        D, H, A, eps = shape.hidden_size, shape.target_hidden_size, len(shape.aux_layers), shape.rms_norm_eps
        self.fc = Linear(A * H, D)
        self.fc_norm = nn.ModuleList(RMSNorm(H, eps) for _ in range(A)) if shape.fc_norm else None
        self.input_norm = RMSNorm(A * H, eps) if shape.norm_before_fc else None
        self.midlayer = Layer(shape, first=True)
        self.layers = nn.ModuleDict({str(i): Layer(shape) for i in range(1, shape.num_layers)})
        self.norm = RMSNorm(D, eps)
        self.lm_head = Linear(D, shape.draft_vocab_size)
        for module in self.modules():
            # On the meta device, torch would draw weights through its compiler, which takes seconds.
            if isinstance(module, Linear) and not module.weight.is_meta:
                nn.init.normal_(module.weight, std=0.02)
        if shape.parallel:
            self.mask_hidden = nn.Parameter(0.02 * torch.randn(1, A * H))

        if shape.share_embedding:
            assert embedding is not None, "a drafter that shares the embedding needs the target's"
            self.shared_embedding: Tensor
            self.register_buffer("shared_embedding", embedding, persistent=False)
        else:
            self.embed_tokens = nn.Embedding(shape.vocab_size, D)
            if embedding is not None and embedding.shape[1] == D:
                self.embed_tokens.weight.data.copy_(embedding)

    @property
    def stack(self) -> list[Layer]:
        return [self.midlayer, *(layer for layer in self.layers.values() if isinstance(layer, Layer))]

    def embed(self, tokens: Tensor) -> Tensor:
        """tokens [...] int64, target ids → [..., D] in the compute dtype."""
        rows = self.shared_embedding if self.shape.share_embedding else self.embed_tokens.weight
        return nn.functional.embedding(tokens, rows).to(compute_dtype(self.norm.weight))

    def fuse(self, aux: Encoded) -> Tensor:
        """The target's auxiliary states [n, A, H], still encoded → g_0 [n, D]."""
        dtype = compute_dtype(self.norm.weight)
        states = [layer.decode().to(dtype) for layer in aux.unbind()]
        if self.input_norm is not None:
            states = list(self.input_norm(torch.cat(states, dim=-1)).chunk(len(states), dim=-1))
        with recomputed(self._fc_input, *states) as rows:
            return self.fc(rows)

    def _fc_input(self, *states: Tensor) -> Tensor:
        """States [n, H] of each auxiliary layer → fc's input [n, A * H], normed (`fc_norm`) or scaled."""
        if self.fc_norm is not None:
            states = tuple(norm(state) for norm, state in zip(self.fc_norm, states, strict=True))
        elif self.fc_input_scale:
            states = tuple(scale * state for scale, state in zip(self.fc_input_scale, states, strict=True))
        return torch.cat(states, dim=-1)

    def to_checkpoint(self, name: str, weight: Tensor) -> Tensor:
        """Return a parameter as checkpoints hold it: fc.weight [D, A * H] for unscaled states."""
        return weight * self._columns(weight) if name == "fc.weight" and self.fc_input_scale else weight

    def from_checkpoint(self, name: str, weight: Tensor) -> Tensor:
        """The inverse of `to_checkpoint`."""
        return weight / self._columns(weight) if name == "fc.weight" and self.fc_input_scale else weight

    def _columns(self, weight: Tensor) -> Tensor:
        return weight.new_tensor(self.fc_input_scale).repeat_interleave(self.shape.target_hidden_size)

    def mask_token(self) -> Tensor:
        """The token [1] int64 that every slot of a parallel drafter reads at steps 1, 2, …"""
        token = self.shape.ptd_token_id
        assert token is not None, "contract.check_shape refuses a parallel drafter without"
        return self.mask_hidden.new_full((1,), token, dtype=torch.int64)

    def mask_state(self) -> Tensor:
        """The state g [1, D] that every slot of a parallel drafter reads beside the mask token."""
        return self.fuse(plain(self.mask_hidden.view(1, len(self.shape.aux_layers), -1)))

    def feedback(self, h: Tensor, z: Tensor) -> Tensor:
        """The state that a chain's next step reads: this step's post-norm z or pre-norm h."""
        return z if self.shape.norm_output else h

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Run all K steps of every slot of a packed batch → outputs z [K, S, D]; mean RMS [K] of the states g_k."""
        run, gather = checkpointed if self.recompute else call, None
        if batch.shared is not None:
            assert self.context_group is not None, "ranks that share documents need the group of them"
            gather = partial(gather_keys, places=batch.shared, group=self.context_group)
        stack = [AttendingLayer(layer, run, self.fused, gather) for layer in self.stack]
        ids, steps_read, of_step = batch.ids, batch.read, list(batch.reads)
        if self.shape.parallel:  # the mask token comes last, once for all slots
            mask_token = self.mask_token()
            ids, steps_read = torch.cat([ids, mask_token]), F.pad(steps_read, (0, 1), value=len(ids))
            of_step[1:] = [torch.full_like(mask_token, len(batch.read))] * (batch.ttt_length - 1)
        tokens = TokenHalf(self.midlayer, self.embed(ids), steps_read, all_queries=len(stack) > 1)
        following = tokens.context(batch.following)
        reads = (tokens.step(rows) for rows in of_step)

        layouts = batch.everywhere, batch.layout
        outputs, rms = [], []
        for g, z in self.unroll(stack, batch.aux, batch.positions, batch.slot_rows, layouts, following, reads):
            rms.append(g.detach().float().square().mean(-1).sqrt().sum() / max(len(g), 1))  # no slot: 0, not NaN
            outputs.append(z)
        return torch.stack(outputs), torch.stack(rms)

    def unroll(
        self,
        stack: Sequence["AttendingLayer"],
        aux: Encoded,
        positions: Tensor,
        slots: Tensor,
        layouts: tuple[Layout, Layout],
        following: Read,
        reads: Iterable[Read],
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """The recurrence: yield, for each step k, the states g_k that slots read and their outputs z_k, [S, D] each.

        Steps 1, 2, … of a parallel drafter yield g_k as [1, D], the same for all slots.

        Args:
            stack: the layers, with no keys kept yet.
            aux: [C, A, H] the target's states at every position up to the last slot.
            positions: [C] int64, within the document.
            slots: [S] int64 into [C].
            layouts: that of all positions; that of the slots.
            following: how the first layer reads the states of all positions, beside the tokens that follow them.
            reads: how it reads the states of the slots at each step; the next is taken after a step's outputs are used.
        """
        *below, last = stack
        everywhere, layout = layouts
        # Step 0: keys and values of every position up to the last slot. Then only slots.
        g = h = self.fuse(aux)  # [C, D]
        read = following
        for layer in below:
            layer.keep_context(h, read, positions)
            h = layer.finish(*layer.attend(h, read, positions, everywhere))
            read = applied_to
        last.keep_context(h, read, positions)
        g, h, positions = g.index_select(0, slots), h.index_select(0, slots), positions[slots]

        mask_state = self.mask_state() if self.shape.parallel else None
        for k, read in enumerate(reads):
            for layer in below:
                if k > 0:  # step 0 was computed above, for every position
                    h = layer.finish(*layer.attend(h, read, positions + k, layout, own=True))
                read = applied_to
            h, z = last.run(self._answer, *last.attend(h, read, positions + k, layout, own=k > 0))
            yield g, z
            g = h = self.feedback(h, z) if mask_state is None else mask_state

    def _answer(self, residual: Tensor, attended: Tensor) -> tuple[Tensor, Tensor]:
        """h_k and z_k, [S, D] each."""
        h = self.stack[-1].finish(residual, attended)
        return h, self.norm(h)


class AttendingLayer:
    """One layer during the K steps, with its keys and values so far.

    Args:
        run: calls a function, with or without activation checkpointing.
        fused: see `unrolled_attention`.
        gather: makes all keys and values of the context of those of this rank, if several ranks share it.
    """

    def __init__(
        self, layer: Layer, run: Callable[..., Any], fused: bool = False, gather: Callable[..., Any] | None = None
    ) -> None:
        self._layer, self.run, self._gather = layer, run, gather
        self._attention = partial(unrolled_attention, fused=fused, window=layer.self_attn.window)
        self.finish = partial(run, layer.finish)
        self._own_k: list[Tensor] = []
        self._own_v: list[Tensor] = []

    def keep_context(self, states: Tensor, read: Read, positions: Tensor) -> None:
        """Compute and keep the step-0 keys and values of every position, from the layer's input states [C, D]."""
        self._k0, self._v0 = self.run(self._keys_values, states, read, positions)
        if self._gather is not None:
            self._k0, self._v0 = self._gather(self._k0, self._v0)

    def attend(
        self, states: Tensor, read: Read, positions: Tensor, layout: Layout, own: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Run the attention of one step, for the slots of a layout: states [S, D], or [1, D] if all are the same → the
        residual in the same shape, and attention's output [S, h, dv]. own: also keep the slots' keys and values of this
        step. (Those of step 0 are in the context.)"""
        q, residual, *key_value = self.run(self._ask, states, read, positions, own)
        if own:
            key, value = key_value
            self.keep_own(key, value.expand(len(key), -1, -1))
        scale = self._layer.self_attn.scale
        return residual, self._attention(q, self._k0, self._v0, self._own_k, self._own_v, layout, scale)

    def keep_own(self, key: Tensor, value: Tensor) -> None:
        """Keep the slots' keys [S, g, d] and values [S, g, dv] of one step."""
        self._own_k.append(key)
        self._own_v.append(value)

    def _keys_values(self, states: Tensor, read: Read, positions: Tensor) -> tuple[Tensor, Tensor]:
        with recomputed(self._layer.state_norm, states) as normed:
            return self._layer.self_attn.keys_values(read(normed), positions)

    def _ask(self, states: Tensor, read: Read, positions: Tensor, own: bool) -> tuple[Tensor, ...]:
        """Return query and residual; with `own`, also key and value."""
        attention = self._layer.self_attn
        with recomputed(self._layer.state_norm, states) as normed:
            project = read(normed)
            key_value = attention.keys_values(project, positions) if own else ()
            return attention.queries(project, positions), self._layer.residual(states, normed), *key_value


class TokenHalf:
    """The embeddings' half of the attention's input projections, computed once for all steps.

    The input concatenates a token's embedding e and a state n, so W · concat(e, n) = W_e · e + W_n · n. Up to K slots
    read the same token, each at another step, with the same W_e · e. A bias is added to this half.

    Args:
        embedded: [N, D] embeddings of all packed tokens.
        read: [R] int64, the tokens that slots read.
        all_queries: project queries of all tokens, not only of those that slots read, since layers above need them.
    """

    def __init__(self, layer: Layer, embedded: Tensor, read: Tensor, all_queries: bool = False) -> None:
        attention, D = layer.self_attn, embedded.shape[-1]
        e = layer.input_layernorm(embedded)
        dtype = compute_dtype(e)
        everyone = attention.query_inputs + attention.key_inputs
        halves = {projection: projection.weight.to(dtype).split(D, 1) for projection in everyone}
        self._state = {projection: half[1].contiguous() for projection, half in halves.items()}
        # Keys and values are needed for all tokens [N, width], queries often only for those that slots read [R, width].
        of_all = everyone if all_queries else attention.key_inputs
        self._all = {projection: projection.shifted(linear(e, halves[projection][0])) for projection in of_all}
        self._read = {projection: rows.index_select(0, read) for projection, rows in self._all.items()}
        e_read = e.index_select(0, read)
        of_read = [projection for projection in everyone if projection not in self._all]
        self._read |= {projection: projection.shifted(linear(e_read, halves[projection][0])) for projection in of_read}

    def context(self, following: Tensor) -> Read:
        """How to read normed states [C, D] of every context position, beside the tokens at `following` [C]."""
        return partial(self._beside, self._all, following)

    def step(self, reads: Tensor) -> Read:
        """How to read normed states [S, D] of every slot, beside the tokens at `reads` [S] of those that slots read. If
        all slots read the same, one row of each is enough."""
        return partial(self._beside, self._read, reads)

    def _beside(self, halves: dict[Linear, Tensor], rows: Tensor, normed: Tensor) -> Project:
        return lambda projection: self._join(projection, halves[projection].index_select(0, rows), normed)

    def _join(self, projection: Linear, token_half: Tensor, normed: Tensor) -> Tensor:
        return token_half + linear(normed.to(token_half.dtype), self._state[projection])


def call(function: Callable, *args: Any) -> Any:
    """function(*args), where `checkpointed` would recompute."""
    return function(*args)
