"""The launch profiles of configs/accelerate, and the memory that each takes on a device.

Read off train/parallel.py, DeepSpeed 0.19.8 (runtime/zero/stage_1_and_2.py, stage3.py, partition_parameters.py) and
torch's FSDP2 (distributed/fsdp/_fully_shard). Weights, gradients, moments and their flat copies are all fp32. What is
there all the time is exact but for some padding; buffers that come and go are upper bounds.

P trained parameters, F frozen ones of the drafter, L the largest of its tensors, W devices, B elements of DeepSpeed's
reduce bucket.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from eagle31_train.planning.footprint import FP32, Activations

GROUP = 1_000_000_000  # DeepSpeed's own sub_group_size: elements that ZeRO-3 updates together


@dataclass(frozen=True)
class Profile:
    """One of configs/accelerate, by its file's name, and what it shards."""

    name: str
    stage: int = 0  # 1: moments are sharded, 2: gradients too, 3: weights too
    several: bool = True

    @property
    def deepspeed(self) -> bool:
        """Whether it is DeepSpeed's, with settings of this name in configs/deepspeed."""
        return self.name.startswith("zero")

    @property
    def offload(self) -> bool:
        """Whether moments and the update are in the host's memory."""
        return self.name.endswith("offload")

    def takes(self, optimizer: str) -> bool:
        """Whether train.optimizer may be this: Muon needs whole matrices, which DeepSpeed cuts up."""
        return optimizer != "muon" or not self.deepspeed


STAGES = {"ddp": 0, "zero1": 1, "zero2": 2, "zero2_offload": 2, "fsdp2": 3, "zero3": 3, "zero3_offload": 3}
PROFILES = (Profile("gpu", several=False), *(Profile(name, stage) for name, stage in STAGES.items()))


@dataclass(frozen=True)
class State:
    """What is trained: parameters of each tensor in the order of the optimizer's groups, and frozen parameters.

    orthogonal: sizes of the matrices, among those, that Muon updates; none with AdamW.
    """

    groups: Sequence[Sequence[int]]
    frozen: int = 0
    orthogonal: Sequence[tuple[int, int]] = ()

    @property
    def trained(self) -> int:
        """P."""
        return sum(map(sum, self.groups))

    @property
    def moments(self) -> int:
        """Values that the optimizer keeps: AdamW two for each parameter, Muon one."""
        return 2 * self.trained - sum(map(math.prod, self.orthogonal))

    @property
    def iterated(self) -> float:
        """Bytes while Newton-Schulz iterates on the largest matrix [m, n], m <= n; see `work.newton_schulz_flops`.

        The momentum in fp32; in bf16 the iterate and the next one, and two products [m, m].
        """
        sizes = [(min(size), max(size)) for size in self.orthogonal]
        return max((FP32 * m * n + 2 * (2 * m * n + 2 * m * m) for m, n in sizes), default=0.0)

    def touched(self, parts: int) -> int:
        """Parameters of whole tensors that a device's part lies in, of the device with most.

        ZeRO-2 cuts each group, end to end, into `parts`, and keeps the gradient of every tensor that begins, ends or
        lies in its part as a whole.
        """
        totals = [0] * parts
        for group in self.groups:
            size = math.ceil(sum(group) / (2 * parts)) * 2  # DeepSpeed aligns the whole group to two elements a part
            for numel, end in zip(group, accumulate(group), strict=True):
                for part in range((end - numel) // size, math.ceil(end / size)):
                    totals[part] += numel
        return max(totals)


@dataclass(frozen=True)
class Memory:
    """Bytes on one device. The first four are there all the time.

    weights, moments: its share, or all. copies: flat copies of weights or gradients, and buckets. target: the
    target's frozen pieces. step: at the worst moment of a micro-batch's forward and backward pass. exchange: when
    gradients go over the devices and the update is made. host: in the memory of the machine, for this process.
    """

    weights: float
    moments: float
    copies: float
    target: float
    step: float
    exchange: float
    host: float = 0.0

    @property
    def held(self) -> float:
        """Between two steps."""
        return self.weights + self.moments + self.copies + self.target

    @property
    def peak(self) -> float:
        """At the worst moment."""
        return self.held + max(self.step, self.exchange)


@dataclass(frozen=True)
class Setting:
    """What the memory of a profile depends on.

    devices: W. target: bytes of the target's pieces. micro, batch: bytes of one micro-batch, worked out and as it
    comes. bucket: elements of DeepSpeed's reduce bucket. overlap: whether there are two. accumulates: a step has
    several micro-batches.
    """

    state: State
    devices: int
    target: float
    micro: Activations
    batch: float
    bucket: int = 0
    overlap: bool = False
    accumulates: bool = False


def memory(profile: Profile, s: Setting) -> Memory:
    """Of one device under a profile."""
    whole, frozen, bucket = (FP32 * count for count in (s.state.trained, s.state.frozen, s.bucket))
    gathered, part, largest = whole + frozen, whole / s.devices, FP32 * max(map(max, s.state.groups))
    flat = largest if largest > bucket else min(bucket, whole)  # flattened once more to be sent
    step = s.batch + s.micro.peak
    if not profile.stage:  # one process, or DDP, whose buckets hold the gradients
        copies, own = (whole, 0) if profile.several else (0, whole)
        moments, exchange = FP32 * s.state.moments, s.state.iterated + own
        return Memory(gathered, moments, copies, s.target, step + s.accumulates * own, exchange)
    if not profile.deepspeed:
        # FSDP2 gathers in one buffer, which lives as long as the tensors that it is copied into; gradients likewise.
        step += 2 * gathered + s.accumulates * part
        exchange = max(gathered + whole, 2 * whole + part, part + s.state.iterated)
        return Memory(gathered / s.devices, FP32 * s.state.moments / s.devices, 0, s.target, step, exchange)
    sharded = 0.0 if profile.offload else 2 * part
    if profile.stage == 3:
        # Gathered in one buffer, then copied into tensors; gradients go bucket by bucket. DeepSpeed means to update
        # fp32 weights where they are, but compares a device with its name, and so has a copy.
        step = s.batch + max(s.micro.after_forward + 2 * gathered, s.micro.peak + gathered)
        exchange = max(gathered + largest + flat, min(FP32 * GROUP, part))
        host = 5 * part if profile.offload else 0  # moments, weights, and gradients twice
        return Memory(gathered / s.devices, sharded, bucket + sharded, s.target, step, exchange, host)
    # ZeRO-1 and 2: all weights in one flat tensor, and the part that is updated once more.
    host, partial = 0.0, float(FP32 * s.state.touched(s.devices))
    if profile.stage == 1:  # all gradients, moved into the bucket one after another
        waiting, between = whole + max(0, flat - bucket), float(whole)
    else:
        waiting, between = largest + flat, partial
    if profile.offload:
        # On the host: moments, weights, a buffer to send them, gradients; and one gradient on its way.
        host, partial, between = 5 * part + largest + s.accumulates * partial, 0.0, 0.0
    step += s.accumulates * between
    exchange = max(partial + waiting + bucket * (1 + s.overlap), partial + part)
    return Memory(gathered, sharded, largest if profile.offload else part, s.target, step, exchange, host)
