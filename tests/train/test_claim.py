"""A run's folder is one process's at a time and holds one run, which the same command finishes and never repeats."""

import json
import math
import shutil
from functools import partial
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from made import message_of
from pipeline import assert_equal, contents, flip_bit
from planting import watched
from surviving import calling, timeless

from eagle31_train import compose
from eagle31_train.checkpoint.drafter_checkpoint import DrafterCheckpoint
from eagle31_train.checkpoint.run_folder import RECORD
from eagle31_train.common import artifacts, locks
from eagle31_train.common.errors import UserError
from eagle31_train.config import TargetConfig, TrainConfig
from eagle31_train.store import Store
from eagle31_train.targets import derive
from train import initial_weights, inputs, prepare, trainer, windows
from train.prepare import LOCK

EAGLE3, BEFORE = ("drafter.fc_norm=false", "drafter.norm_output=false"), "drafter.norm_before_fc=true"
SHORT = ["train.max_steps=3", "train.checkpoint_every=2"]


def test_a_second_training_in_the_same_folder_is_refused(new_run):
    run = new_run()
    with locks.alone(Path(run.folder, "run", LOCK), "this test trains"):
        assert f"another process is training in {run.train}" in message_of(run.fit, "train.max_steps=1")
        assert not run.train.exists()


def damage_checkpoint(run):
    flip_bit(run.newest() / "model.safetensors")


def remove_manifest(run):
    """As if it had been killed after its last checkpoint."""
    (run.train / "manifest.json").unlink()


@pytest.mark.parametrize(
    ("happens", "steps", "printed"),
    [
        (None, 0, "train: up to date"),
        (damage_checkpoint, 1, "model.safetensors does not match its checksum"),
        (remove_manifest, 0, "train: resuming after step 3 "),
    ],
)
def test_the_same_command_trains_only_what_a_finished_run_lacks(new_run, monkeypatch, capsys, happens, steps, printed):
    run = new_run().fit(*SHORT)
    weights, rows, manifest, before = run.weights(), run.rows(), run.manifest(), contents(run.train)
    weights = {name: tensor.clone() for name, tensor in weights.items()}
    if happens:
        happens(run)
    trained = watched(monkeypatch, trainer, "accumulate")
    run.fit(*SHORT)
    assert len(trained) == steps
    assert printed in capsys.readouterr().out
    assert_equal(run.weights(), weights)
    assert run.rows() == rows
    assert timeless(run.manifest()) == timeless(manifest)
    assert happens or contents(run.train) == before


def test_a_run_remembers_its_target_when_its_store_is_gone(new_run, tmp_path):
    """Or other weights in the same place would pass for those that it was trained for."""
    run = new_run().fit(*SHORT)
    there = DrafterCheckpoint.open(run.folder / "run").trained_for()
    (run.folder / "run" / "store").rename(tmp_path / "store")
    known = DrafterCheckpoint.open(run.folder / "run").trained_for()
    assert known == there == json.loads((run.train / RECORD).read_text())["target"]
    other = tmp_path / known["name"]
    artifacts.write_bytes(other / "model.safetensors", b"other weights")
    drafter = DrafterCheckpoint.open(run.folder / "run")
    assert "was trained for" in message_of(drafter.check_target, TargetConfig(path=str(other)))
    gone = TargetConfig(path=str(tmp_path / "gone" / known["name"]))
    assert f"target.path={gone.path} does not exist" in message_of(drafter.check_target, gone)
    model = f"org/{known['name']}"
    of_hub = {"name": model, "weights": artifacts.weights_fingerprint(model), "revision": "v1"}
    record = json.loads((run.train / RECORD).read_text())
    artifacts.write_json(run.train / RECORD, {**record, "target": of_hub})
    drafter.check_target(TargetConfig(path=str(other)))  # a copy of the model, whose weights on the hub are not known
    assert "was trained for" in message_of(drafter.check_target, TargetConfig(path=str(tmp_path)))
    assert "was trained for" in message_of(drafter.check_target, TargetConfig(path="org/other"))
    drafter.check_target(TargetConfig(path=model, revision="v1"))
    assert "was trained for" in message_of(drafter.check_target, TargetConfig(path=model, revision="v2"))
    assert "was trained for" in drafter.other_target(TargetConfig(path=model, revision="v2")), "where it is told, too"
    assert drafter.other_target(TargetConfig(path=str(gone.path))) is None
    del record["target"]  # as earlier versions wrote it
    artifacts.write_json(run.train / RECORD, record)
    assert DrafterCheckpoint.open(run.folder / "run").trained_for() == {"name": known["name"]}
    renamed = run.train.rename(run.train.with_name("renamed"))
    assert DrafterCheckpoint.open(renamed).trained_for() == {"name": known["name"]}


