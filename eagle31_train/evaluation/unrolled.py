"""Draft freely from every position of a target's output at once: how far each draft gets, and how the drafter drifts.

Once the target has answered, a server's cache holds the step-0 rows of the verified positions and nothing of earlier
drafts. So training's attention (`model/attention.py`), fed with the drafter's own tokens, is that of serving. What
`model/decode.py` drafts from one position after another, this module drafts from all of them, in one batch per step.

Shares of the attention need no second softmax: every value gets a column for each kind of key, 1 for its own kind and 0
for the others. The attention's output in these columns is the share of each kind.

Cost, for N positions, S slots and K steps: 2 N (fc + projections of keys and values) FLOPs once, and
2 K S (layer + lm_head, in parameters) + 2 K S N (widths of a key and a value, of all heads). For Llama 3.1 8B, its
drafter, 32,000 draft tokens and K = 8 that is two fifths of one forward pass of the target over the same tokens. Memory
is linear in N, plus at most `SCORES` scores.

Shapes: N positions; S slots; K steps; D draft hidden; h query heads; g key/value heads; dv width of a value.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from eagle31_train.common.transfers import each_tensor
from eagle31_train.evaluation.measurement import Drift
from eagle31_train.model.drafter import AttendingLayer, Drafter, Read, call
from eagle31_train.model.layer import Layer, applied_to
from eagle31_train.model.packing import Layout, make_layout
from eagle31_train.store.codec import plain

SINKS = 4  # first positions of a sequence, which attention falls back on
SCORES = 2**24  # scores over the draft vocabulary that are held at once
KINDS = 4  # of keys: sink, prompt, verified, own
COLUMNS = 8  # added to values to mark kinds; CUDA's kernel needs widths in multiples of 8


@dataclass(frozen=True)
class Trajectory:
    """What the target wrote after one prompt, and its auxiliary states on the way.

    prompt, output: token ids; the output ends with an end token or at the limit.
    beyond: what the target would have written after that. vLLM counts drafted tokens that agree with it, too.
    aux: [>= len(prompt) + len(output) - 2, A, H] auxiliary states from position 0 on: drafts are made at positions
        len(prompt) - 1 + i, for i = 0 .. len(output) - 2.
    """

    prompt: list[int]
    output: list[int]
    beyond: list[int]
    aux: Tensor

    @property
    def slots(self) -> int:
        """How many output positions a draft can be made at: all before the token that ends the output."""
        return len(self.output) - 1

    @property
    def text(self) -> list[int]:
        """All that the target wrote, or would have written."""
        return [*self.output, *self.beyond]

    def at(self, slot: int) -> "Trajectory":
        return Trajectory([*self.prompt, *self.text[:slot]], self.text[slot : slot + 2], [], self.aux)


@dataclass(frozen=True)
class Step:
    """One step of every slot.

    tokens: [S] int64, drafted, as target ids. read, written: [S, D], the state g_k and the output z_k.
    shares: [S, h, KINDS], of the attention of each head of every layer; entropy: [S] fp64, of the draft distribution,
        in nats. Both are empty without drift.
    """

    tokens: Tensor
    read: Tensor
    written: Tensor
    shares: Tensor
    entropy: Tensor


@torch.no_grad()
def unroll(
    drafter: Drafter, target_ids: Tensor, trajectory: Trajectory, depth: int, drift: bool
) -> tuple[list[int], Drift | None]:
    """Draft `depth` tokens greedily at every slot of a trajectory, in the dtype of the drafter's weights.

    Args:
        target_ids: [Vd] int64, the target's id of each draft token.
        trajectory: with its states on the drafter's device, and at least depth - 1 tokens beyond.

    Returns:
        For each slot, how many tokens of the draft, from the first on, are what the target wrote there; and the drift
        (None without `drift`, or without slots).
    """
    slots, text = trajectory.slots, trajectory.text
    if slots == 0:
        return [], None
    assert len(text) >= slots + depth, "what the target wrote goes on for depth - 1 tokens after the output"
    drafted, seen = [], []
    for step in steps(drafter, target_ids, trajectory, depth, drift):
        drafted.append(step.tokens)
        if drift:
            shares = step.shares.double().mean((0, 1))
            seen.append(torch.stack([*shares, rms(step.read).mean(), step.entropy.mean()]))
    # The draft of slot i follows token i of the output.
    wanted = torch.tensor(text, device=target_ids.device).unfold(0, depth, 1)[1 : slots + 1]  # [S, K]
    agreed = (torch.stack(drafted, 1) == wanted).long().cumprod(1).sum(1)
    return agreed.tolist(), Drift(*torch.stack(seen, 1).tolist()) if drift else None


@torch.no_grad()
def narrowest(drafter: Drafter, target_ids: Tensor, trajectory: Trajectory, slot: int, depth: int) -> float:
    """Return the smallest gap between the two best scores in any step of the draft at one slot."""
    gaps = []
    for step in steps(drafter, target_ids, trajectory.at(slot), depth, drift=False):
        best, second = drafter.lm_head(step.written[0]).double().topk(2).values.tolist()
        gaps.append(best - second)
    return min(gaps)


@torch.no_grad()
def steps(drafter: Drafter, target_ids: Tensor, trajectory: Trajectory, depth: int, drift: bool) -> Iterator[Step]:
    """Yield steps 0 .. depth-1 of all slots (at least one). Arguments are `unroll`'s."""
    device, prompt = target_ids.device, len(trajectory.prompt)
    # Row p: the state of position p beside the token at p + 1. The first slot is at the prompt's last position.
    first, N = prompt - 1, prompt - 1 + trajectory.slots
    positions = torch.arange(N, device=device)
    tokens = torch.tensor([*trajectory.prompt, *trajectory.output][1 : N + 1], device=device)
    every, layout = (
        each_tensor(make_layout([(0, N)], slots), lambda tensor: tensor.to(device))
        for slots in (torch.arange(N), torch.arange(first, N))
    )
    layers = [MarkedLayer(layer, kinds(positions, prompt) if drift else None) for layer in drafter.stack]
    newest = tokens[first:]  # what the slots read: at step 0 the target's tokens, then the tokens drafted last
    reads = (_beside(drafter, newest) for _ in range(depth))
    aux, slots, following = plain(trajectory.aux[:N]), positions[first:], _beside(drafter, tokens)
    for g, z in drafter.unroll(layers, aux, positions, slots, (every, layout), following, reads):
        choice, entropy = _read_out(drafter, z, drift)
        drafted = target_ids[choice]
        # At step 0 the layers below the last have shares of all positions.
        shares = torch.cat([layer.shares[-len(slots) :] for layer in layers], 1)
        yield Step(drafted, g, z, shares, entropy)
        newest = drafter.mask_token() if drafter.shape.parallel else drafted


