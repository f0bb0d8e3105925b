"""The training loop on a tiny store: it learns by every option that is given, says what it did, counts what it trained,
and refuses what cannot be."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from made import message_of
from pipeline import assert_equal, write_data
from planting import watched

from eagle31_train import compose
from eagle31_train.checkpoint import contract
from eagle31_train.common import order
from eagle31_train.config import DrafterShape, TrainConfig
from eagle31_train.model import vocab
from eagle31_train.model.batch import build_batch
from eagle31_train.store import Store, StoreSplit
from train import loader
from train.metrics import heldout_text, summarise
from train.step import learning_rate, step_weights
from train.trainer import memory_bytes

TWO = ["train.max_steps=2"]
OPTIONS = ["train.gamma=0.5", "train.lk=0.5", "train.betas=[0.5,0.6]", "train.weight_decay=0.5", "train.oov=keep",
           "train.max_grad_norm=0.01", "train.fc_init_scale=0.5", "train.optimizer=muon", "drafter.train_lm_head=false",
           "train.precision=bf16", "train.slots_per_batch=12"]  # fmt: skip


def test_the_seed_decides_the_weights_and_nothing_else_does(new_run):
    first = new_run().fit("train.max_steps=3").weights()
    # Options that steer reporting and saving are not part of what is learnt.
    again = new_run().fit("train.max_steps=3", "train.eval_every=1", "train.checkpoint_every=1", "train.eval_samples=2")
    assert_equal(again.weights(), first)
    other = new_run().fit("train.max_steps=3", "seed=1").weights()
    assert not torch.equal(other["fc.weight"], first["fc.weight"])


def test_the_manifest_names_a_checkpoint_with_exactly_the_drafters_tensors(new_run):
    run = new_run().fit("train.eval_every=5", "train.precision=bf16")
    manifest, rows = run.manifest(), run.rows()
    assert manifest["checkpoint"] == "checkpoints/step-000012"
    shape = DrafterShape(**json.loads((run.newest() / "drafter.json").read_text()))
    assert contract.check(run.weights(), shape) == []
    assert {tensor.dtype for tensor in run.weights().values()} == {torch.float32}
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, 13))
    assert [row["step"] for row in rows if "heldout_loss" in row] == [5, 10, 12]
    heldout = {f"heldout_{name}": value for name, value in manifest["heldout"].items()}
    assert heldout.pop("heldout_conversations") == 4
    assert {"step": 12, **heldout} == rows[-1]
    assert manifest["tokens"] == rows[-2]["tokens"] == 3 * sum(Store(run.folder / "run/store").split("train").lengths)
    assert "lr: 0.01" in (run.train / "config.yaml").read_text()


@pytest.mark.parametrize("given", [False, True])
def test_a_store_of_another_target_or_of_other_data_is_refused(new_run, given):
    """Where data_dir is given it may be wrong, and a good store is not to be replaced."""
    run, other = new_run(), new_run()
    assert "target.dtype" in message_of(run.fit, "target.dtype=bfloat16")
    data = (other if given else run).folder / "run" / "data"
    write_data(data.parent, seed=1)
    data_dir = f"data_dir={data}"
    message = message_of(run.fit, *[data_dir] * given)
    assert message.startswith(f"{run.folder / 'run' / 'store'} was made from other data than {data} now holds: ")
    assert message.endswith(f": correct {data_dir}" if given else "run `eagle31 extract` again with overwrite=true")
    assert not run.train.exists()


def test_options_that_data_and_store_were_not_made_with_are_told_and_not_recorded(new_run, capsys):
    run = new_run()
    file = run.folder / "run" / "data" / "manifest.json"
    manifest = json.loads(file.read_text())
    made = {"max_length": 64, "heldout": 0.5, "draft_vocab_size": None}
    file.write_text(json.dumps({**manifest, "inputs": {**manifest["inputs"], **made}}))
    same = [f"data.{name}={json.dumps(value)}" for name, value in made.items()]
    run.fit(*TWO, *same)
    assert "was made with other options" not in capsys.readouterr().out
    run.fit(*TWO, *same, "data.draft_vocab_size=20", "store.last_codec=fp8", "overwrite=true")
    said, saved = capsys.readouterr().out, (run.train / "config.yaml").read_text()
    assert "data was made with other options than these (data.draft_vocab_size: null there, 20 here)" in said
    assert "store was made with other options than these (store.last_codec:" in said
    read = compose.load_config([], run.train / "config.yaml")
    assert (read.data.prompts, read.regenerate) == (None, False), "the data are conversations that were given"
    assert "draft_vocab_size: null" in saved
    assert "last_codec: fp8" not in saved


def test_step_weights_are_gamma_to_the_k_over_the_count():
    weights = step_weights(torch.tensor([10, 4, 0, 1]), 0.5)
    assert weights.dtype == torch.float32
    assert weights.tolist() == pytest.approx([1 / 10, 0.5 / 4, 0.0, 0.125])


def test_the_learning_rate_warms_up_and_ends_at_its_share():
    t = TrainConfig(lr=2.0, warmup_ratio=0.1, min_lr_ratio=0.25)
    rates = [learning_rate(step, 100, t) for step in range(1, 101)]
    assert rates[:10] == pytest.approx([0.2 * step for step in range(1, 11)])
    assert rates[-1] == pytest.approx(0.5)
    assert all(before > after for before, after in pairwise(rates[9:]))
    assert rates[54] == pytest.approx(2.0 * (0.25 + 0.75 * 0.5)), "half-way down the cosine"
    assert learning_rate(1, 1, t) == 2.0
    assert learning_rate(1, 100, replace(t, warmup_ratio=0.0)) == 2.0


def test_metrics_are_the_sums_divided_by_their_own_counts():
    loss, trained, correct, eligible = [6.0, 2.0], [3.0, 4.0], [2.0, 1.0], [4.0, 5.0]
    prefix, eligible_prefix, rms, slots = [2.0, 1.0], [4.0, 2.0], [8.0, 15.0], [4.0, 4.0]
    sums = torch.tensor([loss, trained, correct, eligible, prefix, eligible_prefix, rms, slots])
    assert summarise(sums) == {
        "loss": (2.0 + 0.5) / 2,
        "acceptance_estimate": 1 + 0.5 + 0.5,
        "loss_at_depth": [2.0, 0.5],
        "accuracy_at_depth": [0.5, 0.2],
        "prefix_at_depth": [0.5, 0.5],
        "rms_at_depth": [2.0, 3.75],
        "oov_share": pytest.approx(1 - 7 / 9),
    }
    sums[:, 1] = 0
    assert summarise(sums)["loss_at_depth"] == [2.0, None], "a depth that no slot reaches has no share"
    nothing = summarise(torch.zeros(8, 2))
    assert (nothing["loss"], nothing["acceptance_estimate"]) == (0.0, 1.0)
    assert "nothing to predict" in heldout_text(nothing)
    assert heldout_text(summarise(sums)) == "held-out loss 1.000, acceptance estimate 1.500"


@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_that_is_given_is_trained_by(by_one, option):
    usual, other = by_one(*TWO).weights(), by_one(*TWO, option).weights()
    assert not torch.equal(other["fc.weight"], usual["fc.weight"])


def test_a_subset_of_all_slots_is_all_of_them(by_one):
    assert_equal(by_one(*TWO, "train.slots_per_batch=60").weights(), by_one(*TWO).weights())


def test_cross_entropy_is_told_with_the_targets_entropy_and_trains_as_kl_does(by_one):
    kl, ce = by_one(*TWO), by_one(*TWO, "train.loss=ce")
    assert all(theirs > ours for ours, theirs in zip(kl.losses(), ce.losses(), strict=True))
    torch.testing.assert_close(ce.weights(), kl.weights())


def test_the_seed_and_the_step_decide_which_slots_are_trained(new_run, monkeypatch):
    """How: test_subset.py. So a run that goes on draws what it would have drawn."""
    drawn = watched(monkeypatch, loader, "choose_slots")
    options = [*TWO, "train.slots_per_batch=12", "train.num_workers=0", "seed=7"]
    run = new_run().stopped(1, *options)
    assert [given[3:] for given in drawn] == [(12, 7, 1)]
    run.fit(*options)
    assert [given[3:] for given in drawn] == [(12, 7, 1), (12, 7, 2)]


def test_evaluations_read_samples_spread_over_the_split_and_the_last_one_all(new_run, monkeypatch):
    read = watched(monkeypatch, StoreSplit, "read_all")
    options = ["train.max_steps=2", "train.eval_every=1", "train.batch_tokens=60"]
    few = new_run().fit(*options, "train.eval_samples=2")
    assert next(sorted(indices) for split, indices in read if len(split) == 4) == [0, 2]
    every = new_run().fit(*options)
    for name, value in every.manifest()["heldout"].items():
        assert few.manifest()["heldout"][name] == pytest.approx(value), name
    assert few.rows()[-1]["heldout_loss"] != pytest.approx(every.rows()[-1]["heldout_loss"])


def test_pairs_are_those_that_were_trained(new_run):
    run = new_run().fit("train.max_steps=2")
    split, kept = Store(run.folder / "run" / "store").split("train"), torch.zeros(40, dtype=torch.bool)
    kept[vocab.read(run.config().data_folder / "vocab.safetensors").target_ids] = True
    steps = order.schedule(split.lengths, 60, 0, 3, 2)
    counted = sum(int(build_batch(split.read_all(step), 3, kept).trained.sum()) for step in steps)
    assert run.manifest()["pairs"] == counted


def test_memory_is_in_bytes():
    status = Path("/proc/self/status").read_text().splitlines()
    (line,) = [line for line in status if line.startswith("VmHWM:")]
    assert memory_bytes(torch.device("cpu")) == pytest.approx(int(line.split()[1]) * 1024, rel=0.05)
