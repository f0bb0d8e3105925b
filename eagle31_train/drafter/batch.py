"""From documents to a packed batch: which slots are trained, and what each of their steps predicts.

All index arithmetic of the recurrence stands here, once:

    slot t, step k:  input token x[t+1+k], RoPE position t+k,
                     predicts x[t+2+k], taught by the target's distribution at t+1+k.

A pair (t, k) is *eligible* if x[t+2+k] is in the same document and was written by the assistant.
It is *trained* if, besides, the draft vocabulary holds the target's arg-max at t+1+k (or with
`oov: keep`, in any case). A slot exists if any of its pairs is trained.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from eagle31_train.drafter.attention import Layout, make_layout
from eagle31_train.schema import Document

CHUNK = 128  # taught positions per chunk: up to K * 128 rows of logits are alive at once


@dataclass(frozen=True)
class Batch:
    """Packed documents and the pairs to train. N positions, S slots, J taught positions, P pairs.

    The pairs are sorted by the position that teaches them, so that a chunk of positions is a
    contiguous run of pairs.
    """

    aux: Tensor  # [N, A, H]
    inputs: Tensor  # [K, S] int64: token that slot t reads at step k (x[t+1+k])
    context_inputs: Tensor  # [N] int64: x[t+1] for every position, the step-0 input
    positions: Tensor  # [N] int64: position within the document
    layout: Layout
    teacher: Tensor  # [J, H] last hidden state of the target at the taught positions
    top1: Tensor  # [J] int64, full vocabulary
    pair_row: Tensor  # [P] int64 into the flattened [K, S]
    pair_teacher: Tensor  # [P] int64 into [J], ascending
    pair_step: Tensor  # [P] int64
    chunks: list[tuple[int, int, int, int]]  # runs of CHUNK taught positions: first, end of [J]; of [P]
    trained: list[int]  # [K] trained pairs per step
    eligible: list[int]  # [K] eligible pairs per step
    eligible_prefix: list[int]  # [K] slots eligible at every step 0..k
    tokens: int  # N, and
    assistant_tokens: int  # how many of them the assistant wrote

    @property
    def unroll(self) -> int:
        """K."""
        return len(self.inputs)

    def to(self, device: torch.device | str) -> "Batch":
        """The batch on another device."""
        moved: dict[str, Any] = {
            field.name: value.to(device, non_blocking=True)
            for field in fields(self)
            if isinstance(value := getattr(self, field.name), Tensor)
        }
        layout = replace(self.layout, slots=self.layout.slots.to(device, non_blocking=True))
        return replace(self, layout=layout, **moved)


def build_batch(documents: Sequence[Document], unroll: int, kept: Tensor, oov: str) -> Batch:
    """Pack documents and work out every slot and pair.

    Args:
        documents: at least one; none reads another's tokens, whatever the order.
        unroll: K, steps per slot.
        kept: [V] bool, `t2d`: which target tokens the draft vocabulary holds.
        oov: "mask" or "keep".
    """
    K = unroll
    eligible, trained = zip(*(_pairs(document, K, kept, oov) for document in documents), strict=True)
    starts = torch.tensor([0, *(len(d) for d in documents)]).cumsum(0).tolist()

    all_eligible, all_trained = torch.cat(eligible), torch.cat(trained)
    slot = all_trained.any(1).nonzero()[:, 0]

    steps = torch.arange(K)
    tokens = torch.cat([d.tokens for d in documents])
    ends = torch.cat([torch.full((len(d),), end - 1) for d, end in zip(documents, starts[1:], strict=True)])
    # Steps past the end of a document are no pairs; they read its last token so that indices stay inside.
    reads = torch.minimum(slot + 1 + steps[:, None], ends[slot])

    rows, ks = all_trained[slot].nonzero(as_tuple=True)  # sorted by slot; wanted: by taught position
    taught = slot[rows] + 1 + ks
    order = torch.argsort(taught, stable=True)
    rows, ks, taught = rows[order], ks[order], taught[order]
    teachers, pair_teacher = torch.unique_consecutive(taught, return_inverse=True)

    every = torch.arange(len(tokens))
    return Batch(
        aux=torch.cat([d.aux for d in documents]),
        inputs=tokens[reads],
        context_inputs=tokens[torch.minimum(every + 1, ends)],
        positions=torch.cat([torch.arange(len(d)) for d in documents]),
        layout=make_layout(list(pairwise(starts)), slot),
        teacher=torch.cat([d.last for d in documents])[teachers],
        top1=torch.cat([d.top1 for d in documents])[teachers],
        pair_row=ks * len(slot) + rows,
        pair_teacher=pair_teacher,
        pair_step=ks,
        chunks=_chunks(pair_teacher, len(teachers)),
        trained=all_trained.sum(0).tolist(),
        eligible=all_eligible.sum(0).tolist(),
        eligible_prefix=all_eligible.cumprod(1).sum(0).tolist(),
        tokens=len(tokens),
        assistant_tokens=int(sum(d.loss_mask.sum() for d in documents)),
    )


def _chunks(pair_teacher: Tensor, taught: int) -> list[tuple[int, int, int, int]]:
    """Cut the taught positions into runs of CHUNK; worked out here, so that a step never waits for a device."""
    edges = [*range(0, taught, CHUNK), taught]
    pairs = torch.searchsorted(pair_teacher, torch.tensor(edges)).tolist()
    return [(*taught_run, *pair_run) for taught_run, pair_run in zip(pairwise(edges), pairwise(pairs), strict=True)]


def _pairs(document: Document, unroll: int, kept: Tensor, oov: str) -> tuple[Tensor, Tensor]:
    """[T, K] bool twice: eligible pairs and trained pairs of one document."""
    T = len(document)
    predicted = torch.arange(T)[:, None] + 2 + torch.arange(unroll)  # x[t+2+k]
    inside = predicted < T
    predicted = predicted.clamp(max=T - 1)
    eligible = inside & document.loss_mask[predicted]
    if oov == "keep":
        return eligible, eligible
    teaches = kept[document.top1[predicted - 1]]  # arg-max at t+1+k
    return eligible, eligible & teaches
