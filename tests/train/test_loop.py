"""The training loop on a tiny store: it learns, goes on after a stop bit for bit, and refuses what cannot be."""

import shutil
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from pipeline import KEPT, assert_close, assert_equal, flip_bit, message_of, write_data

from eagle31_train import artifacts
from eagle31_train.config import TrainConfig
from eagle31_train.extract import extract
from eagle31_train.store import Store
from train.metrics import summarise
from train.optimizer import parameter_groups
from train.step import learning_rate, step_weights

# ---------------------------------------------------------------- it learns


def test_a_few_conversations_are_learnt_by_heart(new_run):
    run = new_run().fit("train.epochs=15")
    losses, rows = run.losses(), run.rows()
    assert losses[-1] < 0.2 * losses[0]
    assert rows[0]["acceptance_estimate"] < 1.5 < 2 < rows[-2]["acceptance_estimate"]
    assert run.manifest()["steps"] == len(losses) > 50


VARIANTS = {
    "eagle 3.1": [],
    "eagle 3": ["drafter.fc_norm=false", "drafter.norm_output=false"],
    "norm before residual": ["drafter.norm_before_residual=true"],
    "own embedding": ["drafter.share_embedding=false"],
    "another width": ["drafter.hidden_size=24", "drafter.share_embedding=false"],
    "frozen head": ["drafter.train_lm_head=false"],
    "cross entropy": ["train.loss=ce"],
    "half of the LK loss": ["train.lk=0.5"],
    "keep": ["train.oov=keep"],
    "bf16": ["train.precision=bf16"],
    "weight decay": ["train.weight_decay=0.1"],
    "a subset of the slots": ["train.slots_per_batch=20"],
}


FAST = ("eagle 3", "own embedding", "bf16")


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(options, id=name, marks=[] if name in FAST else pytest.mark.slow)
        for name, options in VARIANTS.items()
    ],
)
def test_every_variant_is_one_option_and_trains(new_run, options):
    run = new_run().fit("train.epochs=4", *options)
    losses = run.losses()
    assert sum(losses[-3:]) < 0.9 * sum(losses[:3])
    weights = run.weights()
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    assert ("fc_norm.0.weight" in weights) == ("drafter.fc_norm=false" not in options)
    assert ("embed_tokens.weight" in weights) == ("drafter.share_embedding=false" in options)


def test_norm_output_changes_the_state_that_later_steps_read_and_no_other(new_run):
    options = ["train.max_steps=1", "drafter.norm_output="]
    normed, raw = (
        new_run().fit(*options[:-1], options[-1] + value).rows()[0]["rms_at_depth"] for value in ("true", "false")
    )
    assert normed[0] == raw[0]
    assert abs(normed[1] - raw[1]) > 0.01 * raw[1]
    assert abs(normed[2] - raw[2]) > 0.01 * raw[2]


def test_a_frozen_lm_head_stays_the_targets_and_a_trained_one_starts_there(new_run):
    rows = Store(new_run().folder / "run" / "store").target["lm_head"][torch.tensor(KEPT)]
    assert torch.equal(new_run().fit("drafter.train_lm_head=false").weights()["lm_head.weight"], rows)
    started = new_run().fit("train.max_steps=1", "train.lr=1e-6").weights()["lm_head.weight"]
    assert not torch.equal(started, rows)
    torch.testing.assert_close(started, rows, rtol=0, atol=2e-6)


@pytest.mark.core
def test_the_seed_decides_the_weights_and_nothing_else_does(new_run):
    first = new_run().fit("train.max_steps=3").weights()
    # Options that steer reporting and saving are not part of what is learnt.
    again = new_run().fit("train.max_steps=3", "train.eval_every=1", "train.checkpoint_every=1", "train.eval_samples=2")
    assert_equal(again.weights(), first)
    other = new_run().fit("train.max_steps=3", "seed=1").weights()
    assert not torch.equal(other["fc.weight"], first["fc.weight"])


@pytest.mark.parametrize("accumulation", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_accumulation_changes_neither_weights_nor_metrics(new_run, accumulation):
    # Batches of 2 to 5 samples: some of 4 micro-batches are empty, and others hold unlike numbers of pairs.
    whole, parts = new_run().fit(), new_run().fit(f"train.gradient_accumulation_steps={accumulation}")
    assert_close(parts.weights(), whole.weights(), 2e-6)
    for ours, theirs in zip(parts.rows(), whole.rows(), strict=True):
        assert ours.keys() == theirs.keys()
        for name in theirs:
            assert ours[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-5), name


# ---------------------------------------------------------------- what it leaves


def test_the_manifest_names_a_checkpoint_with_exactly_the_drafters_tensors(new_run):
    run = new_run().fit("train.eval_every=5")
    manifest = run.manifest()
    assert manifest["checkpoint"] == "checkpoints/step-000012"
    assert manifest["inputs"]["train"]["lr"] == 0.01
    assert manifest["fingerprint"] == artifacts.fingerprint(manifest["inputs"])
    assert artifacts.first_damaged(run.train, manifest["files"]) is None
    assert {name.split("/")[-1] for name in manifest["files"]} == {
        "model.safetensors",
        "optimizer.safetensors",
        "drafter.json",
        "manifest.json",
    }
    assert sorted(run.weights()) == sorted(
        [f"fc_norm.{i}.weight" for i in range(3)]
        + [f"midlayer.self_attn.{name}_proj.weight" for name in "qkvo"]
        + [f"midlayer.mlp.{name}_proj.weight" for name in ("gate", "up", "down")]
        + [f"midlayer.{name}.weight" for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")]
        + ["fc.weight", "norm.weight", "lm_head.weight"]
    )
    rows = run.rows()
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, 13))
    assert [row["step"] for row in rows if "heldout_loss" in row] == [5, 10, 12]
    last = rows[-1]
    assert {f"heldout_{name}": value for name, value in manifest["heldout"].items()} == {
        name: value for name, value in last.items() if name != "step"
    }
    assert manifest["tokens"] == rows[-2]["tokens"] == 3 * sum(Store(run.folder / "run/store").split("train").lengths)
    assert "lr: 0.01" in (run.train / "config.yaml").read_text()


