"""From a configuration and a store to the things that are trained: shape, drafter, teacher, objective."""

import torch

from eagle31_train.contract import require_available
from eagle31_train.drafter.model import Drafter
from eagle31_train.loss import Objective, Teacher
from eagle31_train.schema import Config, DrafterConfig, DrafterShape, UserError
from eagle31_train.store import Store
from eagle31_train.vocab import DraftVocab


def drafter_shape(config: DrafterConfig, store: Store, vocab: DraftVocab) -> DrafterShape:
    """The drafter's architecture, joined with what the store says of its target."""
    require_available(config.architecture)
    H, V = store.provenance["hidden_size"], store.provenance["vocab_size"]
    if vocab.target_size != V:
        raise UserError(
            f"the draft vocabulary is of a target with {vocab.target_size} tokens, the store's target has {V}: "
            "run `python -m data_prep` and `python -m eagle31_train.extract` for the same target"
        )
    D = config.hidden_size or H
    if config.share_embedding and D != H:
        raise UserError(
            f"drafter.hidden_size={D} cannot share the target's embedding of width {H}: "
            "set drafter.share_embedding=false or hidden_size=null"
        )
    if config.num_attention_heads % config.num_key_value_heads:
        raise UserError(
            f"drafter.num_attention_heads={config.num_attention_heads} is not a multiple of "
            f"num_key_value_heads={config.num_key_value_heads}"
        )
    return DrafterShape(
        architecture=config.architecture,
        hidden_size=D,
        target_hidden_size=H,
        aux_layers=list(store.provenance["aux_layers"]),
        vocab_size=V,
        draft_vocab_size=len(vocab),
        intermediate_size=config.intermediate_size,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        rms_norm_eps=config.rms_norm_eps,
        rope_theta=config.rope_theta,
        rope_scaling=config.rope_scaling or None,
        max_position_embeddings=config.max_position_embeddings,
        fc_norm=config.fc_norm,
        norm_output=config.norm_output,
        norm_before_residual=config.norm_before_residual,
        share_embedding=config.share_embedding,
    )


def build_objective(config: Config, shape: DrafterShape, store: Store, vocab: DraftVocab) -> Objective:
    """Drafter and teacher with their initial weights, on the CPU; the same for the same seed.

    Where the widths agree, lm_head starts from the target's rows of the draft vocabulary and the
    final norm from the target's: the rows expect states of that norm's scale, per channel.
    """
    if config.train.loss not in ("kl", "ce"):
        raise UserError(f"train.loss={config.train.loss!r} is not kl or ce")
    if config.train.oov not in ("mask", "keep"):
        raise UserError(f"train.oov={config.train.oov!r} is not mask or keep")
    torch.manual_seed(config.seed)
    weights = store.target
    ids = torch.from_numpy(vocab.target_ids)
    low = torch.bfloat16 if config.train.precision == "bf16" else torch.float32
    drafter = Drafter(shape, weights["embed_tokens"].to(low))
    head_rows = weights["lm_head"][ids]
    if shape.hidden_size == shape.target_hidden_size:
        drafter.lm_head.weight.data.copy_(head_rows)
        drafter.norm.weight.data.copy_(weights["norm"])
    drafter.lm_head.weight.requires_grad_(config.drafter.train_lm_head)
    teacher = Teacher(weights["norm"], store.provenance["norm"]["eps"], head_rows.to(low), ids)
    return Objective(drafter, teacher, config.train.loss)
