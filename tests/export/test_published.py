"""Published drafts: every spelling reads as the drafter that was exported, and what vLLM would misread is refused."""

import json
import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle31_train import published
from eagle31_train.export import export
from eagle31_train.schema import UserError


def never():
    raise AssertionError("the config names its layers")


def parts(config):
    """A speculators config: the layer's fields apart from the drafter's."""
    ours = ("draft_vocab_size", "target_hidden_size", "fc_norm", "norm_output", "norm_before_residual", "torch_dtype")
    ours += ("eagle_aux_hidden_state_layer_ids",)
    layer = {k: v for k, v in config.items() if k not in (*ours, "architectures", "num_aux_hidden_states")}
    verifier = {"name_or_path": "someone/a-target", "architectures": ["LlamaForCausalLM"]}
    methods = [{"proposal_type": "greedy", "speculative_tokens": 3}]
    return {
        **{k: config[k] for k in ours},
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_config": {"algorithm": "eagle3", "proposal_methods": methods, "verifier": verifier},
        "transformer_layer_config": layer,
    }


def renamed(tensors, *pairs):
    for old, new in pairs:
        tensors = {new + name.removeprefix(old) if name.startswith(old) else name: t for name, t in tensors.items()}
    return tensors


def joined(tensors):
    tensors = dict(tensors)
    for name, inner in (("self_attn.qkv", "qkv"), ("mlp.gate_up", ("gate", "up"))):
        room = name.split(".")[0]
        stacked = torch.cat([tensors.pop(f"midlayer.{room}.{part}_proj.weight") for part in inner])
        tensors[f"midlayer.{name}_proj.weight"] = stacked
    return tensors


def in_model(tensors):
    outside = ("lm_head", "d2t", "t2d")
    return {name if name.startswith(outside) else f"model.{name}": t for name, t in tensors.items()}


def shuffled(tensors):
    """The draft tokens in another order, which vLLM takes too."""
    ids = tensors["d2t"] + torch.arange(12)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(3))
    head = tensors["lm_head.weight"][order].clone()
    return {**tensors, "d2t": ids[order] - torch.arange(12), "lm_head.weight": head}


def with_tables(tensors):
    return {**tensors, "midlayer.self_attn.rotary_emb.inv_freq": torch.ones(3)}


def ids_in(where):
    def change(config):
        ids = config.pop("eagle_aux_hidden_state_layer_ids")
        return {**config, "eagle_config": {where: ids[::-1], "use_aux_hidden_state": True}}

    return change


def old_rope(config):
    """As transformers 4 wrote it."""
    return {key: value for key, value in config.items() if key != "rope_parameters"}


def same(value):
    return value


SPELLINGS = {
    "as exported": (same, same),
    "layers.0": (same, lambda t: renamed(t, ("midlayer.", "layers.0."))),
    "model. before all": (same, in_model),
    "model.layers.0": (same, lambda t: in_model(renamed(t, ("midlayer.", "layers.0.")))),
    "joined": (same, joined),
    "joined layers.0": (same, lambda t: renamed(joined(t), ("midlayer.", "layers.0."))),
    "another order of tokens": (same, shuffled),
    "no t2d": (same, lambda t: {name: tensor for name, tensor in t.items() if name != "t2d"}),
    "tables of RoPE": (same, with_tables),
    "int32 d2t": (same, lambda t: {**t, "d2t": t["d2t"].int()}),
    "speculators": (parts, lambda t: renamed(t, ("midlayer.", "layers.0."))),
    "another name": (lambda c: {**c, "architectures": ["Eagle3LlamaForCausalLM"]}, same),
    "the target's name": (lambda c: {**c, "architectures": ["LlamaForCausalLM"]}, same),
    "layer ids in eagle_config": (ids_in("eagle_aux_hidden_state_layer_ids"), same),
    "layer ids by their older name": (ids_in("layer_ids"), same),
    "rope of transformers 4": (old_rope, same),
}


@pytest.fixture
def exported(run):
    """folder, config and tensors of an export, which the project's own exporter checked against the contract."""
    export(run.config("target.dtype=float32"))
    config, tensors, _ = run.exported()
    return run.folder / "export", config, tensors


def write(folder, config, tensors):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def read(folder, target_layers=never):
    return published.read(folder, "init_from=x", target_layers)


def refusal(folder, target_layers=never):
    with pytest.raises(UserError) as error:
        read(folder, target_layers)
    assert "\n" not in str(error.value)
    assert str(error.value).startswith("init_from=x")
    return str(error.value)


def assert_same_draft(ours, theirs):
    assert ours.shape == theirs.shape
    np.testing.assert_array_equal(ours.vocab.target_ids, theirs.vocab.target_ids)
    assert ours.tensors.keys() == theirs.tensors.keys()
    assert all(torch.equal(ours.tensors[name], theirs.tensors[name]) for name in theirs.tensors)


