"""RoPE of the Llama drafter, and of both what vLLM would read otherwise than it was trained, which is refused."""

import pytest
import torch
from conftest import YARN as MLAS
from conftest import make_mla_shape, make_shape
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from eagle31_train.checkpoint.config_json import config_json
from eagle31_train.checkpoint.contract import check_shape
from eagle31_train.checkpoint.published_config import shape_from_config
from eagle31_train.errors import UserError
from eagle31_train.model.rope import Rope

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LONG = {**YARN, "rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
SCALINGS = {
    "linear": {"rope_type": "linear", "factor": 2},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn by its old name": {**{key: YARN[key] for key in YARN if key != "rope_type"}, "type": "yarn"},
    "yarn, its shares": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.0},
    "yarn, its bounds": {**YARN, "beta_fast": 16, "beta_slow": 2, "truncate": False},
    "yarn, a magnitude of its own": {**YARN, "attention_factor": 1.2},
}
REFUSED = {
    "a misspelt key, which transformers passes over": {**YARN, "beta_fasst": 3},
    "no original length": {"rope_type": "yarn", "factor": 4.0},
    "a factor that follows from the longest position, in one of the two": {**YARN, "factor": None},
    "bounds in the wrong order, of which the two make different frequencies": {
        **LLAMA3,
        "low_freq_factor": 4.0,
        "high_freq_factor": 1.0,
    },
    "two tables, of which vLLM may take the other": LONG,
    "an unknown kind": {"rope_type": "twisted"},
}
REFUSED_OF_MLA = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "an attention_factor, which vLLM passes over": {**MLAS, "attention_factor": 1.4},
    "a correction range that is not rounded, which vLLM passes over": {**MLAS, "truncate": False},
    "a base of its own, which would be lost": {**MLAS, "rope_theta": 10000.0},
    "an unknown kind": {"rope_type": "twisted"},
}
NOT_SERVED = {name: make_shape(rope_scaling=scaling) for name, scaling in REFUSED.items()}
NOT_SERVED |= {f"mla: {name}": make_mla_shape(rope_scaling=scaling) for name, scaling in REFUSED_OF_MLA.items()}


@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS.keys())
def test_a_scaling_is_the_targets_and_survives_config_json(scaling):
    shape = make_shape(rope_scaling=scaling)
    assert check_shape(shape) == []
    ours, config = Rope(shape), config_json(shape, "float32", "x")
    theirs = LlamaRotaryEmbedding(LlamaConfig(**config))
    assert torch.equal(ours.inv_freq, theirs.inv_freq)
    assert ours.factor == theirs.attention_scaling
    assert isinstance(config["rope_parameters"]["factor"], float)  # vLLM iterates over any other factor of linear
    again = shape_from_config(config)
    assert torch.equal(Rope(again).inv_freq, ours.inv_freq)


@pytest.mark.parametrize("shape", NOT_SERVED.values(), ids=NOT_SERVED.keys())
def test_a_scaling_that_vllm_reads_otherwise_is_refused_in_one_line(shape):
    with pytest.raises(UserError, match=r"^drafter\.rope_scaling[^\n]+$") as refused:
        Rope(shape)
    assert check_shape(shape) == [str(refused.value)]


@pytest.mark.parametrize("kind", [YARN, LLAMA3], ids=["yarn", "llama3"])
def test_a_published_draft_without_its_original_length_is_read_as_transformers_does(kind):
    shape = make_shape(rope_scaling={**kind, "original_max_position_embeddings": 128}, max_position_embeddings=128)
    config = config_json(shape, "float32", "x")
    for written in (config["rope_scaling"], config["rope_parameters"]):
        written.pop("original_max_position_embeddings", None)
    assert torch.equal(Rope(shape_from_config(config)).inv_freq, Rope(shape).inv_freq)
    assert torch.equal(LlamaRotaryEmbedding(LlamaConfig(**config)).inv_freq, Rope(shape).inv_freq)
