"""What a run writes down of its steps over several launches, in files and TensorBoard; what is said of Weights &
Biases. Rows of metrics.jsonl are those of a run that nobody stopped: test_survival.py."""

import json
import math
import os
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from made import message_of
from planting import watched

from eagle31_train.common import artifacts
from eagle31_train.common.errors import UserError
from eagle31_train.config import Config
from train import tracking
from train.metrics import Reporter, append, scalars


@pytest.mark.parametrize(
    "damaged", [b'{"step": ', b'{"step": Infinity}', b'{"step": 1e999}', b"[" * 5000, b"[1]", b"\xff"], ids=range(6)
)
def test_a_run_goes_on_behind_damaged_and_torn_rows(tmp_path, damaged):
    recorder = SimpleNamespace(is_main_process=True, log=lambda values, step: None)
    reporter = Reporter(recorder, tmp_path, 0, 1000)
    for step in range(1, 31):
        reporter.log(step, {"loss": 1 / step})
    reporter.close()
    file = tmp_path / "metrics.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    lines[11] = damaged + b"\n"
    file.write_bytes(b"".join(lines))
    again = Reporter(recorder, tmp_path, 20, 1000)
    assert again.bar.n == 20
    again.close()
    assert file.read_bytes() == b"".join(lines[:20])
    file.write_bytes(b"".join(lines[:5]) + b'{"step": 6, "lo')  # torn by a kill
    Reporter(recorder, tmp_path, 20, 1000).close()
    assert file.read_bytes() == b"".join(lines[:5])


def test_what_is_not_finite_is_null_in_a_row_and_absent_from_the_trackers(tmp_path):
    row = {"loss": math.nan, "prefix_at_depth": [0.5, math.inf], "heldout_loss": -math.inf, "step": 3}
    append(tmp_path / "rows", row)
    written = {"loss": None, "prefix_at_depth": [0.5, None], "heldout_loss": None, "step": 3}
    assert json.loads((tmp_path / "rows").read_text()) == written
    assert scalars("train", row) == {"train/prefix_at_depth/0": 0.5, "train/step": 3.0}


def test_the_rows_of_a_run_that_ends_are_on_the_disk(tmp_path, monkeypatch):
    reporter = Reporter(SimpleNamespace(is_main_process=True, log=lambda *_, **__: None), tmp_path, 0, 1)
    reporter.log(1, {"loss": 1.0})
    reporter.timing(1, {"seconds": 2.0, "aside": 1.5, "tokens": 10})
    synced = watched(monkeypatch, artifacts, "fsync_path")
    reporter.close()
    assert synced == [(tmp_path / "metrics.jsonl",), (tmp_path / "timings.jsonl",)]


@pytest.fixture
def config(tmp_path):
    made = Config()
    made.name, made.run_dir, made.train.wandb = "tiny", str(tmp_path), "disabled"
    (tmp_path / "train").mkdir()
    return made


def launch(config, done, steps):
    AcceleratorState._reset_state(True)
    accelerator = Accelerator(log_with=tracking.loggers(config) or None)
    tracking.start(accelerator, config, {"train": {"lr": 1.0}}, done)
    reporter = Reporter(accelerator, config.train_folder, done, 100)
    for step in steps:
        reporter.log(step, {"loss": 100 * done + step, "prefix_at_depth": [0.5, 0.25], "oops": None})
        reporter.timing(step, {"seconds": 2.0, "aside": 1.5, "tokens": 10, "memory_bytes": None})
        if step % 5 == 0:
            reporter.log(step, {"heldout_acceptance_estimate": 100 * done + step})
    reporter.close()
    accelerator.end_training()


def test_timings_and_tensorboard_have_every_step_once_after_a_resume(config, tmp_path):
    """A launch killed before its first checkpoint, one killed at step 20, and one that goes on after 10."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config.train.tensorboard = True
    launch(config, 0, steps=range(1, 4))
    launch(config, 0, steps=range(1, 21))
    launch(config, 10, steps=range(11, 15))
    timings = (tmp_path / "train" / "timings.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in timings] == list(range(1, 15))
    events = EventAccumulator(str(tmp_path / "train" / "tensorboard"))
    events.Reload()
    shown = {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert shown["train/loss"] == [(step, step if step <= 10 else 1000 + step) for step in range(1, 15)]
    assert shown["heldout/acceptance_estimate"] == [(5, 5), (10, 10)]
    assert shown["train/prefix_at_depth/1"] == [(step, 0.25) for step in range(1, 15)]
    assert shown["timing/tokens_per_second"] == [(step, 20) for step in range(1, 15)]


def test_weights_and_biases_know_a_run_by_one_id_in_all_launches_and_no_other_by_it(config, tmp_path, capsys):
    asked, run = [], SimpleNamespace(dir=str(tmp_path / "files"), offline=True)
    accelerator = SimpleNamespace(
        is_main_process=True,
        log_with=[],
        init_trackers=lambda _, init_kwargs: asked.append(init_kwargs["wandb"]),
        get_tracker=lambda *_, **__: run,
    )
    for folder, mode in (("a", "online"), ("a", "online"), ("a", "offline"), ("b", "online")):
        config.run_dir, config.train.wandb = str(tmp_path / folder), mode
        tracking.start(accelerator, config, {}, 0)
    first, *again, other = [one["id"] for one in asked]
    assert again == [first, first]
    assert other != first
    assert [one["resume"] for one in asked] == ["allow", "allow", None, "allow"]
    assert [one["dir"] for one in asked] == [str(tmp_path / folder / "train") for folder in "aaab"]
    assert f"wandb sync {os.path.relpath(tmp_path)}\n" in capsys.readouterr().out


def test_the_trackers_that_are_asked_for_follow_a_run_or_it_does_not_begin(config, monkeypatch):
    monkeypatch.setattr(tracking, "check_wandb", lambda _: None)
    for mode, asked in (("disabled", []), ("offline", ["wandb"]), ("online", ["wandb"])):
        config.train.wandb = mode
        assert tracking.loggers(config) == asked
    config.train.tensorboard = True
    monkeypatch.setattr(tracking.importlib.util, "find_spec", lambda _: None)
    assert "train.tensorboard" in message_of(tracking.loggers, config)


@pytest.mark.parametrize(("module", "named"), [("wandb.errors", UserError), ("builtins", OSError)])
def test_a_tracker_that_does_not_start_ends_the_run(config, module, named):
    error = type("Failed", (OSError,), {"__module__": module})
    accelerator = SimpleNamespace(is_main_process=True, log_with=[], init_trackers=Mock(side_effect=error))
    with pytest.raises(named):
        tracking.start(accelerator, config, {}, 0)


def test_a_damaged_line_about_an_earlier_launch_stops_none(config, tmp_path):
    launches = tmp_path / "train" / tracking.LAUNCHES
    launches.write_bytes(b"\xff\n")
    tracking.record_launch(config, {"steps": 3})
    damaged, line = launches.read_bytes().splitlines()
    assert damaged == b"\xff"
    assert json.loads(line)["facts"] == {"steps": 3}
