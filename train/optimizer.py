"""What updates the weights: AdamW, or Muon on the matrices and AdamW on the rest. Both are torch's own.

Muon (Jordan et al., 2024; "Muon is Scalable for LLM Training", arXiv 2502.16982) makes the momentum of a matrix
orthogonal before it is applied. Its steps are scaled to the size of AdamW's, so that train.lr means the same for both.
lm_head and an embedding, whose rows are tokens, stay with AdamW, as do norms.
"""

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import _muon

from eagle31_train.config import TrainConfig

ADAMW = ("exp_avg", "exp_avg_sq")  # its moments
MOMENTS = (*ADAMW, "momentum_buffer")  # and Muon's
BY_TOKEN = ("lm_head", "embed_tokens")
MOMENTUM = 0.95


class Muon(torch.optim.Muon):
    """torch's, with which sharded matrices become orthogonal as one process makes them so, to the bit.

    torch 2.13's own iterates on the shards: 15 exchanges a matrix, sums rounded to bf16 before they are added up, and
    an error where a matrix has fewer rows than there are ranks. Here momentum and weights stay sharded, and the
    update is gathered once, in bf16, which is what is iterated on anyway; then every rank iterates, as under DDP.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update what has a gradient."""
        if not any(isinstance(p, DTensor) for group in self.param_groups for p in group["params"]):
            return super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, parameter.grad, group)
        return None

    def _step(self, parameter: DTensor, gradient: Any, group: dict[str, Any]) -> None:
        """As torch.optim._muon._single_tensor_muon, with what is not element by element done to the whole."""
        state, lr, momentum = self.state[parameter], group["lr"], group["momentum"]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        mean = state["momentum_buffer"].lerp_(gradient, 1 - momentum)
        whole = gradient.lerp(mean, momentum).bfloat16().full_tensor()
        whole = _muon._zeropower_via_newtonschulz(whole, group["ns_coefficients"], group["ns_steps"], group["eps"])
        # Everybody has the whole, so nobody need send: src_data_rank=None.
        part = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.mul_(1 - lr * group["weight_decay"])
        parameter.add_(part, alpha=-_muon._adjust_lr(lr, group["adjust_lr_fn"], parameter.shape))


class MuonAndAdamW:
    """Two optimizers that look like one: the same groups, state and calls."""

    def __init__(self, muon: torch.optim.Muon, adamw: torch.optim.AdamW) -> None:
        self._both = (muon, adamw)
        adamw.state = self.state = muon.state  # parameters are keys, and none belongs to both

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Of both."""
        return [group for optimizer in self._both for group in optimizer.param_groups]

    def step(self) -> None:
        """Update what has a gradient."""
        for optimizer in self._both:
            optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients."""
        for optimizer in self._both:
            optimizer.zero_grad(set_to_none)


Optimizer = torch.optim.AdamW | MuonAndAdamW


def make_optimizer(module: nn.Module, t: TrainConfig) -> Optimizer:
    """The optimizer that train.optimizer names, on what is trained; matrices decay, norms do not."""
    trained = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    matrices = {n: p for n, p in trained.items() if p.dim() == 2 and not set(BY_TOKEN) & set(n.split("."))}
    rest = [p for name, p in trained.items() if t.optimizer == "adamw" or name not in matrices]
    groups = [
        {"params": [p for p in rest if p.dim() > 1], "weight_decay": t.weight_decay},
        {"params": [p for p in rest if p.dim() <= 1], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=t.lr, betas=(t.betas[0], t.betas[1]), fused=True)
    if t.optimizer == "adamw":
        return adamw
    muon = Muon(matrices.values(), t.lr, t.weight_decay, momentum=MOMENTUM, adjust_lr_fn="match_rms_adamw")
    return MuonAndAdamW(muon, adamw)
