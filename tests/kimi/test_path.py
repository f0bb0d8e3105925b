"""The whole path of Kimi's drafter at toy size, by the commands that a user types: from prompts to the export.

A target of Kimi's kind thinks, is asked in several languages and with tools, and learns to draft from its own
answers.
"""

import json
import os
import subprocess
import sys

import pytest
import torch
from launching import ROOT
from safetensors.torch import load_file

from eagle31_train.checkpoint import contract
from eagle31_train.cli import load_config
from eagle31_train.config import DrafterShape
from eagle31_train.targets import toy
from eagle31_train.targets.hf import HiddenStateTarget, load_model

TRAIN = ["-m", "accelerate.commands.launch", "--config_file", "configs/accelerate/cpu.yaml", "train.py"]
STAGES = {
    "data": ["-m", "data_prep"],
    "extract": ["-m", "eagle31_train.extract"],
    "train": TRAIN,
    "evaluate": ["-m", "eagle31_train.evaluate"],
    "export": ["-m", "eagle31_train.export"],
}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return toy.make(tmp_path_factory.mktemp("kimi") / "toy")


def command(stage, run, target, more):
    words = [sys.executable, *STAGES[stage], "+experiment=kimi_toy", f"run_dir={run}", f"target.path={target}", *more]
    how = {"cwd": ROOT, "capture_output": True, "text": True, "env": {**os.environ, "CUDA_VISIBLE_DEVICES": ""}}
    done = subprocess.run(words, **how, check=False)
    assert done.returncode == 0, f"{stage}: {done.stderr[-3000:]}"
    return done.stdout


def manifest(run, stage):
    return json.loads((run / stage / "manifest.json").read_text())


# ---------------------------------------------------------------- the target itself


@pytest.fixture(scope="module")
def model(target):
    return load_model(load_config(["+experiment=kimi_toy", f"target.path={target}", "target.device=cpu"]).target)


def test_states_of_deepseek_are_inputs_of_layers_and_the_last_before_the_norm(model):
    layers = list(range(1, 7))
    tapped = HiddenStateTarget(model, layers)
    tokens = torch.randint(0, 1500, (1, 90), generator=torch.Generator().manual_seed(0))
    aux, last = tapped.states(tokens, None)
    with torch.no_grad():
        hidden = model(input_ids=tokens, output_hidden_states=True, use_cache=False).hidden_states
    for column, layer in enumerate(layers[:-1]):
        assert torch.equal(aux[:, :, column], hidden[layer])
    assert torch.equal(aux[:, :, -1], last)
    torch.testing.assert_close(tapped.final_norm(last), hidden[-1])


# ---------------------------------------------------------------- the recipe as it is


@pytest.mark.slow
def test_the_recipe_trains_a_drafter_by_the_commands_that_a_user_types(target, tmp_path):
    run = tmp_path / "run"
    output = {stage: command(stage, run, target, ["train.wandb=disabled"]) for stage in STAGES}
    data = manifest(run, "data")
    assert data["refused"] == []
    assert "REFUSED" not in output["data"]
    sources = {**data["splits"]["train"]["by_source"], **data["splits"]["heldout"]["by_source"]}
    assert sources.keys() == {"agent", "chat", "chinese"}
    rows = [json.loads(line) for line in (run / "conversations.jsonl").read_text().splitlines()]
    answers = [m["content"] for row in rows for m in row["messages"] if m["role"] == "assistant"]
    assert answers
    assert all(answer.count("</think>") == 1 for answer in answers if len(answer.split()) > 50)
    assert data["no_end_of_turn"] < len(answers) / 2  # most end by themselves, and are learnt to
    evaluated = manifest(run, "evaluate")
    assert evaluated["identical"]
    (numbers,) = evaluated["result"]["workloads"][0]["drafters"].values()
    assert numbers["by_depth"][str(evaluated["result"]["draft_tokens"])]["acceptance_length"][0] > 2
    config = json.loads((run / "export" / "config.json").read_text())
    assert (config["model_type"], config["architectures"]) == ("kimi_k2", ["Eagle3DeepseekV2ForCausalLM"])
    assert (config["kv_lora_rank"], config["qk_rope_head_dim"], config["rope_theta"]) == (512, 64, 50000.0)
    assert config["rope_scaling"]["mscale_all_dim"] == 1.0
    assert config["rope_scaling"]["original_max_position_embeddings"] == 64
    shape = json.loads(next((run / "train" / "checkpoints").glob("*/drafter.json")).read_text())
    assert contract.check(load_file(run / "export" / "model.safetensors"), DrafterShape(**shape)) == []
