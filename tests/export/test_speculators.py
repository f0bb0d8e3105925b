"""Drafts that speculators 0.9.0 wrote (tests/fixtures/speculators): read, and worked out as it works them out."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from eagle31_train.checkpoint.drafter_checkpoint import DrafterCheckpoint
from eagle31_train.model.batch import build_batch
from eagle31_train.store.document import Document

DRAFTS = Path(__file__).parent.parent / "fixtures" / "speculators"
FLAGS = ("fc_norm", "norm_output", "norm_before_fc", "norm_before_residual", "qk_norm", "num_layers")


def target_of(shape):
    """A target of the right size; the drafts have embeddings and heads of their own."""
    weight = torch.zeros(shape.vocab_size, shape.target_hidden_size)
    module = SimpleNamespace(weight=torch.nn.Parameter(weight))
    return SimpleNamespace(embedding=module, head=module, depth=4)


@pytest.mark.parametrize(
    ("name", "flags"), [("llama", (True, True, False, False, False, 1)), ("qwen3", (False, False, True, True, True, 2))]
)
def test_a_draft_of_speculators_gives_its_logits(name, flags):
    checkpoint = DrafterCheckpoint.open(DRAFTS / name)
    assert checkpoint.target_name == "someone/a-target"
    assert tuple(getattr(checkpoint.shape, flag) for flag in FLAGS) == flags

    run = load_file(DRAFTS / f"{name}.safetensors")
    tokens, wanted, shape = run["tokens"], run["logits"], checkpoint.shape
    document = Document(
        tokens=tokens,
        loss_mask=torch.ones(len(tokens), dtype=torch.bool),
        top1=torch.zeros_like(tokens),
        aux=run["states"].unflatten(1, (3, -1)),
        last=torch.zeros(len(tokens), shape.target_hidden_size),
    )
    drafter = checkpoint.load(target_of(shape), torch.float32, torch.float32)
    batch = build_batch([document], len(wanted), torch.ones(shape.vocab_size, dtype=torch.bool), "keep")
    with torch.no_grad():
        found = drafter.lm_head(drafter(batch).z)
    for k, (ours, theirs) in enumerate(zip(found, wanted, strict=True)):
        rows = len(tokens) - 2 - k  # slots whose token of this step is in the document
        torch.testing.assert_close(ours[:rows], theirs[:rows], rtol=2e-5, atol=2e-5)
