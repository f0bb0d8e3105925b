"""How many bytes training takes on a device: a micro-batch, and the state under each profile of configs/accelerate.

Derived from the code of `model/` and train/parallel.py, DeepSpeed 0.19.8 (runtime/zero/stage_1_and_2.py, stage3.py,
partition_parameters.py) and torch's FSDP2 (distributed/fsdp/_fully_shard). Persistent state, all fp32, is exact except
for some padding; transient memory is an estimate. Tests compare both with measurements on a CPU.

Letters: A auxiliary layers, D and H hidden sizes of drafter and target, I MLP width, Vd draft vocabulary; K steps,
S slots, N tokens, C positions; P trained parameters, W devices.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from eagle31_train.checkpoint.contract import weight_shapes
from eagle31_train.config import DrafterShape
from eagle31_train.model.loss import LOGITS
from eagle31_train.model.packing import MOST_COPIES
from eagle31_train.planning.work import Widths, Work, widths

FP32 = 4
GROUP = 1_000_000_000  # DeepSpeed's own sub_group_size: elements that ZeRO-3 updates together


# ---------------------------------------------------------------- one micro-batch


@dataclass(frozen=True)
class Activations:
    copies: float  # weights in the precision of the products
    kept: float  # what waits for the backward pass
    head: float  # lm_head's gradient in fp32, computed with the loss
    loss: float  # what lives only while the loss is computed
    backward: float  # what lives only in the backward pass, gradients of `copies` included

    @property
    def after_forward(self) -> float:
        """Bytes between the forward and the backward pass."""
        return self.copies + self.kept + self.head

    @property
    def peak(self) -> float:
        """Bytes at the worse of two moments: in the loss, and early in the backward pass."""
        return self.after_forward + max(self.loss, self.backward)


@dataclass(frozen=True)
class Step:
    value: int = 2  # bytes of a value in the precision of the products
    decodes: bool = True  # the store's states are decoded to that precision on the device
    recompute: bool = False
    train_lm_head: bool = True
    lk: bool = False
    logits: tuple[int, int] = LOGITS["other"]  # how many are alive at once; default: a GPU's plain kernels
    flash: bool = True  # attention is CUDA's flash kernel in 16 bits
    context: int = 1  # ranks that share the conversations, train.context_parallel


def activations(shape: DrafterShape, work: Work, step: Step) -> Activations:
    """Return the bytes of one micro-batch. work: what all ranks that share it have to do for it."""
    if step.context > 1:
        # A rank has two pieces of a conversation, which cut two stretches, halfway on average.
        work = replace(work * (1 / step.context), copies=work.copies / step.context + work.positions)
    w, value, low = widths(shape), step.value, step.value < FP32
    sizes = matrices(shape)
    head = sizes.pop("lm_head.weight")
    sizes.pop("embed_tokens.weight", None)
    # The state's half of the first projections is copied into one piece. With bf16 every matrix has a copy, except
    # those with which work is recomputed.
    entering = shape.hidden_size * (w.query_in + w.key_in)
    everything = sum(sizes.values())
    fused = sizes["fc.weight"] * shape.norms_states  # without a norm no gradient goes back through fc
    cast = 2 * entering + fused if step.recompute else everything - sizes["fc.weight"] + fused
    S, K = work.slots[0], work.ttt_length
    outputs = S * K * shape.hidden_size
    keep = _kept_recomputing if step.recompute else _kept
    return Activations(
        copies=value * (entering + low * cast),
        kept=keep(shape, w, work, step) + value * outputs,  # the outputs, later their gradient instead
        head=FP32 * head * step.train_lm_head,
        loss=value * low * (head + everything - cast) + _loss(shape, work, step),
        backward=value * (everything + _backward(shape, w, work, step)),
    )


def matrices(shape: DrafterShape) -> dict[str, int]:
    return {name: math.prod(size) for name, size in weight_shapes(shape).items() if len(size) > 1}


def _loss(shape: DrafterShape, work: Work, step: Step) -> float:
    """Return the bytes of the loss while a block of logits is alive.

    Throughout: states and logits of the block's pairs, in the precision of the products. While divergences are
    computed: logits of the positions that teach them, in that precision, and p in fp32; of a part of the pairs, in
    fp32: logits (with bf16), log q, the teacher's rows of p, their product; three more with train.lk. After that: the
    gradient of the states, and weighted in fp32; or, of a part of lm_head, its gradient before it is added up, and its
    factor.
    """
    pairs = sum(work.pairs)
    block = min(step.logits[0], pairs * shape.draft_vocab_size)
    teacher = block * work.targets / max(pairs, 1)
    copies = 3 + (step.value < FP32) + 3 * step.lk
    part = FP32 * copies * min(step.logits[1], block)
    states = block / shape.draft_vocab_size * shape.hidden_size
    head = 2 * step.value * min(step.logits[1], shape.draft_vocab_size * shape.hidden_size) * step.train_lm_head
    after = max((step.value + FP32) * states, head)
    return step.value * (block + states) + max((step.value + FP32) * teacher + part, after)


def _backward(shape: DrafterShape, w: Widths, work: Work, step: Step) -> float:
    """Return the number of values: gradients of all keys and values, plus one step's MLP (with recomputation also what
    it keeps) or one step's attention, whichever is larger."""
    S, D, inner = work.slots[0], shape.hidden_size, shape.intermediate_size
    seen = work.positions * step.context  # the step-0 keys that a device holds
    keys = shape.num_layers * (w.keys + w.values) * (seen + S * (work.ttt_length - 1))
    mlp = S * (4 * D + 6 * inner if step.recompute else 3 * inner)
    return keys + max(mlp, _flash(shape, w, work, seen) if step.flash and step.value < FP32 else 0)


