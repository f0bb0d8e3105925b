"""Grouped-query attention's projections, as in Llama.

Shapes: n rows; D draft hidden; h query heads; g key/value heads; d head width.
"""

from collections.abc import Callable

from torch import Tensor, nn

from eagle31_train.config import DrafterShape
from eagle31_train.model.linear import Linear
from eagle31_train.model.rope import Rope

Project = Callable[[Linear], Tensor]  # a linear layer → what it makes of the attention's input, [n, its width]


def applied_to(x: Tensor) -> Project:
    """Projections of the attention's input x [n, 2D] itself."""
    return lambda layer: layer(x)


class GroupedQueryAttention(nn.Module):
    """Projections of the drafter's attention; who attends to whom is `attention.py`'s business.

    The input is 2D wide: the normed embedding beside the normed hidden state. How a projection is worked
    out is the caller's business: training computes the embedding's half once for all steps.
    """

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.heads, self.groups, self.width = (
            shape.num_attention_heads,
            shape.num_key_value_heads,
            shape.head_dim,
        )
        D = shape.hidden_size
        self.q_proj = Linear(2 * D, self.heads * self.width)
        self.k_proj = Linear(2 * D, self.groups * self.width)
        self.v_proj = Linear(2 * D, self.groups * self.width)
        self.o_proj = Linear(self.heads * self.width, D)
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
        """Positions [n] → q [n, h, d], rotated."""
        return self.rope(project(self.q_proj).unflatten(-1, (self.heads, self.width)), positions)

    def keys_values(self, project: Project, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Positions [n] → k [n, g, d], rotated, and v [n, g, d]."""
        k = self.rope(project(self.k_proj).unflatten(-1, (self.groups, self.width)), positions)
        return k, project(self.v_proj).unflatten(-1, (self.groups, self.width))

    def output(self, o: Tensor) -> Tensor:
        """o [n, h, d] → [n, D]."""
        return self.o_proj(o.flatten(-2))