def test_an_export_reads_back_as_the_run_that_was_exported(run, exported):
    draft = read(exported[0])
    trained = load_file(run.checkpoint / "model.safetensors")
    assert draft.shape == run.shape
    assert draft.tensors.keys() == trained.keys()
    assert all(torch.equal(draft.tensors[name], trained[name]) for name in trained)
    assert draft.vocab.target_ids.tolist() == [0, 1, 2, 5, 8, 13, 21, 25, 30, 33, 36, 39]


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_reads_as_the_same_drafter(spelling, exported, tmp_path):
    folder, config, tensors = exported
    of_config, of_tensors = SPELLINGS[spelling]
    other = write(tmp_path / "other", of_config(dict(config)), of_tensors(tensors))
    assert_same_draft(read(other), read(folder))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_dtype_of_the_file_is_kept(dtype, exported, tmp_path):
    _, config, tensors = exported
    low = {name: t.to(dtype) if t.is_floating_point() else t for name, t in tensors.items()}
    draft = read(write(tmp_path / "low", config, low))
    assert {tensor.dtype for tensor in draft.tensors.values()} == {dtype}
    assert all(torch.equal(tensor, low[name]) for name, tensor in draft.tensors.items())


@pytest.fixture
def sharded(exported, tmp_path):
    """The export in three files and an index, beside a file of somebody else's that the index does not list."""
    _, config, tensors = exported
    out, places = write(tmp_path / "sharded", config, {}), {}
    (out / "model.safetensors").unlink()
    for shard in range(3):
        name = f"model-{shard + 1:05d}-of-00003.safetensors"
        part = dict(sorted(tensors.items())[shard::3])
        save_file(part, out / name)
        places |= dict.fromkeys(part, name)
    save_file({"fc.weight": torch.zeros(1)}, out / "consolidated.safetensors")
    (out / published.INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return out


def test_shards_are_read_by_their_index(exported, sharded):
    assert_same_draft(read(sharded), read(exported[0]))


def test_a_missing_shard_and_a_tensor_that_no_shard_has_are_named(exported, sharded):
    third = sharded / "model-00003-of-00003.safetensors"
    whole = third.read_bytes()
    third.unlink()
    assert "model-00003-of-00003.safetensors is missing or damaged" in refusal(sharded)
    third.write_bytes(whole)
    save_file({}, sharded / "model-00001-of-00003.safetensors")
    assert "d2t is listed in model.safetensors.index.json but in none of its files" in refusal(sharded)
    (sharded / published.INDEX).write_text("{}")
    assert "no weight_map" in refusal(sharded)


def test_without_an_index_a_tensor_in_two_files_is_refused(exported):
    save_file({"fc.weight": torch.zeros(1)}, exported[0] / "more.safetensors")
    assert "fc.weight is in two files" in refusal(exported[0])


def test_layers_that_are_left_to_vllm_are_counted_from_the_targets(exported, tmp_path):
    _, config, tensors = exported
    del config["eagle_aux_hidden_state_layer_ids"], config["num_aux_hidden_states"]
    tensors["fc.weight"] = torch.zeros(16, 48)
    tensors["fc_norm.2.weight"] = torch.ones(16)
    assert read(write(tmp_path / "open", config, tensors), lambda: 9).shape.aux_layers == [2, 4, 6]


def test_the_whole_vocabulary_needs_no_map_and_may_share_the_targets_head(exported, tmp_path):
    _, config, tensors = exported
    whole = {name: tensor for name, tensor in tensors.items() if name not in ("d2t", "t2d")}
    whole["lm_head.weight"] = torch.randn(40, 16)
    draft = read(write(tmp_path / "whole", {**config, "draft_vocab_size": None}, whole))
    assert draft.vocab.target_ids.tolist() == list(range(40))
    assert not draft.vocab.pruned
    zeros = {**whole, "d2t": torch.zeros(40, dtype=torch.int64)}
    assert_same_draft(read(write(tmp_path / "zeros", {**config, "draft_vocab_size": 40}, zeros)), draft)
    del whole["lm_head.weight"]
    shared = read(write(tmp_path / "shared", {**config, "draft_vocab_size": None}, whole))
    assert "lm_head.weight" not in shared.tensors
    assert shared.shape == draft.shape


def test_its_own_embedding_is_told_by_the_tensors(exported, tmp_path):
    _, config, tensors = exported
    draft = read(write(tmp_path / "own", config, {**tensors, "embed_tokens.weight": torch.randn(40, 16)}))
    assert draft.shape == replace(read(exported[0]).shape, share_embedding=False)


def without(*names):
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if name not in names}


def with_(name, make):
    return lambda tensors: {**tensors, name: make(tensors)}


