"""What cannot be trained on is named in one line, before it does harm: never an index error, never a NaN."""

import re
import shutil

import pytest
import torch
from pipeline import HIDDEN, assert_close, message_of, reseal, write_data
from safetensors.torch import load_file, save_file

from eagle31_train.extract import extract


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
