"""The drafter run freely from every place of one trajectory at once: how far each draft gets, and what drifts.

The step-0 keys of the trajectory are those of every draft made along it, whatever was accepted before: a server's
cache holds exactly them once the target has spoken. So the unroll of training (`drafter/attention.py`) serves here
too, fed with the drafter's own tokens; what `drafter/decode.py` drafts from one row after another comes out of one
batch per step.

Shares of the attention cost no second softmax: every value gets a column for each kind of key, which is 1 for its own
kind and 0 for the others, and what attention makes of those columns is the shares.

Cost, for N positions, S slots and K steps (W parameters of the layer, D wide, Vd draft tokens, h heads of width d):
the drafter's one reading of the trajectory, 2 N (A H D + W) FLOPs, and 2 K S (W + Vd D + 2 h d N), in S/C + 1 kernels'
worth of rows. Memory is linear in N, beside at most `SCORES` scores. Against the target's own decoding, which reads
all its weights S times, it is small: a few per cent of its time.

Shapes: N positions; S slots; K steps; g key/value heads; dv width of a value.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from eagle31_train.codec import plain
from eagle31_train.drafter.attention import unrolled_attention
from eagle31_train.drafter.batch import each_tensor
from eagle31_train.drafter.gqa import applied_to
from eagle31_train.drafter.layout import make_layout
from eagle31_train.drafter.model import Drafter
from eagle31_train.measure.results import Drift, Trajectory

SINKS = 4  # positions at the start of a sequence, which attention falls back upon
SCORES = 2**24  # scores over the draft vocabulary that are held at once, in slots * Vd
KINDS = 4  # of keys: sink, prompt, verified, own
COLUMNS = 8  # that tell them: CUDA's kernel wants widths in eights


@torch.no_grad()
def unroll(
    drafter: Drafter, target_ids: Tensor, trajectory: Trajectory, depth: int, drift: bool
) -> tuple[list[int], Drift | None]:
    """Draft `depth` tokens greedily at every slot of a trajectory.

    Args:
        drafter: any drafter module, in the dtype of its weights.
        target_ids: [Vd] int64, the target's id of each draft token.
        trajectory: on the drafter's device; `beyond` holds at least depth - 1 tokens.
        drift: whether to tell what changes from step to step.

    Returns:
        For each slot, how many tokens of the draft, from the first on, are what the target wrote there; and the drift,
        means over the slots (None if it is not asked for, or there is no slot).
    """
    slots, told = trajectory.slots, [*trajectory.output, *trajectory.beyond]
    if slots == 0:
        return [], None
    assert len(told) >= slots + depth, "the target's words go on for depth - 1 tokens after the output"
    device, before = target_ids.device, len(trajectory.prompt)
    layer, attention = drafter.midlayer, drafter.midlayer.self_attn

    # Row p: the state of position p beside the token at p + 1. The first slot is the prompt's last position.
    N = before - 1 + slots
    tokens = torch.tensor([*trajectory.prompt, *trajectory.output], device=device)
    positions = torch.arange(N, device=device)
    g = drafter.fuse(plain(trajectory.aux[:N]))
    x, residual = layer.attention_input(drafter.embed(tokens[1 : N + 1]), g)
    k0, v0 = attention.keys_values(applied_to(x), positions)
    width = v0.shape[-1]
    if drift:
        v0 = _marked(v0, kinds(positions, before))

    g, x, residual, positions = g[before - 1 :], x[before - 1 :], residual[before - 1 :], positions[before - 1 :]
    layout = each_tensor(make_layout([(0, N)], positions.cpu()), lambda tensor: tensor.to(device))
    own_k: list[Tensor] = []
    own_v: list[Tensor] = []
    drafted, seen = [], []
    for step in range(depth):
        if step > 0:
            key, value = attention.keys_values(applied_to(x), positions + step)
            own_k.append(key)
            own_v.append(_marked(value, torch.full_like(positions, KINDS - 1)) if drift else value)
        q = attention.queries(applied_to(x), positions + step)
        attended = unrolled_attention(q, k0, v0, own_k, own_v, layout, attention.scale)
        h = layer.finish(residual, attended[..., :width])
        z = drafter.norm(h)
        choice, entropy = _read_out(drafter, z, drift)
        drafted.append(target_ids[choice])
        if drift:
            shares = attended[..., width : width + KINDS].double().mean((0, 1))
            seen.append(torch.stack([*shares, rms(g).mean(), entropy.mean()]))
        g = drafter.feedback(h, z)
        x, residual = layer.attention_input(drafter.embed(drafted[-1]), g)

    wanted = torch.tensor(told, device=device).unfold(0, depth, 1)[1 : slots + 1]  # [S, K]
    agreed = (torch.stack(drafted, 1) == wanted).long().cumprod(1).sum(1)
    return agreed.tolist(), Drift(*torch.stack(seen, 1).tolist()) if drift else None


def kinds(positions: Tensor, prompt: int) -> Tensor:
    """Positions [N] → [N] int64, the kind of their step-0 keys: 0 sink, 1 prompt, 2 verified (own keys are 3).

    A key is where its state is from. That of the prompt's last position, beside which stands the first token that the
    target wrote, is the prompt's.
    """
    return (positions >= SINKS).long() + (positions >= max(SINKS, prompt)).long()


def rms(states: Tensor) -> Tensor:
    """States [n, D] → the root of their mean square [n] fp64."""
    return states.double().square().mean(-1).sqrt()


def _marked(values: Tensor, kind: Tensor) -> Tensor:
    """Values [n, g, dv] of n kinds → [n, g, dv + COLUMNS]."""
    columns = F.one_hot(kind, COLUMNS).to(values.dtype)[:, None].expand(-1, values.shape[1], -1)
    return torch.cat([values, columns], -1)


def _read_out(drafter: Drafter, z: Tensor, entropies: bool) -> tuple[Tensor, Tensor]:
    """Outputs z [S, D] → the draft token [S] of each, and the entropy [S] fp64 of its distribution, in nats.

    Some rows at a time: scores of all of them, over a vocabulary, may not fit. Without `entropies` these are empty.
    """
    choice, entropy = [], []
    for rows in z.split(max(1, SCORES // drafter.shape.draft_vocab_size)):
        scores = drafter.lm_head(rows)
        choice.append(scores.argmax(-1))
        if entropies:
            wide = torch.promote_types(scores.dtype, torch.float32)
            entropy.append(torch.special.entr(scores.softmax(-1, wide)).sum(-1).double())
    return torch.cat(choice), torch.cat(entropy) if entropies else z.new_empty(0)
