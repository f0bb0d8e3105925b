"""FlashAttention 3 and 4 in the place of torch's own kernel, without a GPU: torch's own way to them, registered for the
CPU, with imitations at its end. The kernels themselves are for tests/gpu."""

import math
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from conftest import make_mla_shape, make_shape
from model.test_attention import imitated_backward, imitated_forward
from planting import replaced
from torch.nn import attention
from torch.nn import functional as F

from eagle31_train.config import TrainConfig
from eagle31_train.model import context_attention, flash
from train import build

fa3 = pytest.importorskip("torch.nn.attention._fa3", reason="this torch has no switch")
fa4 = pytest.importorskip("torch.nn.attention._fa4", reason="this torch has no switch")
registry = pytest.importorskip("torch.nn.attention._registry", reason="this torch has no switch")


class Imitation:
    """What one of the two packages has, with a mistake or none; a number: of the window."""

    def __init__(self, mistake=None):
        self.mistake, self.widths = mistake, set()

    def window(self, left, right):
        """As aten has it."""
        if left in (None, -1):
            return {}
        off = self.mistake if isinstance(self.mistake, int) else 0
        return {"window_size_left": left + off, "window_size_right": right}

    def forward(self, q, k, v, edges, scale, causal, *window):
        self.widths.add((k.shape[-1], v.shape[-1]))
        if self.mistake == "the forward raises":
            raise AssertionError("(head_dim, head_dim_v)=(7, 5) is not supported\non this GPU")
        scale *= 1.1 if self.mistake == "scale" else 1.0
        out, lse, *_ = imitated_forward(q, k, v, *edges, 0.0, causal, False, scale=scale, **self.window(*window))
        if self.mistake == "not a number":
            out[3] = math.nan
        return out, lse / math.log(2) if self.mistake == "base of the log-sum-exp" else lse

    def backward(self, dout, q, k, v, out, lse, edges, scale, causal, *window):
        if self.mistake == "the backward raises":
            raise RuntimeError("Deterministic backward not supported for hdim 256.")
        if self.mistake == "its own log-sum-exp":
            longest = (max(2, int(edges[0].diff().max())), int(edges[1].diff().max()))
            lse = self.forward(q, k, v, (*edges, *longest), scale, causal, *window)[1]
        none = (None, None, 0.0, causal, None, None)
        down = imitated_backward(dout, q, k, v, out, lse, *edges, *none, scale=scale, **self.window(*window))
        if self.mistake == "a gradient is not a number":
            down[2][3] = math.nan
        return down

    def fa3_forward(
        self, q, k, v, k_new, v_new, q_v, out, query_edges, key_edges, new_edges, used_q, used_k, queries, keys,
        pages, batch, leftpad, cos, sin, rotary, q_scale, k_scale, v_scale, scale, causal, left, right, *_
    ):  # fmt: skip
        """By the schema of torch.ops.flash_attn_3.fwd."""
        assert all(x is None for x in (k_new, v_new, q_v, out, new_edges, used_q, used_k, pages, batch, leftpad))
        edges = (query_edges, key_edges, queries, keys)
        return *self.forward(q, k, v, edges, scale, causal, left, right), None, None

    def fa3_backward(
        self, dout, q, k, v, out, lse, dq, dk, dv, query_edges, key_edges, used_q, used_k, queries, keys, scale,
        causal, left, right, *_
    ):  # fmt: skip
        """By the schema of torch.ops.flash_attn_3.bwd, which fills dq, dk and dv."""
        down = self.backward(dout, q, k, v, out, lse, (query_edges, key_edges), scale, causal, left, right)
        for into, result in zip((dq, dk, dv), down, strict=True):
            into.copy_(result)

    def fa4_forward(self, q, k, v, **named):
        """flash_attn.cute.interface._flash_attn_fwd."""
        edges = [named[name] for name in ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")]
        return self.forward(q, k, v, edges, *(named[name] for name in FA4))

    def fa4_backward(self, q, k, v, out, dout, lse, **named):
        """flash_attn.cute.interface._flash_attn_bwd."""
        edges = (named["cu_seqlens_q"], named["cu_seqlens_k"])
        return self.backward(dout, q, k, v, out, lse, edges, *(named[name] for name in FA4))


FA4 = ("softmax_scale", "causal", "window_size_left", "window_size_right")


def either(operator, own, *args, **kwargs):
    """torch's operator where another kernel is behind it, which on the CPU has none of its own."""
    return (operator if context_attention.replaced() else own)(*args, **kwargs)


@contextmanager
def installed(**imitations):
    """FA3=, FA4=: torch's switch finds these, for tensors of the CPU, where torch's own kernel is imitated too."""
    real = {name: getattr(torch.ops.aten, f"_flash_attention_{name}") for name in ("forward", "backward")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(context_attention, "takes_flash", lambda q, v: q.dtype == torch.bfloat16)
        for name, own in (("forward", imitated_forward), ("backward", imitated_backward)):
            patch.setattr(torch.ops.aten, f"_flash_attention_{name}", partial(either, real[name], own))
        for name, module in (("FA3", fa3), ("FA4", fa4)):
            patch.setattr(module, f"_{name.lower()}_common_support_error", lambda *_, **__: None)  # it is no GPU
            patch.setattr(module, "_get_device_major", lambda device: 10)
            if name in imitations:
                patch.setitem(registry._FLASH_ATTENTION_IMPLS, name, partial(register, name, module))
        if "FA3" in imitations:
            patch.setattr(fa3, "_FA3_CUDA_FWD", imitations["FA3"].fa3_forward)
            patch.setattr(fa3, "_FA3_CUDA_BWD", imitations["FA3"].fa3_backward)
        if "FA4" in imitations:
            one = imitations["FA4"]
            package = SimpleNamespace(_flash_attn_fwd=one.fa4_forward, _flash_attn_bwd=one.fa4_backward)
            patch.setattr(fa4, "_FA4_MODULE_PATH", "imitated")
            patch.setattr(fa4, "_fa4_import_module", lambda path: package)
        try:
            yield
        finally:
            flash.restore_flash()
    assert context_attention.replaced() is None
    with pytest.raises(NotImplementedError):  # CUDA's alone again
        real["forward"](*[torch.zeros(1, 1, 8)] * 3, None, None, 1, 1, 0.0, True, False)


def register(name, module):
    """What torch does for CUDA, for the CPU."""
    library, prefix = torch.library.Library("aten", "IMPL"), f"_{name.lower()}_flash_attention"
    forward = getattr(module, f"{prefix}_forward_impl_default", None) or getattr(module, f"{prefix}_forward_impl")
    library.impl("_flash_attention_forward", forward, "CPU")
    library.impl("_flash_attention_backward", getattr(module, f"{prefix}_backward_impl"), "CPU")
    return SimpleNamespace(remove=library._destroy)


@pytest.mark.parametrize("module", [fa3, fa4])
def test_torch_puts_it_behind_the_operators_that_we_call(module):
    library = getattr(module, f"{module.__name__[-4:]}_register_kernels")()
    for name in ("_flash_attention_forward", "_flash_attention_backward"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "CUDA")
    library._destroy()


@pytest.fixture
def on(monkeypatch):
    """A drafter's switch for a device of some compute capability, in truth the CPU."""

    def switch(major, shape=None):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))
        return flash.switch_flash(shape or make_shape(), torch.device("cpu"))

    return switch


