"""The EAGLE 3.1 drafter and its unrolled training pass. Symbols as in docs/recurrence.md.

    g_0   = fc(concat(fc_norm_i(aux_i)))
    h_k   = layer(embed(x[t+1+k]), g_k)        attention as in attention.py
    z_k   = norm(h_k)                          what lm_head reads
    g_k+1 = z_k with norm_output (EAGLE 3.1), h_k without (EAGLE 3)

Nothing is detached: gradients flow through every step's state, keys and values.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from eagle31_train.config import DrafterShape
from eagle31_train.model.attention import unrolled_attention
from eagle31_train.model.batch import Batch
from eagle31_train.model.gqa import Project
from eagle31_train.model.layer import MidLayer
from eagle31_train.model.linear import Linear, compute_dtype, linear
from eagle31_train.model.norm import RMSNorm
from eagle31_train.store.codec import Encoded


@dataclass(frozen=True)
class Unrolled:
    """z: [K, S, D] outputs of every step; rms: [K] mean RMS of the state g_k that each step reads."""

    z: Tensor
    rms: Tensor


class Drafter(nn.Module):
    """A one-layer drafter. Parameters carry the checkpoint's names.

    Args:
        shape: the architecture.
        embedding: [V, D] the target's embedding rows; frozen and left out of the checkpoint with
            `shape.share_embedding`, the initial value of the drafter's own otherwise.

    Attributes:
        recompute: work activations out again for the gradient instead of keeping them, but for the
            attention and the states: less memory, one more forward pass of the layer.
        fused: see `unrolled_attention`.
    """

    recompute = False
    fused = False

    def __init__(self, shape: DrafterShape, embedding: Tensor | None = None) -> None:
        super().__init__()
        self.shape = shape
        D, H, A, eps = shape.hidden_size, shape.target_hidden_size, len(shape.aux_layers), shape.rms_norm_eps
        self.fc = Linear(A * H, D)
        self.fc_norm = nn.ModuleList(RMSNorm(H, eps) for _ in range(A)) if shape.fc_norm else None
        self.midlayer = MidLayer(shape)
        self.norm = RMSNorm(D, eps)
        self.lm_head = Linear(D, shape.draft_vocab_size)
        for module in self.modules():
            if isinstance(module, Linear):
                nn.init.normal_(module.weight, std=0.02)

        if shape.share_embedding:
            assert embedding is not None, "a drafter that shares the embedding needs the target's"
            self.shared_embedding: Tensor
            self.register_buffer("shared_embedding", embedding, persistent=False)
        else:
            self.embed_tokens = nn.Embedding(shape.vocab_size, D)
            if embedding is not None and embedding.shape[1] == D:
                self.embed_tokens.weight.data.copy_(embedding)

    def embed(self, tokens: Tensor) -> Tensor:
        """tokens [...] int64, target ids → [..., D], in the dtype that products are worked out in."""
        rows = self.shared_embedding if self.shape.share_embedding else self.embed_tokens.weight
        return nn.functional.embedding(tokens, rows).to(compute_dtype(self.fc.weight))

    def fuse(self, aux: Encoded) -> Tensor:
        """Auxiliary states [n, A, H] of the target → g_0 [n, D]. They are decoded here, one layer at a time."""
        dtype = compute_dtype(self.fc.weight)
        norms = self.fc_norm if self.fc_norm is not None else [nn.Identity()] * len(self.shape.aux_layers)
        states = [norm(layer.decode().to(dtype)) for norm, layer in zip(norms, aux.unbind(), strict=True)]
        return self.fc(torch.cat(states, dim=-1))

    def feedback(self, h: Tensor, z: Tensor) -> Tensor:
        """The state that the next step reads, from this step's pre-norm h and post-norm z."""
        return z if self.shape.norm_output else h

    def forward(self, batch: Batch) -> Unrolled:
        """Run all K steps of every slot of a packed batch."""
        slots, scale = batch.layout.slots, self.midlayer.self_attn.scale
        run = partial(checkpoint, use_reentrant=False, preserve_rng_state=False) if self.recompute else call
        tokens = TokenHalf(self.midlayer, self.embed(batch.ids), batch.read)

        # Step 0: every position up to the last slot gives a key and a value; from here on, only slots count.
        g = self.fuse(batch.aux)  # [C, D]
        k0, v0 = run(self._context, g, tokens, batch.following, batch.positions)
        g, positions = g.index_select(0, slots), batch.positions[slots]

        attend = partial(unrolled_attention, fused=True) if self.fused else unrolled_attention
        own_k: list[Tensor] = []
        own_v: list[Tensor] = []
        outputs, rms = [], []
        for k in range(batch.ttt_length):
            rms.append(g.detach().float().square().mean(-1).sqrt().sum() / max(len(g), 1))  # no slot: 0, not NaN
            q, residual, *own = run(self._ask, g, tokens, batch.reads[k], positions + k, k > 0)
            if own:  # at step 0 it is among k0
                own_k.append(own[0])
                own_v.append(own[1])
            attended = attend(q, k0, v0, own_k, own_v, batch.layout, scale)
            h, z = run(self._answer, residual, attended)
            outputs.append(z)
            g = self.feedback(h, z)
        return Unrolled(torch.stack(outputs), torch.stack(rms))

    def _context(self, g: Tensor, tokens: "TokenHalf", following: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Step-0 keys and values of every position of a context, from g_0 [C, D]."""
        normed, _ = self.midlayer.state_input(g)
        return self.midlayer.self_attn.keys_values(tokens.context(normed, following), positions)

    def _ask(self, g: Tensor, tokens: "TokenHalf", reads: Tensor, positions: Tensor, own: bool) -> tuple[Tensor, ...]:
        """Query and residual of every slot at one step, and its own key and value, from g_k [S, D]."""
        normed, residual = self.midlayer.state_input(g)
        project, attention = tokens.step(normed, reads), self.midlayer.self_attn
        key_value = attention.keys_values(project, positions) if own else ()
        return attention.queries(project, positions), residual, *key_value

    def _answer(self, residual: Tensor, attended: Tensor) -> tuple[Tensor, Tensor]:
        """h_k and z_k, [S, D] each."""
        h = self.midlayer.finish(residual, attended)
        return h, self.norm(h)


class TokenHalf:
    """The embeddings' half of the attention's input projections, worked out once for all steps.

    The input is a token's embedding beside a state, so W · concat(e, n) = W_e · e + W_n · n. A token that
    K slots read, each at another step, has the same W_e · e in all of them.

    Args:
        layer: the drafter's layer.
        embedded: [N, D] embeddings of all packed tokens.
        read: [R] int64, which of them slots read.
    """

    def __init__(self, layer: MidLayer, embedded: Tensor, read: Tensor) -> None:
        attention, D = layer.self_attn, embedded.shape[-1]
        e = layer.input_layernorm(embedded)
        dtype = compute_dtype(e)
        everyone = attention.query_inputs + attention.key_inputs
        halves = {projection: projection.weight.to(dtype).split(D, 1) for projection in everyone}
        self._state = {projection: half[1].contiguous() for projection, half in halves.items()}
        # Keys and values are needed of all tokens [N, width], queries only of those that slots read [R, width].
        self._all = {projection: linear(e, halves[projection][0]) for projection in attention.key_inputs}
        self._read = {projection: rows.index_select(0, read) for projection, rows in self._all.items()}
        e_read = e.index_select(0, read)
        self._read |= {projection: linear(e_read, halves[projection][0]) for projection in attention.query_inputs}

    def context(self, normed: Tensor, following: Tensor) -> Project:
        """Projections of every position of a context: normed states [C, D], beside the tokens at `following` [C]."""
        return lambda projection: self._join(projection, self._all[projection].index_select(0, following), normed)

    def step(self, normed: Tensor, reads: Tensor) -> Project:
        """Projections of every slot: normed states [S, D], beside the tokens that `reads` [S] picks of those read."""
        return lambda projection: self._join(projection, self._read[projection].index_select(0, reads), normed)

    def _join(self, projection: Linear, token_half: Tensor, normed: Tensor) -> Tensor:
        return token_half + linear(normed.to(token_half.dtype), self._state[projection])


def call(function: Callable, *args: Any) -> Any:
    """function(*args): what stands in place of `checkpoint` where activations are kept."""
    return function(*args)
