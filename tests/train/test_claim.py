"""A run's folder is one process's at a time."""

from pathlib import Path

import pytest
from pipeline import message_of

from eagle31_train.schema import Config, UserError
from train.claim import alone, check_made


def test_a_second_training_in_the_same_folder_is_refused_and_a_later_one_is_not(new_run):
    run = new_run()
    with alone(Path(run.folder / "run")):
        assert f"another process trains in {run.train} now" in message_of(run, "train.max_steps=1")
        assert not run.train.exists()
    run.fit("train.max_steps=1")
    assert run.manifest()["steps"] == 1


def test_the_folder_is_given_back_after_an_error(tmp_path):
    with pytest.raises(KeyboardInterrupt), alone(tmp_path):
        raise KeyboardInterrupt
    with alone(tmp_path):
        pass


def test_a_run_without_data_or_store_names_both_and_the_commands_that_make_them(tmp_path, monkeypatch):
    config = Config(name="kimi", run_dir=str(tmp_path))
    monkeypatch.setattr("sys.argv", ["train.py", "+experiment=kimi", "data.prompts=a b.jsonl"])
    options = "+experiment=kimi 'data.prompts=a b.jsonl'"
    with pytest.raises(UserError) as error:
        check_made(config)
    assert str(error.value) == (
        f"there is nothing to train on: {tmp_path}/data and {tmp_path}/store are missing; run "
        f"`python -m data_prep {options}`, then `python -m eagle31_train.extract {options}`"
    )
    (tmp_path / "data").mkdir()
    with pytest.raises(UserError, match=f"{tmp_path}/store is missing; run `python -m eagle31_train.extract"):
        check_made(config)
    config.store.follow = True  # training waits for it
    check_made(config)
