"""The recipes with a Llama draft compose, and say what was published. Kimi's have tests of their own."""

import pytest

from eagle31_train.cli import ROOT, load_config

SHAPES = {
    # target, layers read, MLP width, query and key heads, head width, RoPE base, draft vocabulary
    "smollm2": (None, [2, 15, 27], 1536, 9, 3, 64, 100000.0, 8192),
    "smollm2_study": (None, [2, 15, 27], 1536, 9, 3, 64, 100000.0, 8192),
    "llama31_8b": ("meta-llama/Llama-3.1-8B-Instruct", [2, 16, 29], 14336, 32, 8, 128, 500000.0, 32000),
    "qwen3_8b": ("Qwen/Qwen3-8B", [2, 18, 33], 12288, 32, 8, 128, 1000000.0, 32000),
}


@pytest.mark.parametrize("name", SHAPES)
def test_each_recipe_composes_as_published(name):
    config = load_config([f"+experiment={name}"])
    d = config.drafter
    target, *rest = SHAPES[name]
    assert target in (None, config.target.path)
    assert config.target.trust_remote_code is False
    assert rest == [
        config.target.aux_layers,
        d.intermediate_size,
        d.num_attention_heads,
        d.num_key_value_heads,
        d.head_dim,
        d.rope_theta,
        config.data.draft_vocab_size,
    ]
    assert (d.fc_norm, d.norm_output) == (True, True)


def test_every_recipe_is_looked_at():
    recipes = {file.stem for file in (ROOT / "configs" / "experiment").glob("*.yaml")}
    assert {name for name in recipes if not name.startswith("kimi")} == SHAPES.keys()
