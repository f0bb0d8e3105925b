"""What is measured: drafter shapes, cases, and the random weights and document that every contender gets.

A case is written `shape:length:share`, for example `smollm2:512:0.5`: the drafter's shape, the tokens of one
document, and the share of them that the assistant wrote; or `llama8b:8x4096:0.5`, of documents that are packed.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from eagle31_train.checkpoint.contract import weight_shapes
from eagle31_train.common.errors import UserError
from eagle31_train.config import DrafterShape
from eagle31_train.store.document import Document

GAMMA = 0.8  # weight of step k is GAMMA**k
TURNS = 4  # prompts and answers in a document
UNROLL = 7

# name: hidden, MLP, query heads, key/value heads, head width, vocabulary
_SHAPES = {
    "tiny": (64, 96, 4, 2, 16, 256),
    "smollm2": (576, 1536, 9, 3, 64, 8192),
    "mid": (1024, 2816, 16, 4, 64, 32000),
    "llama8b": (4096, 14336, 32, 8, 128, 32000),
    "tiny-mla": (64, 96, 4, 4, 24, 256),
    "mla": (576, 1536, 8, 8, 96, 8192),
    "kimi": (7168, 18432, 64, 64, 192, 163840),  # GPUs only
}
# Shapes with MLA: ranks of queries, of keys and values; widths of a key without and with position, of a value
_LATENT = {
    "tiny-mla": (24, 16, 16, 8, 16),
    "mla": (192, 128, 64, 32, 64),
    "kimi": (1536, 512, 128, 64, 128),
}
_LATENT_NAMES = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_UNROLLS = {"kimi": 4}  # TTT steps other than UNROLL, as in configs/experiment/kimi.yaml
_YARN = {"rope_type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096, "mscale_all_dim": 1.0}


@dataclass(frozen=True)
class Case:
    """One thing to time. `vocab` None means the shape's own; target and draft vocabulary are the same. `documents`: how
    many are packed, of `length` tokens each; None for one alone."""

    shape: str
    length: int
    share: float
    unroll: int = UNROLL
    vocab: int | None = None
    documents: int | None = None

    def __str__(self) -> str:
        packed = f"{self.documents}x" if self.documents else ""
        return f"{self.shape}:{packed}{self.length}:{self.share:g}"

    @staticmethod
    def parse(text: str) -> "Case":
        """Parse `shape:length:share`; UserError for anything else."""
        try:
            shape, size, share = text.split(":")
            documents, packed, length = size.rpartition("x")
            unroll, count = _UNROLLS.get(shape, UNROLL), int(documents) if packed else None
            case = Case(shape, int(length), float(share), unroll, documents=count)
        except ValueError:
            example = "smollm2:512:0.5 or llama8b:8x4096:0.5"
            raise UserError(f"case {text!r} is not shape:length:share, e.g. {example}") from None
        if shape not in _SHAPES:
            raise UserError(f"case {text!r}: the shape must be one of {', '.join(_SHAPES)}")
        if case.length < 4 * TURNS or not 0 < case.share <= 1 or (count is not None and count < 1):
            raise UserError(f"case {text!r} must have at least {4 * TURNS} tokens, and a share above 0 and up to 1")
        return case

    @property
    def masks(self) -> list[Tensor]:
        """The loss mask [length] bool of every document."""
        return [turns(self.length, self.share)] * (self.documents or 1)

    def drafter(self) -> DrafterShape:
        D, inner, heads, groups, width, own_vocab = _SHAPES[self.shape]
        vocab, latent = self.vocab or own_vocab, self.shape in _LATENT
        widths: dict[str, Any] = dict(zip(_LATENT_NAMES, _LATENT.get(self.shape, ()), strict=False))
        return DrafterShape(
            **widths,
            architecture="mla" if latent else "llama",
            hidden_size=D,
            target_hidden_size=D,
            aux_layers=[2, 15, 27],
            vocab_size=vocab,
            draft_vocab_size=vocab,
            intermediate_size=inner,
            num_attention_heads=heads,
            num_key_value_heads=groups,
            head_dim=width,
            rms_norm_eps=1e-5,
            rope_theta=50000.0 if latent else 10000.0,
            rope_scaling=_YARN if latent else None,
            max_position_embeddings=262144 if latent else max(2048, self.length + 2 * self.unroll),
            fc_norm=True,
            norm_output=True,
            norm_before_residual=False,
            share_embedding=True,
        )


@dataclass(frozen=True)
class Material:
    """The same numbers for every contender, all fp32.

    weights: the drafter's trained tensors by the checkpoint's names. norm, head_rows: the target's final norm [H]
    and the draft rows of its lm_head [Vd, H]. target_ids: [Vd], target id of each draft token, ascending.
    """

    shape: DrafterShape
    weights: dict[str, Tensor]
    embedding: Tensor
    norm: Tensor
    head_rows: Tensor
    target_ids: Tensor
    document: Document
    states: tuple[Tensor, Tensor]  # aux [T, A, H] and last [T, H]

    @property
    def kept(self) -> Tensor:
        """[V] bool, t2d."""
        kept = torch.zeros(self.shape.vocab_size, dtype=torch.bool)
        kept[self.target_ids] = True
        return kept

    def teacher_logits(self) -> Tensor:
        """Return [T, Vd], the target's logits over the draft vocabulary, which teach at every position."""
        _, last = self.states
        normed = last * torch.rsqrt(last.square().mean(-1, keepdim=True) + self.shape.rms_norm_eps) * self.norm
        return normed @ self.head_rows.T


def turns(length: int, share: float) -> Tensor:
    """Return [length] bool: TURNS turns, each a prompt, then an answer of `share`, since real masks have stretches."""
    edges = [round(i * length / TURNS) for i in range(TURNS + 1)]
    mask = torch.zeros(length, dtype=torch.bool)
    for begin, end in pairwise(edges):
        mask[end - round(share * (end - begin)) : end] = True
    return mask


def make_material(shape: DrafterShape, mask: Tensor, seed: int = 0) -> Material:
    """Make random weights, and a random document with loss mask [T] whose arg-maxes are all in the draft vocabulary."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.empty(size).normal_(generator=generator)

    def matrix(rows: int, columns: int) -> Tensor:  # scores and logits of order one
        return normal(rows, columns).mul_(columns**-0.5)

    def gain(width: int) -> Tensor:
        return torch.empty(width).uniform_(0.5, 1.5, generator=generator)

    D, H, A, T = shape.hidden_size, shape.target_hidden_size, len(shape.aux_layers), len(mask)
    V, Vd = shape.vocab_size, shape.draft_vocab_size
    weights = {name: matrix(*size) if len(size) > 1 else gain(*size) for name, size in weight_shapes(shape).items()}
    weights["lm_head.weight"].mul_(0.5)
    target_ids = torch.randperm(V, generator=generator)[:Vd].sort().values if Vd < V else torch.arange(V)
    tokens = torch.randint(0, V, (T,), generator=generator)
    top1 = target_ids[torch.randint(0, Vd, (T,), generator=generator)]
    aux, last = normal(T, A, H), normal(T, H)
    document = Document.of(tokens, mask, top1, aux, last)
    return Material(shape, weights, normal(V, D), gain(H), matrix(Vd, H), target_ids, document, (aux, last))
