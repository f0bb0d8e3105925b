"""Drafts that other trainers wrote (tests/fixtures/speculators, specforge, torchspec): read, worked out as they do."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from made import message_of
from safetensors.torch import load_file
from spelling import write

from eagle31_train.checkpoint.drafter_checkpoint import DrafterCheckpoint
from eagle31_train.model.batch import build_batch
from eagle31_train.store.document import Document

FIXTURES = Path(__file__).parent.parent / "fixtures"
PLAIN = {"architecture": "llama", "num_layers": 1, "target_hidden_size": 32, "aux_layers": [1, 2, 4]}
PLAIN |= dict.fromkeys(("fc_norm", "norm_output", "norm_before_fc", "norm_before_residual", "qk_norm"), False)
PLAIN |= {"share_embedding": False, "sliding_window": None, "attention_bias": False, "mlp_bias": False}
WINDOW = {"sliding_window": 6, "attention_bias": True, "mlp_bias": True, "num_layers": 2}
DRAFTS = {
    "speculators/llama": {"fc_norm": True, "norm_output": True},
    "speculators/qwen3": {"norm_before_fc": True, "norm_before_residual": True, "qk_norm": True, "num_layers": 2},
    "speculators/window": {"fc_norm": True, "norm_output": True, **WINDOW},
    "specforge/sglang@outputs": {"share_embedding": True},
    "specforge/hf@outputs": {"fc_norm": True, "target_hidden_size": 40},
    "torchspec/llama@outputs": {"target_hidden_size": 40},
    "torchspec/llama31@outputs": {"fc_norm": True, "norm_output": True, "target_hidden_size": 40},
    "torchspec/mla@inputs": {"architecture": "mla"},  # of model_type kimi_k2, as it exports that for vLLM
    "torchspec/mla31@inputs": {"architecture": "mla", "fc_norm": True, "norm_output": True},
}


def unrolled(draft):
    """Its shape, our logits [K, T - 1, Vd], and its trainer's."""
    checkpoint = DrafterCheckpoint.open(FIXTURES / draft)
    run, shape = load_file((FIXTURES / draft.partition("@")[0]).with_suffix(".safetensors")), checkpoint.shape
    tokens, wanted = run["tokens"], run["logits"]
    document = Document.of(
        tokens=tokens,
        loss_mask=torch.ones(len(tokens), dtype=torch.bool),
        top1=torch.zeros_like(tokens),
        aux=run["states"].unflatten(1, (3, -1)),
        last=torch.zeros(len(tokens), shape.target_hidden_size),
    )
    V, H = shape.vocab_size, shape.target_hidden_size
    target = SimpleNamespace(embedding=torch.nn.Embedding(V, H), head=torch.nn.Linear(H, V, bias=False), depth=4)
    if shape.share_embedding:
        target.embedding.weight.data.copy_(run["embedding"])
    drafter = checkpoint.load(target, torch.float32, torch.float32)
    batch = build_batch([document], len(wanted), torch.ones(shape.vocab_size, dtype=torch.bool))
    with torch.no_grad():
        return shape, drafter.lm_head(drafter(batch)[0]), wanted


@pytest.mark.parametrize("draft", DRAFTS)
def test_a_draft_gives_the_logits_of_its_trainer(draft):
    shape, found, wanted = unrolled(draft)
    assert {name: getattr(shape, name) for name in PLAIN} == PLAIN | DRAFTS[draft]
    for k, (ours, theirs) in enumerate(zip(found, wanted, strict=True)):
        rows = wanted.shape[1] - 1 - k  # slots whose token of this step is in the document
        if k > 0 and shape.sliding_window:  # speculators' window does not move on with the steps: vLLM's does
            rows = shape.sliding_window - k
        torch.testing.assert_close(ours[:rows], theirs[:rows], rtol=2e-5, atol=2e-5)
    if shape.sliding_window:
        assert (found[1, rows:9] - wanted[1, rows:9]).abs().max() > 1e-2


def test_each_reading_of_layer_ids_is_another_draft():
    """And neither is guessed, which `published_configs.jsonl` has."""
    folder = FIXTURES / "specforge" / "sglang"
    inputs, outputs = (DrafterCheckpoint.open(f"{folder}@{counted}") for counted in ("inputs", "outputs"))
    assert (inputs.shape.aux_layers, outputs.shape.aux_layers) == ([0, 1, 3], [1, 2, 4])
    assert inputs.identity != outputs.identity  # or one's measurements would be taken for the other's
    assert inputs.folder == outputs.folder == folder


def test_a_draft_of_specforge_whose_lm_head_reads_states_without_a_norm_is_refused(tmp_path):
    folder = FIXTURES / "specforge" / "hf"
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    for norm_output, weight in ((False, 1.5), (True, 1.0), (False, 1.0)):
        tensors["norm.weight"] = torch.full_like(tensors["norm.weight"], weight)
        draft = f"{write(tmp_path, {**config, 'norm_output': norm_output}, tensors)}@outputs"
        if norm_output or weight != 1:
            assert DrafterCheckpoint.open(draft).shape.norm_output == norm_output
    assert "norm.weight is all ones" in message_of(DrafterCheckpoint.open, draft)
    tensors["norm.weight"][-1] = 1.5  # a trained norm may hold ones
    write(tmp_path, {**config, "norm_output": False}, tensors)
    assert not DrafterCheckpoint.open(draft).shape.norm_output


def test_rows_that_torchspec_takes_from_other_tokens_are_refused(tmp_path):
    """As its `--prune-vocab` left them; with each token's own row the draft is read."""
    folder = FIXTURES / "torchspec" / "pruned"
    assert "TorchSpec's --prune-vocab" in message_of(DrafterCheckpoint.open, f"{folder}@outputs")
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = torch.arange(24 * 32.0).reshape(24, 32)
    write(tmp_path, json.loads((folder / "config.json").read_text()), tensors)
    assert DrafterCheckpoint.open(f"{tmp_path}@outputs").shape.draft_vocab_size == 24
