"""How much arithmetic the data take, counted from loss masks and a drafter's shape without any tensors.

FLOPs count only the matrix products that the recurrence needs, and not norms, RoPE, softmax and element-wise work.

Letters: A auxiliary layers, D and H hidden sizes of drafter and target, I MLP width, Vd draft vocabulary; K steps.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eagle31_train.config import DrafterShape, mla_widths
from eagle31_train.model.batch import STRETCH

NOT_MAPS = ("lm_head", "embed_tokens", "mask_hidden")  # no maps, so Muon leaves them to AdamW


# ---------------------------------------------------------------- how much there is to do


@dataclass(frozen=True)
class Work:
    """Counts of what a batch has to do; averages if it stands for a part of the data. Lists are over k = 0..K-1."""

    conversations: float
    tokens: float
    squares: float  # of each conversation's tokens, added up
    assistant: float  # tokens
    positions: float  # C, up to each conversation's last slot
    copies: float  # step-0 keys that stretches of neighbouring slots see, added up over the stretches
    targets: float  # J, positions whose target distribution is needed
    read: float  # R, tokens that slots read, at any step
    slots: Sequence[float]  # those with a prediction at step k or later
    keys: Sequence[float]  # step-0 keys that these slots see, in total
    pairs: Sequence[float]  # predictions that count, if the draft vocabulary holds every arg-max

    @property
    def ttt_length(self) -> int:
        """K."""
        return len(self.slots)

    def __mul__(self, factor: float) -> "Work":
        return Work(*(np.multiply(value, factor).tolist() for value in vars(self).values()))

    def of_slots(self, share: float) -> "Work":
        """Return the work with a random share of the slots trained, drawn in stretches as by train.slots_per_batch."""
        touched = min(1.0, share * (1 + self.ttt_length / STRETCH))  # neighbours share tokens and target distributions
        slots, keys, pairs = ([value * share for value in steps] for steps in (self.slots, self.keys, self.pairs))
        # A stretch copies what its last slot sees. Drawn stretches also end where stretches of the data end.
        copies = share * (self.copies + self.keys[0] / STRETCH) if share < 1 else self.copies
        targets, read = self.targets * touched, self.read * touched
        return replace(self, copies=copies, targets=targets, read=read, slots=slots, keys=keys, pairs=pairs)


def add_up(works: Iterable[Work]) -> Work:
    columns = zip(*(vars(work).values() for work in works), strict=True)
    return Work(*(np.sum(column, axis=0).tolist() for column in columns))


def count_work(masks: Iterable[NDArray[np.bool_]], ttt_length: int) -> Work:
    """Count the work from the loss masks [T] of conversations, in one pass."""
    single = np.zeros(8)
    slots, keys, pairs = np.zeros(ttt_length), np.zeros(ttt_length), np.zeros(ttt_length)
    for mask in masks:
        T = len(mask)
        t, k = np.arange(T)[:, None], np.arange(ttt_length)
        predicted = t + 2 + k
        pair = (predicted < T) & np.append(mask, False)[np.minimum(predicted, T)]  # [T, K]
        needed = np.logical_or.accumulate(pair[:, ::-1], axis=1)[:, ::-1]  # at step k or later
        used = pair.any(1).nonzero()[0]
        reach = int(used[-1]) + 1 if len(used) else 0
        last = np.append(np.diff(used) != 1, True)[: len(used)]  # of each stretch of neighbouring slots
        touched = [len(np.unique((t + 1 + k)[some])) for some in (pair, needed)]
        single += [1, T, T * T, int(mask.sum()), reach, int((used[last] + 1).sum()), *touched]
        slots += needed.sum(0)
        keys += (needed * (t + 1)).sum(0)
        pairs += pair.sum(0)
    counts: list[Any] = [*single.tolist(), slots.tolist(), keys.tolist(), pairs.tolist()]
    return Work(*counts)


def made_mask(tokens: int, share: float) -> NDArray[np.bool_]:
    """Return [tokens] bool, the loss mask of an uncounted conversation: one prompt, then one answer, `share` of it."""
    return np.arange(tokens) >= tokens - round(share * tokens)


# ---------------------------------------------------------------- the drafter's attention in numbers


@dataclass(frozen=True)
class Widths:
    """Widths of the attention's parts, all heads together."""

    query_in: int  # outputs of the projections of its input (2D wide)
    key_in: int
    query_up: tuple[int, int]  # (from, to) of MLA's second projections
    key_up: tuple[int, int]
    queries: int  # as attention itself reads and writes them
    keys: int
    values: int
    out: int
    rope: int  # of one head, the part that RoPE rotates
    heads: int  # of queries


