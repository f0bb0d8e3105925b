"""Builds what is trained from a configuration and a store: shape, drafter, teacher, objective."""

import torch
from torch import Tensor

from eagle31_train.checkpoint.contract import drafter_shape
from eagle31_train.common.errors import UserError
from eagle31_train.config import Config, DrafterConfig, DrafterShape, TrainConfig
from eagle31_train.kernels import missing
from eagle31_train.model.drafter import Drafter
from eagle31_train.model.flash import restore_flash, switch_flash
from eagle31_train.model.layer import GroupedQueryAttention
from eagle31_train.model.loss import Objective, Teacher
from eagle31_train.model.vocab import DraftVocab
from eagle31_train.store import Store

FIRST_NORM, FIRST_SPREAD = 0.7, 2.0  # see `first_norm`
LOOK_BACK = 12.0  # nats by which a head's initial score of its preferred position exceeds scores far away


def shape_of(config: DrafterConfig, store: Store, vocab: DraftVocab) -> DrafterShape:
    """Return the drafter's architecture: its options, joined with what the store says about its target."""
    H, V = store.states["hidden_size"], store.states["vocab_size"]
    if vocab.target_size != V:
        raise UserError(
            f"the draft vocabulary is for a target with {vocab.target_size} tokens, but the store's target has {V}: "
            "run `eagle31 data` and `eagle31 extract` for the same target"
        )
    return drafter_shape(config, H, V, len(vocab), list(store.states["aux_layers"]))


def build_objective(config: Config, shape: DrafterShape, store: Store, vocab: DraftVocab) -> Objective:
    """Return drafter and teacher with their initial weights, on the CPU; the same for the same seed.

    If the widths agree, the drafter starts as a poor copy of the target's last layers (compared with random ones in
    docs/log.md): fc passes the last auxiliary state on, lm_head is the target's, and the final norm about the target's.
    """
    torch.manual_seed(config.seed)
    weights = store.target
    ids = torch.from_numpy(vocab.target_ids)
    low = torch.bfloat16 if config.train.precision == "bf16" else torch.float32
    drafter = Drafter(shape, weights["embed_tokens"][: shape.vocab_size].to(low))
    head_rows = weights["lm_head"][ids]
    if shape.hidden_size == shape.target_hidden_size:
        drafter.lm_head.weight.data.copy_(head_rows)
        drafter.norm.weight.data.copy_(first_norm(weights["norm"]))
        # fc passes the last auxiliary state on, with a little of the others mixed in.
        drafter.fc.weight.data.mul_(0.25)[:, -shape.hidden_size :] += torch.eye(shape.hidden_size)
    if shape.parallel and shape.attention_bias and not shape.qk_norm:
        look_back(drafter, config.train.ttt_length)
    drafter.fc.weight.data.mul_(config.train.fc_init_scale or 1.0)
    drafter.fc_input_scale = tuple(config.train.fc_input_scale or ())
    drafter.lm_head.weight.requires_grad_(config.drafter.train_lm_head)
    states = store.states
    teacher = Teacher(weights["norm"], states["norm"]["eps"], head_rows.to(low), ids, states.get("soft_cap"))
    drafter.recompute = config.train.activation_checkpointing
    objective = Objective(drafter, teacher, config.train.loss, config.train.lk)
    objective.autocast = torch.bfloat16 if config.train.precision == "bf16" else None
    return objective


def first_norm(target: Tensor) -> Tensor:
    """Return initial weights [D] of the drafter's final norm: the target's effective ones, scaled down and clipped.

    At the start the drafter guesses the token that it has just been given. That is wrong, and under the target's own
    norm also confident. Gemma 3's norm scales some dimensions by up to 301; the normed state is fed back, so every step
    would scale them again, and training did not recover in a hundred steps (docs/log.md). So a weight is FIRST_NORM
    where the target's is the median, and at most FIRST_SPREAD times that anywhere.
    """
    return FIRST_NORM * (target / target.abs().median()).clamp(-FIRST_SPREAD, FIRST_SPREAD)


@torch.no_grad()
def look_back(drafter: Drafter, steps: int) -> None:
    """Let head h of every layer of a parallel drafter attend, at first, to the position h mod `steps` before its own.

    The mask row of step k knows its slot only as the position k before it, and has the same query in all slots. Random
    projections show it the mean of all positions, from which it learns slowly where to look (docs/log.md). So keys get
    a bias b, and queries R(-o) b, where R is RoPE's rotation and o = h mod `steps`. This adds LOOK_BACK times the mean
    of cos(f (distance - o)) to the scores. The f are the frequencies of the fastest quarter of the pairs, where b is
    not 0.
    """
    shape = drafter.shape
    width, pairs = shape.head_dim, max(1, shape.head_dim // 8)
    b = torch.zeros(width)
    b[:pairs] = (LOOK_BACK * width**0.5 / pairs) ** 0.5
    back = torch.arange(shape.num_attention_heads) % steps
    for layer in drafter.stack:
        attention = layer.self_attn
        assert isinstance(attention, GroupedQueryAttention), "contract.check_shape refuses MLA here"
        attention.k_proj.bias.copy_(b.repeat(shape.num_key_value_heads))
        attention.q_proj.bias.copy_(attention.rope(b.expand(len(back), 1, width), -back).flatten())


def choose_kernels(objective: Objective, t: TrainConfig, device: torch.device) -> str:
    """Choose an objective's kernels by train.kernels, and return them in words. Unless that is `plain`, use
    FlashAttention 3 or 4 if installed. Raise UserError if fused kernels are asked for and cannot run on this device."""
    lack = missing(device)
    if t.kernels == "fused" and lack:
        raise UserError(f"train.kernels=fused does not run here ({lack}): set train.kernels=auto or plain")
    fused = t.kernels != "plain" and not lack
    if fused:
        objective.fuse_kernels()
    kernels = "fused kernels" if fused else "plain kernels"
    if lack and t.kernels == "auto" and device.type == "cuda":  # on a CPU nobody expects others
        kernels += f" ({lack})"
    restore_flash()
    switches = t.kernels != "plain" and device.type == "cuda" and objective.autocast is not None
    flash = switch_flash(objective.drafter.shape, device) if switches else None
    return f"{kernels}, {flash}" if flash else kernels
