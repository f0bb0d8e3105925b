"""A run's folder is one process's at a time."""

from pathlib import Path

import pytest
from pipeline import message_of

from train.claim import alone


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
