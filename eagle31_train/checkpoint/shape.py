"""From options to a drafter's architecture, with every default and every refusal, once."""

from dataclasses import fields

from eagle31_train.checkpoint.contract import check_shape
from eagle31_train.config import MLA_WIDTHS, DrafterConfig, DrafterShape, check_architecture, mla_widths
from eagle31_train.errors import UserError
from eagle31_train.model.rope import check_rope

POSITIVE = ("intermediate_size", "num_attention_heads", "rms_norm_eps", "rope_theta", "max_position_embeddings")


def check_drafter(d: DrafterConfig) -> None:
    """Refuse, before anything is read, options that make no drafter of any target.

    Raises:
        UserError: names the option.
    """
    check_architecture(d.architecture)
    optional = [name for name in ("num_key_value_heads", "head_dim", "hidden_size") if getattr(d, name) is not None]
    for name in (*POSITIVE, *optional):
        if not (value := getattr(d, name)) > 0:
            raise UserError(f"drafter.{name}={value} must be above 0")
    if d.architecture == "mla":
        _check_mla(d)
        return
    heads = d.num_key_value_heads or d.num_attention_heads
    if d.num_attention_heads % heads:
        raise UserError(
            f"drafter.num_attention_heads={d.num_attention_heads} is not a multiple of num_key_value_heads={heads}"
        )
    if d.head_dim is not None and d.head_dim % 2:
        raise UserError(f"drafter.head_dim={d.head_dim} must be even: RoPE turns pairs")
    if given := [name for name in ("q_lora_rank", *MLA_WIDTHS) if getattr(d, name) is not None]:
        raise UserError(f"drafter.{given[0]} is MLA's: set drafter.architecture=mla, or leave it out")


def _check_mla(d: DrafterConfig) -> None:
    widths = dict(zip(MLA_WIDTHS, mla_widths(d), strict=True))
    if d.q_lora_rank is not None:
        widths["q_lora_rank"] = d.q_lora_rank
    for name, value in widths.items():
        if value <= 0:
            raise UserError(f"drafter.{name}={value} must be above 0" + ", or null" * (name == "q_lora_rank"))
    if widths["qk_rope_head_dim"] % 2:
        raise UserError(f"drafter.qk_rope_head_dim={widths['qk_rope_head_dim']} must be even: RoPE turns pairs")
    fixed = {
        "num_key_value_heads": d.num_attention_heads,
        "head_dim": widths["qk_nope_head_dim"] + widths["qk_rope_head_dim"],
    }
    for name, value in fixed.items():
        if getattr(d, name) not in (None, value):
            raise UserError(f"drafter.{name}={getattr(d, name)}: with MLA it is always {value} here: leave it out")


def drafter_shape(
    d: DrafterConfig, hidden_size: int, vocab_size: int, draft_vocab_size: int, aux_layers: list[int]
) -> DrafterShape:
    """The drafter's architecture, joined with its target.

    Args:
        d: the options.
        hidden_size, vocab_size: H and V of the target.
        draft_vocab_size: Vd.
        aux_layers: auxiliary layers, as inputs of layer i, in the order of their states.

    Raises:
        UserError: options that make no drafter, or one that vLLM could not serve.
    """
    check_drafter(d)
    D, heads = d.hidden_size or hidden_size, d.num_attention_heads
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
            raise UserError(f"drafter.head_dim={width}, as hidden_size / num_attention_heads, is odd: set an even one")
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
    check_rope(shape)
    if problems := check_shape(shape):  # what vLLM would not serve is not worth training
        raise UserError(f"vLLM could not serve this drafter: {problems[0]}")
    return shape
