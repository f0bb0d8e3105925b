"""Real vLLM: a store by two parts of extraction has the bytes of one by one command."""

import json
from pathlib import Path

import pytest
from engines import command
from pipeline import contents, make_run, options

pytestmark = pytest.mark.vllm


def timeless(store):
    """Every file of a store, its manifest without the time it took."""
    files = contents(store)
    manifest = json.loads(files["manifest.json"])
    del manifest["seconds"], manifest["check"]
    return {**files, "manifest.json": json.dumps(manifest)}


def test_two_parts_make_the_store_of_one(tmp_path, vllm_python):
    make_run(tmp_path, num_attention_heads=1, num_key_value_heads=1)  # vLLM takes heads of 32 values and wider
    engine = ["extract.engine=vllm", "extract.engine_args={enforce_eager: true, skip_tokenizer_init: true}"]
    whole, shared = tmp_path / "whole", tmp_path / "shared"
    run = Path(__file__).with_name("run_parts.py")
    said = command(vllm_python, run, whole, shared, *options(tmp_path, *engine))
    assert said.count("extract.part=1 is done") == 1
    assert timeless(shared) == timeless(whole)
