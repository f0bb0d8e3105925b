"""What cannot be trained on is named in one line, before it does harm: never an index error, never a NaN."""

import re
import shutil

import pytest
import torch
from pipeline import HIDDEN, assert_close, message_of, reseal, write_data
from safetensors.torch import load_file, save_file

from eagle31_train.extract import extract
from eagle31_train.store import StoreSplit


@pytest.fixture
def run_of(new_run):
    """run_of(train, heldout): an extracted run with samples of these lengths."""

    def make(train, heldout=(10, 14)):
        run = new_run()
        shutil.rmtree(run.folder / "run")
        write_data(run.folder / "run", {"train": list(train), "heldout": list(heldout)})
        extract(run.config())
        return run

    return make


# ---------------------------------------------------------------- nothing to train in a batch


def test_a_batch_without_a_pair_stops_the_run_before_it_is_saved(run_of):
    # A sample of three tokens has no pair: the first answer's token is the fourth.
    run = run_of([30, 3, 28, 29])
    message = message_of(run, "train.batch_tokens=30", "train.checkpoint_every=1", "seed=2")
    step, sample = re.match(
        r"step (\d+): no sample of its batch has a pair to train \(samples \[(\d+)\]\), nothing was saved since: "
        r"raise train\.batch_tokens, or prepare the data without",
        message,
    ).groups()
    assert sample == "1"
    assert int(step) > 1, "choose another seed: this test wants a step before"
    assert [row["step"] for row in run.rows() if "loss" in row] == list(range(1, int(step)))
    assert max(run.checkpoints.glob("step-*")).name == f"step-{int(step) - 1:06d}"
    assert not (run.train / "manifest.json").exists()


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_a_batch_without_a_pair_leaves_no_nan_on_its_way(run_of, monkeypatch, precision):
    norms, clip = [], torch.nn.utils.clip_grad_norm_

    def clip_grad_norm_(parameters, *rest, **options):
        norms.append(clip(parameters, *rest, **options))
        return norms[-1]

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", clip_grad_norm_)
    message = message_of(run_of([3]), f"train.precision={precision}")
    assert "step 1: no sample of its batch has a pair to train (samples [0])" in message
    assert [norm.item() for norm in norms] == [0.0]


# ---------------------------------------------------------------- lengths


def test_a_training_sample_longer_than_the_budget_is_refused_before_any_is_read(new_run, monkeypatch):
    run = new_run()
    with monkeypatch.context() as patch:
        patch.setattr(StoreSplit, "read", None)
        message = message_of(run, "train.batch_tokens=20")
    assert message.startswith(f"row 6 of the train split in {run.folder / 'run' / 'store'} has 30 tokens: set train.")
    assert not run.train.exists()
    run.fit("train.batch_tokens=30", "train.max_steps=1")


# ---------------------------------------------------------------- the vocabulary map


# ---------------------------------------------------------------- ids and weights in the store


def rewrite(run, name, change):
    """Change tensors of a file of the store, and list it as if it had been written so; returns its path."""
    store = run.folder / "run" / "store"
    tensors = load_file(store / name)
    change(tensors)
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, store / name)
    reseal(store)
    return store / name


@pytest.mark.parametrize("share", ["true", "false"])
def test_a_padded_embedding_trains_what_the_same_without_padding_does(new_run, share):
    def pad(tensors):
        tensors["embed_tokens"] = torch.cat([tensors["embed_tokens"], torch.full((3, HIDDEN), float("nan"))])

    padded = new_run()
    rewrite(padded, "target.safetensors", pad)
    options = ["train.max_steps=2", f"drafter.share_embedding={share}"]
    assert_close(padded.fit(*options).weights(), new_run().fit(*options).weights(), 0)
