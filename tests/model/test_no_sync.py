"""Loss and gradients of a batch without a single question to the device: a GPU's queue never runs dry for one."""

from functools import partial

import pytest
import torch
from conftest import kept_mask, make_document, make_mla_shape, make_objective, make_shape
from waits import Waits

from eagle31_train.model import context_attention, drafter, packing
from eagle31_train.model.batch import build_batch

K = 3


def waits_of(objective, documents, precision=None):
    """Names of the waits in forward and backward of one batch."""
    packed = build_batch(documents, K, kept_mask(objective), "mask")
    weights = torch.ones(K)
    with Waits() as found, torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        loss, measured = objective(packed, weights)
        loss.backward()
        measured.stacked()
    assert all(p.grad is not None for p in objective.drafter.parameters() if p.requires_grad)
    return found


VARIANTS = {
    "eagle 3.1": ({}, {}),
    "eagle 3": ({"fc_norm": False, "norm_output": False}, {}),
    "own embedding": ({"share_embedding": False}, {}),
    "frozen head": ({}, {"frozen": True}),
    "lk": ({}, {"lk": 0.5}),
    "cross entropy": ({}, {"kind": "ce"}),
    "recomputed": ({}, {"recompute": True}),
    "bf16": ({}, {"precision": "bf16"}),
    "mla": ({"architecture": "mla"}, {}),
    "mla, full rank, recomputed in bf16": (
        {"architecture": "mla", "q_lora_rank": None},
        {"recompute": True, "precision": "bf16"},
    ),
}


@pytest.mark.parametrize(("shape", "options"), VARIANTS.values(), ids=VARIANTS.keys())
def test_a_step_asks_the_device_nothing(shape, options):
    shape = (make_mla_shape if "architecture" in shape else make_shape)(**shape)
    generator = torch.Generator().manual_seed(1)
    objective = make_objective(shape, torch.float32)
    objective.lk, objective.kind = options.get("lk", 0.0), options.get("kind", "kl")
    objective.drafter.recompute = options.get("recompute", False)
    objective.drafter.lm_head.weight.requires_grad_(not options.get("frozen", False))
    # Single tokens, a document of questions only, and more taught positions than one chunk holds.
    lengths = (9, 1, 160, 5)
    documents = [make_document(shape, length, generator) for length in lengths]
    documents.append(make_document(shape, 6, generator, answer=[]))
    assert waits_of(objective, documents, options.get("precision")) == []


def ask(h):
    return {
        "item": lambda: h.sum().item(),
        "float": lambda: float(h.detach().sum()),
        "tolist": lambda: h[0].tolist(),
        "a condition": lambda: bool((h > 0).any()),
        "cpu": lambda: h.cpu(),
        "numpy": lambda: h.detach().numpy(),
        "nonzero": lambda: (h > 0).nonzero(),
        "where without values": lambda: torch.where(h > 0),
        "a mask as index": lambda: h[h > 0],
        "assignment by a mask": lambda: h.clone().index_put_((h == h,), h.flatten()),
        "masked_select": lambda: h.masked_select(h > 0),
        "unique": lambda: h.unique(),
        "unique_consecutive": lambda: h.unique_consecutive(),
        "repeats from a tensor": lambda: h.repeat_interleave(torch.ones_like(h[:, 0], dtype=torch.long), 0),
        "numbers of the host": lambda: torch.tensor([1.0, 2.0]),
        "a list of the host": lambda: torch.as_tensor([1.0, 2.0]),
    }


@pytest.mark.parametrize("question", ask(torch.zeros(1)).keys())
def test_a_planted_question_is_found(tiny, question, monkeypatch):
    objective, documents = tiny
    right = drafter.Drafter.feedback

    def asking(self, h, z):
        ask(h)[question]()
        return right(self, h, z)

    assert waits_of(objective, documents) == []
    monkeypatch.setattr(drafter.Drafter, "feedback", asking)
    assert waits_of(objective, documents) != []


def test_a_planted_question_in_the_backward_pass_is_found(tiny):
    objective, documents = tiny
    objective.drafter.fc.weight.register_hook(lambda grad: grad * (1.0 if grad.norm() > 0 else 0.0))
    assert waits_of(objective, documents) == ["_local_scalar_dense"]


class AskingBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h):
        return h.clone()

    @staticmethod
    def backward(ctx, grad):
        grad.tolist()
        return grad


def test_a_planted_question_in_a_custom_backward_is_found(tiny, monkeypatch):
    objective, documents = tiny
    right = drafter.Drafter.feedback
    monkeypatch.setattr(drafter.Drafter, "feedback", lambda self, h, z: AskingBackward.apply(right(self, h, z)))
    assert waits_of(objective, documents) == ["tolist"] * (K - 1)  # nothing reads the last step's state


@pytest.mark.parametrize("most_copies", [100.0, 0.0], ids=["copied keys", "spread queries"])
def test_the_way_to_cudas_kernel_asks_nothing(most_copies, monkeypatch):
    """What surrounds the kernel, with another in its place that only has its shapes."""

    def forward(q, k, v, query_edges, key_edges, queries, keys, *rest, scale):
        assert isinstance(queries, int)
        assert isinstance(keys, int)
        return torch.zeros_like(q), torch.zeros(q.shape[1], len(q)), None, None, None

    def backward(dout, q, k, v, *rest, scale):
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)

    monkeypatch.setattr(context_attention, "_flash_cuda", lambda q, v: True)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", forward)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", backward)
    monkeypatch.setattr(packing, "make_segments", partial(packing.make_segments, most_copies=most_copies))
    shape = make_shape()
    generator = torch.Generator().manual_seed(1)
    documents = [make_document(shape, length, generator) for length in (9, 1, 60)]
    assert waits_of(make_objective(shape, torch.float32), documents) == []