class MarkedLayer(AttendingLayer):
    """A layer whose values are marked with the kind of their keys.

    kind: [N] int64, of every position; None marks nothing.
    shares: [S, h, KINDS], of the newest step's attention, for each kind; [S, h, 0] if nothing is marked."""

    def __init__(self, layer: Layer, kind: Tensor | None) -> None:
        super().__init__(layer, call)
        self._kind = kind
        self.shares: Tensor

    def keep_context(self, states: Tensor, read: Read, positions: Tensor) -> None:
        super().keep_context(states, read, positions)
        self._width = self._v0.shape[-1]
        if self._kind is not None:
            self._v0 = _marked(self._v0, self._kind)

    def keep_own(self, key: Tensor, value: Tensor) -> None:
        if self._kind is not None:
            value = _marked(value, torch.full_like(self._kind[: len(value)], KINDS - 1))
        super().keep_own(key, value)

    def attend(
        self, states: Tensor, read: Read, positions: Tensor, layout: Layout, own: bool = False
    ) -> tuple[Tensor, Tensor]:
        residual, attended = super().attend(states, read, positions, layout, own)
        self.shares = attended[..., self._width :][..., :KINDS]
        return residual, attended[..., : self._width]


def _beside(drafter: Drafter, tokens: Tensor) -> Read:
    """Return how the first layer reads states [n, D]: joined to the embeddings of tokens [n]."""
    e = drafter.midlayer.input_layernorm(drafter.embed(tokens))
    return lambda normed: applied_to(torch.cat([e, normed], -1))


def kinds(positions: Tensor, prompt: int) -> Tensor:
    """Positions [N] → [N] int64, the kinds of their step-0 keys: 0 sink, 1 prompt, 2 verified (own keys are 3).

    The key of the prompt's last position is the prompt's, though its row reads the target's first token."""
    return (positions >= SINKS).long() + (positions >= max(SINKS, prompt)).long()


def rms(states: Tensor) -> Tensor:
    """States [n, D] → the root mean square of each, [n] fp64."""
    return states.double().square().mean(-1).sqrt()


def _marked(values: Tensor, kind: Tensor) -> Tensor:
    """Values [n, g, dv] of kinds [n] → marked values [n, g, dv + COLUMNS]."""
    columns = F.one_hot(kind, COLUMNS).to(values.dtype)[:, None].expand(-1, values.shape[1], -1)
    return torch.cat([values, columns], -1)


def _read_out(drafter: Drafter, z: Tensor, entropies: bool) -> tuple[Tensor, Tensor]:
    """Outputs z [S, D] → the best draft token [S] of each, and, if asked for, the entropy [S] of its distribution.

    Some rows are done at a time, since all scores may not fit."""
    choice, entropy = [], []
    for rows in z.split(max(1, SCORES // drafter.shape.draft_vocab_size)):
        scores = drafter.lm_head(rows)
        choice.append(scores.argmax(-1))
        if entropies:
            wide = torch.promote_types(scores.dtype, torch.float32)
            entropy.append(torch.special.entr(scores.softmax(-1, wide)).sum(-1).double())
    return torch.cat(choice), torch.cat(entropy) if entropies else z.new_empty(0)
