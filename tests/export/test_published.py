"""Published drafts: every spelling reads as the drafter that was exported, and what vLLM would misread is refused."""

import json
from dataclasses import replace

import pytest
import torch
from made import message_of
from safetensors.torch import load_file, save_file
from spelling import joined, layers_0, same, speculators, write

from eagle31_train.checkpoint import config_json, published
from eagle31_train.checkpoint.contract import LAYER_IDS
from eagle31_train.checkpoint.drafter_checkpoint import DrafterCheckpoint


def read(folder):
    checkpoint = DrafterCheckpoint.open(folder)
    assert checkpoint.tensors
    return checkpoint


def refusal(folder):
    message = message_of(read, folder)
    assert message.startswith((str(folder), f"vLLM cannot serve the drafter in {folder}: "))
    return message


def alike(ours, theirs):
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)


def old_rope(config):
    """As transformers 4 and DeepSeek wrote it."""
    del config["rope_parameters"]
    (config["rope_scaling"] or {}).pop("rope_type", None)
    return config


def in_model(tensors):
    outside = ("lm_head", "d2t", "t2d")
    return {name if name.startswith(outside) else f"model.{name}": t for name, t in tensors.items()}


def shuffled(tensors):
    """The draft tokens in another order, which vLLM takes too."""
    ids = tensors["d2t"] + torch.arange(12)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(3))
    head = tensors["lm_head.weight"][order].clone()
    return {**tensors, "d2t": ids[order] - torch.arange(12), "lm_head.weight": head}


def without(*names):
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if name not in names}


def with_(name, make):
    return lambda tensors: {**tensors, name: make(tensors)}


def ids_elsewhere(config):
    ids = config.pop(LAYER_IDS)
    return {**config, "eagle_config": {LAYER_IDS: ids[::-1], "use_aux_hidden_state": True}}


def sglang_ids(config):
    return ids_elsewhere({**config, LAYER_IDS: [layer - 1 for layer in config[LAYER_IDS]]})


def copied(config):
    """With what a trainer leaves of the target's config.json."""
    experts = {"n_routed_experts": 8, "moe_intermediate_size": 4, "first_k_dense_replace": 1, "head_dim": 4}
    return {**config, **experts, "model_type": "deepseek_v3", "architectures": ["Eagle3DeepseekV3ForCausalLM"]}


SPELLINGS = {  # config.json, tensors
    "as exported": (same, same),
    "layers.0": (same, layers_0),
    "model.layers.0": (same, lambda t: in_model(layers_0(t))),
    "joined": (same, joined),
    "joined layers.0": (same, lambda t: layers_0(joined(t))),
    "another order of tokens": (same, shuffled),
    "no t2d": (same, without("t2d")),
    "tables of RoPE": (same, with_("midlayer.self_attn.rotary_emb.inv_freq", lambda _: torch.ones(3))),
    "tables of ChatGLM": (same, with_("midlayer.self_attn.rotary_pos_emb.inv_freq", lambda _: torch.ones(3))),
    "int32 d2t": (same, with_("d2t", lambda t: t["d2t"].int())),
    "layer ids in eagle_config@inputs": (ids_elsewhere, same),
    "layer ids as SGLang counts them@outputs": (sglang_ids, same),
    "rope of older versions": (old_rope, same),
    "llama: speculators": (speculators, layers_0),
    "llama: another name": (lambda c: {**c, "architectures": ["Eagle3LlamaForCausalLM"]}, same),
    "llama: the target's name": (lambda c: {**c, "architectures": ["LlamaForCausalLM"]}, same),
    "mla: a copied config": (copied, same),
}
CASES = [(kind, name) for name in SPELLINGS for kind in ("llama", "mla") if name.startswith(kind) or ":" not in name]


