"""The optimizers: AdamW, or Muon on the matrices and AdamW on the rest.

Muon (Jordan et al., 2024; "Muon is Scalable for LLM Training", arXiv 2502.16982) makes the momentum of a matrix
orthogonal before it is applied. Its steps are scaled to the size of AdamW's, so that train.lr means the same for both.
lm_head and an embedding, whose rows are tokens, stay with AdamW, as do norms and a parallel drafter's mask_hidden.
"""

import math
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from eagle31_train.common.order import share
from eagle31_train.config import TrainConfig
from eagle31_train.model.loss import parts
from eagle31_train.planning.work import NOT_MAPS, newton_schulz_flops

ADAMW = ("exp_avg", "exp_avg_sq")  # AdamW's moments
MOMENTS = (*ADAMW, "momentum_buffer")  # those and Muon's
MOMENTUM = 0.95
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # Jordan's coefficients
ITERATIONS = 5
STRIPE = 192  # rows that a CPU multiplies at once if the product is symmetric; the fastest of 96 to 288


class Muon(torch.optim.Optimizer):
    """Muon, bit for bit torch's own in bf16, with two things that torch 2.13's lacks.

    It iterates in `dtype`, which is float32 if training's is. torch's iterates in bf16 everywhere, which takes more
    than ten times as long on a CPU without bf16 instructions (docs/log.md). And ranks share the work: each makes some
    whole matrices orthogonal, bit for bit as one process would, and sends them to the others. Momentum and weights of
    sharded matrices stay sharded. torch's does all on every rank or, if sharded, iterates on the shards, with 15
    exchanges per matrix, and fails if a matrix has fewer rows than there are ranks.
    """

    def __init__(self, parameters: Any, lr: float, weight_decay: float, dtype: torch.dtype) -> None:
        super().__init__(parameters, {"lr": lr, "weight_decay": weight_decay})
        self._dtype = dtype

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update every matrix that has a gradient. Every rank calls this, with the same matrices and no closure."""
        assert closure is None
        learning = [(p, group) for group in self.param_groups for p in group["params"] if p.grad is not None]
        rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        costs = [round(newton_schulz_flops([(len(p), p.shape[1])])) for p, _ in learning]
        shares = [[learning[index] for index in some] for some in share(range(len(learning)), costs, ranks)]
        sent: list[Sent] = []
        for dealt in zip_longest(*shares):  # one matrix for each rank, as long as there are enough
            mine = torch.empty(0)
            everyone = [(owner, *one) for owner, one in enumerate(dealt) if one is not None]
            for owner, parameter, _ in everyone:
                whole = self._momentum(parameter)  # if sharded, all ranks gather it, and its owner keeps it
                mine = whole if owner == rank else mine
            if dealt[rank] is not None:  # after all are gathered: ranks would wait for one another
                mine = orthogonal(mine).contiguous()
            _apply(sent)  # directions of the round before, which had time to arrive
            sent = []
            for owner, parameter, group in everyone:
                direction = mine
                if owner != rank:
                    direction = torch.empty(parameter.shape, dtype=self._dtype, device=parameter.device)
                arrival = dist.broadcast(direction, owner, async_op=True) if ranks > 1 else None
                sent.append((arrival, direction, parameter, group))
        _apply(sent)
        return None

    def _momentum(self, parameter: Tensor) -> Tensor:
        """Update a matrix's momentum; return its Nesterov form, unsharded, in the dtype of the iterations."""
        state, gradient = self.state[parameter], parameter.grad
        assert gradient is not None
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        mean = state["momentum_buffer"].lerp_(gradient, 1 - MOMENTUM)
        momentum = nesterov(gradient, mean).to(self._dtype)
        return momentum.full_tensor() if isinstance(momentum, DTensor) else momentum


Sent = tuple[Any, Tensor, Tensor, dict[str, Any]]  # what to wait for, a direction, its parameter, the parameter's group


