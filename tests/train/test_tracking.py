"""Trackers over several launches of one run, and what a launch leaves written down."""

import json
import random

import pytest
import yaml
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.tracking import TensorBoardTracker

from eagle31_train import cli
from eagle31_train.config import Config
from train import tracking
from train.metrics import Reporter


@pytest.fixture
def config(tmp_path):
    made = Config()
    made.name, made.run_dir, made.train.wandb = "tiny", str(tmp_path / "run"), "disabled"
    (tmp_path / "run" / "train").mkdir(parents=True)
    return made


@pytest.fixture
def folder(config, tmp_path):
    return tmp_path / "run" / "train"


def launch(config, folder, done=0, ids=None, steps=(), inputs=None):
    """One launch from its start to its end; returns the ids."""
    AcceleratorState._reset_state(True)
    accelerator = Accelerator(log_with=tracking.loggers(config) or None)
    known = tracking.start(accelerator, config, folder, inputs or {"train": {"lr": 1.0}}, done, ids)
    reporter = Reporter(accelerator, folder, done, 100)
    for step in steps:
        reporter.log(step, {"loss": 100 * done + step, "prefix_at_depth": [0.5, 0.25], "oops": None})
        reporter.timing(step, {"seconds": 0.5, "tokens": 10, "memory_bytes": None})
        if step % 5 == 0:
            reporter.log(step, {"heldout_acceptance_estimate": 100 * done + step})
    reporter.close()
    accelerator.end_training()
    return known


# ---------------------------------------------------------------- TensorBoard


def curves(folder):
    """Tag → (step, value) of every point that TensorBoard shows."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    shown = {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    return shown, events.Tags()["tensors"]


def killed_twice(config, folder):
    """A launch killed before its first checkpoint, one killed at step 20, and one that goes on after 10."""
    config.train.tensorboard = True
    launch(config, folder, 0, steps=range(1, 4))
    launch(config, folder, 0, steps=range(1, 21))
    launch(config, folder, 10, steps=range(11, 15))


def test_tensorboard_shows_every_step_once_after_a_resume(config, folder):
    killed_twice(config, folder)
    shown, tensors = curves(folder)
    assert shown["train/loss"] == [(step, step if step <= 10 else 1000 + step) for step in range(1, 15)]
    assert shown["heldout/acceptance_estimate"] == [(5, 5), (10, 10)]
    assert shown["train/prefix_at_depth/1"] == [(step, 0.25) for step in range(1, 15)]
    assert shown["timing/tokens_per_second"] == [(step, 20) for step in range(1, 15)]
    assert tensors == ["config/text_summary"]


def test_without_a_purge_it_would_show_them_twice(config, folder, monkeypatch):
    original = TensorBoardTracker.start

    def start(self):
        self.init_kwargs.pop("purge_step")
        original(self)

    monkeypatch.setattr(TensorBoardTracker, "start", start)
    killed_twice(config, folder)
    steps = [step for step, _ in curves(folder)[0]["train/loss"]]
    assert len(steps) > len(set(steps))


# ---------------------------------------------------------------- Weights & Biases


def test_a_run_keeps_its_id_over_its_launches(config, folder, monkeypatch):
    monkeypatch.setenv("WANDB_SILENT", "true")
    config.name, config.train.wandb = "kimi k2/α", "offline"
    state = random.getstate()
    first = launch(config, folder, steps=[1])
    assert random.getstate() == state, "the id is drawn with the training's random numbers"
    name, _, suffix = first["wandb"].rpartition("-")
    assert (name, len(suffix)) == ("kimi-k2-", 8)
    assert launch(config, folder, steps=[1]) == first, "killed before the first checkpoint"
    runs = [path.name for path in (folder / "wandb").glob("offline-run-*")]
    assert runs
    # Of two that began in the same second the later has a number behind.
    assert all(first["wandb"] in name for name in runs)

    config.train.wandb = "disabled"
    assert launch(config, folder) == first, "a launch without the tracker forgets its id"
    (folder / tracking.TRACKERS).unlink()
    assert launch(config, folder, 5, ids=first) == first, "known from the checkpoint alone"
    assert json.loads((folder / tracking.TRACKERS).read_text()) == first


# ---------------------------------------------------------------- launches


def test_every_launch_adds_a_line_and_the_newest_configuration_stays(config, folder):
    tracking.record_launch(folder, config, {"after_step": 0, "device": "cpu"})
    config.train.eval_every = 7
    tracking.record_launch(folder, config, {"after_step": 20, "loss": float("nan")})
    first, second = (json.loads(line) for line in (folder / "launches.jsonl").read_text().splitlines())
    assert first["facts"] == {"after_step": 0, "device": "cpu"}
    assert second["facts"] == {"after_step": 20, "loss": None}
    assert first.keys() == {"time", "argv", "git", "versions", "host", "facts"}
    assert yaml.safe_load((folder / "config.yaml").read_text())["train"]["eval_every"] == 7
    assert (folder / "config.yaml").read_text() == cli.to_yaml(config)
