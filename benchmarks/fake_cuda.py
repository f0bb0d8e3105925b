"""Run the training step on fake CUDA tensors, and count what it asks of the device. Needs no GPU, but a C++ compiler.

    fake_cuda.enter()                                 # first of all: it restarts the process, with the device
    step = FakeStep(shape, masks, Options(...))       # weights and batch of any size: no tensor has memory
    count = step.run()                                # a whole step; raises where a real one could not run

Fake tensors have only device, dtype and shape, which torch derives for every result as on a GPU. So an operator that
does not accept its arguments raises, and so does reading a value that the host would wait for.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.shapes import GAMMA
from eagle31_train.common.transfers import each_tensor
from eagle31_train.config import DrafterShape, TrainConfig
from eagle31_train.model import context_attention, rope
from eagle31_train.model.batch import Batch, build_batch, choose_slots
from eagle31_train.model.drafter import Drafter
from eagle31_train.model.loss import Objective, Teacher
from eagle31_train.store.codec import CODECS, Encoded
from eagle31_train.store.document import Document
from train.loader import MicroBatch, StepTotals
from train.optimizer import make_optimizer
from train.step import accumulate

SOURCE = Path(__file__).with_suffix(".cpp")
ROOT = SOURCE.parent.parent
# Operators with a CUDA kernel that torch without CUDA decomposes before they can be counted.
KERNELS, IN_ONE_KERNEL = torch.library.Library("aten", "IMPL"), ("silu_backward",)
OURS = tuple(f"{ROOT / name}/" for name in ("eagle31_train", "train", "tests"))
DEVICE = torch.device("cuda", 0)


class UnavailableError(Exception):
    """Fake CUDA is not available here; the message says why."""


def build(folder: Path) -> Path:
    """Return the library, compiled for this torch into `folder` if needed; UnavailableError if that is impossible."""
    if torch.version.cuda is not None:
        raise UnavailableError("this torch is built for CUDA, whose devices are real")
    name = hashlib.sha256(SOURCE.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    library = folder / f"fake_cuda-{name}.so"
    if library.is_file():
        return library
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        raise UnavailableError("there is no C++ compiler (set CXX)")
    torch_home = Path(torch.__file__).parent
    libraries = torch_home / "lib"
    part = folder / f"{library.name}.{os.getpid()}"
    folder.mkdir(parents=True, exist_ok=True)
    words = [compiler, "-std=c++20", "-O0", "-fPIC", "-shared", str(SOURCE), "-o", str(part)]
    words += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}", f"-I{torch_home / 'include'}"]
    words += [
        f"-I{sysconfig.get_paths()['include']}",
        f"-L{libraries}",
        f"-Wl,-rpath,{libraries}",
        "-lc10",
        "-ltorch_cpu",
    ]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UnavailableError(f"{compiler} cannot build {SOURCE.name}: {done.stderr.strip().splitlines()[0]}")
    part.replace(library)
    return library


def enter(folder: Path = ROOT / "build") -> None:
    """Give this process a fake CUDA device. The first call restarts the process, with the library."""
    library = str(build(folder))
    if os.environ.get("LD_PRELOAD") != library:  # torch looks for devices only while it is imported
        os.execve(sys.executable, sys.orig_argv, {**os.environ, "LD_PRELOAD": library})
    torch.cuda.amp.common.amp_definitely_not_available = lambda: False  # otherwise autocast turns itself off
    torch.cuda.is_bf16_supported = lambda *_, **__: True
    for name in IN_ONE_KERNEL:
        KERNELS.impl(name, lambda *_: None, "CUDA")


# ---------------------------------------------------------------- what a step asks of the device

# Operators that touch no element: views of the same memory, and uninitialized memory.
VIEWS = {
    *("view", "_unsafe_view", "unsqueeze", "squeeze", "transpose", "t", "permute", "expand", "slice", "select"),
    *("split", "split_with_sizes", "unbind", "alias", "detach", "as_strided", "unflatten", "reshape", "flatten"),
    *("chunk", "narrow", "diagonal", "view_as", "_reshape_alias", "lift_fresh", "is_same_size"),
    *("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "set_", "resize_", "device"),
}
PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "linear"}
FLASH = {"_flash_attention_forward", "_flash_attention_backward"}
PICKS = {"index_select", "embedding", "gather", "index"}  # read only what they pick
PASSES = {"divergence": 2}  # our kernel → how often it reads its rows, which do not stay in a cache in between
PUTS = {"index_add_", "index_copy_", "index_put_"}  # touch only the elements that they write


@dataclass
class Sums:
    """Operators of one kind in one place: their number, bytes read and written, FLOPs of products."""

    operations: int = 0
    bytes: float = 0.0
    flops: float = 0.0

    def add(self, other: "Sums") -> None:
        self.operations += other.operations
        self.bytes += other.bytes
        self.flops += other.flops


@dataclass
class Count(TorchDispatchMode):
    """Counts every operator in its block by phase, place in our source and name; and the bytes that are alive.

    Attributes:
        phase: what the step is doing; set by the caller.
        sums: (phase, "file.py:function", operator) → Sums.
        on_host: operators on a tensor of the host, and where they are: each is a wait.
        onto_itself: where a tensor was copied onto itself, as by `x[some] += y`.
        before: bytes of memory on the device at the start: weights and the like.
        alive, peak, after_forward: bytes of what the block makes there, now, at most, and before the backward pass.
        dtypes: of floating-point tensors on the device.
    """

    phase: str = ""
    sums: dict[tuple[str, str, str], Sums] = field(default_factory=lambda: defaultdict(Sums))
    on_host: list[str] = field(default_factory=list)
    onto_itself: list[str] = field(default_factory=list)
    before: int = 0
    alive: int = 0
    peak: int = 0
    after_forward: int = 0
    dtypes: set[torch.dtype] = field(default_factory=set)
    _known: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        inputs, outputs = _tensors((args, kwargs)), _tensors(out)
        for tensor in outputs:
            self.hold(tensor)
        self.peak = max(self.peak, self.alive + flash_workspace(name, inputs))
        if name in VIEWS:
            return out
        self.dtypes |= {x.dtype for x in outputs if x.device == DEVICE and x.is_floating_point()}
        place = _place()
        queued = name == "_to_copy" and (kwargs or {}).get("non_blocking")
        if not queued and any(tensor.device != DEVICE for tensor in inputs + outputs):
            self.on_host.append(f"{name} in {place}")
        if name == "copy_" and _same_memory(*inputs[:2]):
            self.onto_itself.append(place)
        sums = Sums(1, _traffic(func, name, args, kwargs or {}, inputs, outputs), _flops(name, _tensors(args)))
        self.sums[self.phase, place, name].add(sums)
        return out

    def ignore(self, tensors: Iterable[Tensor]) -> int:
        """Leave existing memory out of what is alive; return its bytes."""
        storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
        self._known |= storages.keys()
        return sum(storage.nbytes() for storage in storages.values())

    def hold(self, tensor: Tensor) -> None:
        """Count a tensor's memory as alive for as long as it is."""
        storage = tensor.untyped_storage()
        if tensor.device != DEVICE or storage._cdata in self._known:
            return
        self._known.add(storage._cdata)
        self.alive += storage.nbytes()
        weakref.finalize(storage, self._free, storage._cdata, storage.nbytes())

    def _free(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.alive -= size

    def total(self, keep: Callable[[str, str, str], bool] = lambda *_: True) -> Sums:
        """Return the sum over all entries that `keep(phase, place, operator)` accepts."""
        total = Sums()
        for key, sums in self.sums.items():
            if keep(*key):
                total.add(sums)
        return total


def _tensors(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


def _same_memory(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata and a.storage_offset() == b.storage_offset()


def _place() -> str:
    """Return the innermost running function of ours as "file.py:function", or "torch" if there is none."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(OURS):
            return f"{Path(file).name}:{frame.f_code.co_name}"
        frame = frame.f_back
    return "torch"


def _size(tensor: Tensor) -> int:
    """Return the bytes of a tensor; expanded dimensions count once."""
    count = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= size if stride or not size else 1
    return count * tensor.element_size()


def _traffic(
    func: Any, name: str, args: tuple, kwargs: dict[str, Any], inputs: list[Tensor], outputs: list[Tensor]
) -> int:
    """Return the bytes that an operator reads and writes if it does both once."""
    if name in PICKS:
        return 2 * sum(map(_size, outputs)) + sum(_size(x) for x in inputs[1:])
    if name in PUTS:  # index_put_ may have several indices; the values come last
        return (3 if name == "index_add_" else 2) * _size(inputs[-1])
    written = {id(tensor): tensor for tensor in outputs}
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            written |= {id(tensor): tensor for tensor in _tensors(value)}
    read = 0 if name in ("fill_", "zero_") else sum(map(_size, inputs)) * PASSES.get(name, 1)
    return read + sum(map(_size, written.values()))


def _flops(name: str, inputs: list[Tensor]) -> float:
    if name not in PRODUCTS:
        return 0.0
    left, right = [x for x in inputs if x.dim() >= 2][-2:]
    return 2.0 * left.numel() * right.shape[-1]


def flash_workspace(name: str, inputs: Sequence[Tensor]) -> int:
    """Return the bytes that CUDA's flash kernel takes while it runs, from mha_varlen_bwd in torch's flash_api.cpp."""
    if name != "_flash_attention_backward":
        return 0
    _, q, k = inputs[:3]
    rows, heads, width = q.shape
    rounded = -(-width // (32 if width <= 128 else 64)) * (32 if width <= 128 else 64)
    sums = 4 * rows * heads * (rounded + 1)  # dq in fp32, and a number for every row
    return sums + (2 * 2 * len(k) * heads * width if k.shape[1] != heads else 0)  # dk and dv of every query head


# ---------------------------------------------------------------- a step


@dataclass(frozen=True)
class Options:
    """How a step is computed; names and defaults follow train.* where it has them."""

    ttt_length: int = 7
    codec: str = "bf16"
    optimizer: str = "adamw"
    precision: str = "bf16"
    loss: str = "kl"
    lk: float = 0.0
    recompute: bool = False
    train_lm_head: bool = True
    slots: int | None = None
    kernels: str = "fused"  # plain, fused, or fused+FA3: with FlashAttention 3 instead of torch's


class FakeStep:
    """A drafter of any size, a teacher, an optimizer after its first step, and a batch of documents with these loss
    masks, [T] bool each, all without memory."""

    def __init__(self, shape: DrafterShape, masks: Sequence[Tensor], options: Options) -> None:
        self.shape, self.options = shape, options
        self.mode = FakeTensorMode()
        batch = make_batch(shape, masks, options)
        self.layout = batch.layout
        totals = torch.cat([batch.population, torch.zeros(1).long()])
        low = torch.bfloat16 if options.precision == "bf16" else torch.float32
        H, V, Vd = shape.target_hidden_size, shape.vocab_size, shape.draft_vocab_size
        with self.mode:
            self.batch = _fake(batch, shape, options.codec, self.mode)
            self.totals = StepTotals(self.mode.from_tensor(totals))
        # A scaled RoPE reads its frequencies, which a fake tensor does not have. The cost does not depend on them.
        unscaled = patch.object(rope, "frequencies", lambda _, width: (torch.ones(width // 2), 1.0))
        with self.mode, DEVICE, unscaled:
            drafter = Drafter(shape, torch.empty(V, shape.hidden_size, dtype=low))
            for turning in (module for module in drafter.modules() if isinstance(module, rope.Rope)):
                turning.to(DEVICE)  # it creates its buffers on the host, wherever the weights are
            drafter.recompute = options.recompute
            drafter.lm_head.weight.requires_grad_(options.train_lm_head)
            teacher = Teacher(torch.ones(H), 1e-5, torch.empty(Vd, H, dtype=low), torch.empty(Vd).long())
            self.objective = Objective(drafter, teacher, options.loss, options.lk)
            self.objective.autocast = low if options.precision == "bf16" else None
            if options.kernels != "plain":
                self.objective.fuse_kernels()
            t = TrainConfig(optimizer=options.optimizer, precision=options.precision, weight_decay=0.1)
            self.optimizer = make_optimizer(self.objective, t)
            for parameter in drafter.parameters():
                parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
            self.optimizer.step()  # creates its moments before any step is counted
            self.optimizer.zero_grad(set_to_none=True)

    def run(self) -> Count:
        """Run one whole step, including the batch's transfer to the device. Raise as torch would on the device, or
        where it would wait."""
        accelerator = SimpleNamespace(device=DEVICE, num_processes=1, reduce=lambda value, **_: value)
        count, drafter = Count(), self.objective.drafter

        def backward(loss: Tensor) -> None:
            count.phase, count.after_forward = "backward", count.alive
            loss.backward()

        parallel: Any = SimpleNamespace(
            accelerator=accelerator, model=self.objective, backward=backward, micro_batch=lambda **_: nullcontext()
        )
        moments = [x for state in self.optimizer.state.values() for x in state.values() if isinstance(x, Tensor)]
        count.before = count.ignore([*self.objective.parameters(), *self.objective.buffers(), *moments])
        flash = patch.object(context_attention, "replaced", lambda: self.options.kernels.partition("+")[2])
        with self.mode, count, flash:
            count.phase = "forward"
            accumulate(parallel, [MicroBatch(self.batch, True)], self.totals, GAMMA)
            count.phase = "update"
            torch.nn.utils.clip_grad_norm_(drafter.parameters(), 0.5)
            self.optimizer.step()
        for name, parameter in drafter.named_parameters():
            assert (parameter.grad is not None) == parameter.requires_grad, name
            assert parameter.grad is None or parameter.grad.dtype == parameter.dtype == torch.float32, name
        self.optimizer.zero_grad(set_to_none=True)
        return count


def make_batch(shape: DrafterShape, masks: Sequence[Tensor], options: Options) -> Batch:
    """Build a real batch of documents on the CPU, whose states are one value wide."""
    generator = torch.Generator().manual_seed(0)
    V, Vd, A = shape.vocab_size, shape.draft_vocab_size, len(shape.aux_layers)
    documents = [
        Document.of(
            tokens=torch.randint(0, V, (len(mask),), generator=generator),
            loss_mask=mask,
            top1=torch.randint(0, Vd, (len(mask),), generator=generator),
            aux=torch.zeros(len(mask), A, 1),
            last=torch.zeros(len(mask), 1),
        )
        for mask in masks
    ]
    keep_mask = torch.arange(V) < Vd
    subset = None
    if options.slots is not None:
        subset = choose_slots(documents, options.ttt_length, keep_mask, options.slots, 0, 1)
    return build_batch(documents, options.ttt_length, keep_mask, subset)


def _fake(batch: Batch, shape: DrafterShape, codec: str, mode: FakeTensorMode) -> Batch:
    """Return the batch as fake tensors on the host, with states of the target's width, encoded by `codec`."""
    how, H = CODECS[codec], shape.target_hidden_size

    def states(of: Encoded) -> Encoded:
        rows = of.values.shape[:-1]
        blocks = -(-H // how.block) if how.block else 0
        values = torch.empty(*rows, -(-H // how.packed), dtype=how.dtype)
        scale = torch.empty(*rows, blocks, dtype=torch.bfloat16)
        channels = torch.empty(len(of.channels), *rows[1:], H if how.channels else 0, dtype=torch.bfloat16)
        return Encoded(codec, H, values, scale, channels, of.document)

    indices = each_tensor(batch, mode.from_tensor)
    return replace(indices, aux=states(indices.aux), teacher=states(indices.teacher))