def _apply(sent: list[Sent]) -> None:
    """Update parameters, each once its direction has arrived."""
    for arrival, direction, parameter, group in sent:
        if arrival is not None:
            arrival.wait()
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(as_sharded(direction, parameter), alpha=-group["lr"] * adamw_size(parameter.shape))


def as_sharded(whole: Tensor, parameter: Tensor) -> Tensor:
    """Return a matrix that every rank has, sharded as the parameter is."""
    if not isinstance(parameter, DTensor):
        return whole
    # Every rank has the whole, so none need send it: src_data_rank=None.
    return distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)


def nesterov(gradient: Tensor, mean: Tensor) -> Tensor:
    return gradient.lerp(mean, MOMENTUM)


def adamw_size(shape: torch.Size) -> float:
    """Return the factor that gives an orthogonal matrix the RMS of AdamW's updates."""
    return 0.2 * math.sqrt(max(shape))


def orthogonal(matrix: Tensor) -> Tensor:
    """[m, n] → [m, n], approximately U·Vᵀ of its singular value decomposition, by Newton-Schulz in its dtype."""
    a, b, c = NEWTON_SCHULZ
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(ITERATIONS):
        x = torch.addmm(x, symmetric(symmetric(x), beta=b, alpha=c), x, beta=a)
    return x.T if matrix.shape[0] > matrix.shape[1] else x


def symmetric(x: Tensor, beta: float = 0.0, alpha: float = 1.0) -> Tensor:
    """x [m, n] → x·xᵀ [m, m]; with beta, beta·x + alpha·x·x of a symmetric x. A CPU multiplies the lower half, stripe
    by stripe, and mirrors it: a tenth to a quarter less time for Muon (docs/log.md). A GPU multiplies all, since a
    stripe would not fill it."""
    if x.device.type != "cpu" or len(x) <= STRIPE:
        return torch.addmm(x, x, x, beta=beta, alpha=alpha) if beta else x @ x.T
    whole = x.new_empty(len(x), len(x))
    for rows in parts(len(x), STRIPE):
        some, others, lower = x[rows], x[: rows.stop].T, whole[rows, : rows.stop]
        lower.copy_(torch.addmm(some[:, : rows.stop], some, others, beta=beta, alpha=alpha) if beta else some @ others)
        whole[: rows.start, rows] = lower[:, : rows.start].T
    return whole


class MuonAndAdamW:
    """Two optimizers that look like one: the same groups, state and calls."""

    def __init__(self, muon: Muon, adamw: torch.optim.AdamW) -> None:
        self._both = (muon, adamw)
        adamw.state = self.state = muon.state  # parameters are keys, and none belongs to both

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self._both for group in optimizer.param_groups]

    def step(self) -> None:
        for optimizer in self._both:
            optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self._both:
            optimizer.zero_grad(set_to_none)


Optimizer = torch.optim.AdamW | MuonAndAdamW


def make_optimizer(module: nn.Module, t: TrainConfig) -> Optimizer:
    """Return the optimizer that train.optimizer names, on what is trained. Linear layers have weight decay. Norms do
    not, and neither do lm_head and an embedding, which begin as the target's rows and should stay near them."""
    trained = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    maps = {n: p for n, p in trained.items() if p.dim() == 2 and not set(NOT_MAPS) & set(n.split("."))}
    assert t.lr is not None  # `prepare` sets both
    assert t.weight_decay is not None
    groups = [{"params": [p for name, p in trained.items() if name not in maps], "weight_decay": 0.0}]
    if t.optimizer == "adamw":
        groups.insert(0, {"params": list(maps.values()), "weight_decay": t.weight_decay})
    adamw = torch.optim.AdamW(groups, lr=t.lr, betas=(t.betas[0], t.betas[1]), fused=True)
    if t.optimizer == "adamw":
        return adamw
    dtype = torch.bfloat16 if t.precision == "bf16" else torch.float32
    return MuonAndAdamW(Muon(maps.values(), t.lr, t.weight_decay, dtype), adamw)
