"""The readout of checkpoints whose model transformers has no causal LM for, such as Kimi-K2.6's: files alone say it."""

import json

import pytest
import torch
from huggingface_hub.utils import filter_repo_objects
from hypothesis import given
from hypothesis import strategies as st
from made import message_of
from pipeline import HIDDEN, LAYERS, VOCAB, tiny_llama
from safetensors.torch import load_file, save_file

from eagle31_train.config import TargetConfig
from eagle31_train.model.linear import BLOCK, first_largest
from eagle31_train.targets.readout import checkpoint_folder, readout_from_checkpoint

CODE = {"AutoConfig": "code.KimiConfig", "AutoModelForCausalLM": "code.KimiForCausalLM"}
TEXT = {"model_type": "kimi_k2", "vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS}
TEXT |= {"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "auto_map": CODE}
WRAPPED = {"model_type": "kimi_k25", "architectures": ["KimiK25ForConditionalGeneration"], "auto_map": CODE}
WRAPPED |= {"text_config": TEXT, "quantization_config": {"quant_method": "compressed-tensors", "ignore": ["lm_head"]}}


@pytest.mark.parametrize(("config", "prefix"), [(WRAPPED, "language_model."), (TEXT, "")])
def test_kimis_three_tensors_are_read_without_its_code(tmp_path, config, prefix):
    """Of a checkpoint of Kimi's layout: quantized experts, a vision tower, code that must not be run."""
    model, folder = tiny_llama(), tmp_path / "kimi"
    weights = {f"{prefix}{name}": t for name, t in model.state_dict().items() if ".layers." not in name}
    others = {
        f"{prefix}model.layers.1.mlp.experts.0.down_proj.weight_packed": torch.zeros(4, 4, dtype=torch.int32),
        f"{prefix}model.layers.1.input_layernorm.weight": torch.ones(HIDDEN),
        "vision_tower.encoder.final_layernorm.weight": torch.ones(8),
        "mm_projector.pre_norm.weight": torch.ones(8),
    }
    files = {"a.safetensors": weights, "b.safetensors": others}
    folder.mkdir()
    for file, tensors in files.items():
        save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, folder / file)
    weight_map = {name: file for file, tensors in files.items() for name in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "code.py").write_text("raise AssertionError('code of the checkpoint was run')")
    target = TargetConfig(path=str(folder), dtype="float32", device="cpu", trust_remote_code=True)
    read = readout_from_checkpoint(target, torch.float32)
    assert torch.equal(read.embedding, model.model.embed_tokens.weight)
    assert torch.equal(read.norm, model.model.norm.weight)
    assert torch.equal(read.head, model.lm_head.weight)
    assert (read.norm_kind, read.eps, read.depth, read.tied) == ("w", 1e-6, LAYERS, False)
    file = folder / "a.safetensors"
    held = load_file(file)
    fp8 = {n: t.to(torch.float8_e4m3fn) if n.endswith("lm_head.weight") else t for n, t in held.items()}
    save_file(fp8, file)  # whose scale is a tensor of its own
    said = message_of(readout_from_checkpoint, target, torch.float32)
    assert "use extract.engine=transformers if it is quantized" in said


def test_of_a_hubs_target_the_revision_is_fetched_and_no_weights_twice(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **how: asked.append(how) or str(tmp_path))
    assert checkpoint_folder(TargetConfig(path="org/target", revision="v2")) == tmp_path
    assert asked[0].pop("revision") == "v2"
    there = ["config.json", "model.safetensors", "original/model.safetensors", "consolidated.safetensors", "a.bin"]
    assert list(filter_repo_objects(there, **asked[0])) == there[:2]


@given(
    rows=st.integers(0, 5),
    vocab=st.sampled_from([1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 3 * BLOCK - 7]),
    kinds=st.integers(1, 40),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 10**6),
    odd=st.sampled_from([None, float("nan"), float("-inf"), float("inf")]),
)
def test_of_equal_logits_the_first_is_taken_as_torch_takes_it(rows, vocab, kinds, dtype, seed, odd):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(0, kinds, (rows, vocab), generator=generator).to(dtype)  # equal ones, mostly
    if odd is not None:
        logits[torch.rand(rows, vocab, generator=generator) < 2 / vocab] = odd
    assert torch.equal(first_largest(logits), logits.max(-1).indices)
