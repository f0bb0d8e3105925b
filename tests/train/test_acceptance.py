"""Acceptance measured during training is real decoding's, and chooses what the run leaves."""

from types import SimpleNamespace

import pytest
import torch
from conftest import kept_mask
from made import Split, message_of
from pipeline import AUX, END, assert_equal, flip_bit, save_quietly, tiny_config, tiny_llama, write_data
from planting import replaced, watched

from eagle31_train.checkpoint.drafter_checkpoint import DrafterCheckpoint
from eagle31_train.config import TrainConfig
from eagle31_train.evaluation import trajectories
from eagle31_train.evaluation.decoding import Limits, decode_speculative
from eagle31_train.evaluation.measurement import acceptance
from eagle31_train.extract import extract
from eagle31_train.store import Store
from eagle31_train.targets.cached import CachedTarget
from eagle31_train.targets.hf import load_model
from train import acceptance as during
from train import checkpoint, prepare
from train.acceptance import AcceptanceMeter
from train.trainer import State

# ---------------------------------------------------------------- it is real decoding's

# A drafter learns to be accepted where the answers are the target's own.
LENGTHS = {"train": [25] * 24, "heldout": [9] * 16}
LEARNING = ["train.epochs=8", "train.batch_tokens=80", "train.eval_every=1000"]


@pytest.mark.core
def test_what_training_reports_is_what_real_decoding_accepts(copy_of, tmp_path):
    model = tiny_llama()
    save_quietly(model, tmp_path / "target")
    write_data(tmp_path / "run", LENGTHS, model=model)
    extract(tiny_config(tmp_path))
    run = copy_of(tmp_path / "reported", tmp_path).fit(*LEARNING)
    # Stage 4's way: the target in memory, and the drafter as it is loaded there.
    config = run.config()
    target = CachedTarget(load_model(config.target, config.evaluate.dtype), AUX)
    trained = DrafterCheckpoint.of_run(run.folder / "run", config.data_folder)
    drafter = trained.load(target, getattr(torch, config.target.dtype), getattr(torch, config.evaluate.dtype))
    prompts = [one.prompt for one in trajectories.read(Store(run.folder / "run" / "store"), 3)]
    ids = torch.from_numpy(trained.vocab.target_ids)
    decoded = decode_speculative(target, drafter, ids, prompts, 3, Limits(config.evaluate.max_new_tokens, {END}))
    accepted = [number for one in decoded for number in one.accepted]
    shares = acceptance(len(accepted), [sum(number > depth for number in accepted) for depth in range(3)])
    assert shares["acceptance_length"] > 1.3, "a drafter that is never accepted shows nothing"
    for name in ("acceptance_length", "acceptance_at_depth"):
        assert run.rows()[-1][f"heldout_{name}"] == shares[name]


def test_the_measured_drafter_is_the_one_that_stage_4_would_load(new_run, monkeypatch):
    """Rounded to the dtype that the store names, run in `evaluate.dtype`, and with the target's own embedding, though
    training's is rounded."""
    seen = []

    @replaced(monkeypatch, during, "reached")
    def looked_at(right, drafter, *rest):
        seen.append({name: tensor.clone() for name, tensor in drafter.state_dict().items()})
        assert torch.equal(drafter.shared_embedding, store.target["embed_tokens"])
        return right(drafter, *rest)

    @replaced(monkeypatch, AcceptanceMeter, "__init__")
    def of_bf16(right, self, config, parallel, store, measured):
        store.inputs["target"]["dtype"] = "bfloat16"
        config.evaluate.dtype = "float64"
        right(self, config, parallel, store, measured)

    run = new_run()
    store = Store(run.folder / "run" / "store")
    run.fit("train.max_steps=2", "train.precision=bf16")
    config = run.config()
    trained = DrafterCheckpoint.of_run(run.folder / "run", config.data_folder)
    served = trained.load(CachedTarget(load_model(config.target), AUX), torch.bfloat16, torch.float64)
    assert_equal(seen[-1], served.state_dict())
    assert seen[-1]["fc.weight"].dtype == served.fc.weight.dtype == torch.float64
    assert not torch.equal(served.fc.weight.float(), trained.tensors["fc.weight"]), "the rounding shows"


