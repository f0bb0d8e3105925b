"""The EAGLE 3.1 drafter and its unrolled training pass. Symbols as in docs/recurrence.md.

    g_0   = fc(concat(fc_norm_i(aux_i)))
    h_k   = layer(embed(x[t+1+k]), g_k)        attention as in attention.py
    z_k   = norm(h_k)                          what lm_head reads
    g_k+1 = z_k with norm_output (EAGLE 3.1), h_k without (EAGLE 3)

Nothing is detached: gradients flow through every step's state, keys and values.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from eagle31_train.drafter.attention import unrolled_attention
from eagle31_train.drafter.batch import Batch
from eagle31_train.drafter.layer import MidLayer, RMSNorm
from eagle31_train.schema import DrafterShape


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
    """

    def __init__(self, shape: DrafterShape, embedding: Tensor | None = None) -> None:
        super().__init__()
        self.shape = shape
        D, H, A, eps = shape.hidden_size, shape.target_hidden_size, len(shape.aux_layers), shape.rms_norm_eps
        self.fc = nn.Linear(A * H, D, bias=False)
        self.fc_norm = nn.ModuleList(RMSNorm(H, eps) for _ in range(A)) if shape.fc_norm else None
        self.midlayer = MidLayer(shape)
        self.norm = RMSNorm(D, eps)
        self.lm_head = nn.Linear(D, shape.draft_vocab_size, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear):
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
        """tokens [...] int64, target ids → [..., D] in the dtype of the weights."""
        if self.shape.share_embedding:
            return nn.functional.embedding(tokens, self.shared_embedding).to(self.fc.weight.dtype)
        return self.embed_tokens(tokens)

    def fuse(self, aux: Tensor) -> Tensor:
        """Auxiliary states [n, A, H] of the target → g_0 [n, D]."""
        states = aux.to(self.fc.weight.dtype)
        if self.fc_norm is not None:
            states = torch.stack([norm(states[:, i]) for i, norm in enumerate(self.fc_norm)], dim=1)
        return self.fc(states.flatten(1))

    def feedback(self, h: Tensor, z: Tensor) -> Tensor:
        """The state that the next step reads, from this step's pre-norm h and post-norm z."""
        return z if self.shape.norm_output else h

    def forward(self, batch: Batch) -> Unrolled:
        """Run all K steps of every slot of a packed batch."""
        layer, attention, slots = self.midlayer, self.midlayer.self_attn, batch.layout.slots
        g = self.fuse(batch.aux)  # [N, D]

        # Step 0: every position gives a key and a value; only slots ask.
        x, residual = layer.attention_input(self.embed(batch.context_inputs), g)
        k0, v0 = attention.keys_values(x, batch.positions)
        x, residual, g = x[slots], residual[slots], g[slots]
        positions = batch.positions[slots]

        own_k: list[Tensor] = []
        own_v: list[Tensor] = []
        outputs, rms = [], []
        for k in range(batch.unroll):
            if k > 0:
                x, residual = layer.attention_input(self.embed(batch.inputs[k]), g)
                key, value = attention.keys_values(x, positions + k)
                own_k.append(key)
                own_v.append(value)
            rms.append(g.detach().float().square().mean(-1).sqrt().sum() / max(len(g), 1))  # no slot: 0, not NaN
            q = attention.queries(x, positions + k)
            attended = unrolled_attention(q, k0, v0, own_k, own_v, batch.layout, attention.scale)
            h = layer.finish(residual, attended)
            z = self.norm(h)
            outputs.append(z)
            g = self.feedback(h, z)
        return Unrolled(torch.stack(outputs), torch.stack(rms))
