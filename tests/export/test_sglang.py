"""Export for SGLang: its layer ids and names, for vLLM too, and what SGLang would read otherwise is refused.

SGLang is not run here: what it does is from the source of its version 0.5.23.
"""

from dataclasses import replace

import pytest
import torch
from conftest import make_mla_shape
from made import message_of
from pipeline import contents
from safetensors.torch import save_file
from spelling import random_tensors
from transformers import LlamaConfig

from eagle31_train import export
from eagle31_train.checkpoint import contract
from eagle31_train.checkpoint.drafter_checkpoint import DrafterCheckpoint
from tests.export.conftest import SHARPENED, TINY, YARN

IDS = "eagle_aux_hidden_state_layer_ids"


def write_target(folder, layers):
    """config.json of a Llama that the drafter fits; gives the option that names it."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    LlamaConfig(hidden_size=16, vocab_size=40, num_hidden_layers=layers, **heads).save_pretrained(folder)
    return f"target.path={folder}"


@pytest.fixture
def deep(run, tmp_path):
    """A run of two layers, its target's config.json beside it, and its export for SGLang."""
    run.set_shape(replace(TINY, num_layers=2))
    run.set_tensors(random_tensors(run.shape))
    run.more = [write_target(tmp_path / "target", layers=4), "target.dtype=float32", "drafter.num_layers=2"]
    export.export(run.config(*run.more, "export_format=sglang"))
    return run


def test_sglang_and_vllm_find_the_same_layers_and_each_its_norm_and_we_read_it_by_either_count(deep):
    config, tensors, card = deep.exported()
    captured = [layer + 1 for layer in config["eagle_config"][IDS]]  # before them SGLang's Llama takes a state
    assert captured == config[IDS] == deep.shape.aux_layers == [1, 2]
    assert "sglang.launch_server" in card
    assert "--speculative-num-draft-tokens 4" in card
    assert torch.equal(tensors["layers.1.hidden_norm.weight"], tensors["layers.1.input_layernorm.weight"])
    for counted in ("", "@inputs", "@outputs"):
        draft = DrafterCheckpoint.open(f"{deep.folder / 'export'}{counted}")
        assert draft.shape == deep.shape
        assert draft.tensors.keys() == contract.weight_shapes(deep.shape).keys()


def test_a_window_is_in_sglangs_command_which_does_not_count_a_tokens_own_key(deep):
    target = "target.revision=abc", "target.trust_remote_code=true"
    window = "export_sliding_window=16"
    export.export(deep.config(*deep.more, "export_format=sglang", window, *target, "overwrite=true"))
    config, _, card = deep.exported()
    assert "EAGLE3" in (command := card.split("sglang.launch_server")[1].splitlines()[0])
    assert {"--revision", "abc", "--trust-remote-code"} <= set(command.split())
    assert config["sliding_window"] == 16  # vLLM's, with a token's own
    assert "--speculative-draft-window-size 15" in card


def test_a_draft_that_has_sglangs_name_alone_is_read_and_one_with_two_norms_that_differ_is_refused(deep):
    _, tensors, _ = deep.exported()
    file, wanted = deep.folder / "export" / "model.safetensors", tensors["layers.1.input_layernorm.weight"]
    save_file({**tensors, "layers.1.hidden_norm.weight": wanted + 1}, file)
    assert "differs from hidden_norm" in message_of(DrafterCheckpoint.open, file.parent)
    del tensors["layers.1.input_layernorm.weight"]
    save_file(tensors, file)
    assert torch.equal(DrafterCheckpoint.open(file.parent).tensors["layers.1.input_layernorm.weight"], wanted)


LACKING = ("qk_norm", "norm_before_residual", "attention_bias", "mlp_bias")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({}, None),
        ({"fc_norm": False, "norm_output": False, "norm_before_fc": True}, None),
        ({"hidden_size": 24, "share_embedding": False}, None),
        *(({name: True}, f"not support drafters with {name}") for name in LACKING),
        ({"sliding_window": 64}, None),
        ({"sliding_window": 1}, "not support drafter.sliding_window=1"),
        ({"parallel": True, "ptd_token_id": 3}, "not support drafters with parallel"),
        ({"share_embedding": False}, "drafter's own embedding with the target's"),
        ({"aux_layers": [3]}, "skips fc"),
        ({"aux_layers": [0, 2]}, "neither the embedding nor the last output"),
        ({"rope_scaling": YARN}, None),
        ({"rope_scaling": SHARPENED}, None),
        ({"rope_scaling": YARN | {"attention_factor": 1.0}}, "ignores rope_scaling.attention_factor"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "applies RoPE scaling of type dynamic"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "applies RoPE scaling of type dynamic"),
        ({"aux_layers": [2, 9]}, "neither the embedding nor the last output"),
    ],
)
def test_what_sglang_would_read_otherwise_is_named(change, named):
    problems = contract.sglang_problems(replace(TINY, **change), "llama", 9)
    assert problems == [] if named is None else [named in problem for problem in problems] == [True]


def test_a_target_of_deepseek_must_have_layer_2_first():
    """SGLang adds one to ids that begin with 1, and takes others for inputs."""
    for first in (1, 2, 3):
        shape = make_mla_shape(aux_layers=[first, 5, 6])
        assert (contract.sglang_problems(shape, "kimi_k2", 9) == []) == (first == 2)
        assert contract.sglang_problems(shape, "llama", 9) == []


def test_export_refuses_and_writes_nothing(run, tmp_path):
    target, before = write_target(tmp_path / "target", layers=2), contents(run.folder)
    said = message_of(export.export, run.config(target, "export_format=sglang"))
    assert "neither the embedding nor the last output" in said
    assert contents(run.folder) == before
