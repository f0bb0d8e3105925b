"""Drafters large enough that a step's memory is that of its tensors."""

from unittest.mock import patch

import torch
from conftest import make_shape
from torch import profiler
from whole import encoded

from eagle31_train.model import loss
from eagle31_train.model.batch import build_batch
from eagle31_train.model.drafter import Drafter
from eagle31_train.model.loss import Objective, Teacher
from eagle31_train.store.document import Document

SIZES = {"hidden_size": 256, "target_hidden_size": 256, "vocab_size": 2000, "draft_vocab_size": 1000}
SIZES |= {"intermediate_size": 704, "num_attention_heads": 8, "head_dim": 32, "max_position_embeddings": 2048}


def shape_of(**changes):
    return make_shape(**{**SIZES, "rope_theta": 1e4, **changes})


# MLA, beside `shape_of`'s own sizes.
SMALL_MLA = {
    "architecture": "mla",
    "num_key_value_heads": 8,
    "head_dim": 48,
    "q_lora_rank": 96,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 24,
}


def objective_and_batch(shape, masks, unroll, dtype=torch.float32, codec="bf16", part=(0, 1)):
    """An objective with frozen pieces in `dtype`, and documents of random states with these loss masks."""
    generator = torch.Generator().manual_seed(0)
    V, Vd, H, A = shape.vocab_size, shape.draft_vocab_size, shape.target_hidden_size, len(shape.aux_layers)

    drafter = Drafter(shape, torch.randn(V, shape.hidden_size, generator=generator).to(dtype))
    teacher = Teacher(torch.ones(H), 1e-5, torch.randn(Vd, H, generator=generator).to(dtype), torch.arange(Vd))
    documents = [
        Document.of(
            tokens=torch.randint(0, V, (len(mask),), generator=generator),
            loss_mask=torch.as_tensor(mask),
            top1=torch.randint(0, Vd, (len(mask),), generator=generator),
            aux=torch.randn(len(mask), A, H, generator=generator),
            last=torch.randn(len(mask), H, generator=generator),
        )
        for mask in masks
    ]
    documents = [encoded(document, codec, codec) for document in documents]
    kept = torch.arange(V) < Vd
    return Objective(drafter, teacher, "kl"), build_batch(documents, unroll, kept, part=part)


# Logits at once, in pieces as large beside a block as a GPU's are; with a CPU's small ones other moments are the worst.
LOGITS = (2**23, 2**22)


@patch.dict(loss.LOGITS, cpu=LOGITS)
def measure(objective, batch, weights):
    """Bytes after the forward pass, and at the worst moment of it and of the backward pass."""
    objective(batch, weights)[0].backward()  # what is made once is there
    objective.zero_grad(set_to_none=True)
    with profiler.profile(activities=[profiler.ProfilerActivity.CPU], profile_memory=True) as recorded:
        with profiler.record_function("FORWARD"):
            total = objective(batch, weights)[0]
        with profiler.record_function("BACKWARD"):
            total.backward()
    events = recorded.profiler.kineto_results.events()
    backward = next(event.start_ns() for event in events if event.name() == "BACKWARD")
    begin = next(event.start_ns() for event in events if event.name() == "FORWARD")
    live = kept = peak = 0
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        live += event.nbytes() if event.start_ns() >= begin else 0
        kept = live if event.start_ns() < backward else kept
        peak = max(peak, live)
    return kept, peak