def test_the_curve_is_of_the_same_conversations_throughout_and_the_record_of_all(new_run):
    first = new_run().fit("train.eval_samples=2", "train.eval_every=11", "train.max_steps=12", "train.lr=1e-9")
    every = new_run().fit("train.eval_samples=100", "train.eval_every=11", "train.max_steps=12", "train.lr=1e-9")
    assert first.manifest()["heldout"] == every.manifest()["heldout"]

    def curve(run):
        return [row["heldout_loss"] for row in run.rows() if "heldout_loss" in row]

    # Weights hardly move: what differs by more is which conversations are read.
    (few, few_at_the_end), (many, many_at_the_end) = curve(first), curve(every)
    assert few_at_the_end == pytest.approx(few, rel=1e-5)
    assert many_at_the_end == pytest.approx(many, rel=1e-5)
    assert abs(few - many) > 1e-3


def test_no_heldout_split_means_no_heldout_numbers(new_run, extracted):
    run = new_run()
    shutil.rmtree(run.folder / "run")
    write_data(run.folder / "run", {"train": [9, 12, 20], "heldout": []})
    extract(run.config())
    run.fit()
    assert run.manifest()["heldout"] is None
    assert not any("heldout_loss" in row for row in run.rows())


@pytest.mark.slow
def test_wandb_offline_writes_a_run_beside_the_checkpoints(new_run, monkeypatch):
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = new_run().fit("train.wandb=offline", "train.max_steps=2")
    assert list((run.train / "wandb").glob("offline-run-*/run-*.wandb"))
    assert run.manifest()["steps"] == 2


# ---------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("drafter.num_key_value_heads=3", "num_attention_heads=4 is not a multiple of num_key_value_heads=3"),
        ("drafter.num_key_value_heads=0", "drafter.num_key_value_heads=0 must be above 0"),
        ("drafter.head_dim=7", "drafter.head_dim=7 must be even"),
        ("drafter.hidden_size=24", "drafter.hidden_size=24 cannot share the target's embedding of width 32"),
        ("drafter.rope_scaling.rope_type=foo", "use rope_type=linear or dynamic or llama3 or yarn, or {} for none"),
        ("drafter.rope_scaling.factor=2.0", "names no rope_type"),
        ("target.aux_layers=[1,2]", "was made for another target (target.aux_layers: [1, 3, 5] there, [1, 2] here)"),
        ("target.path=models/other", "was made for another target (target.name: "),
    ],
)
def test_options_that_no_run_can_use_are_one_line_and_leave_nothing(new_run, option, words):
    run = new_run()
    assert words in message_of(run, option)
    assert not run.train.exists()


def test_a_store_of_other_data_is_refused(new_run):
    run = new_run()
    write_data(run.folder / "run", seed=1)
    message = message_of(run)
    assert message.startswith(f"{run.folder / 'run' / 'store'} was made from other data")
    assert not run.train.exists()


@pytest.mark.parametrize(
    ("path", "command"),
    [("data/manifest.json", "data_prep"), ("data/vocab.safetensors", "data_prep"), ("store/manifest.json", "extract")],
)
def test_a_missing_input_names_the_stage_that_makes_it(new_run, path, command):
    run = new_run()
    (run.folder / "run" / path).unlink()
    message = message_of(run)
    assert path in message
    assert command in message
    assert not run.train.exists()


def test_a_shard_that_breaks_while_training_is_named(new_run):
    run = new_run()
    shard = run.folder / "run" / "store" / "shards" / "train-00002.safetensors"
    flip_bit(shard)
    assert message_of(run).startswith(
        f"{shard} (samples 4 to 5 of train) is not as it was written (its checksum differs)"
    )


# ---------------------------------------------------------------- arithmetic


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
    nothing = summarise(torch.zeros(8, 2))
    assert (nothing["loss"], nothing["acceptance_estimate"]) == (0.0, 1.0)


def test_norms_do_not_decay():
    drafter = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.LayerNorm(2))
    drafter[0].bias.requires_grad_(False)
    decayed, kept = parameter_groups(drafter, 0.1)
    assert [p.shape for p in decayed["params"]] == [(2, 3)]
    assert decayed["weight_decay"] == 0.1
    assert [p.shape for p in kept["params"]] == [(2,), (2,)]
    assert kept["weight_decay"] == 0.0
