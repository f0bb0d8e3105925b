"""Kimi's recipes: published sizes, variants that are overrides, and one line for what the user has to set."""

from eagle31_train.cli import load_config
from eagle31_train.targets import toy


def recipe(name, *more):
    return load_config([f"+experiment={name}", *more])


def test_kimi_is_the_published_drafter_and_recipe():
    config = recipe("kimi")
    d, t = config.drafter, config.train
    assert config.target.path == "moonshotai/Kimi-K2.6"
    assert config.target.aux_layers == [2, 30, 58]
    assert (d.architecture, d.intermediate_size, d.num_attention_heads) == ("mla", 18432, 64)
    assert (d.q_lora_rank, d.kv_lora_rank) == (1536, 512)
    assert (d.qk_nope_head_dim, d.qk_rope_head_dim, d.v_head_dim) == (128, 64, 128)
    assert d.rope_theta == 50000.0
    assert d.max_position_embeddings == 262144
    yarn = {"rope_type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096}
    assert d.rope_scaling == {**yarn, "beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}
    assert (d.fc_norm, d.norm_output, config.data.draft_vocab_size) == (True, True, None)
    assert (config.data.max_length, t.lr, t.ttt_length) == (20480, 5e-5, 4)
    assert t.batch_tokens == 8 * config.data.max_length
    assert config.extract.engine == "vllm"
    assert config.extract.engine_args["tensor_parallel_size"] == 8
    assert config.regenerate


def test_the_toys_drafter_has_its_targets_widths():
    config = recipe("kimi_toy")
    target, d = toy.make_config(toy.make_tokenizer()), config.drafter
    for name in ("num_attention_heads", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim"):
        assert getattr(d, name) == getattr(target, name), name
    assert d.max_position_embeddings == target.max_position_embeddings
    assert config.target.aux_layers[-1] < target.num_hidden_layers
    yarn = {k: v for k, v in target.rope_parameters.items() if k not in ("rope_theta", "beta_fast")}
    assert {k: v for k, v in d.rope_scaling.items() if k != "beta_fast"} == yarn
