"""How much arithmetic a training step cannot do without: the matrix products of the recurrence, counted from the masks.

A product of [n, a] with [a, b] is 2·n·a·b FLOPs. Norms, RoPE, softmax and element-wise work are not counted.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle31_train.config import DrafterShape


@dataclass(frozen=True)
class Work:
    """How often a step has to do what, for documents given by their loss masks.

    positions: C, up to each document's last slot. taught: J, positions whose target distribution is needed. read:
    tokens that slots read, at any step.
    Lists over k = 0..K-1: slots: slots with a pair at step k or later, so that step k has to be run; keys: step-0 keys
    that these slots see, together; pairs: predictions that count.
    """

    positions: int
    taught: int
    read: int
    slots: list[int]
    keys: list[int]
    pairs: list[int]


def count_work(masks: Sequence[Tensor], unroll: int) -> Work:
    """From loss masks [T] of documents, as build_batch counts pairs where every arg-max is in the draft vocabulary."""
    positions, taught, read = 0, 0, 0
    slots, keys, pairs = ([0] * unroll for _ in range(3))
    for mask in masks:
        T = len(mask)
        t, k = torch.arange(T)[:, None], torch.arange(unroll)
        predicted = t + 2 + k
        pair = (predicted < T) & mask[predicted.clamp(max=T - 1)]  # [T, K]
        needed = pair.flip(1).cummax(1).values.flip(1)  # at step k or later
        positions += int(pair.any(1).nonzero().max()) + 1 if pair.any() else 0
        taught += len((t + 1 + k)[pair].unique())
        read += len((t + 1 + k)[needed].unique())
        for step in range(unroll):
            slots[step] += int(needed[:, step].sum())
            keys[step] += int((t[:, 0] + 1)[needed[:, step]].sum())
            pairs[step] += int(pair[:, step].sum())
    return Work(positions, taught, read, slots, keys, pairs)


def necessary(shape: DrafterShape, work: Work, train_lm_head: bool = True) -> dict[str, int]:
    """FLOPs of forward and backward, by part.

    | part | forward | backward |
    | --- | --- | --- |
    | fc | every position, A·H → D | twice that, once if there is no fc_norm: its inputs need no gradient |
    | keys, values | D → 2·groups·width: states of every position at step 0, of the step's slots at every later step;
      and the embedding of every token, once for all steps that read it. With MLA D → latent and shared key; then
      every head's key and value out of the latent, without the embeddings | twice |
    | queries | D → heads·width: states of the step's slots, at every step; each token read, once. With MLA likewise in
      two products, the second without the tokens | twice |
    | output, mlp | the step's slots, at every step | twice |
    | attention | scores and weighted values: each slot's own step-0 keys (itself and all before it in its document)
      and k later ones | twice: gradients of queries, keys, values and shares; scores computed anew are not counted |
    | lm_head | each pair, D → Vd | once for the states, once more for the weights if they are trained |
    | teacher | each taught position once, H → Vd, whatever the number of steps that it teaches | none |
    """
    D, H, A, Vd = shape.hidden_size, shape.target_hidden_size, len(shape.aux_layers), shape.draft_vocab_size
    steps = sum(work.slots)
    seen = sum(keys + k * slots for k, (keys, slots) in enumerate(zip(work.keys, work.slots, strict=True)))
    keyed = work.positions + steps - work.slots[0]  # states that a key and a value are made of
    pairs = sum(work.pairs)
    fc = 2 * work.positions * A * H * D
    a = _attention(shape)
    return {
        "fc": fc * (3 if shape.fc_norm else 2),
        "keys, values": 3 * 2 * ((keyed + work.positions) * D * a.key_value + keyed * a.key_value_up),
        "queries": 3 * 2 * ((steps + work.read) * D * a.query + steps * a.query_up),
        "attention": 3 * 2 * seen * a.pair,
        "output": 3 * 2 * steps * a.output * D,
        "mlp": 3 * 2 * steps * 3 * D * shape.intermediate_size,
        "lm_head": (3 if train_lm_head else 2) * 2 * pairs * D * Vd,
        "teacher": 2 * work.taught * H * Vd,
    }


@dataclass(frozen=True)
class _Attention:
    """Widths of the first projections (all heads together), multiplications of MLA's second ones, and of a score with
    its weighted value; width of what all heads give."""

    key_value: int
    key_value_up: int
    query: int
    query_up: int
    pair: int
    output: int


def _attention(shape: DrafterShape) -> _Attention:
    heads, groups, width = shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim
    if shape.architecture == "llama":
        return _Attention(2 * groups * width, 0, heads * width, 0, heads * width * 2, heads * width)
    latent, nope, value = shape.kv_lora_rank or 0, shape.qk_nope_head_dim or 0, shape.v_head_dim or 0
    rank = shape.q_lora_rank
    return _Attention(
        key_value=latent + (shape.qk_rope_head_dim or 0),
        key_value_up=latent * heads * (nope + value),
        query=rank or heads * width,
        query_up=(rank or 0) * heads * width,
        pair=heads * (width + value),
        output=heads * value,
    )
