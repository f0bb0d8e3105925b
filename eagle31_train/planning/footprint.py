"""How many bytes a training step takes on a device: what autograd keeps of a micro-batch, and the state it updates.

Written off the code of `drafter/`, `loss.py` and `train/parallel.py`, and of DeepSpeed 0.19.8
(runtime/zero/stage_1_and_2.py, stage3.py) and torch's FSDP2. State that is there all the time is exact; what comes
and goes is an estimate: allocators, attention kernels and compilers take some more. Tests hold both against
measurements on a CPU.

Letters: A auxiliary layers, D and H hidden sizes of drafter and target, I MLP width, Vd draft vocabulary; K steps,
S slots, N tokens, C positions.
"""

import math
from dataclasses import dataclass

from eagle31_train.checkpoint.contract import weight_shapes
from eagle31_train.config import DrafterShape
from eagle31_train.planning.work import Widths, Work, widths

MOST_COPIES = 8.0  # of the keys for attention on a GPU: make_segments of drafter/packing.py
LOGITS = (2**28, 2**26)  # loss.LOGITS on a GPU: in one matrix product, and while probabilities are worked out
FP32 = 4


# ---------------------------------------------------------------- one micro-batch


@dataclass(frozen=True)
class Activations:
    """Bytes on the device while one micro-batch is worked out.

    copies: weights in the precision of the products. kept: what waits for the backward pass. head: lm_head's
    gradient in fp32, worked out with the loss. loss: what lives only while the loss is worked out. backward: what
    lives only in the backward pass, gradients of `copies` included.
    """

    copies: float
    kept: float
    head: float
    loss: float
    backward: float

    @property
    def after_forward(self) -> float:
        """What is there between the forward and the backward pass."""
        return self.copies + self.kept + self.head

    @property
    def peak(self) -> float:
        """At the worse of two moments: in the loss, and early in the backward pass."""
        return self.after_forward + max(self.loss, self.backward)


@dataclass(frozen=True)
class Step:
    """How a step is worked out.

    value: bytes of a value in the precision of the products, 2 with bf16 and 4 with fp32. decodes: the store's
    states are made values of that precision on the device, where bf16 ones are used as they came. logits: how many
    are alive at once, see LOGITS. flash: attention is CUDA's flash kernel in 16 bits. The others are options of train
    and drafter.
    """

    value: int = 2
    decodes: bool = True
    recompute: bool = False
    train_lm_head: bool = True
    lk: bool = False
    logits: tuple[int, int] = LOGITS
    flash: bool = True


def activations(shape: DrafterShape, work: Work, step: Step) -> Activations:
    """Of one micro-batch; `work` is what there is to do for it."""
    w, value, low = widths(shape), step.value, step.value < FP32
    sizes = matrices(shape)
    head = sizes.pop("lm_head.weight")
    sizes.pop("embed_tokens.weight", None)
    # The state's half of the first projections is copied into one piece. With bf16 there is a copy of every matrix,
    # but of those that work is repeated with.
    entering = shape.hidden_size * (w.query_in + w.key_in)
    everything = sum(sizes.values())
    fused = sizes["fc.weight"] * (shape.fc_norm or shape.norm_before_fc)  # without one nothing goes back through fc
    cast = 2 * entering + fused if step.recompute else everything - sizes["fc.weight"] + fused
    S, K = work.slots[0], work.ttt_length
    outputs = S * K * shape.hidden_size
    keep = _kept_recomputing if step.recompute else _kept
    return Activations(
        copies=value * (entering + low * cast),
        kept=keep(shape, w, work, step) + value * outputs,  # and the outputs' gradient, which the loss leaves
        head=FP32 * head * step.train_lm_head,
        loss=value * (outputs + low * (head + everything - cast)) + _loss(shape, work, step),
        backward=value * (everything + _backward(shape, w, work, step)),
    )


def matrices(shape: DrafterShape) -> dict[str, int]:
    """Parameters of each matrix of a drafter."""
    return {name: math.prod(size) for name, size in weight_shapes(shape).items() if len(size) > 1}


def _loss(shape: DrafterShape, work: Work, step: Step) -> float:
    """Bytes of logits while a block of them is alive.

    Of the block's pairs, logits in the precision of the products; of the positions that teach them, log p and p in
    fp32; of a part of the pairs, in fp32: logits (with bf16), log q, the teacher's rows of p, their product; three
    more with train.lk. After that, of a part of lm_head, its gradient before it is added up, and its factor.
    """
    pairs = sum(work.pairs)
    block = min(step.logits[0], pairs * shape.draft_vocab_size)
    teacher = block * work.taught / max(pairs, 1)
    copies = 3 + (step.value < FP32) + 3 * step.lk
    part = FP32 * copies * min(step.logits[1], block)
    head = 2 * step.value * min(step.logits[1], shape.draft_vocab_size * shape.hidden_size) * step.train_lm_head
    return step.value * block + FP32 * 2 * teacher + max(part, head)


def _backward(shape: DrafterShape, w: Widths, work: Work, step: Step) -> float:
    """Values: gradients of all keys and values, and of one step's MLP, with recomputation also what that keeps; or of
    one step's attention."""
    S, D, inner = work.slots[0], shape.hidden_size, shape.intermediate_size
    keys = shape.num_layers * (w.keys + w.values) * (work.positions + S * (work.ttt_length - 1))
    mlp = S * (4 * D + 6 * inner if step.recompute else inner)
    return keys + max(mlp, _flash(shape, w, work) if step.flash and step.value < FP32 else 0)