NONE = {"FA3": "No module named 'flash_attn_interface'", "FA4": "No module named 'flash_attn'"}


@pytest.mark.parametrize("shape", [make_shape(), make_mla_shape(), make_shape(sliding_window=30)])
@pytest.mark.parametrize(
    ("major", "names", "chosen"), [(9, ["FA3", "FA4"], "FA3"), (9, ["FA4"], "FA4"), (10, ["FA4"], "FA4")]
)
def test_the_one_for_the_gpu_is_switched_to(on, major, names, chosen, shape):
    imitations = {name: Imitation() for name in names}
    with installed(**imitations):
        assert on(major, shape) == f"attention by {chosen}"
        assert context_attention.replaced() == chosen
        widths = (22, 5) if shape.architecture == "mla" else (4, 4)
        for name, one in imitations.items():
            assert one.widths == ({widths} if name == chosen else set()), "values stay as wide as they are"


def test_where_none_is_installed_or_torch_has_no_switch_torchs_own_stays(on, monkeypatch):
    with installed():
        assert on(9) == f"torch's own attention (FA3: {NONE['FA3']}; FA4: {NONE['FA4']})"
        assert on(8) is on(12) is None
        monkeypatch.delattr(attention, "restore_flash_attention_impl")
        assert on(10) == "torch's own attention (before 2.11 it has no other)"


@pytest.mark.parametrize(
    ("mistake", "told"),
    [
        ("the forward raises", "FA3: (head_dim, head_dim_v)=(7, 5) is not supported; "),
        ("the backward raises", "FA3: Deterministic backward not supported for hdim 256.; "),
        ("scale", "FA3 differs from it by "),
        ("base of the log-sum-exp", "FA3 differs from it by "),
        ("its own log-sum-exp", "FA3 differs from it by "),
        ("not a number", "FA3 differs from it by nan%"),
        ("a gradient is not a number", "FA3 differs from it by nan%"),
        (-1, "FA3 differs from it by "),
        (1, "FA3 differs from it by "),
    ],
)
def test_one_that_fails_or_is_wrong_is_taken_back(on, mistake, told):
    shape = make_shape(sliding_window=30 if isinstance(mistake, int) else None)
    with installed(FA3=Imitation(mistake)):
        said = on(9, shape)
        assert said.startswith(f"torch's own attention ({told}")
        assert said.endswith(f"FA4: {NONE['FA4']})")
        assert context_attention.replaced() is None
    with installed(FA3=Imitation(mistake), FA4=Imitation()):
        assert on(9, shape) == "attention by FA4"


def test_one_that_fails_the_decoder_is_taken_back(on, monkeypatch):
    @replaced(monkeypatch, F, "scaled_dot_product_attention")
    def planted(right, *args, **kwargs):
        if context_attention.replaced():
            raise RuntimeError("FA4 SDPA forward unsupported")
        return right(*args, **kwargs)

    with installed(FA4=Imitation()):
        assert on(10) == "torch's own attention (FA4: FA4 SDPA forward unsupported)"
        assert context_attention.replaced() is None


@pytest.mark.parametrize(
    ("device", "kernels", "bf16", "switched"),
    [
        ("cuda", "auto", True, True),
        ("cuda", "plain", True, False),
        ("cuda", "auto", False, False),
        ("cpu", "auto", True, False),
    ],
)
def test_the_trainer_switches_in_bf16_on_cuda_and_says_so(tiny, monkeypatch, device, kernels, bf16, switched):
    objective, _ = tiny
    objective.autocast = torch.bfloat16 if bf16 else None
    monkeypatch.setattr(build, "missing", lambda device: "triton is not installed")
    monkeypatch.setattr(build, "switch_flash", lambda shape, device: "attention by FA3")
    said = build.choose_kernels(objective, TrainConfig(kernels=kernels), torch.device(device))
    assert said.endswith(", attention by FA3") == switched