@pytest.mark.parametrize(("kind", "spelling"), CASES)
def test_every_spelling_reads_as_the_drafter_that_was_exported(kind, spelling, exports, tmp_path):
    run, (of_config, of_tensors) = exports[kind], SPELLINGS[spelling]
    config, tensors, _ = run.exported()
    _, at, counted = spelling.partition("@")
    folder = write(tmp_path / "other", of_config(dict(config)), of_tensors(tensors))
    draft = read(f"{folder}{at}{counted}")
    trained = load_file(run.checkpoint / "model.safetensors")
    assert draft.shape == replace(run.shape, rope_scaling=config_json.rope_scaling(run.shape))
    assert draft.vocab.target_ids.tolist() == [0, 1, 2, 5, 8, 13, 21, 25, 30, 33, 36, 39]
    assert draft.target_name == "someone/a-target"
    assert alike(draft.tensors, trained)


def test_shards_are_read_by_their_index(exports, tmp_path):
    """Three files and an index, beside a file of somebody else's that the index does not list."""
    config, tensors, _ = exports["llama"].exported()
    sharded, files = write(tmp_path / "sharded", config, {"fc.weight": torch.zeros(1)}), {}
    for shard in range(3):
        name = f"model-{shard + 1:05d}-of-00003.safetensors"
        part = dict(sorted(tensors.items())[shard::3])
        save_file(part, sharded / name)
        files |= dict.fromkeys(part, name)
    (sharded / published.INDEX).write_text(json.dumps({"metadata": {}, "weight_map": files}))
    assert alike(read(sharded).tensors, read(exports["llama"].folder / "export").tensors)
    third = sharded / "model-00003-of-00003.safetensors"
    whole = third.read_bytes()
    third.unlink()
    assert "model-00003-of-00003.safetensors is missing or damaged" in refusal(sharded)
    save_file({name: tensors[name] for name in sorted(tensors)[5::3]}, third)
    lost = sorted(tensors)[2]
    assert f"{lost} is missing, and vLLM would" in refusal(sharded)
    third.unlink()
    (tmp_path / third.name).write_bytes(whole)  # a download reads nothing outside its folder
    outside = {name: f"../{file}" if file == third.name else file for name, file in files.items()}
    (sharded / published.INDEX).write_text(json.dumps({"metadata": {}, "weight_map": outside}))
    assert third.name in refusal(sharded)
    third.write_bytes(whole)
    (sharded / published.INDEX).write_text("{}")
    assert "weight_map of model.safetensors.index.json does not map names to files" in refusal(sharded)


def test_the_whole_vocabulary_needs_no_map_and_may_share_the_targets_head(exports, tmp_path):
    config, tensors, _ = exports["llama"].exported()
    whole = without("d2t", "t2d")(tensors) | {"lm_head.weight": torch.randn(40, 16)}
    draft = read(write(tmp_path / "whole", {**config, "draft_vocab_size": None}, whole))
    assert draft.vocab.target_ids.tolist() == list(range(40))
    zeros = {**whole, "d2t": torch.zeros(40, dtype=torch.int64)}
    mapped = read(write(tmp_path / "zeros", {**config, "draft_vocab_size": 40}, zeros))
    assert (mapped.shape, mapped.vocab.target_ids.tolist()) == (draft.shape, list(range(40)))
    assert alike(mapped.tensors, draft.tensors)
    del whole["lm_head.weight"]
    shared = read(write(tmp_path / "shared", {**config, "draft_vocab_size": None}, whole))
    assert "lm_head.weight" not in shared.tensors
    assert shared.shape == draft.shape


def test_a_folder_may_be_called_as_one_that_counts_inputs_and_has_no_revision(exports, tmp_path):
    config, tensors, _ = exports["llama"].exported()
    folder = write(tmp_path / "draft@inputs", config, tensors)
    assert read(folder).folder == folder
    assert "revision main" in message_of(DrafterCheckpoint.open, folder, "main")


def eagle1(tensors):
    """One state beside the embedding, no norms but the MLP's, no head: EAGLE 1 and 2, under the same names."""
    layer = {n: t for n, t in tensors.items() if n.startswith("midlayer.") and "norm" not in n}
    layer["midlayer.post_attention_layernorm.weight"] = torch.ones(16)
    return layers_0({"fc.weight": torch.zeros(16, 32), "fc.bias": torch.zeros(16), **layer})


