"""FlashAttention 3 and 4 in the place of torch's own kernel, without a GPU or either of them: torch's switch, with
imitations behind it. Torch's own way to them, and the kernels themselves, are for tests/gpu."""

import math
from contextlib import contextmanager

import pytest
import torch
from conftest import make_mla_shape, make_shape
from model.test_attention import imitated_backward, imitated_forward
from planting import replaced
from torch.nn import attention
from torch.nn import functional as F

from eagle31_train.model import context_attention, flash


class Imitation:
    """What one of the two puts behind aten's operators, with a mistake or none; a number: of the window."""

    def __init__(self, mistake=None):
        self.mistake, self.widths = mistake, set()

    def window(self, window_size_left=None, window_size_right=None):
        if window_size_left is None:
            return {}
        off = self.mistake if isinstance(self.mistake, int) else 0
        return {"window_size_left": window_size_left + off, "window_size_right": window_size_right}

    def forward(self, q, k, v, *given, scale, **window):
        self.widths.add((k.shape[-1], v.shape[-1]))
        if self.mistake == "the forward raises":
            raise AssertionError("(head_dim, head_dim_v)=(7, 5) is not supported\non this GPU")
        scale *= 1.1 if self.mistake == "scale" else 1.0
        out, lse, *rest = imitated_forward(q, k, v, *given, scale=scale, **self.window(**window))
        if self.mistake == "not a number":
            out[3] = math.nan
        return out, lse / math.log(2) if self.mistake == "base of the log-sum-exp" else lse, *rest

    def backward(self, dout, q, k, v, out, lse, *given, scale, **window):
        if self.mistake == "the backward raises":
            raise RuntimeError("Deterministic backward not supported for hdim 256.")
        if self.mistake == "its own log-sum-exp":
            lse = self.forward(q, k, v, *given[:6], False, scale=scale, **window)[1]
        down = imitated_backward(dout, q, k, v, out, lse, *given, scale=scale, **self.window(**window))
        if self.mistake == "a gradient is not a number":
            down[2][3] = math.nan
        return down


NONE = {"FA3": "No module named 'flash_attn_interface'", "FA4": "No module named 'flash_attn'"}


@contextmanager
def installed(**imitations):
    """FA3=, FA4=: torch's switch finds these, for tensors of the CPU, where torch's own kernel is imitated too."""
    now = []

    def activate(name):
        if name not in imitations:
            raise ModuleNotFoundError(NONE[name])
        now.append(name)

    def either(name, own):
        return lambda *given, **named: (getattr(imitations[now[0]], name) if now else own)(*given, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(context_attention, "takes_flash", lambda q, v: q.dtype == torch.bfloat16)
        for name, own in (("forward", imitated_forward), ("backward", imitated_backward)):
            patch.setattr(torch.ops.aten, f"_flash_attention_{name}", either(name, own))
        patch.setattr(attention, "activate_flash_attention_impl", activate, raising=False)
        patch.setattr(attention, "restore_flash_attention_impl", now.clear, raising=False)
        patch.setattr(attention, "current_flash_attention_impl", lambda: now[0] if now else None, raising=False)
        yield


@pytest.fixture
def on(monkeypatch):
    """A drafter's switch for a device of some compute capability, in truth the CPU."""

    def switch(major, shape=None):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))
        return flash.switch_flash(shape or make_shape(), torch.device("cpu"))

    return switch


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
        with monkeypatch.context() as before:  # its end puts back what `installed` takes away
            before.delattr(attention, "restore_flash_attention_impl")
            assert on(10) == "torch's own attention (others need torch 2.11)"


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
