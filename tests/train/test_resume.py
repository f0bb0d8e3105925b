"""Runs that are stopped, damaged or begun elsewhere, and what goes on from them."""

import errno
import json
import os
import shutil
from types import SimpleNamespace

import pytest
import torch
from pipeline import assert_equal, contents, flip_bit, message_of

from eagle31_train.store.sealed import seal, unseal
from train import checkpoint
from train.metrics import Reporter

TIMED = {"seconds", "waited", "files"}  # a checkpoint's own manifest, which is listed, says seconds too


@pytest.fixture
def stop(monkeypatch):
    """stop(step): training is stopped by Ctrl-C right after this step's row is written, once."""

    def stop_at(step):
        original = Reporter.log

        def log(self, at, values):
            original(self, at, values)
            if at == step:
                monkeypatch.setattr(Reporter, "log", original)
                raise KeyboardInterrupt

        monkeypatch.setattr(Reporter, "log", log)

    return stop_at


@pytest.fixture(scope="module")
def whole(copy_of, tmp_path_factory):
    """Rows and weights of a run that nobody stopped."""
    run = copy_of(tmp_path_factory.mktemp("whole")).fit("train.eval_every=4")
    return SimpleNamespace(rows=run.rows(), weights=run.weights(), manifest=run.manifest())


def assert_same_run(run, whole):
    assert_equal(run.weights(), whole.weights)
    assert run.rows() == whole.rows
    timeless = [{k: v for k, v in m.items() if k not in TIMED} for m in (run.manifest(), whole.manifest)]
    assert timeless[0] == timeless[1]