# ---------------------------------------------------------------- what it chooses

RECIPE = ["train.eval_every=2", "train.checkpoint_every=4", "train.keep_checkpoints=1", "train.eval_samples=2"]
SCRIPT = {2: 1.2, 4: 1.1, 6: 1.5, 8: 1.3, 10: 1.5, 12: 1.4}


@pytest.fixture
def scripted(monkeypatch):
    """Measurements by step, in place of real ones."""
    told = {step: {"acceptance_length": length, "acceptance_at_depth": [0.5]} for step, length in SCRIPT.items()}
    monkeypatch.setattr(AcceptanceMeter, "measure", lambda self: told[self.parallel.updates])


@pytest.fixture
def unchosen(scripted, by_one):
    """A run that leaves its last step, and has the one that is best."""
    return by_one(*RECIPE, "train.checkpoint_every=2", "train.keep_checkpoints=9")


def test_the_best_step_is_kept_and_is_what_the_run_leaves(unchosen, new_run, capsys):
    run = new_run().fit(*RECIPE, "train.keep_best=true")
    assert "train: kept step 6 of 12, which has the greatest acceptance length" in capsys.readouterr().out
    assert run.saved() == [6, 12]
    manifest = run.manifest()
    assert manifest["checkpoint"] == "checkpoints/step-000006"
    assert manifest["heldout"]["acceptance_length"] == 1.5
    assert manifest["kept"] == {"step": 6, "acceptance_length": 1.5}
    assert run.recorded()["train"]["choice"]["prompts"] == manifest["measured_on"] != []
    assert "choice" not in unchosen.recorded()["train"], "nor in the records of versions that knew no choice"
    (row,) = [row for row in run.rows() if row["step"] == 6 and "heldout_loss" in row]
    assert manifest["heldout"]["loss"] == row["heldout_loss"]
    assert manifest["heldout"]["conversations"] == 2  # the last step's are of all
    left = DrafterCheckpoint.of_run(run.folder / "run", run.folder / "run" / "data")
    assert left.folder == run.checkpoints / "step-000006"
    assert unchosen.manifest()["checkpoint"] == "checkpoints/step-000012", "where nobody asks for the best"
    assert_equal(run.weights(), unchosen.at(6)[0])

    again = new_run().stopped(7, *RECIPE, "train.keep_best=true")
    assert again.saved() == [6, 7]
    unfinished = DrafterCheckpoint.open(again.folder / "run", allow_unfinished=True)
    assert unfinished.measured_on == left.measured_on == manifest["measured_on"]
    again.fit(*RECIPE, "train.keep_best=true")
    assert again.rows() == run.rows()
    assert again.saved() == [6, 12]
    assert_equal(again.weights(), run.weights())


@pytest.mark.usefixtures("scripted")
def test_a_best_checkpoint_that_is_damaged_is_the_best_no_more(new_run, capsys):
    run = new_run().stopped(7, *RECIPE, "train.keep_best=true")
    flip_bit(run.checkpoints / "step-000006" / "model.safetensors")
    run.fit(*RECIPE, "train.keep_best=true")
    assert "the best checkpoint so far is missing or damaged" in capsys.readouterr().out
    assert run.manifest()["checkpoint"] == "checkpoints/step-000010"


@pytest.mark.usefixtures("scripted")
def test_a_best_step_that_could_not_be_written_is_not_left(new_run, monkeypatch, capsys):
    @replaced(monkeypatch, checkpoint, "_write")
    def write(right, snapshot, *rest):
        if snapshot.step == 6:
            raise OSError(28, "No space left on device")
        right(snapshot, *rest)

    run = new_run().fit(*RECIPE, "train.keep_best=true")
    assert "step-000006 could not be written" in capsys.readouterr().out
    # 1.2 at step 2 was the best that was written as such; the last has 1.4.
    assert run.manifest()["checkpoint"] == "checkpoints/step-000012"
    assert run.manifest()["heldout"]["acceptance_length"] == 1.4
    assert "kept" not in run.manifest()


