"""The types of what is read of a draft's config.json; what the fields mean, `config_json` knows."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field
from typing_extensions import TypedDict

from eagle31_train import foreign
from eagle31_train.errors import UserError
from eagle31_train.foreign import Count, Positions, Scaling, Theta, Width

Size = Annotated[Width, Field(ge=1)]
LayerIds = Annotated[list[Count], Field(max_length=1024)] | None


class _Rope(TypedDict, total=False):
    rope_type: str | None
    type: str | None
    rope_theta: Theta | None


class _Eagle(TypedDict, total=False):
    eagle_aux_hidden_state_layer_ids: LayerIds
    layer_ids: LayerIds


class _Verifier(TypedDict, total=False):
    name_or_path: str | None


class _Speculators(TypedDict, total=False):
    verifier: _Verifier | None


class _Layer(TypedDict, total=False):
    architectures: list[str] | None
    model_type: str | None
    hidden_size: Size
    target_hidden_size: Width | None
    vocab_size: Size
    draft_vocab_size: Width | None
    intermediate_size: Size
    num_attention_heads: Annotated[int, Field(ge=1, le=1 << 16)]
    num_key_value_heads: Count | None
    head_dim: Count | None
    q_lora_rank: Width | None
    kv_lora_rank: Width
    qk_nope_head_dim: Width
    qk_rope_head_dim: Width
    v_head_dim: Width
    rms_norm_eps: Annotated[float, Field(gt=0, lt=1)]
    rope_theta: Theta | None
    rope_scaling: _Rope | None
    rope_parameters: _Rope | None
    max_position_embeddings: Annotated[Positions, Field(ge=1)]
    layer_types: list[str] | None
    num_aux_hidden_states: Count | None


class _Config(_Layer, total=False):
    eagle_aux_hidden_state_layer_ids: LayerIds
    eagle_config: _Eagle | None
    target_model_name: str | None
    speculators_config: _Speculators | None
    transformer_layer_config: _Layer | None


def check(config: Mapping[str, Any]) -> None:
    """Refuse a config.json of which a field that is read has another type, or a size beyond all real ones.

    Raises:
        UserError: names the field.
    """
    try:
        foreign.typed(_Config, config)
        layer = config.get("transformer_layer_config") or {}
        for name in ("rope_scaling", "rope_parameters"):
            foreign.typed(Scaling | None, config.get(name))
            foreign.typed(Scaling | None, layer.get(name))
    except ValueError as error:
        raise UserError(f"config.json gives {error}: get it again, or correct it") from None
