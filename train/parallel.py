"""How a step is shared by devices: one process, DDP, DeepSpeed ZeRO and FSDP2, behind one interface.

    parallel = parallelise(accelerator, objective, t)
    with parallel.micro_batch(last):                      # gradients add up until the last, then over ranks
        loss, measured = parallel.model(batch, weights)   # every rank as often as every other
        parallel.backward(loss)
    norm, totals, sums = parallel.update(lr, totals, sums)  # clipped; skipped without pairs or a finite norm

Weights are fp32 in all of them, and autocast computes in bf16 (`Objective.autocast`), so that a recipe means the same
under each. `moments` and `set_moments` exchange unsharded tensors by name, whatever the sharding: any profile can
resume what another one saved.

The drafter's projections are used outside of their modules' forward passes. So ZeRO-3 and FSDP2 gather the objective as
a whole: parameters, gradients and moments are sharded between steps, and there is one full copy of the parameters
during each.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, parse_flag_from_env
from torch import Tensor, nn
from torch.distributed import new_subgroups
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from eagle31_train.config import TrainConfig
from eagle31_train.model.loss import Objective
from train.launch import PATIENCE
from train.loader import StepTotals
from train.metrics import fetch
from train.optimizer import ADAMW, MOMENTS, as_sharded, make_optimizer


def parallelise(accelerator: Accelerator, objective: Objective, t: TrainConfig) -> "Parallel":
    """Spread an objective, which has its initial weights on every rank, over the launched processes."""
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        return Zero(accelerator, objective, t)
    # On a CPU accelerate silently ignores FSDP: what the launch asked for counts.
    if parse_flag_from_env("ACCELERATE_USE_FSDP"):
        return Sharded(accelerator, objective, t)
    return Replicated(accelerator, objective, t)


class Parallel:
    """What all kinds share. objective: on the CPU, with its initial weights, the same on every rank."""

    model: Any  # called like `Objective.forward`, by every rank as often as by every other
    optimizer: Any  # from `make_optimizer`, or a wrapper around that
    kind: str  # in words, for records
    updates = 0  # optimizer steps so far

    def __init__(self, accelerator: Accelerator, objective: Objective, t: TrainConfig) -> None:
        self.accelerator, self.objective, self.t = accelerator, objective, t
        if t.context_parallel > 1:  # neighbours, as Mesh has it
            objective.drafter.context_group, _ = new_subgroups(t.context_parallel, timeout=PATIENCE)
        self._spread()

    def _spread(self) -> None:
        """Move the objective to the devices, and make model and optimizer."""
        raise NotImplementedError

    def micro_batch(self, last: bool) -> AbstractContextManager[Any]:  # noqa: ARG002 (not every kind waits for it)
        """Return a context for forward and backward pass. Gradients are exchanged in the `last` one at the latest."""
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        """Add the loss's gradient to the step's. After the last micro-batch, that is the mean over ranks."""
        loss.backward()

    def update(self, lr: float, totals: StepTotals, sums: Tensor) -> tuple[Tensor, StepTotals, Tensor]:
        """Clip, step if the step has pairs and the gradient is finite on every rank, and clear the gradients. Return
        the norm before clipping (infinite or NaN: nothing was updated), totals and sums, on the CPU after one wait."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        norm, packed, sums = fetch(self.clip(), totals.packed, sums)
        totals = StepTotals(packed)
        if torch.isfinite(norm) and totals.pairs.any():
            self.optimizer.step()
            self.updates += 1
        self.optimizer.zero_grad(set_to_none=True)
        return norm, totals, sums

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every parameter of the drafter by name, unsharded, as checkpoints hold it. Collective. A parameter is
        valid until the next one is asked for."""
        for name, whole in self._weights():
            yield name, self.objective.drafter.to_checkpoint(name, whole)

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.objective.drafter.named_parameters():
            yield name, self._whole(parameter.detach())

    def moments(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the optimizer's moments, unsharded, as `exp_avg.NAME` and so on. Collective; none before any update."""
        for name, parameter in self.objective.drafter.named_parameters():
            if state := self.optimizer.state.get(parameter):
                yield from ((f"{m}.{name}", self._whole(state[m])) for m in MOMENTS if m in state)

    def set_moments(self, moments: Mapping[str, Tensor], updates: int) -> None:
        """Resume after `updates` updates, which left these moments. Every rank passes all of them."""
        self.updates = updates
        for name, parameter in self.objective.drafter.named_parameters():
            there = {m: moments[f"{m}.{name}"] for m in MOMENTS if f"{m}.{name}" in moments}
            if there:
                state = {moment: self._part(whole, parameter) for moment, whole in there.items()}
                step = {"step": self._count(parameter.device)} if ADAMW[0] in there else {}
                self.optimizer.state[parameter] = {**step, **state}

    def differs(self) -> str | None:
        """Say which weight is not the same on all ranks, or not sharded as it should be; None if there is none."""
        if self.accelerator.num_processes == 1:
            return None
        names, parameters = zip(*self.objective.drafter.named_parameters(), strict=True)
        everyone = self.accelerator.gather(torch.stack([digest(parameter) for parameter in parameters])[None])
        assert isinstance(everyone, Tensor)
        wrong = (everyone != everyone[:1]).any(0).any(-1).nonzero()
        return f"{names[int(wrong[0])]} is not the same on all ranks" if len(wrong) else None

    def _count(self, device: torch.device) -> Tensor:
        return torch.tensor(float(self.updates), device=device)  # where fused AdamW needs it

    def clip(self) -> Tensor:
        """Clip the gradients and return their norm before clipping, on the device."""
        norm = nn.utils.clip_grad_norm_(self.objective.drafter.parameters(), self.t.max_grad_norm)
        return self._whole(norm)

    def _whole(self, tensor: Tensor) -> Tensor:
        return tensor

    def _part(self, whole: Tensor, parameter: Tensor) -> Tensor:
        """Copy this rank's part of a moment of `parameter`: the file that holds the whole moment may be removed."""
        return whole.to(parameter.device, copy=True)


