"""`eagle31 run`: which words its stages are given, and under which profile it trains."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

from eagle31_train import cli, run


@pytest.fixture
def started(monkeypatch):
    """The commands that a run starts, none of which is run."""
    commands = []
    monkeypatch.setattr(subprocess, "run", lambda words, **_: commands.append(words) or SimpleNamespace(returncode=0))

    def call(*words):
        commands.clear()
        monkeypatch.setattr(sys, "argv", ["eagle31 run", *words])
        run.main()
        return commands

    return call


def test_without_a_recipe_and_prompts_it_says_what_it_takes(started, capsys):
    commands = started("target.path=t", "name=x")
    said = capsys.readouterr().out
    assert "no recipe is named: +experiment=any" in said
    assert "the target writes them itself" in said
    assert len(commands) == len(run.STAGES)
    for words in commands:
        assert words[-5:] == ["+experiment=any", "target.path=t", "name=x", *run.SELF]
    config = cli.load_config(commands[0][-5:])
    assert (config.train.optimizer, config.train.ttt_length, config.data.prompts) == ("muon", 3, "self")

    commands = started("+experiment=smollm2", "train.lr=1", "--until", "data")
    assert [words[-2:] for words in commands] == [["+experiment=smollm2", "train.lr=1"]]
    assert "no recipe" not in capsys.readouterr().out
    (words,) = started("target.path=t", "name=x", "data.conversations=c.jsonl", "--until", "data")
    assert words[-1] == "data.conversations=c.jsonl", "nothing is answered anew that is given"


def test_a_profile_is_taken_by_its_name(started, monkeypatch, capsys):
    monkeypatch.setattr(run, "launch_profile", lambda: ("ddp", 4))
    words = started("name=x", "target.path=t", "--from", "train", "--until", "train", "--profile", "zero2")[0]
    file = words[words.index("--config_file") + 1]
    assert file == str(cli.CONFIGS / "accelerate" / "zero2.yaml")
    assert words[words.index("--num_processes") + 1] == "4"
    assert "--profile" not in words
    assert "training on 4 GPUs, profile zero2" in capsys.readouterr().out
    assert all((cli.CONFIGS / "accelerate" / f"{name}.yaml").is_file() for name in run.PROFILES)
    with pytest.raises(SystemExit):
        started("name=x", "target.path=t", "--profile", "zero9")
    assert "--profile takes one of cpu, gpu, ddp" in capsys.readouterr().err
