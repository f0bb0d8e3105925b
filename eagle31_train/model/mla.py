"""Multi-head latent attention's projections, as in DeepSeek-V2 and Kimi.

Keys and values come out of one narrow latent per token, queries out of another (or, without `q_lora_rank`, of
the input itself). Each head's key is [without position | with position]; the second part is the same for all
heads. Training and decoding expand the latent into a key and a value per head: then it is ordinary attention
with as many key heads as query heads, and all that is said of the recurrence holds as it stands. (vLLM keeps the
latent and moves the expansion into queries and outputs: the same numbers in another order.)

Source: DeepSeek-V2 (arXiv 2405.04434); names and order of the parts as vLLM's DeepseekV2MLAAttention reads them.

Shapes: n rows; D draft hidden; h heads; d = nope + rope width of a key; dv width of a value; c latent width.
"""

import torch
from torch import Tensor, nn

from eagle31_train.config import DrafterShape, mla_widths
from eagle31_train.model.gqa import Project
from eagle31_train.model.linear import Linear
from eagle31_train.model.norm import RMSNorm
from eagle31_train.model.rope import Rope


class LatentAttention(nn.Module):
    """Projections of an MLA drafter; the same interface as `GroupedQueryAttention`."""

    def __init__(self, shape: DrafterShape, inputs: int) -> None:
        super().__init__()
        D, eps, rank = shape.hidden_size, shape.rms_norm_eps, shape.q_lora_rank
        latent, nope, rope, value = mla_widths(shape)
        self.heads = shape.num_attention_heads
        self.query_parts, self.latent_parts, self.head_parts = [nope, rope], [latent, rope], [nope, value]
        if rank is None:
            self.q_proj = Linear(inputs, self.heads * (nope + rope))
        else:
            self.q_a_proj = Linear(inputs, rank)
            self.q_a_layernorm = RMSNorm(rank, eps)
            self.q_b_proj = Linear(rank, self.heads * (nope + rope))
        self.kv_a_proj_with_mqa = Linear(inputs, latent + rope)
        self.kv_a_layernorm = RMSNorm(latent, eps)
        self.kv_b_proj = Linear(latent, self.heads * (nope + value))
        self.o_proj = Linear(self.heads * value, D)
        self.rope = Rope(shape)
        self.low_rank = rank is not None
        self.scale = (nope + rope) ** -0.5 * self.rope.softmax_factor

    @property
    def query_inputs(self) -> list[Linear]:
        """The projections of the attention's input that queries need."""
        return [self.q_a_proj if self.low_rank else self.q_proj]

    @property
    def key_inputs(self) -> list[Linear]:
        """Those that keys and values need."""
        return [self.kv_a_proj_with_mqa]

    def queries(self, project: Project, positions: Tensor) -> Tensor:
        """Positions [n] → q [n, h, d], its second part rotated."""
        (projection,) = self.query_inputs
        rows = project(projection)
        if self.low_rank:
            rows = self.q_b_proj(self.q_a_layernorm(rows))
        still, turning = rows.unflatten(-1, (self.heads, -1)).split(self.query_parts, -1)
        return torch.cat([still, self.rope(turning, positions)], -1)

    def keys_values(self, project: Project, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Positions [n] → k [n, h, d], its second part rotated, and v [n, h, dv]."""
        latent, turning = project(self.kv_a_proj_with_mqa).split(self.latent_parts, -1)
        heads = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (self.heads, -1))
        still, v = heads.split(self.head_parts, -1)
        shared = self.rope(turning[:, None], positions).expand(-1, self.heads, -1)
        # v is copied so that what is kept for the gradient is v, and not the keys' part beside it, too.
        return torch.cat([still, shared], -1), v.contiguous()

    def output(self, o: Tensor) -> Tensor:
        """o [n, h, dv] → [n, D]."""
        return self.o_proj(o.flatten(-2))
