"""The recipes for large targets compose, say what was published, and Kimi's stops in one line."""

import os
import subprocess
import sys

import pytest

from eagle31_train.cli import ROOT, load_config
from eagle31_train.schema import UserError, require_available

SHAPES = {
    # target, layers read, MLP width, query and key heads, head width, RoPE base, draft vocabulary
    "smollm2": (None, [2, 15, 27], 1536, 9, 3, 64, 100000.0, 8192),
    "llama31_8b": ("meta-llama/Llama-3.1-8B-Instruct", [2, 16, 29], 14336, 32, 8, 128, 500000.0, 32000),
    "qwen3_8b": ("Qwen/Qwen3-8B", [2, 18, 33], 12288, 32, 8, 128, 1000000.0, 32000),
    "kimi": ("moonshotai/Kimi-K2.6", [2, 30, 58], 18432, 64, 64, 192, 50000.0, None),
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
    assert {file.stem for file in (ROOT / "configs" / "experiment").glob("*.yaml")} == SHAPES.keys()


def test_kimi_has_the_published_mla_dimensions():
    d = load_config(["+experiment=kimi"]).drafter
    ranks = (d.q_lora_rank, d.kv_lora_rank, d.qk_nope_head_dim, d.qk_rope_head_dim, d.v_head_dim)
    assert ranks == (1536, 512, 128, 64, 128)
    assert d.rope_scaling == {"rope_type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096}


@pytest.mark.parametrize("name", ["llama31_8b", "qwen3_8b", "smollm2"])
def test_the_other_recipes_are_available(name):
    require_available(load_config([f"+experiment={name}"]).drafter.architecture)


def test_kimi_stops_the_export_with_one_clear_line(tmp_path):
    from eagle31_train.export import export

    with pytest.raises(UserError, match="the MLA drafter is not available yet"):
        export(load_config(["+experiment=kimi", f"run_dir={tmp_path}"]))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("stage", [["-m", "data_prep"], ["train.py"], ["-m", "eagle31_train.export"]])
def test_every_stage_prints_the_refusal_first_and_exits_2(tmp_path, stage):
    done = subprocess.run(
        [sys.executable, *stage, "+experiment=kimi", f"run_dir={tmp_path}"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: the MLA drafter is not available yet")
    assert done.stderr.count("\n") == 1