def _flash(shape: DrafterShape, w: Widths, work: Work, seen: float) -> float:
    """Return the values while CUDA's flash kernel computes attention's gradient, with `seen` keys; fp32 counts twice.

    Inside the kernel, all are as wide as the wider of key and value: copies of keys and values; the gradients of both,
    once more for every query head if heads share keys; the queries' gradient, in fp32 too; padded inputs and outputs.
    After it, with copies, these gradients remain, and those of the keys twice in fp32. Slots too scattered for copies
    are placed among all positions instead.
    """
    h, g = w.heads, shape.num_key_value_heads
    key, value = w.keys // g, w.values // g
    width, copied = max(key, value), seen < work.copies <= MOST_COPIES * seen
    spread = work.copies > MOST_COPIES * seen
    copies, rows = work.copies if copied else seen, seen if spread else work.slots[0]
    gradients = copies * 2 * g * width + rows * h * width
    inside = copied * copies * 2 * g * width + (g != h) * copies * 2 * h * width
    inside += rows * h * width * (2 + 2 * (value < width or spread) + (key < width or spread))
    return gradients + max(inside, copied * 2 * 2 * seen * g * max(key, value))


def _kept(shape: DrafterShape, w: Widths, work: Work, step: Step) -> float:
    """Return the bytes that autograd keeps of the K steps; `numbers` are fp32, `values` have `step.value` bytes each.

    Each layer has its norm, keys and values. At step 0, layers below the last process every position, not the slots.
    """
    D, S, K, L, rows = shape.hidden_size, work.slots[0], work.ttt_length, shape.num_layers, _rows(shape, work)
    # Key, value, what RoPE keeps; for MLA also what both come from, and the normed latent.
    key = w.keys + w.values + w.rope + (w.key_in + w.key_up[0] if w.key_up[0] else 0)
    # Query, what RoPE keeps; for MLA also the query's latent, and that normed.
    query, latents = w.queries + w.rope + 2 * w.query_up[0], bool(w.query_up[0])
    values = work.tokens * 2 * D + work.read * D * (L == 1)  # embeddings and their norm; those that queries read
    values += work.positions * (_fused(shape, step) + D + L * key)  # fc's norms, g_0, keys
    values += work.positions * (step.context - 1) * L * (w.keys + w.values)  # keys and values of other ranks
    values += S * (K if shape.norm_output and not shape.parallel else 1) * D  # g_0, or z of every step
    values += rows * (2 * D + 2 * shape.intermediate_size + query + w.out)  # u, h; gate, up; attention
    values += L * S * (K - 1) * key  # a slot's own keys and values, at every step but the first
    masked = S * (K - 1) * shape.parallel  # rows of the first layer whose states and values are one shared row
    values -= masked * w.values
    numbers = work.tokens + work.positions * (_norms(shape) + L * (1 + bool(w.key_up[0])))
    numbers += rows * (2 + w.heads + latents) + S * K - masked  # norms, log-sum-exp per head; the last norm
    numbers += L * S * (K - 1) * bool(w.key_up[0])
    return step.value * values + FP32 * numbers


