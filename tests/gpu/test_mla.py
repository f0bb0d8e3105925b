"""The MLA drafter on a CUDA device, in bf16 through the flash kernel, against the CPU; one full-size step of Kimi's."""

import pytest
import torch
from conftest import kept_mask, make_document, make_mla_shape, make_objective
from model.test_exactness import weights_of

from eagle31_train.model import context_attention
from eagle31_train.model.batch import build_batch
from eagle31_train.model.decode import DraftDecoder

# Kimi's heads: 128 + 64 wide keys, 128 wide values.
HEADS = {"num_attention_heads": 4, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
WIDE = {"hidden_size": 256, "target_hidden_size": 256, "intermediate_size": 512, "q_lora_rank": 96, "kv_lora_rank": 64}


def wide_problem():
    """fp32, with weights that keep the size of what they multiply."""
    shape = make_mla_shape(**HEADS, **WIDE, vocab_size=300, draft_vocab_size=200)
    objective = make_objective(shape, torch.float32)
    for parameter in objective.drafter.parameters():
        parameter.data *= parameter.shape[1] ** -0.5 / 0.3 if parameter.dim() > 1 else 1.0
    objective.teacher.head_rows *= 3 * shape.target_hidden_size**-0.5
    generator = torch.Generator().manual_seed(3)
    documents = [make_document(shape, length, generator) for length in (300, 1, 450, 260)]
    return objective, [d.to(torch.float32) for d in documents]


def trained(objective, documents, device, low):
    """Loss and gradients of seven steps, on the CPU in fp64."""
    packed = build_batch(documents, 7, kept_mask(objective.cpu()), "mask")
    weights = weights_of(packed.trained.tolist(), 0.8).float().to(device)
    objective.to(device).zero_grad()
    objective.autocast = torch.bfloat16 if low else None
    loss, _ = objective(packed.to(device), weights)
    loss.backward()
    return {"loss": loss.detach().cpu().double()} | {
        name: p.grad.cpu().double() for name, p in objective.drafter.named_parameters()
    }


@pytest.mark.parametrize("recompute", [False, True])
def test_bf16_is_no_further_from_fp32_than_the_cpus(recompute, monkeypatch):
    """Twice the CPU's distance, and at least 1 %: other kernels round elsewhere."""
    objective, documents = wide_problem()
    objective.drafter.recompute = recompute
    truth = trained(objective, documents, "cpu", low=False)
    cpus = trained(objective, documents, "cpu", low=True)
    right, asked = context_attention._cuda_forward, []
    monkeypatch.setattr(
        context_attention, "_cuda_forward", lambda q, *rest: asked.append(q.shape[-1]) or right(q, *rest)
    )
    ours = trained(objective, documents, "cuda", low=True)
    assert asked == [192] * 7
    for name, wanted in truth.items():
        error, theirs = ((each[name] - wanted).norm() / wanted.norm() for each in (ours, cpus))
        assert error < max(2 * theirs, 0.01), name


def test_drafts_are_the_cpus():
    objective, documents = wide_problem()
    d = documents[0]
    drafted = []
    for device in ("cpu", "cuda"):
        objective.to(device)
        decoder = DraftDecoder(objective.drafter, objective.teacher.target_ids, capacity=128)
        decoder.extend(d.all_aux[:100].to(device), d.tokens[1:101].to(device))
        drafted.append(torch.cat([z for _, z in decoder.unroll(5)]).cpu())
    torch.testing.assert_close(*drafted, rtol=1e-3, atol=1e-3)
