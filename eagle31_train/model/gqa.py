"""Grouped-query attention's projections, as in Llama.

Shapes: n rows; D draft hidden; I the attention's input; h query heads; g key/value heads; d head width.
"""

from collections.abc import Callable

from torch import Tensor, nn

from eagle31_train.config import DrafterShape
from eagle31_train.model.linear import Linear
from eagle31_train.model.norm import RMSNorm
from eagle31_train.model.rope import Rope

Project = Callable[[Linear], Tensor]  # a linear layer → what it makes of the attention's input, [n, its width]


def applied_to(x: Tensor) -> Project:
    """Projections of the attention's input x [n, I] itself."""
    return lambda layer: layer(x)


class GroupedQueryAttention(nn.Module):
    """Projections of one layer's attention; who attends to whom is `attention.py`'s business.

    How a projection is worked out is the caller's business: training computes the embedding's half of the first
    layer's input once for all steps.

    Args:
        inputs: I.
    """

    def __init__(self, shape: DrafterShape, inputs: int) -> None:
        super().__init__()
        self.heads, self.groups, self.width = (
            shape.num_attention_heads,
            shape.num_key_value_heads,
            shape.head_dim,
        )
        D = shape.hidden_size
        self.q_proj = Linear(inputs, self.heads * self.width)
        self.k_proj = Linear(inputs, self.groups * self.width)
        self.v_proj = Linear(inputs, self.groups * self.width)
        self.o_proj = Linear(self.heads * self.width, D)
        self.q_norm = RMSNorm(self.width, shape.rms_norm_eps) if shape.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(self.width, shape.rms_norm_eps) if shape.qk_norm else nn.Identity()
        self.rope = Rope(shape)
        self.scale = self.width**-0.5

    @property
    def query_inputs(self) -> list[Linear]:
        """The projections of the attention's input that queries need."""
        return [self.q_proj]

    @property
    def key_inputs(self) -> list[Linear]:
        """Those that keys and values need."""
        return [self.k_proj, self.v_proj]

    def queries(self, project: Project, positions: Tensor) -> Tensor:
        """Positions [n] → q [n, h, d], normed with `qk_norm`, and rotated."""
        return self.rope(self.q_norm(project(self.q_proj).unflatten(-1, (self.heads, self.width))), positions)

    def keys_values(self, project: Project, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Positions [n] → k [n, g, d], normed with `qk_norm`, and rotated; and v [n, g, d]."""
        k = self.rope(self.k_norm(project(self.k_proj).unflatten(-1, (self.groups, self.width))), positions)
        return k, project(self.v_proj).unflatten(-1, (self.groups, self.width))

    def output(self, o: Tensor) -> Tensor:
        """o [n, h, d] → [n, D]."""
        return self.o_proj(o.flatten(-2))