def _kept_recomputing(shape: DrafterShape, w: Widths, work: Work, step: Step) -> float:
    """Return the same with train.activation_checkpointing: what lies between the recomputed parts, and their inputs."""
    D, S, K, L, rows = shape.hidden_size, work.slots[0], work.ttt_length, shape.num_layers, _rows(shape, work)
    asking = work.tokens if L > 1 else work.read
    # Embeddings and their norm; the embeddings' half of the first projections.
    values = work.tokens * (2 * D + w.key_in) + work.read * (D + w.key_in) + asking * w.query_in
    values += work.positions * (_fused(shape, step) + D)  # fc's norms, g_0
    values += work.positions * step.context * L * (w.keys + w.values)
    values += S * K * D * shape.norm_before_residual + rows * (D + w.queries + w.out)  # state, query, output
    values += L * S * (K - 1) * (w.keys + w.values)
    masked = S * (K - 1) * shape.parallel  # as in `_kept`
    values -= masked * (D + w.values + D * shape.norm_before_residual)
    numbers = work.tokens + work.positions * _norms(shape) + rows * (w.heads + 2)  # log-sum-exp per head, and position
    return step.value * values + FP32 * numbers


def _norms(shape: DrafterShape) -> int:
    """Return how many fp32 numbers per position the norms before fc keep."""
    return len(shape.aux_layers) * shape.fc_norm + shape.norm_before_fc


def _rows(shape: DrafterShape, work: Work) -> float:
    """Return the rows that pass through the layers, counted once per layer: slots at every step but, in layers below
    the last, every position at step 0."""
    S, K = work.slots[0], work.ttt_length
    return S * K + (shape.num_layers - 1) * (work.positions + S * (K - 1))


def _fused(shape: DrafterShape, step: Step) -> float:
    """Return the values per position that are kept for the gradients of fc and of the norms before it."""
    wide = len(shape.aux_layers) * shape.target_hidden_size
    # Undecoded states are counted with the batch. Decoded ones are kept; with norm_before_fc, its input and output.
    return wide * ((step.decodes or shape.norm_before_fc) + shape.norm_before_fc)


# ---------------------------------------------------------------- the state, and a step, under a launch profile


@dataclass(frozen=True)
class Profile:
    """A launch profile: the name of its file in configs/accelerate, and what it shards."""

    name: str
    stage: int = 0  # 1: moments are sharded, 2: gradients too, 3: weights too
    several: bool = True

    @property
    def deepspeed(self) -> bool:
        """Whether it uses DeepSpeed, with settings of this name in configs/deepspeed."""
        return self.name.startswith("zero")

    @property
    def offload(self) -> bool:
        """Whether moments and the update are in the host's memory."""
        return self.name.endswith("offload")


STAGES = {"ddp": 0, "zero1": 1, "zero2": 2, "zero2_offload": 2, "fsdp2": 3, "zero3": 3, "zero3_offload": 3}
PROFILES = (Profile("gpu", several=False), *(Profile(name, stage) for name, stage in STAGES.items()))


