"""From options to a drafter's architecture, with every default and every refusal, once."""

from dataclasses import fields

from eagle31_train.checkpoint.contract import check_shape
from eagle31_train.config import MLA_WIDTHS, DrafterConfig, DrafterShape, check_value, mla_widths
from eagle31_train.errors import UserError

# Options that are the target's where they are not given (`targets.derive`).
REQUIRED = ("intermediate_size", "num_attention_heads", "rms_norm_eps", "rope_theta", "max_position_embeddings")


def check_drafter(d: DrafterConfig) -> None:
    """Refuse, before anything is read, options that make no drafter of any target.

    Raises:
        UserError: names the option.
    """
    for field in fields(d):
        check_value(f"drafter.{field.name}", getattr(d, field.name), field.metadata)
    if missing := [name for name in REQUIRED if getattr(d, name) is None]:
        raise UserError(f"drafter.{missing[0]} is open: it follows from the target's config.json, or is given")
    heads = d.num_attention_heads or 0
    if d.architecture == "mla":
        _, nope, rope, _ = mla_widths(d)
        for name, value in {"num_key_value_heads": heads, "head_dim": nope + rope}.items():
            if (given := getattr(d, name)) not in (None, value):
                raise UserError(f"drafter.{name}={given}: with MLA it is always {value} here: leave it out")
        if rope % 2:
            raise UserError(f"drafter.qk_rope_head_dim={rope} must be even: RoPE turns pairs")
    else:
        if heads % (keys := d.num_key_value_heads or heads):
            raise UserError(f"drafter.num_attention_heads={heads} is not a multiple of num_key_value_heads={keys}")
        if given := [name for name in ("q_lora_rank", *MLA_WIDTHS) if getattr(d, name) is not None]:
            raise UserError(f"drafter.{given[0]} is MLA's: set drafter.architecture=mla, or leave it out")


def drafter_shape(
    d: DrafterConfig, hidden_size: int, vocab_size: int, draft_vocab_size: int, aux_layers: list[int]
) -> DrafterShape:
    """The drafter's architecture, joined with its target.

    Args:
        d: the options, with all that the target decides (`targets.derive.complete`).
        hidden_size, vocab_size: H and V of the target.
        draft_vocab_size: Vd.
        aux_layers: auxiliary layers, as inputs of layer i, in the order of their states.

    Raises:
        UserError: options that make no drafter, or one that vLLM could not serve.
    """
    check_drafter(d)
    D, heads = d.hidden_size or hidden_size, d.num_attention_heads or 0
    if d.share_embedding and hidden_size != D:
        raise UserError(
            f"drafter.hidden_size={D} cannot share the target's embedding of width {hidden_size}: "
            "set drafter.share_embedding=false or hidden_size=null"
        )
    if d.architecture == "mla":
        _, nope, rope, _ = mla_widths(d)
        width = nope + rope
    else:
        width = d.head_dim or D // heads
        if width % 2:
            raise UserError(f"drafter.head_dim={width} must be even: RoPE turns pairs")
    joined = {
        "hidden_size": D,
        "target_hidden_size": hidden_size,
        "aux_layers": aux_layers,
        "vocab_size": vocab_size,
        "draft_vocab_size": draft_vocab_size,
        "num_key_value_heads": d.num_key_value_heads or heads,
        "head_dim": width,
        "rope_scaling": d.rope_scaling or None,
    }
    own = {field.name for field in fields(d)} & {field.name for field in fields(DrafterShape)}
    shape = DrafterShape(**{name: getattr(d, name) for name in own} | joined)
    if problems := check_shape(shape):  # what vLLM would not serve is not worth training
        raise UserError(problems[0])
    return shape
