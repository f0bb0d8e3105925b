"""The training loop on a tiny store: it learns, says what it did, and refuses what cannot be."""

import json
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from pipeline import assert_equal, message_of, write_data

from eagle31_train.checkpoint import contract
from eagle31_train.common import artifacts
from eagle31_train.config import DrafterShape, TrainConfig
from eagle31_train.store import Store
from train.metrics import heldout_text, summarise
from train.prepare import tell_of_waiting
from train.step import learning_rate, step_weights


def test_the_seed_decides_the_weights_and_nothing_else_does(new_run):
    first = new_run().fit("train.max_steps=3").weights()
    # Options that steer reporting and saving are not part of what is learnt.
    again = new_run().fit("train.max_steps=3", "train.eval_every=1", "train.checkpoint_every=1", "train.eval_samples=2")
    assert_equal(again.weights(), first)
    other = new_run().fit("train.max_steps=3", "seed=1").weights()
    assert not torch.equal(other["fc.weight"], first["fc.weight"])


def test_a_subset_of_the_slots_is_another_training_and_all_of_them_the_same(new_run):
    some, every, none = (
        new_run().fit("train.max_steps=1", *options).weights()
        for options in (["train.slots_per_batch=12"], ["train.slots_per_batch=60"], [])
    )
    assert not torch.equal(some["fc.weight"], none["fc.weight"])
    assert_equal(every, none)


@pytest.mark.parametrize(("replicas", "waits"), [(2, False), (3, True)])
def test_a_step_with_too_few_conversations_is_told(replicas, waits, capsys):
    tell_of_waiting([[0, 1, 2], [3, 4], [5, 6]], replicas)
    assert ("a step has 2.3 conversations on average, and 3 processes" in capsys.readouterr().out) == waits


def test_the_manifest_names_a_checkpoint_with_exactly_the_drafters_tensors(new_run):
    run = new_run().fit("train.eval_every=5", "train.precision=bf16")
    manifest = run.manifest()
    assert manifest["checkpoint"] == "checkpoints/step-000012"
    assert manifest["inputs"]["train"]["lr"] == 0.01
    assert manifest["fingerprint"] == artifacts.fingerprint(manifest["inputs"])
    shape = DrafterShape(**json.loads((run.newest() / "drafter.json").read_text()))
    assert contract.check(run.weights(), shape) == []
    assert {tensor.dtype for tensor in run.weights().values()} == {torch.float32}
    rows = run.rows()
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, 13))
    assert [row["step"] for row in rows if "heldout_loss" in row] == [5, 10, 12]
    last = rows[-1]
    heldout = manifest["heldout"]
    assert heldout.pop("conversations") == 4
    assert {f"heldout_{name}": value for name, value in heldout.items()} == {
        name: value for name, value in last.items() if name != "step"
    }
    assert manifest["tokens"] == rows[-2]["tokens"] == 3 * sum(Store(run.folder / "run/store").split("train").lengths)
    assert "lr: 0.01" in (run.train / "config.yaml").read_text()


@pytest.mark.parametrize("given", [False, True])
def test_a_store_of_other_data_is_refused(new_run, given):
    """Where data_dir is given it may be wrong, and a good store is not to be replaced."""
    run, other = new_run(), new_run()
    write_data((other if given else run).folder / "run", seed=1)
    data_dir = f"data_dir={other.folder / 'run' / 'data'}"
    message = message_of(run, *[data_dir] * given)
    assert message.startswith(f"{run.folder / 'run' / 'store'} was made from other data")
    assert message.endswith(f": correct {data_dir}" if given else "run `eagle31 extract` again with overwrite=true")
    assert not run.train.exists()


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
    sums = torch.tensor(
        [
            [6.0, 2.0],  # loss
            [3.0, 4.0],  # trained
            [2.0, 1.0],  # correct
            [4.0, 5.0],  # eligible
            [2.0, 1.0],  # prefix
            [4.0, 2.0],  # eligible_prefix
            [8.0, 15.0],  # summed rms
            [4.0, 4.0],  # slots
        ]
    )
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