def test_a_run_of_open_rates_goes_on_with_those_that_it_was_begun_with(new_run, monkeypatch):
    options = *SHORT, "train.optimizer=muon", *(f"train.{name}=null" for name in ("lr", "weight_decay", "batch_tokens"))
    run = new_run().fit(*options)

    def rates():
        return [run.manifest()["inputs"]["train"][name] for name in ("lr", "weight_decay", "batch_tokens")]

    rate, decay, tokens = rates()
    assert (rate, decay, tokens) == (derive.MUON_LR, 1.0, derive.STEP_TOKENS)
    monkeypatch.setattr(derive, "MUON_LR", rate / 2)
    monkeypatch.setattr(derive, "STEP_TOKENS", 512)
    remove_manifest(run)
    run.fit(*options)
    assert rates() == [rate, decay, tokens]
    run.fit(*options, "overwrite=true")
    assert rates() == [rate / 2, 2 * decay, 512]


@pytest.mark.parametrize(("processes", "waits"), [(1, False), (2, False), (3, True)])
def test_steps_of_fewer_conversations_than_processes_are_told_of(capsys, processes, waits):
    prepare.tell_of_waiting([[0], [1, 2, 3]], processes)
    assert ("train.batch_tokens" in capsys.readouterr().out) == waits


def test_an_export_of_the_training_that_was_replaced_is_named(new_run, capsys):
    run = new_run().fit(*SHORT)
    record, weights = run.manifest(), f"{run.manifest()['checkpoint']}/model.safetensors"
    made_from = {"train": record["fingerprint"], "weights": record["files"][weights]["sha256"]}
    artifacts.write_json(run.train.parent / "export.json", {"inputs": made_from, "files": {}, "checkpoint": "x"})
    remove_manifest(run)
    run.fit(*SHORT)
    assert "has other weights" not in capsys.readouterr().out
    run.fit(*SHORT, "train.lr=0.5", "overwrite=true")
    assert f"/export has other weights than {run.train}: run `eagle31 export` again" in capsys.readouterr().out


@pytest.mark.parametrize(("options", "normed"), [((), True), (EAGLE3, False), ((*EAGLE3, BEFORE), True)])
def test_fc_trains_on_states_of_about_one_and_a_run_goes_on_with_its_own_scales(new_run, monkeypatch, options, normed):
    run = new_run().fit(*SHORT, *options)
    trained = run.manifest()["inputs"]["train"]
    monkeypatch.setattr(initial_weights, "input_scale", lambda *_: [8.0] * 3)
    remove_manifest(run)
    assert run.fit(*SHORT, *options).manifest()["inputs"]["train"] == trained
    if normed:
        assert "fc_input_scale" not in trained, "as in the records of versions that knew none"
        return
    split, scales = Store(Path(run.folder, "run", "store")).split("train"), trained["fc_input_scale"]
    states = torch.cat([split.read(i).aux.decode().double() for i in range(len(split))])
    sizes = (states.square().mean(-1).sqrt().median(0).values * torch.tensor(scales)).tolist()
    assert all(0.6 < size < 1.7 for size in sizes)
    assert all(math.log2(scale).is_integer() for scale in scales)


@pytest.mark.parametrize("overwrite", [[], ["overwrite=true"]])
def test_eagle_3_goes_on_though_it_has_used_up_the_states_that_its_scales_are_of(new_run, overwrite):
    run = new_run()
    options = *EAGLE3, "train.window_tokens=20", "train.epochs=1", "store.follow=true", *overwrite
    run.unfinish(*options)
    run.stopped(3, *options)
    scales = run.recorded()["train"]["fc_input_scale"]
    run.fit(*options)
    assert run.recorded()["train"]["fc_input_scale"] == scales


def test_a_run_of_eagle_3_that_was_begun_without_scales_goes_on_without(new_run):
    run = new_run().fit(*SHORT, *EAGLE3, "train.fc_init_scale=0.25")  # given, there are none, as then
    before = run.weights()["fc.weight"].clone()
    assert "fc_input_scale" not in run.manifest()["inputs"]["train"]
    remove_manifest(run)
    assert run.fit(*SHORT, *EAGLE3).weights()["fc.weight"].equal(before)
    scaled = new_run().fit(*SHORT, *EAGLE3)
    assert "fc_input_scale" in scaled.recorded()["train"]
    scaled.fit(*SHORT, *EAGLE3, "train.fc_init_scale=0.25", "overwrite=true")
    assert scaled.recorded() == run.recorded(), "nor does it take those of the run that it replaces"


ENDS = {  # and what the training is given besides
    "a full disk": (OSError, []),
    "a tracker that fails": (UserError, ["train.wandb=offline"]),
    "kernels that do not run here": (UserError, ["train.kernels=fused"]),
    "Ctrl-C": (KeyboardInterrupt, []),
    "a kill": (KeyboardInterrupt, []),
    "a loss that is not finite": (UserError, ["train.lr=1e30"]),
}


