"""The launch profiles of configs/accelerate, and the memory that each takes on a device.

Read off train/parallel.py, DeepSpeed 0.19.8 (runtime/zero/stage_1_and_2.py, stage3.py, partition_parameters.py) and
torch's FSDP2 (distributed/fsdp/_fully_shard). Weights, gradients, moments and their flat copies are all fp32. What is
there all the time is exact but for some padding; buffers that come and go are upper bounds.

P trained parameters, F frozen ones of the drafter, L the largest of its tensors, W devices, B elements of DeepSpeed's
reduce bucket.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from eagle31_train.planning.footprint import FP32, Activations

BUCKET = 500_000_000  # DeepSpeed's own reduce_bucket_size
GROUP = 1_000_000_000  # and sub_group_size: what ZeRO-3 updates together


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
class Buffers:
    """DeepSpeed's: elements of a reduce bucket, whether there are two, and what is updated together."""

    bucket: int = BUCKET
    overlap: bool = False
    group: int = GROUP


def read_buffers(file: Path) -> Buffers:
    """From one of configs/deepspeed; DeepSpeed's defaults where it says nothing, or `auto`."""
    settings = json.loads(file.read_text(encoding="utf-8"))["zero_optimization"]
    numbers = {name: value for name, value in settings.items() if value != "auto"}
    return Buffers(
        int(numbers.get("reduce_bucket_size", BUCKET)),
        bool(numbers.get("overlap_comm", settings["stage"] == 3)),
        int(numbers.get("sub_group_size", GROUP)),
    )


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
        return max(sum(_touched(group, parts, part) for group in self.groups) for part in range(parts))


def _touched(group: Sequence[int], parts: int, part: int) -> int:
    size = math.ceil(sum(group) / (2 * parts)) * 2  # DeepSpeed aligns the whole group to two elements a part
    begin, end, at, found = part * size, (part + 1) * size, 0, 0
    for numel in group:
        found += numel if at < end and at + numel > begin else 0
        at += numel
    return found


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
    comes. buffers: DeepSpeed's. accumulates: a step has several micro-batches.
    """

    state: State
    devices: int
    target: float
    micro: Activations
    batch: float
    buffers: Buffers = Buffers()
    accumulates: bool = False

    @property
    def whole(self) -> float:
        """Bytes of fp32 values of all trained parameters."""
        return FP32 * self.state.trained

    @property
    def part(self) -> float:
        """Of a device's share of them."""
        return self.whole / self.devices

    @property
    def gathered(self) -> float:
        """Of all parameters, frozen ones too."""
        return FP32 * (self.state.trained + self.state.frozen)

    @property
    def largest(self) -> float:
        """Of the largest tensor."""
        return FP32 * max(size for group in self.state.groups for size in group)

    @property
    def bucket(self) -> float:
        """Of DeepSpeed's reduce bucket."""
        return FP32 * self.buffers.bucket

    @property
    def flat(self) -> float:
        """Of what is flattened once more to be sent: what is in the bucket, or a tensor that is larger."""
        return self.largest if self.largest > self.bucket else min(self.bucket, self.whole)


def memory(profile: Profile, setting: Setting) -> Memory:
    """Of one device under a profile."""
    if profile.deepspeed:
        return _zero3(profile, setting) if profile.stage == 3 else _zero12(profile, setting)
    return _fsdp2(setting) if profile.stage == 3 else _replicated(profile, setting)


def _replicated(profile: Profile, s: Setting) -> Memory:
    """One process, or DDP, whose buckets hold the gradients."""
    return Memory(
        weights=s.gathered,
        moments=FP32 * s.state.moments,
        copies=s.whole if profile.several else 0,
        target=s.target,
        step=s.batch + s.micro.peak + (0 if profile.several else s.accumulates * s.whole),
        exchange=s.state.iterated + (0 if profile.several else s.whole),
    )


def _fsdp2(s: Setting) -> Memory:
    """Gathered in one buffer, which lives as long as the tensors that it is copied into; gradients likewise."""
    return Memory(
        weights=s.gathered / s.devices,
        moments=FP32 * s.state.moments / s.devices,
        copies=0,
        target=s.target,
        step=s.batch + s.micro.peak + 2 * s.gathered + s.accumulates * s.part,
        exchange=max(s.gathered + s.whole, 2 * s.whole + s.part, s.part + s.state.iterated),
    )


def _zero3(profile: Profile, s: Setting) -> Memory:
    """Gathered in one buffer, then copied into tensors; gradients go bucket by bucket.

    DeepSpeed means to update fp32 weights where they are, but compares a device with its name, and so has a copy.
    """
    return Memory(
        weights=s.gathered / s.devices,
        moments=0 if profile.offload else 2 * s.part,
        copies=s.bucket + (0 if profile.offload else 2 * s.part),  # weights, gradients
        target=s.target,
        step=s.batch + max(s.micro.after_forward + 2 * s.gathered, s.micro.peak + s.gathered),
        exchange=max(s.gathered + s.largest + s.flat, min(FP32 * s.buffers.group, s.part)),
        host=5 * s.part if profile.offload else 0,  # moments, weights, and gradients twice
    )


def _zero12(profile: Profile, s: Setting) -> Memory:
    """All weights in one flat tensor, and the part that is updated once more."""
    partial = float(FP32 * s.state.touched(s.devices))
    pending = s.bucket * (1 + s.buffers.overlap)
    if profile.stage == 1:  # all gradients, moved into the bucket one after another
        waiting, between = s.whole + max(0, s.flat - s.bucket), s.whole
    else:
        waiting, between = s.largest + s.flat, partial
    host = 0.0
    if profile.offload:
        # On the host: moments, weights, a buffer to send them, gradients; and one gradient on its way.
        host, partial, between = 5 * s.part + s.largest + s.accumulates * partial, 0.0, 0.0
    return Memory(
        weights=s.gathered,
        moments=0 if profile.offload else 2 * s.part,
        copies=s.largest if profile.offload else s.part,
        target=s.target,
        step=s.batch + s.micro.peak + s.accumulates * between,
        exchange=max(partial + waiting + pending, partial + s.part),
        host=host,
    )