@pytest.mark.parametrize("step", [1, 5, 6, 12])
def test_a_stopped_run_goes_on_and_ends_bit_for_bit_the_same(new_run, whole, stop, capsys, step):
    run, options = new_run(), ["train.checkpoint_every=2", "train.eval_every=4"]
    stop(step)
    with pytest.raises(KeyboardInterrupt):
        run.fit(*options)
    assert not (run.train / "manifest.json").exists()
    with (run.train / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "los')  # the torn line of a harder stop
    run.fit(*options)
    done = (step - 1) // 2 * 2
    assert (f"train: going on after step {done} " in capsys.readouterr().out) == (done > 0)
    assert_same_run(run, whole)


def test_a_run_killed_between_its_last_checkpoint_and_its_manifest_is_finished_without_training(
    new_run, whole, monkeypatch
):
    run = new_run().fit("train.eval_every=4")
    (run.train / "manifest.json").unlink()
    monkeypatch.setattr(torch.optim.AdamW, "step", None)
    assert_same_run(run.fit("train.eval_every=4"), whole)


@pytest.mark.parametrize(
    ("file", "harm", "words"),
    [
        ("model.safetensors", flip_bit, "does not match its checksum"),
        ("optimizer.safetensors", lambda path: path.unlink(), "is missing"),
        ("manifest.json", lambda path: path.write_text("{"), "is damaged"),
        ("manifest.json", lambda path: path.unlink(), "is missing"),
    ],
)
def test_a_damaged_newest_checkpoint_is_named_and_passed_over(new_run, whole, stop, capsys, file, harm, words):
    run, options = new_run(), ["train.checkpoint_every=2", "train.eval_every=4"]
    stop(5)
    with pytest.raises(KeyboardInterrupt):
        run.fit(*options)
    harm(run.checkpoints / "step-000004" / file)
    run.fit(*options)
    printed = capsys.readouterr().out
    assert f"checkpoint {run.checkpoints / 'step-000004'} is not used: " in printed
    assert words in printed
    assert "train: going on after step 2 " in printed
    assert_same_run(run, whole)


def test_a_finished_run_with_a_damaged_checkpoint_is_trained_again(new_run, whole, capsys):
    run = new_run().fit("train.eval_every=4")
    flip_bit(run.newest() / "model.safetensors")
    run.fit("train.eval_every=4")
    assert "model.safetensors does not match its checksum" in capsys.readouterr().out
    assert_same_run(run, whole)


def test_a_finished_run_is_not_repeated(new_run, capsys):
    run = new_run().fit("train.max_steps=2")
    before = contents(run.train)
    run.fit("train.max_steps=2", "train.eval_every=7")
    assert "train: up to date" in capsys.readouterr().out
    assert contents(run.train) == before


@pytest.mark.parametrize("finished", [True, False])
def test_a_folder_with_a_run_of_other_options_is_refused_or_replaced(new_run, stop, finished):
    run = new_run()
    if not finished:
        stop(3)
    options = ["train.max_steps=4", "train.checkpoint_every=1"]
    if finished:
        run.fit(*options)
    else:
        with pytest.raises(KeyboardInterrupt):
            run.fit(*options)
    before = contents(run.train)
    message = message_of(run, *options, "train.gamma=0.5")
    assert "train.gamma: 0.8 there, 0.5 here" in message
    assert "overwrite=true" in message
    assert contents(run.train) == before
    run.fit(*options, "train.gamma=0.5", "overwrite=true")
    assert_equal(run.weights(), new_run().fit(*options, "train.gamma=0.5").weights())


def test_a_checkpoint_is_written_whole_or_not_at_all(new_run, whole, monkeypatch, capsys):
    """A disk that is full for good after the first save: the run goes to its end, and the same command finishes it."""
    run, options = new_run(), ["train.checkpoint_every=2", "train.eval_every=4"]
    original = checkpoint.write_tensors

    def no_space(tensors, path):
        if path.name == "optimizer.safetensors" and path.parent.name != ".step-000002.tmp":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return original(tensors, path)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write_tensors", no_space)
        message = message_of(run, *options)
    assert message.startswith(f"{run.checkpoints / 'step-000012'} could not be written (No space left on device)")
    assert message.endswith(f"goes on from {run.checkpoints / 'step-000002'}")
    assert not (run.train / "manifest.json").exists()
    assert [path.name for path in run.checkpoints.iterdir()] == ["step-000002"]
    capsys.readouterr()
    run.fit(*options)
    assert "train: going on after step 2 " in capsys.readouterr().out
    assert_same_run(run, whole)


def test_a_refused_option_does_not_claim_the_folder(new_run):
    run = new_run()
    message_of(run, "train.max_steps=1", "drafter.hidden_size=24")
    assert_equal(run.fit("train.max_steps=1").weights(), new_run().fit("train.max_steps=1").weights())


def test_a_checkpoint_of_another_shape_is_refused(new_run, stop):
    wide = new_run().fit("train.max_steps=3", "drafter.intermediate_size=48")
    run = new_run()
    stop(2)
    with pytest.raises(KeyboardInterrupt):
        run.fit("train.max_steps=3")
    other = run.checkpoints / wide.newest().name
    shutil.copytree(wide.newest(), other)
    manifest = unseal((other / "manifest.json").read_bytes())
    manifest["fingerprint"] = json.loads((run.checkpoints.parent / "inputs.json").read_text())["fingerprint"]
    (other / "manifest.json").write_bytes(seal(manifest))
    message = message_of(run, "train.max_steps=3")
    assert f"{other} is a drafter of another shape" in message
    assert "intermediate_size: 48 there, 32 here" in message


def test_a_checkpoint_of_another_run_is_passed_over(new_run, stop, capsys):
    """What a killed overwrite=true may leave: checkpoints of a run whose record is gone."""
    other = new_run().fit("train.max_steps=3", "seed=5")
    run = new_run()
    shutil.copytree(other.newest(), run.checkpoints / "step-000002")
    run.fit("train.max_steps=3")
    assert "step-000002 is not used: it is of a run of other inputs" in capsys.readouterr().out
    assert_equal(run.weights(), new_run().fit("train.max_steps=3").weights())