def _flash(shape: DrafterShape, w: Widths, work: Work) -> float:
    """Values while attention's gradient is worked out by CUDA's flash kernel; an fp32 number is two.

    In the kernel, all as wide as the wider of a key and a value: copies of keys and values and the gradients of both,
    where heads share keys once more for every query head; of the queries gradient (in fp32 too), and padded what
    comes and goes. After it, with copies, still these gradients, and those of the keys twice in fp32. Slots too
    scattered for copies stand among all positions instead.
    """
    h, g = w.heads, shape.num_key_value_heads
    key, value = w.keys // g, w.values // g
    width, copied = max(key, value), work.positions < work.copies <= MOST_COPIES * work.positions
    spread = work.copies > MOST_COPIES * work.positions
    copies, rows = work.copies if copied else work.positions, work.positions if spread else work.slots[0]
    gradients = copies * 2 * g * width + rows * h * width
    inside = copied * copies * 2 * g * width + (g != h) * copies * 2 * h * width
    inside += rows * h * width * (2 + 2 * (value < width or spread) + (key < width or spread))
    return gradients + max(inside, copied * 2 * 2 * work.positions * g * max(key, value))


def _kept(shape: DrafterShape, w: Widths, work: Work, step: Step) -> float:
    """Bytes that autograd keeps of the drafter's K steps.

    | per | values | fp32 numbers |
    | --- | --- | --- |
    | token | embedding, its norm: 2D | 1 of the norm |
    | token read | its normed embedding: D | |
    | position | what goes into fc: A·H, and with fc_norm into that, if it had to be decoded: A·H; g_0 and its norm:
      2D; RoPE's sines and cosines; key, value; of MLA what both come from, and its latent normed | A + 1 |
    | slot | g_0: D | |
    | slot-step | normed state, u, normed u, h: 4D, with norm_output the state, which is z: 5D; gate, up and their
      product: 3I; query, RoPE's, attention's output; of MLA the query's latent, and that normed | 3, and attention's
      log-sum-exp per head |
    | slot-step but the first | its own key and value, RoPE's, of MLA as above | |

    Of several layers each has its norm, keys and values; those below the last take every position for the slots of
    step 0. With norm_before_fc what goes into fc is kept before and after it.
    """
    D, A = shape.hidden_size, len(shape.aux_layers)
    S, K, L, rows = work.slots[0], work.ttt_length, shape.num_layers, _rows(shape, work)
    latents = w.key_in + w.key_up[0] if w.key_up[0] else 0
    key, key_numbers = w.keys + w.values + w.rope + latents, bool(w.key_up[0])
    query, query_numbers = w.queries + w.rope + 2 * w.query_up[0], bool(w.query_up[0])
    states = K if shape.norm_output else 1
    values = work.tokens * 2 * D + work.read * D
    values += work.positions * (_fused(shape, step) + D + L * (D + key))
    values += S * states * D + rows * (4 * D + 3 * shape.intermediate_size + query + w.out) + L * S * (K - 1) * key
    numbers = work.tokens + work.positions * (A * shape.fc_norm + shape.norm_before_fc + L * (1 + key_numbers))
    numbers += rows * (3 + w.heads + query_numbers) + L * S * (K - 1) * key_numbers
    return step.value * values + FP32 * numbers


def _kept_recomputing(shape: DrafterShape, w: Widths, work: Work, step: Step) -> float:
    """Likewise with train.activation_checkpointing: what is between the parts worked out again, and what these read.

    | per | values | fp32 numbers |
    | --- | --- | --- |
    | token | embedding, its norm: 2D; its half of the first projection of keys and values | 1 of the norm |
    | token read | normed embedding: D; its half of the first projections | |
    | position | as without, but for the norm of g_0, RoPE's and what is inside MLA | A |
    | slot-step | state: D (with norm_before_residual the normed one too); query; attention's output | log-sum-exp per
      head, and the position: two |
    | slot-step but the first | its own key and value | |
    """
    D, A = shape.hidden_size, len(shape.aux_layers)
    S, K, L, rows = work.slots[0], work.ttt_length, shape.num_layers, _rows(shape, work)
    asking = work.tokens if L > 1 else work.read
    values = work.tokens * (2 * D + w.key_in) + work.read * (D + w.key_in) + asking * w.query_in
    values += work.positions * (_fused(shape, step) + D + L * (w.keys + w.values))
    values += S * K * D * shape.norm_before_residual + rows * (D + w.queries + w.out)
    values += L * S * (K - 1) * (w.keys + w.values)
    numbers = work.tokens + work.positions * (A * shape.fc_norm + shape.norm_before_fc) + rows * (w.heads + 2)
    return step.value * values + FP32 * numbers


def _rows(shape: DrafterShape, work: Work) -> float:
    """Rows that pass through the layers, counted once for each: slots at every step, in the layers below the last at
    step 0 every position."""
    S, K = work.slots[0], work.ttt_length
    return S * K + (shape.num_layers - 1) * (work.positions + S * (K - 1))


def _fused(shape: DrafterShape, step: Step) -> float:
    """Values of a position that wait for the gradient of fc and of the norms before it."""
    wide = len(shape.aux_layers) * shape.target_hidden_size
    return wide * (1 + shape.fc_norm * step.decodes + shape.norm_before_fc)
