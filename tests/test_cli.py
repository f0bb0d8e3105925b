"""The command line: recipes and options compose, and every mistake is one line that says what to do."""

import dataclasses
import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from eagle31_train import cli
from eagle31_train.cli import load_config, run
from eagle31_train.config import RENAMED, Config, check_value
from eagle31_train.errors import Stopped, UserError

ROOT = Path(__file__).resolve().parent.parent
RECIPE = "+experiment=smollm2"


def message_of(*overrides):
    with pytest.raises(UserError) as error:
        load_config(list(overrides))
    assert "\n" not in str(error.value)
    return str(error.value)


# ---------------------------------------------------------------- what composes


def test_a_recipe_and_options_compose():
    config = load_config([RECIPE, "train.lr=3e-4", "name=mine", "target.aux_layers=[1,2]"])
    assert isinstance(config, Config)
    assert (config.name, config.run_dir) == ("mine", "runs/mine")
    assert config.train.lr == 3e-4
    assert config.target.aux_layers == [1, 2]
    assert config.target.path == str(ROOT / "models" / "SmolLM2-135M-Instruct")
    assert config.train.max_grad_norm == Config().train.max_grad_norm


def test_a_recipe_needs_no_plus():
    assert load_config(["experiment=smollm2"]) == load_config([RECIPE])


def test_free_form_options_take_keys_that_the_schema_does_not_name():
    scaling = {"rope_type": "yarn", "factor": 4.0}
    whole = load_config([RECIPE, "drafter.rope_scaling={rope_type:yarn,factor:4.0}"])
    by_key = load_config([RECIPE, "drafter.rope_scaling.rope_type=yarn", "drafter.rope_scaling.factor=4.0"])
    assert whole.drafter.rope_scaling == by_key.drafter.rope_scaling == scaling


def test_commands_work_from_any_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load_config([RECIPE]).data.prompts == str(ROOT / "data_prep" / "prompts" / "prompts.jsonl")


# ---------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("trian.lr=1", "no option 'trian.lr': did you mean 'train.lr'?"),
        ("train.warmpu=0.1", "no option 'train.warmpu': did you mean 'train.warmup_ratio'?"),
        ("warmup=0.1", "no option 'warmup': did you mean 'evaluate.warmup'?"),
        ("+experimnt=smollm2", "no option 'experimnt': did you mean 'experiment'?"),
        ("+experiment=smolm2", "no configs/experiment/smolm2.yaml: did you mean 'smollm2'?"),
        ("+target=zzz", "no configs/target/zzz.yaml (there are kimi, kimi_k25, kimi_toy, "),
        ("hydra.run.dir=x", "no option 'hydra.run.dir'"),
        ("train.lr", "'train.lr' is not of the form key=value"),
        ("train.lr=fast", "train.lr: Value 'fast' of type 'str' could not be converted to Float"),
        ("train.epochs=null", "train.epochs: field 'train.epochs' is not Optional"),
        ("target.aux_layers=[1,a]", "target.aux_layers[1]: Value 'a'"),
        ("run_dir=a=b", "'run_dir=a=b' cannot be read"),
        ("run_dir=runs/${nme}", "run_dir: Interpolation key 'nme' not found"),
        ("name=", "name= is empty: give name=… a value"),
        ("run_dir=''", "run_dir= is empty: give run_dir=… a value"),
    ],
)
def test_a_wrong_option_is_named_with_the_nearest_right_one(override, words):
    assert words in message_of(RECIPE, override)


def test_missing_values_are_named_with_where_to_get_them():
    recipes = "pick a recipe with +experiment=NAME (kimi"
    assert message_of().startswith(f"no value for name: {recipes}")
    assert message_of().endswith("smollm2_study) or set name=…")
    message = message_of("name=mine", "target=smollm2")
    assert message.startswith(f"no value for drafter.intermediate_size, drafter.num_attention_heads: {recipes}")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.ttt_length=0", "train.ttt_length=0 must be at least 1"),
        ("train.lr=0", "train.lr=0.0 must be above 0"),
        ("train.lr=inf", "train.lr=inf must be a finite number"),
        ("train.max_grad_norm=nan", "train.max_grad_norm=nan must be above 0"),
        ("train.betas=[0.9,1.0]", "train.betas=1.0 must be at least 0 and below 1"),
        ("train.loss=mse", "train.loss='mse' is not one of kl, ce"),
        ("store.aux_codec=fp4", "store.aux_codec='fp4' is not one of bf16, fp8, int8"),
        ("drafter.architecture=gpt", "drafter.architecture='gpt' is not one of llama, mla"),
        ("evaluate.serve_speculative_tokens=[1,0]", "evaluate.serve_speculative_tokens=0 must be at least 1"),
        ("seed=-1", "seed=-1 must be at least 0"),
    ],
)
def test_a_value_that_an_option_does_not_take_is_refused_when_it_is_read(override, words):
    assert words in message_of(RECIPE, override)


def test_every_default_is_within_its_bounds_and_a_clip_may_cut_nothing():
    for name, _, field in cli._options(Config):
        if field.default is not dataclasses.MISSING and field.default != "???":
            check_value(name, field.default, field.metadata)
    assert load_config([RECIPE, "train.max_grad_norm=inf"]).train.max_grad_norm == float("inf")


