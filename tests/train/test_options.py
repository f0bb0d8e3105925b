"""Options that change what is learnt are not ignored, and the record counts what was trained."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import sharing
import torch
from conftest import kept_mask, make_objective
from planting import replaced

from eagle31_train.common import order
from eagle31_train.config import TrainConfig
from eagle31_train.model import vocab
from eagle31_train.model.batch import build_batch
from eagle31_train.store import Store, StoreSplit
from train import loader
from train.trainer import memory_bytes

TWO = ["train.max_steps=2"]
OPTIONS = ["train.gamma=0.5", "train.lk=0.5", "train.betas=[0.5,0.6]", "train.weight_decay=0.5", "train.oov=keep",
           "train.max_grad_norm=0.01", "train.fc_init_scale=0.5", "train.optimizer=muon", "drafter.train_lm_head=false",
           "train.precision=bf16", "train.slots_per_batch=12"]  # fmt: skip


@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_that_is_given_is_trained_by(by_one, option):
    usual, other = by_one(*TWO).weights(), by_one(*TWO, option).weights()
    assert not torch.equal(other["fc.weight"], usual["fc.weight"])


def test_cross_entropy_is_told_with_the_targets_entropy_and_trains_as_kl_does(by_one):
    kl, ce = by_one(*TWO), by_one(*TWO, "train.loss=ce")
    assert all(theirs > ours for ours, theirs in zip(kl.losses(), ce.losses(), strict=True))
    torch.testing.assert_close(ce.weights(), kl.weights())


def test_a_head_that_is_not_trained_stays_the_targets(by_one):
    run = by_one(*TWO, "drafter.train_lm_head=false")
    store = Store(run.folder / "run" / "store")
    kept = vocab.read(run.config().data_folder / "vocab.safetensors").target_ids
    assert torch.equal(run.weights()["lm_head.weight"], store.target["lm_head"][torch.from_numpy(kept)].float())


def test_held_out_conversations_are_measured_with_the_runs_oov(by_one):
    rows = [by_one(*TWO, f"train.oov={oov}").rows()[-1] for oov in ("mask", "keep")]
    assert rows[0]["heldout_oov_share"] > 0 == rows[1]["heldout_oov_share"]


def test_the_seed_decides_which_slots_are_trained(new_run, monkeypatch):
    seeds = []

    @replaced(monkeypatch, loader, "choose_slots")
    def chosen(right, *given):
        seeds.append(given[-2])
        return right(*given)

    new_run().fit("train.max_steps=1", "train.slots_per_batch=12", "seed=7")
    assert set(seeds) == {7}


def test_every_step_draws_its_slots_anew_and_a_run_that_goes_on_draws_the_same():
    shape = sharing.SHAPES["gqa"]
    split, kept = sharing.split_of(shape, sharing.RAGGED), kept_mask(make_objective(shape))
    t = TrainConfig(ttt_length=3, num_workers=0, slots_per_batch=20)
    alone = SimpleNamespace(num_processes=1, process_index=0, device=torch.device("cpu"))
    batches = [list(range(len(split.lengths)))] * 3

    def drawn(done):
        return [
            b.micro_batches[0].batch.ids[b.micro_batches[0].batch.read].tolist()
            for b in loader.load(split, batches, done, t, 0, kept, alone)
        ]

    whole = drawn(0)
    assert whole[0] != whole[1] != whole[2]
    assert drawn(1) == whole[1:]


def test_evaluations_read_samples_spread_over_the_split_and_the_last_one_all(new_run, monkeypatch):
    read = []

    @replaced(monkeypatch, StoreSplit, "read_all")
    def seen(right, self, indices):
        if len(self) == 4:
            read.append(sorted(indices))
        return right(self, indices)

    options = ["train.max_steps=2", "train.eval_every=1", "train.batch_tokens=60"]
    few = new_run().fit(*options, "train.eval_samples=2")
    assert read[0] == [0, 2]
    every = new_run().fit(*options)
    for name, value in every.manifest()["heldout"].items():
        assert few.manifest()["heldout"][name] == pytest.approx(value), name
    assert few.rows()[-1]["heldout_loss"] != pytest.approx(every.rows()[-1]["heldout_loss"])


def test_pairs_are_those_that_were_trained(new_run):
    run = new_run().fit("train.max_steps=2")
    rows = [row for row in run.rows() if "loss" in row]
    split, kept = Store(run.folder / "run" / "store").split("train"), torch.zeros(40, dtype=torch.bool)
    kept[vocab.read(run.config().data_folder / "vocab.safetensors").target_ids] = True
    steps = order.schedule(split.lengths, 60, 0, 3, 2)
    counted = sum(int(build_batch(split.read_all(step), 3, kept, "mask").trained.sum()) for step in steps)
    assert run.manifest()["pairs"] == counted, rows


def test_memory_is_in_bytes():
    status = Path("/proc/self/status").read_text().splitlines()
    (line,) = [line for line in status if line.startswith("VmHWM:")]
    assert memory_bytes(torch.device("cpu")) == pytest.approx(int(line.split()[1]) * 1024, rel=0.05)
