"""Kimi's recipes: published sizes, variants that are overrides, and one line for what the user has to set."""

from dataclasses import asdict

from eagle31_train.cli import load_config
from eagle31_train.targets import toy

VARIANTS = ("kimi_k25", "kimi_llama", "kimi_toy")


def recipe(name, *more):
    return load_config([f"+experiment={name}", *more])


def changed(name):
    """Options in which a recipe differs from kimi, by their dotted names."""

    def flat(value, prefix=""):
        if not isinstance(value, dict):
            return {prefix: value}
        return {key: v for name, inner in value.items() for key, v in flat(inner, f"{prefix}.{name}").items()}

    ours, theirs = flat(asdict(recipe(name))), flat(asdict(recipe("kimi")))
    return {key.lstrip(".") for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key)}


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


def test_kimi_k25_differs_in_the_target_alone():
    assert changed("kimi_k25") == {"name", "run_dir", "target.path"}


def test_the_llama_variant_differs_in_the_drafter_alone():
    rest = {key for key in changed("kimi_llama") if not key.startswith("drafter.")}
    assert rest == {"name", "run_dir"}
    d = recipe("kimi_llama").drafter
    assert (d.architecture, d.intermediate_size, d.num_key_value_heads, d.head_dim) == ("llama", 12288, 64, 128)
    assert d.kv_lora_rank is None


def test_the_toy_differs_in_sizes_paths_and_what_a_cpu_has_not_got():
    sizes = {"intermediate_size", "num_attention_heads", "q_lora_rank", "qk_nope_head_dim", "v_head_dim"}
    sizes |= {"rope_scaling.original_max_position_embeddings", "max_position_embeddings"}
    expected = {f"drafter.{name}" for name in sizes}
    expected |= {"name", "run_dir", "target.path", "target.aux_layers", "target.dtype"}
    expected |= {f"data.sources.{name}.path" for name in ("chat", "chinese", "agent")}
    expected |= {"data.max_length", "data.heldout", "extract.shard_tokens"}
    expected |= {f"data.generate.{n}" for n in ("server", "samples", "max_new_tokens", "temperature", "batch_size")}
    expected |= {"extract.engine", *(f"extract.engine_args.{n}" for n in recipe("kimi").extract.engine_args)}
    expected |= {f"train.{n}" for n in ("epochs", "batch_tokens", "lr", "activation_checkpointing")}
    expected |= {"evaluate.max_new_tokens"}
    assert {key for key in changed("kimi_toy") if not key.startswith("plan.")} == expected


def test_the_toys_drafter_has_its_targets_widths():
    config = recipe("kimi_toy")
    target, d = toy.make_config(toy.make_tokenizer()), config.drafter
    for name in ("num_attention_heads", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim"):
        assert getattr(d, name) == getattr(target, name), name
    assert d.max_position_embeddings == target.max_position_embeddings
    assert config.target.aux_layers[-1] < target.num_hidden_layers
    yarn = {k: v for k, v in target.rope_parameters.items() if k not in ("rope_theta", "beta_fast")}
    assert {k: v for k, v in d.rope_scaling.items() if k != "beta_fast"} == yarn
