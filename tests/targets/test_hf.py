"""Hidden states from hooks: which tensor they are, and which models are refused."""

import pytest
import torch
from pipeline import LAYERS, VOCAB, save_quietly, tiny_llama
from random_targets import SIZES, randomised
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GemmaConfig,
    GemmaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from eagle31_train.config import TargetConfig
from eagle31_train.errors import UserError
from eagle31_train.targets.description import pick_layers
from eagle31_train.targets.hf import HiddenStateTarget, load_model


def gemma():
    return randomised(GemmaForCausalLM(GemmaConfig(**SIZES)))


MODELS = {
    "llama": tiny_llama,
    "gemma": gemma,
    "gemma2": lambda: randomised(Gemma2ForCausalLM(Gemma2Config(**SIZES))),
    "qwen3": lambda: randomised(Qwen3ForCausalLM(Qwen3Config(**SIZES))),
}


def batch(lengths, seed=0):
    """Random tokens [B, T], padded at the end, and the mask."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCAB, (len(lengths), max(lengths)), generator=generator)
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    return tokens * mask, mask


@torch.no_grad()
def check_against_transformers(model):
    """Every auxiliary layer, and the last state, against output_hidden_states=True."""
    target = HiddenStateTarget(model, range(LAYERS + 1))
    tokens, mask = batch([9, 9])
    states = target.states(tokens, mask)
    hidden = model(input_ids=tokens, attention_mask=mask, output_hidden_states=True, use_cache=False).hidden_states
    assert len(hidden) == LAYERS + 1
    for i in range(LAYERS):
        assert torch.equal(states.aux[:, :, i], hidden[i]), f"layer {i}"
    # transformers' newest entry is after the final norm; the stored one is before it.
    assert torch.equal(states.aux[:, :, LAYERS], states.last)
    assert not torch.equal(states.last, hidden[LAYERS])
    assert torch.equal(target.final_norm(states.last), hidden[LAYERS])


@pytest.mark.core
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS.keys())
def test_aux_layer_i_is_the_input_of_layer_i_and_last_is_before_the_final_norm(make):
    check_against_transformers(make())


def test_taking_outputs_instead_of_inputs_is_caught(monkeypatch):
    def on_output(self, hook, with_kwargs):
        assert with_kwargs
        return self.register_forward_hook(lambda module, _args, output: hook(module, (output,), {}))

    monkeypatch.setattr(nn.Module, "register_forward_pre_hook", on_output)
    with pytest.raises(AssertionError, match="layer 0"):
        check_against_transformers(tiny_llama())


@pytest.mark.parametrize("layers", [[3, 1], [1, 1, 2], [], [-1, 2], [1, LAYERS + 1]])
def test_layers_that_the_target_lacks_or_vllm_reorders_are_refused(layers):
    with pytest.raises(UserError, match=r"target\.aux_layers="):
        HiddenStateTarget(tiny_llama(), layers)


def rewrite(change):
    """A change of the weights, which maps and returns them, as one of the checkpoint's file."""

    def write(file):
        save_file(change(load_file(file)), file, metadata={"format": "pt"})

    return write


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 16060522496\n"
RANDOM = "and transformers would make up random ones"
WHOLE = "a file is cut short, or only git-lfs's pointer"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (rewrite(lambda w: {k: w[k] for k in w if k != "lm_head.weight"}), ["1 of its", "lm_head.weight", RANDOM]),
        (rewrite(lambda w: {**w, "model.norm.weight": torch.ones(9)}), ["1 of its", "model.norm.weight", RANDOM]),
        (lambda file: file.write_bytes(POINTER), [WHOLE]),
    ],
)
def test_a_target_whose_weights_are_not_all_there_is_refused(tmp_path, change, words):
    """Whatever transformers makes up in their place would be learnt, and passes every later check."""
    folder = save_quietly(tiny_llama(), tmp_path / "target")
    change(folder / "model.safetensors")
    with pytest.raises(UserError) as error:
        load_model(TargetConfig(path=str(folder), dtype="float32", device="cpu"))
    for part in words:
        assert part in str(error.value)


def test_the_input_of_a_deepseeks_layer_0_is_refused_for_vllm_has_none():
    assert pick_layers([1, 2], 6, "deepseek_v3") == [1, 2]
    assert pick_layers([0, 2], 6, "llama") == [0, 2]  # the embeddings, which vLLM's Llama gives
    with pytest.raises(UserError, match=r"aux_layers=\[0, 2\]: vLLM cannot give the input of layer 0 of a deepseek_v3"):
        pick_layers([0, 2], 6, "deepseek_v3")