def widths(shape: DrafterShape) -> Widths:
    """Return the widths of a Llama drafter, or of an MLA drafter that computes keys and values for every head."""
    h = shape.num_attention_heads
    if shape.architecture == "llama":
        q, kv = h * shape.head_dim, shape.num_key_value_heads * shape.head_dim
        return Widths(q, 2 * kv, (0, 0), (0, 0), q, kv, kv, q, shape.head_dim, h)
    latent, nope, rope, v = mla_widths(shape)
    q = h * (nope + rope)
    rank = shape.q_lora_rank or 0
    return Widths(
        query_in=rank or q,
        key_in=latent + rope,
        query_up=(rank, q if rank else 0),
        key_up=(latent, h * (nope + v)),
        queries=q,
        keys=q,
        values=h * v,
        out=h * v,
        rope=rope,
        heads=h,
    )


# ---------------------------------------------------------------- FLOPs


def training_flops(shape: DrafterShape, work: Work, train_lm_head: bool = True) -> dict[str, float]:
    """Return FLOPs of forward and backward by part; a product [n, a] by [a, b] is 2·n·a·b, and its backward twice that.

    fc runs on every position; without a norm before it, its inputs get no gradient. Keys and values are projected from
    the states of every position at step 0 and of the slots at later steps, and once from each position's embedding;
    queries from the states of slots and the embeddings of tokens read. A slot attends to its step-0 keys and k later
    ones. Of several layers, those below the last process every position at step 0, and those above the first no
    embeddings. A parallel drafter's first layer has one mask row per step. The teacher has no backward pass.
    """
    D, H, A, Vd = shape.hidden_size, shape.target_hidden_size, len(shape.aux_layers), shape.draft_vocab_size
    w = widths(shape)
    steps = sum(work.slots)
    later = steps - work.slots[0]
    seen = sum(keys + k * slots for k, (keys, slots) in enumerate(zip(work.keys, work.slots, strict=True)))
    fc = 2 * work.positions * A * H * D
    L, below = shape.num_layers, shape.num_layers - 1
    masked = later * shape.parallel  # rows of the first layer that are one shared row before RoPE
    keyed = L * (work.positions + later) - masked
    asked = steps + below * (work.positions + later)
    embedded = work.positions if below else work.read  # tokens whose embeddings are projected to queries
    # Every position of a conversation up to its last slot sees those before it: half their square, on average.
    everywhere = work.squares * (work.positions / max(work.tokens, 1)) ** 2 / 2
    first = work.keys[0]
    if (window := shape.sliding_window) is not None:  # an upper bound
        seen, first = min(seen, steps * window), min(first, work.slots[0] * window)
        everywhere = min(everywhere, work.positions * window)
    key_up, query_up = (a * b for a, b in (w.key_up, w.query_up))
    return {
        "fc": fc * (3 if shape.norms_states else 2),
        "keys, values": 3 * 2 * ((keyed + work.positions) * D * w.key_in + keyed * key_up),
        "queries": 3 * 2 * ((asked - masked + embedded) * D * w.query_in + asked * query_up),
        "attention": 3 * 2 * (L * seen + below * (everywhere - first)) * (w.queries + w.out),
        "output": 3 * 2 * asked * w.out * D,
        "mlp": 3 * 2 * asked * 3 * D * shape.intermediate_size,
        "lm_head": (3 if train_lm_head else 2) * 2 * sum(work.pairs) * D * Vd,
        "teacher": 2 * work.targets * H * Vd,
    }


def newton_schulz_flops(sizes: Iterable[tuple[int, int]]) -> float:
    """Return the FLOPs of one Muon update of matrices [m, n], m <= n (or transposed): 5 · (4·m²·n + 2·m³) each. Each of
    five steps computes X·Xᵀ, the square of that, and its product with X."""
    shorter_first = ((min(size), max(size)) for size in sizes)
    return float(sum(5 * (4 * m * m * n + 2 * m**3) for m, n in shorter_first))


def extraction_flops(multiplied: float, layers: int, hidden: int, work: Work) -> float:
    """Return the FLOPs of running the target over the data once.

    A token takes 2 per parameter that it is multiplied with, and in attention 2·2·H per layer and key that it sees:
    half of its conversation, on average. A layer's queries are assumed to be H wide together.
    """
    return 2 * multiplied * work.tokens + 4 * layers * hidden * work.squares / 2