@dataclass(frozen=True)
class State:
    groups: Sequence[Sequence[int]]  # parameters of each tensor in the order of the optimizer's groups
    frozen: int = 0  # parameters
    orthogonal: Sequence[tuple[int, int]] = ()  # sizes of the matrices that Muon updates

    @property
    def trained(self) -> int:
        """P."""
        return sum(map(sum, self.groups))

    @property
    def moments(self) -> int:
        """Values that the optimizer keeps: AdamW two for each parameter, Muon one."""
        return 2 * self.trained - sum(map(math.prod, self.orthogonal))

    def iterated(self, devices: int) -> float:
        """Return the bytes while Newton-Schulz iterates on the largest matrix [m, n], m <= n: the momentum in fp32; in
        bf16 the iterate and the next one, two products [m, m], and the result of each device's last matrix."""
        sizes = sorted(((min(size), max(size)) for size in self.orthogonal), key=math.prod, reverse=True)
        largest = max((FP32 * m * n + 2 * (2 * m * n + 2 * m * m) for m, n in sizes), default=0.0)
        return largest + 2 * sum(map(math.prod, sizes[:devices]))

    def touched(self, parts: int) -> int:
        """Return the parameters of all tensors that a device's part overlaps, for the device with most. ZeRO-2 cuts
        each group, end to end, into `parts`; a device keeps the whole gradient of every tensor that overlaps its part.
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
    """Bytes on one device. The first four are persistent."""

    weights: float
    moments: float
    copies: float  # flat copies of weights or gradients, and buckets
    target: float  # the target's frozen pieces
    step: float  # at the worst moment of a micro-batch's forward and backward pass
    exchange: float  # while gradients are exchanged and the update is made
    host: float = 0.0  # host memory of this process

    @property
    def held(self) -> float:
        """Bytes between two steps."""
        return self.weights + self.moments + self.copies + self.target

    @property
    def peak(self) -> float:
        """Bytes at the worst moment."""
        return self.held + max(self.step, self.exchange)


def memory(
    profile: Profile,
    state: State,
    devices: int,
    target: float,
    micro: Activations,
    batch: float,
    bucket: int = 0,
    overlap: bool = False,
    accumulates: bool = False,
) -> Memory:
    """Return the memory of one device under a profile.

    Args:
        devices: W. target: bytes of the target's pieces.
        micro, batch: bytes of one micro-batch: its activations, and the batch as loaded.
        bucket: elements of DeepSpeed's reduce bucket. overlap: whether there are two.
        accumulates: a step has several micro-batches.
    """
    whole, frozen, bucket = FP32 * state.trained, FP32 * state.frozen, FP32 * bucket
    gathered, part, largest = whole + frozen, whole / devices, FP32 * max(map(max, state.groups))
    moments, passes = float(FP32 * state.moments), batch + micro.peak
    if profile.stage == 0:
        gradients = 0 if profile.several else whole  # DDP's are in its buckets, among the copies
        exchange = state.iterated(devices) + gradients
        return Memory(gathered, moments, whole - gradients, target, passes + accumulates * gradients, exchange)
    if not profile.deepspeed:
        # FSDP2 gathers into one buffer, which lives as long as the tensors copied from it; the same for gradients.
        step = passes + 2 * gathered + accumulates * part
        exchange = max(gathered + whole, 2 * whole + part, part + state.iterated(devices))
        return Memory(gathered / devices, moments / devices, 0.0, target, step, exchange)
    flat = largest if largest > bucket else min(bucket, whole)  # flattened once more to be sent
    if profile.stage == 3:
        # Weights are gathered into one buffer, then copied into tensors; gradients go bucket by bucket. DeepSpeed means
        # to update fp32 weights in place, but compares a device with its name, and so makes a copy.
        moments = 0.0 if profile.offload else 2 * part
        step = batch + max(micro.after_forward + 2 * gathered, micro.peak + gathered)
        exchange = max(gathered + largest + flat, min(FP32 * GROUP, part))
        host = 5 * part * profile.offload  # moments, weights, and gradients twice
        return Memory(gathered / devices, moments, bucket + moments, target, step, exchange, host)
    # ZeRO-1 and 2: all weights in one flat tensor, and a second copy of the part that is updated.
    partial, buckets = FP32 * state.touched(devices), bucket * (1 + overlap)
    if profile.offload:
        # On the host: moments, weights, a buffer to send them, gradients; and one gradient in transit.
        host = 5 * part + largest + accumulates * partial
        return Memory(gathered, 0.0, largest, target, passes, max(largest + flat + buckets, part), host)
    if profile.stage == 1:  # all gradients, moved into the bucket one after another
        waiting, between = whole + max(0, flat - bucket), whole
    else:
        waiting, between = largest + flat, partial
    exchange = partial + max(waiting + buckets, part)
    return Memory(gathered, 2 * part, part, target, passes + accumulates * between, exchange)
