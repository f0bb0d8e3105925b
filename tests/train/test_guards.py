"""A step that is not finite, or has nothing to train, is left out; what stops two processes: test_profiles.py. What
cannot be trained on is named in one line, before it does harm: never an index error, never a NaN."""

from dataclasses import replace

import pytest
import torch
from guarding import NAN, RECIPE, fit
from made import message_of
from pipeline import HIDDEN, MLA, VOCAB, assert_close, assert_equal, reseal
from safetensors.torch import load_file, save_file
from warming import with_vocab

from eagle31_train.store import Store, StoreSplit
from train import inputs


@pytest.mark.parametrize(
    ("mark", "listed", "harm", "why"),
    [
        ("left_out", "left_out", ["gradient", [3, 6], 0, NAN], "skipped, loss or gradient is not finite"),
        ("no_pairs", "without_pairs", ["pairs", [3, 6]], "nothing to train, so the weights stay"),
    ],
)
def test_a_step_that_is_left_out_is_as_if_it_were_in_no_schedule(new_run, absent, capsys, mark, listed, harm, why):
    run = new_run()
    assert fit(run, *RECIPE, "train.skip_nonfinite=2", harm=harm) is None
    assert_equal(run.at(12), absent.at(10))
    assert_equal(run.at(3), run.at(2))
    left_out = [row for row in run.rows() if row.get(mark)]
    assert [row["step"] for row in left_out] == [3, 6]
    assert not any("loss" in row for row in left_out)
    assert run.losses() == absent.losses()
    assert run.manifest()[listed] == [3, 6]
    assert run.manifest()["updates"] == absent.manifest()["updates"] == 10
    assert run.manifest()["pairs"] == absent.manifest()["pairs"]
    said = "".join(capsys.readouterr())
    assert f"step 3: {why}" in said
    assert "train: 2 of 12 steps had" in said


def test_a_run_that_mostly_skipped_says_that_it_is_hardly_a_drafter(new_run, capsys):
    new_run().fit(*RECIPE, "train.lr=1e30", "train.skip_nonfinite=99")
    said = capsys.readouterr().out
    assert "train: WARNING: 11 of 12 steps had a loss or gradient that is not finite, and were skipped" in said
    assert "else lower train.lr, and start over with overwrite=true" in said
    gone = fit(new_run(), *RECIPE, "train.skip_nonfinite=99", harm=["gradient", range(1, 13), 0, NAN])
    assert gone.startswith("none of the 12 steps updated a weight, 12 of them since loss or gradient is not finite")


def test_a_parallel_drafter_trains_with_steps_to_learn_from(new_run):
    run = new_run()
    parallel = ["drafter.parallel=true", "train.max_steps=3", "train.optimizer=muon"]
    assert message_of(run.fit, *parallel, "train.ttt_length=1").startswith("drafter.parallel=true learns nothing with")
    weights = run.fit(*parallel, "train.ttt_length=3").weights()
    before = run.fit(*parallel, "train.ttt_length=3", "train.lr=1e-9", "overwrite=true").weights()
    assert (weights["mask_hidden"] != before["mask_hidden"]).all()


def test_a_drafter_that_vllm_will_not_load_is_named_before_hours_of_training(new_run, capsys):
    new_run().fit("train.max_steps=1", *MLA)
    assert "WARNING" not in capsys.readouterr().out
    new_run().fit("train.max_steps=1", *MLA, "drafter.q_lora_rank=null")
    said = capsys.readouterr().out
    assert said.index("WARNING: vLLM 0.32 fails to load an MLA drafter without") < said.index("step 1: ")


def test_a_run_that_has_nothing_to_train_is_refused_before_its_first_step(new_run, monkeypatch):
    run = new_run()
    split = Store(run.folder / "run" / "store").split("train")
    chosen = torch.cat([split.read(i, states=False).top1 for i in range(len(split))])
    with_vocab(run, [min({*range(VOCAB)} - {*chosen.tolist()})])
    assert message_of(run.fit).startswith("the 12 samples of ")
    assert "have nothing to train: no answer has a token" in message_of(run.fit)
    assert not run.train.exists()
    read = StoreSplit.read
    with monkeypatch.context() as patch:
        patch.setattr(StoreSplit, "read", lambda *of: replace(read(*of), aux=read(*of).aux[:0]))
        eagle3 = message_of(run.fit, "drafter.fc_norm=false", "drafter.norm_output=false")
    assert "has no states to train on: check what the loss masks cover" in eagle3
    # Where a store is still being written nobody knows before the end, and then it is no drafter.
    with monkeypatch.context() as patch:
        patch.setattr(inputs, "check_pairs", lambda *_: None)
        assert message_of(run.fit).startswith("none of the 12 steps had a pair to train, so there is no drafter")
    assert not (run.train / "manifest.json").exists()
    run.fit("train.oov=keep", "train.max_steps=1", "overwrite=true")


@pytest.mark.parametrize("share", ["true", "false"])
def test_a_padded_embedding_trains_what_the_same_without_padding_does(new_run, share):
    padded = new_run()
    store = padded.folder / "run" / "store"
    tensors = load_file(store / "target.safetensors")
    tensors["embed_tokens"] = torch.cat([tensors["embed_tokens"], torch.full((3, HIDDEN), float("nan"))])
    save_file(tensors, store / "target.safetensors")
    reseal(store)  # listed as if it had been written so
    options = ["train.max_steps=2", f"drafter.share_embedding={share}"]
    assert_close(padded.fit(*options).weights(), new_run().fit(*options).weights(), 0)