class Replicated(Parallel):
    """One process, or DDP: every rank holds everything."""

    def _spread(self) -> None:
        self.optimizer = make_optimizer(self.objective, self.t)
        self.model = self.accelerator.prepare(self.objective)
        self.kind = "ddp" if self.accelerator.num_processes > 1 else "one process"

    def micro_batch(self, last: bool) -> AbstractContextManager[Any]:
        return nullcontext() if last else self.accelerator.no_sync(self.model)


class Sharded(Parallel):
    """FSDP2: every rank holds a part of each parameter, gradient and moment.

    This uses torch's own `fully_shard`, and accelerate only for the launch: accelerate's wrapper does not support CPUs,
    where this is tested.
    """

    def _spread(self) -> None:
        device = self.accelerator.device
        mesh = init_device_mesh(device.type, (self.accelerator.num_processes,))
        self.model = fully_shard(self.objective.to(device), mesh=mesh, reshard_after_forward=True)
        self.optimizer = make_optimizer(self.objective, self.t)  # of the shards
        self.kind = "fsdp2"

    def differs(self) -> str | None:
        for name, parameter in self.objective.drafter.named_parameters():
            if not isinstance(parameter, DTensor) or parameter.device_mesh.size() != self.accelerator.num_processes:
                return f"{name} is not sharded over all ranks"
        return None

    def _whole(self, tensor: Tensor) -> Tensor:
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def _part(self, whole: Tensor, parameter: Tensor) -> Tensor:
        return as_sharded(super()._part(whole, parameter), parameter)