def twice(tensors):
    d2t = tensors["d2t"].clone()
    d2t[3] = -1  # the third token, 2, once more
    return {**without("t2d")(tensors), "d2t": d2t}


def attention_factor(config):
    return {**config, "rope_scaling": {**config["rope_scaling"], "attention_factor": 1.0}}


def fused_of_another_size(tensors):
    return joined(tensors) | {"midlayer.self_attn.fused_qkv_a_proj.weight": torch.ones(7, 32)}


eight_bits = with_("fc.weight", lambda t: t["fc.weight"].to(torch.float8_e4m3fn))
OFFSET = "d2t must be the offset target id - draft id"
FAULTS = {  # config.json, tensors, words
    "a Llama called MLA": (lambda c: {**c, "architectures": ["Eagle3DeepseekV2ForCausalLM"]}, same, "model_type llama"),
    "d2t of a fraction": (same, with_("d2t", lambda t: t["d2t"].float()), "torch.float32, but must be [12] integers"),
    "no d2t": (same, without("d2t"), "d2t is missing, which must map 12 draft tokens to the target's 40"),
    "no head for some of the tokens": (same, without("lm_head.weight"), "lm_head.weight"),
    "int8 weights": (same, with_("fc.weight", lambda t: t["fc.weight"].char()), "fc.weight is torch.int8, not a "),
    "floats of 8 bits": (same, eight_bits, "fc.weight is torch.float8_e4m3fn, not a floating-point type of 16 bits"),
    "whole numbers": (same, with_("norm.weight", lambda t: t["norm.weight"].long()), "norm.weight is torch.int64"),
    "mla: another rank": (lambda c: {**c, "kv_lora_rank": 13}, same, "kv_a_layernorm.weight has shape [12], not [13]"),
    "EAGLE 1": (same, eagle1, "EAGLE 1 or 2"),
    "ids for offsets": (same, with_("d2t", lambda t: t["d2t"] + torch.arange(12)), OFFSET),
    "d2t of another target": (same, lambda t: {**without("t2d")(t), "d2t": t["d2t"] + 9}, OFFSET),
    "t2d of other tokens": (same, with_("t2d", lambda t: t["t2d"].roll(1)), OFFSET),
    "two rows for one token": (same, twice, OFFSET),
    "d2t of another length": (same, with_("d2t", lambda t: t["d2t"][:11]), "d2t is [11] torch.int64, but must be [12]"),
    "fc_norm against the config": (lambda c: {**c, "fc_norm": False}, same, "fc_norm.0.weight is unexpected"),
    "both names": (same, with_("layers.0.mlp.up_proj.weight", lambda t: torch.zeros(1)), "weight occurs twice"),
    "mla: norm_before_fc": (lambda c: {**c, "norm_before_fc": True}, same, "not serve MLA drafters with norm_before"),
    "mla: RoPE of halves": (lambda c: {**c, "rope_interleave": False}, same, "rope_interleave"),
    "mla: sparse": (lambda c: {**c, "model_type": "deepseek_v32", "index_topk": 9}, same, "deepseek_v32, index_topk"),
    "mla: not causal": (lambda c: {**c, "is_causal": False}, same, "is_causal"),
    "mla: a width that is a text": (lambda c: {**c, "qk_rope_head_dim": "64"}, same, "qk_rope_head_dim: "),
    "mla: an attention_factor": (attention_factor, same, "attention_factor is ignored or read differently by vLLM"),
    "mla: full rank by the config": (lambda c: {**c, "q_lora_rank": None}, same, "q_proj.weight is missing"),
    "mla: fused of another size": (same, fused_of_another_size, "q_a_proj.weight is missing"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_one_line_that_names_it(fault, exports, tmp_path):
    config, tensors, _ = exports["mla" if fault.startswith("mla") else "llama"].exported()
    of_config, of_tensors, words = FAULTS[fault]
    assert words in refusal(write(tmp_path / "faulty", of_config(dict(config)), of_tensors(tensors)))