def test_an_old_name_is_understood_wherever_it_stands_and_says_the_new_one(recipe, monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(RENAMED, "train.rate", "train.lr")
    recipe("  lr: ", "  rate: ")
    assert load_config(["+experiment=bad", "train.rate=0.5"]).train.lr == 0.5
    assert capsys.readouterr().err == "train.rate is called train.lr now\n"
    config = load_config(["+experiment=bad"])
    assert config.train.lr == load_config([RECIPE]).train.lr
    assert not hasattr(config.train, "rate")
    (tmp_path / "saved.yaml").write_text(cli.to_yaml(config).replace("  lr:", "  rate:"))
    assert load_config([], tmp_path / "saved.yaml") == config
    assert "give it once" in message_of(RECIPE, "train.rate=1", "train.lr=1")


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    """A function that writes the recipe `bad` into a copy of the configuration folder."""
    configs = tmp_path / "configs"
    shutil.copytree(cli.CONFIGS, configs)
    monkeypatch.setattr(cli, "CONFIGS", configs)
    good = (configs / "experiment" / "smollm2.yaml").read_text()

    def write(old, new):
        assert old in good
        (configs / "experiment" / "bad.yaml").write_text(good.replace(old, new))

    return write


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("  lr: ", "  lrr: ", "configs/experiment/bad.yaml: no option 'train.lrr': did you mean 'train.lr'?"),
        ("train:", "trian:", "configs/experiment/bad.yaml: no option 'trian': did you mean 'train'?"),
        ("name: ", "sed: 3\nname: ", "configs/experiment/bad.yaml: no option 'sed': did you mean 'seed'?"),
        ("  lr: ", "  lr: x", "configs/experiment/bad.yaml: train.lr: Value 'x"),
        ("/target: smollm2", "/target: smolm2", "In 'experiment/bad': Could not find 'target/smolm2'"),
        ("name: ", "name: [", "a configuration file is not YAML: "),
    ],
)
def test_a_mistake_in_a_recipe_is_named_with_its_file(recipe, old, new, message):
    recipe(old, new)
    found = message_of("+experiment=bad")
    assert found.startswith(message)
    assert "bad.yaml" in found or "experiment/bad" in found


# ---------------------------------------------------------------- run


def test_a_stage_is_run_with_its_configuration():
    seen = []
    run(seen.append, "A stage.", [RECIPE, "seed=7"])
    assert [config.seed for config in seen] == [7]


def test_help_lists_every_option_with_its_default(capsys):
    with pytest.raises(SystemExit) as stopped:
        run(lambda config: None, "A stage of the pipeline.", ["--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    assert "A stage of the pipeline." in text
    recipes = "kimi, kimi_k25, kimi_llama, kimi_toy, llama31_8b, qwen3_8b, smollm2, smollm2_study"
    assert f"recipes (+experiment=…): {recipes}" in text
    described = {
        line.split()[0]: line for line in text.splitlines() if line.startswith("  ") and line.rstrip().endswith("]")
    }
    every = {name for name, _, _ in cli._options(Config)}
    assert every <= described.keys()
    assert described["train.lr"].endswith("peak learning rate [0.0001]")
    assert described["target.path"].endswith("[required]")
    assert described["train.betas"].endswith("[[0.9, 0.95]]")


def test_cfg_prints_the_resolved_configuration_and_runs_nothing(capsys):
    def never(config):
        raise AssertionError("the stage ran")

    run(never, "A stage.", [RECIPE, "--cfg", "train.epochs=4"])
    shown = OmegaConf.to_object(
        OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.create(capsys.readouterr().out))
    )
    assert shown == load_config([RECIPE, "train.epochs=4"])


ENDINGS = {
    "a user's mistake": (UserError("the file is missing: make it"), 2, "error: the file is missing: make it"),
    "a full disk": (OSError(errno.ENOSPC, "No space", "/some/file"), 2, "make room, then run the same command again"),
    "a file in the way": (NotADirectoryError(errno.ENOTDIR, "Not a directory", "/x"), 2, "correct the option that"),
    "no permission": (OSError(errno.EACCES, "Denied", "/some/file"), 2, "or its permissions"),
    "told to stop": (Stopped("saved after step 3"), 75, "saved after step 3"),
    "Ctrl-C": (KeyboardInterrupt(), 130, "stopped; the same command goes on from here"),
}


@pytest.mark.parametrize(("error", "status", "words"), ENDINGS.values(), ids=ENDINGS.keys())
def test_how_a_stage_ends_is_one_line_and_a_status(capsys, error, status, words):
    def stage(config):
        raise error

    with pytest.raises(SystemExit) as stopped:
        run(stage, "A stage.", [RECIPE])
    assert stopped.value.code == status
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line


@pytest.mark.parametrize("error", [ValueError("a bug"), FileNotFoundError(errno.ENOENT, "No", "/x")])
def test_a_bug_is_not_dressed_up_as_a_users_mistake(error):
    def stage(config):
        raise error

    with pytest.raises(type(error)):
        run(stage, "A stage.", [RECIPE])


def test_the_real_command_ends_with_status_2_and_one_line(tmp_path):
    command = [sys.executable, "-m", "eagle31_train.extract", RECIPE, f"run_dir={tmp_path / 'run'}"]
    done = subprocess.run(command, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, check=False)
    manifest = tmp_path / "run" / "data" / "manifest.json"
    assert done.stderr == f"error: {manifest} is missing: run `python -m data_prep` first\n"
    assert (done.returncode, done.stdout) == (2, "")
    assert not (tmp_path / "run").exists()