class Zero(Parallel):
    """DeepSpeed: stage 1 shards the moments, 2 the gradients too, 3 also the parameters.

    DeepSpeed keeps fp32 parameters in flat partitions of its own, and steps on those. It clips by itself, and skips
    updates whose norm is not finite.
    """

    def _spread(self) -> None:
        from deepspeed.runtime.zero import register_external_parameter

        settings = self.accelerator.state.deepspeed_plugin.deepspeed_config
        self.stage = settings["zero_optimization"]["stage"]
        settings["gradient_clipping"] = self.t.max_grad_norm
        self.model, _ = self.accelerator.prepare(self.objective, make_optimizer(self.objective, self.t))
        self.optimizer = self.model.optimizer
        if self.stage == 3:
            # Gather all parameters with the objective, whose forward pass uses them all. With the objective as a leaf
            # module, DeepSpeed's own way to do so, gradients would be reduced before they exist, since no input of the
            # objective has a gradient.
            for parameter in self.objective.drafter.parameters():
                register_external_parameter(self.objective, parameter)
        offload = settings["zero_optimization"].get("offload_optimizer", {}).get("device", "none")
        # Make zero moments, as AdamW's first step would: after that step, DeepSpeed 0.19 lets only the first group's
        # parameters find their moments.
        partitions = "fp32_partitioned_groups_flat" if self.stage == 3 else "single_partition_of_fp32_groups"
        for part in getattr(self.optimizer, partitions):
            moments = {moment: torch.zeros_like(part.data) for moment in ADAMW}
            self.optimizer.optimizer.state[part] = {"step": self._count(part.device), **moments}
        if self.stage < 3:
            self.optimizer._lazy_init_hp_params_optimizer_state()
        self.kind = f"zero{self.stage}" + (f", moments on the {offload.upper()}" if offload != "none" else "")

    def micro_batch(self, last: bool) -> AbstractContextManager[Any]:
        self.model.set_gradient_accumulation_boundary(last)
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        self.model.backward(loss)

    def update(self, lr: float, totals: StepTotals, sums: Tensor) -> tuple[Tensor, StepTotals, Tensor]:
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        with nullcontext() if totals.pairs.any() else self._without_norm():
            self.model.step()
        if not self.optimizer.overflow:
            self.updates += 1
        norm = torch.as_tensor(self.model.get_global_grad_norm(), device=self.accelerator.device)
        norm, packed, sums = fetch(norm, totals.packed, sums)
        return norm, StepTotals(packed), sums

    @contextmanager
    def _without_norm(self) -> Iterator[None]:
        """Make DeepSpeed skip an update, and clean up after it, as if the norm were not finite."""
        name, infinite = ("_get_norm_groups", [math.inf]) if self.stage == 3 else ("scaled_global_norm", math.inf)
        setattr(self.optimizer, name, lambda: infinite)
        yield
        delattr(self.optimizer, name)

    def moments(self) -> Iterator[tuple[str, Tensor]]:
        from deepspeed.utils import safe_get_full_optimizer_state

        for name, parameter in self.objective.drafter.named_parameters() if self.updates else ():
            if parameter.requires_grad:
                yield from ((f"{m}.{name}", safe_get_full_optimizer_state(parameter, m)) for m in ADAMW)

    def set_moments(self, moments: Mapping[str, Tensor], updates: int) -> None:
        self.updates = updates
        if not moments:
            return
        for state in self.optimizer.optimizer.state.values():
            state["step"].fill_(updates)
        for name, parameter in self.objective.drafter.named_parameters():
            for moment in ADAMW if parameter.requires_grad else ():
                self._set_moment(parameter, moment, moments[f"{moment}.{name}"])

    def differs(self) -> str | None:
        if self.stage < 3:
            return super().differs()
        parameter: Any  # with DeepSpeed's own attributes
        for name, parameter in self.objective.drafter.named_parameters():
            if parameter.ds_tensor.numel() * self.accelerator.num_processes < parameter.ds_numel:
                return f"{name} is not sharded over all ranks"
        return None

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        if self.stage < 3:
            yield from super()._weights()
            return
        from deepspeed.runtime.zero import GatheredParameters

        for name, parameter in self.objective.drafter.named_parameters():
            with GatheredParameters([parameter]):
                yield name, parameter.detach()

    def _set_moment(self, parameter: Any, moment: str, whole: Tensor) -> None:
        from deepspeed.utils import safe_set_full_optimizer_state, safe_set_local_optimizer_state

        if self.stage < 3:
            safe_set_full_optimizer_state(parameter, whole.to(parameter.device), moment)
            return
        size, rank = parameter.ds_tensor.ds_numel, self.accelerator.process_index
        part = whole.flatten()[size * rank : size * (rank + 1)]  # the last ranks may have less than a part, or none
        safe_set_local_optimizer_state(parameter, nn.functional.pad(part, (0, size - len(part))), moment)


def digest(tensor: Tensor) -> Tensor:
    """Return sum and sum of squares of a tensor's bits, [2] int64, on its device. They round no difference away."""
    sums = torch.zeros(2, dtype=torch.int64, device=tensor.device)
    for part in tensor.detach().reshape(-1).view(torch.int32).split(1 << 24):  # all of it as int64 would be too large
        bits = part.long()
        sums += torch.stack([bits.sum(), (bits * bits).sum()])
    return sums
