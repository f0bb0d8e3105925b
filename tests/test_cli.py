"""The command line: recipes and options compose, and every mistake is one line that says what to do."""

import errno
import shutil
from pathlib import Path

import pytest

from eagle31_train import cli
from eagle31_train.cli import load_config, run
from eagle31_train.config import RENAMED, Config
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


# ---------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("trian.lr=1", "no option 'trian.lr': did you mean 'train.lr'?"),
        ("+experimnt=smollm2", "no option 'experimnt': did you mean 'experiment'?"),
        ("+experiment=smolm2", "no configs/experiment/smolm2.yaml: did you mean 'smollm2'?"),
        ("+target=zzz", "no configs/target/zzz.yaml (there are kimi, kimi_k25, kimi_toy, "),
        ("train.lr", "'train.lr' is not of the form key=value"),
        ("train.lr=fast", "train.lr=fast: Value 'fast' of type 'str' could not be converted to Float"),
        ("run_dir=a=b", "'run_dir=a=b' cannot be read"),
        ("name=", "name= is empty: give name=… a value"),
    ],
)
def test_a_wrong_option_is_named_with_the_nearest_right_one(override, words):
    assert words in message_of(RECIPE, override)


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


# ---------------------------------------------------------------- run


ENDINGS = {
    "a user's mistake": (UserError("the file is missing: make it"), 2, "error: the file is missing: make it"),
    "a full disk": (OSError(errno.ENOSPC, "No space", "/some/file"), 2, "make room"),
    "a file in the way": (NotADirectoryError(errno.ENOTDIR, "Not a directory", "/x"), 2, "or correct the option that"),
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