def test_a_run_ends_where_acceptance_rises_no_more(unchosen, new_run, capsys):
    """Only evaluations since the last rise count."""
    options = [*RECIPE, "train.early_stop=2"]
    run = new_run().fit(*options)
    assert "step 10 of 12 is the last one: the acceptance length has not risen since step 6" in capsys.readouterr().out
    manifest, rows = run.manifest(), run.rows()
    assert (manifest["steps"], manifest["checkpoint"], rows[-1]["step"]) == (10, "checkpoints/step-000010", 10)
    assert rows == unchosen.rows()[: len(rows)], "the learning rate is planned for all steps"
    run.fit(*options)
    assert "train: up to date" in capsys.readouterr().out
    # Killed between the last checkpoint and the manifest: nothing is left to be trained.
    (run.train / "manifest.json").unlink()
    run.fit(*options)
    assert run.rows() == rows
    assert run.manifest()["checkpoint"] == manifest["checkpoint"]


def test_a_store_trains_without_trajectories_but_not_with_damaged_ones_or_too_short_ones(new_run, capsys):
    run = new_run()
    store = run.folder / "run" / "store"
    message = message_of(run.fit, "evaluate.num_speculative_tokens=9", "evaluate.max_speculative_tokens=9")
    assert "allow at most 8 (evaluate.max_speculative_tokens of their extraction): train with 8 or" in message
    flip_bit(store / "trajectories.safetensors")
    assert "trajectories.safetensors has changed since it was written" in message_of(run.fit)
    for file in store.glob("trajectories.*"):
        file.unlink()
    run.fit("train.max_steps=1")
    assert f"acceptance is not measured: {store} has no trajectories" in capsys.readouterr().out
    assert "acceptance_length" not in run.manifest()["heldout"]
    for by_acceptance in ("train.keep_best=true", "train.early_stop=2"):
        assert "has no trajectories to measure it on" in message_of(run.fit, by_acceptance, "overwrite=true")


def test_prompts_that_an_earlier_store_was_measured_on_stay_known(monkeypatch):
    known = SimpleNamespace(config=None, store=None, trajectories=[1], measured_on=["b", "c"])
    state = State(measured_on=["a", "b"])
    monkeypatch.setattr(prepare, "AcceptanceMeter", lambda *_: None)
    prepare.make_meter(known, None, state)
    assert state.measured_on == ["a", "b", "c"]


# ---------------------------------------------------------------- teacher-forced metrics


def test_an_evaluation_takes_no_more_at_once_than_a_step_of_training_does(tiny, monkeypatch):
    """In which gradients are accumulated so that the memory suffices; except for what is longer than that. That ranks
    share an evaluation: test_profiles.py."""
    objective, documents = tiny
    longest = max(len(one.tokens) for one in documents)
    split = Split([one for one in documents if len(one.tokens) == longest][:1] * 8)
    accelerator = SimpleNamespace(num_processes=1, process_index=0, device=torch.device("cpu"))
    parallel = SimpleNamespace(accelerator=accelerator, model=objective)
    monkeypatch.setattr(during, "reduce_sums", lambda _, sums: sums)
    reads = watched(monkeypatch, split, "read_all")
    for tokens, most in ((4 * longest, 2), (8 * longest, 4), (longest, 1)):
        reads.clear()
        t = TrainConfig(ttt_length=3, batch_tokens=tokens, gradient_accumulation_steps=2)
        during.evaluate(parallel, split, t, kept_mask(objective), 8)
        assert [len(some) for (some,) in reads] == [most] * (8 // most)
    masked, kept = (during.evaluate(parallel, split, t, kept_mask(objective, oov), 8) for oov in ("mask", "keep"))
    assert masked["oov_share"] > kept["oov_share"] == 0, "it measures what is trained"