@pytest.mark.parametrize("ends", ENDS)
def test_a_run_stays_until_what_replaces_it_has_a_checkpoint(new_run, monkeypatch, ends):
    """None of these costs the run, though its first weights are gone, or, with the same command again, the other."""
    first, run = new_run().fit(*SHORT), new_run()
    options = *SHORT, "train.lr=null", f"train.init_from={first.folder}/run"
    run.fit(*options)
    shutil.rmtree(first.folder)
    before, other = contents(run.train), (*SHORT, "train.lr=0.5", "overwrite=true")
    error, more = ENDS[ends]
    fails = Mock(side_effect=error(ends))
    with monkeypatch.context() as patch:
        if error is OSError:
            patch.setattr(prepare.artifacts, "write_json", fails)
        elif error is KeyboardInterrupt:
            patch.setattr(trainer.Trainer, "train_step", fails)
        elif "tracker" in ends:
            patch.setattr(prepare.tracking, "start", fails)
        if ends == "a kill":
            patch.setattr(prepare, "restore_replaced", lambda _: False)
        with pytest.raises(error):
            run.fit(*other, *more)
    assert ends == "a kill" or contents(run.train) == before
    run.fit(*options)
    assert contents(run.train) == before
    run.fit(*other)
    assert contents(run.train) != before
    assert [path.name for path in run.train.parent.glob(".train*")] == [".training"]


def test_a_run_is_a_recipe_for_the_other_version(new_run):
    """What was left open is decided anew, as if nobody had trained."""
    run = new_run().fit(*SHORT)
    saved = compose.load_config([], run.train / "config.yaml").train
    assert (saved.fc_input_scale, saved.fc_init_scale) == (None, None)
    assert "was made from other inputs (drafter.fc_norm: true there, false here" in message_of(run.fit, *SHORT, *EAGLE3)
    run.fit(*SHORT, *EAGLE3, "overwrite=true")
    assert "was made from other inputs (drafter.fc_norm: false there, true here" in message_of(run.fit, *SHORT)


@pytest.mark.parametrize("finished", [True, False])
def test_a_folder_of_other_options_is_refused_or_replaced_with_overwrite(new_run, by_one, finished):
    run = new_run().fit(*SHORT)
    if not finished:
        shutil.rmtree(run.newest())
        remove_manifest(run)
    before = contents(run.train)
    message = message_of(run.fit, *SHORT, "train.gamma=0.5")
    assert "train.gamma: 0.8 there, 0.5 here" in message
    assert "overwrite=true" in message
    assert contents(run.train) == before
    run.fit(*SHORT, "train.gamma=0.5", "overwrite=true")
    assert_equal(run.weights(), by_one(*SHORT, "train.gamma=0.5").weights())


def test_a_checkpoint_that_is_being_written_when_its_run_fails_is_one(new_run):
    """It is waited for before what the run was to replace would be restored, and the run goes on from it."""
    run, other, failed = new_run().fit(*SHORT), (*SHORT, "train.lr=0.5", "overwrite=true"), Event()

    late = calling("train.checkpoint._write", partial(failed.wait, 10), "before", 1)
    awaited = calling("train.checkpoint.Saver.close", failed.set, "before", 1)
    fails = calling("train.trainer.Trainer.train_step", Mock(side_effect=MemoryError), "before", 3)
    with late, awaited, fails, pytest.raises(MemoryError):
        run.fit(*other)
    assert (run.saved(), run.recorded()["train"]["lr"]) == ([2], 0.5)


def test_windows_are_trained_one_after_another_and_it_is_said_that_data_in_order_are_not_mixed(
    new_run, monkeypatch, capsys
):
    run, options = new_run(), ("train.window_tokens=40", "train.epochs=1")
    used = watched(monkeypatch, windows.Usage, "__init__")
    run.fit(*options)
    schedule, cut = used[0][3:5]
    turns = [number for number, samples in enumerate(windows.samples(cut)) for _ in samples]
    order = [turns[i] for batch in schedule for i in batch]
    assert order == sorted(order) == turns
    assert len(cut) > 2
    warning = "the windows follow the order of the data, which is not shuffled: set data.shuffle=SEED"
    assert warning in capsys.readouterr().out
    manifest = run.folder / "run" / "data" / "manifest.json"
    inputs = artifacts.read_json(manifest, "")["inputs"] | {"shuffle": 0}
    artifacts.write_json(manifest, artifacts.read_json(manifest, "") | {"inputs": inputs})
    (run.train / "manifest.json").unlink()
    run.fit(*options)
    assert warning not in capsys.readouterr().out


def test_an_open_weight_decay_is_that_of_a_training_of_so_many_steps():
    muon = TrainConfig(optimizer="muon", weight_decay=None)
    shape = SimpleNamespace(hidden_size=4096)
    decays = [inputs.complete_training(muon, shape, steps, []).weight_decay for steps in (10_000, 20_000)]
    assert decays[0] == pytest.approx(2 * decays[1], rel=0.1)