def eagle1(tensors):
    """One state beside the embedding, no norms but the MLP's, no head: EAGLE 1 and 2, under the same names."""
    layer = {n: t for n, t in tensors.items() if n.startswith("midlayer.") and "norm" not in n}
    layer["midlayer.post_attention_layernorm.weight"] = torch.ones(16)
    return renamed({"fc.weight": torch.zeros(16, 32), "fc.bias": torch.zeros(16), **layer}, ("midlayer.", "layers.0."))


FAULTS = {
    "EAGLE 1": (same, eagle1, "a drafter of EAGLE 1 or 2"),
    "a Llama by the name of MLA": (
        lambda c: {**c, "architectures": ["Eagle3DeepseekV2ForCausalLM"]},
        same,
        "model_type llama",
    ),
    "norm_before_fc": (lambda c: {**c, "norm_before_fc": True}, same, "norm_before_fc"),
    "a parallel draft": (
        lambda c: {**parts(c), "speculators_model_type": "peagle"},
        same,
        "'peagle' is no EAGLE 3",
    ),
    "a parallel draft's state": (same, with_("mask_hidden", lambda t: torch.zeros(32)), "mask_hidden is superfluous"),
    "ids for offsets": (same, with_("d2t", lambda t: t["d2t"] + torch.arange(12)), "d2t holds target ids"),
    "d2t off by one": (same, with_("d2t", lambda t: t["d2t"] + 1), "names no 12 different tokens of 40 that t2d names"),
    "d2t of another target": (
        same,
        lambda t: {**without("t2d")(t), "d2t": t["d2t"] + 9},
        "names no 12 different tokens of 40: target id",
    ),
    "d2t of a fraction": (same, with_("d2t", lambda t: t["d2t"].float()), "torch.float32 is no map of 12"),
    "d2t of another length": (same, with_("d2t", lambda t: t["d2t"][:11]), "d2t [11] torch.int64 is no map of 12"),
    "no d2t": (same, without("d2t"), "d2t is missing though the vocabulary is pruned (12 of 40)"),
    "no lm_head": (same, without("lm_head.weight"), "lm_head.weight is missing"),
    "no fc_norm": (same, without("fc_norm.1.weight"), "fc_norm.1.weight is missing though fc_norm is on"),
    "fc_norm against the config": (lambda c: {**c, "fc_norm": False}, same, "fc_norm.0.weight is superfluous"),
    "NaN": (same, with_("fc.weight", lambda t: t["fc.weight"] / 0), "fc.weight holds 512 NaN or infinite"),
    "more layers than it counts": (
        lambda c: {**c, "eagle_aux_hidden_state_layer_ids": [1, 2, 3]},
        same,
        "num_aux_hidden_states 2",
    ),
    "another width": (lambda c: {**c, "intermediate_size": 25}, same, "down_proj.weight has shape [16, 24]"),
    "a bias": (same, with_("midlayer.self_attn.q_proj.bias", lambda t: torch.zeros(24)), "q_proj.bias is superfluous"),
    "both names": (
        same,
        with_("layers.0.mlp.up_proj.weight", lambda t: torch.zeros(1)),
        "up_proj.weight is there twice",
    ),
    "no size": (lambda c: {k: v for k, v in c.items() if k != "hidden_size"}, same, "does not say 'hidden_size'"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_one_line_that_names_it(fault, exported, tmp_path):
    _, config, tensors = exported
    of_config, of_tensors, words = FAULTS[fault]
    assert words in refusal(write(tmp_path / "faulty", of_config(dict(config)), of_tensors(tensors)))


def test_two_rows_for_one_token_are_refused(exported, tmp_path):
    _, config, tensors = exported
    tensors = without("t2d")(tensors)
    tensors["d2t"][3] = -1  # the third token, 2, once more
    assert "names no 12 different tokens" in refusal(write(tmp_path / "twice", config, tensors))


def test_a_folder_without_a_config_or_with_a_broken_one_is_refused(exported):
    folder = exported[0]
    (folder / "config.json").write_text('{"hidden_size": ')
    assert "config.json is damaged" in refusal(folder)
    (folder / "config.json").write_text("[]")
    assert "config.json is no JSON object" in refusal(folder)
    (folder / "config.json").unlink()
    assert "config.json is missing" in refusal(folder)


def test_a_torn_file_is_refused(exported):
    file = exported[0] / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    assert "model.safetensors is missing or damaged" in refusal(exported[0])


class Harm:
    """What a pickle may do when it is opened."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return (Path.touch, (self.mark,))


def test_a_pickle_is_refused_and_not_opened(exported, tmp_path):
    folder = exported[0]
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Harm(tmp_path / "opened")))
    (folder / "model.safetensors").unlink()
    assert "pytorch_model.bin is a pickle, which may run code and is not opened" in refusal(folder)
    assert not (tmp_path / "opened").exists()
    pickle.loads((folder / "pytorch_model.bin").read_bytes())
    assert (tmp_path / "opened").exists(), "the harm would have been done"
