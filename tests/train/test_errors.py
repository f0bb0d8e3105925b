"""What cannot be trained on is named in one line, before it does harm: never an index error, never a NaN."""

import re
import shutil

import numpy as np
import pytest
import torch
from pipeline import HIDDEN, KEPT, VOCAB, assert_close, message_of, reseal, write_data
from safetensors.numpy import save_file as save_maps
from safetensors.torch import load_file, save_file

from eagle31_train.extract import extract
from eagle31_train.model import vocab
from eagle31_train.store import REMAKE, StoreSplit


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
    assert message == (
        f"3 of 12 training samples in {run.folder / 'run' / 'store'} are longer than train.batch_tokens=20; "
        "the longest, row 6 of the train split, has 30 tokens: set train.batch_tokens=30 or more, or make data and "
        "store again with data.max_length=20"
    )
    assert not run.train.exists()
    assert "1 of 12 training samples" in message_of(run, "train.batch_tokens=29")
    run.fit("train.batch_tokens=30", "train.max_steps=1")


def test_a_store_without_a_training_sample_is_refused(run_of):
    run = run_of([])
    assert message_of(run).startswith(f"{run.folder / 'run' / 'store'} holds no sample to train on: run `python -m")
    assert not run.train.exists()


# ---------------------------------------------------------------- the vocabulary map


def maps(**changes):
    draft = vocab.DraftVocab(np.array(KEPT, dtype=np.int64), VOCAB)
    return {"d2t": draft.d2t, "t2d": draft.t2d, **changes}


def shifted(amount):
    d2t = maps()["d2t"].copy()
    d2t[-1] += amount
    return d2t


def swapped(array):
    array = array.copy()
    array[[0, 1]] = array[[1, 0]]
    return array


VOCABULARIES = {
    "absolute ids": (maps(d2t=np.array(KEPT)), "ascending ids in [0, 40), each once"),
    "an id past the end": (maps(d2t=shifted(1)), "ascending ids in [0, 40), each once"),
    "an id twice": (maps(d2t=shifted(-1)), "ascending ids in [0, 40), each once"),
    "negative ids": (maps(d2t=maps()["d2t"] - 2), "ascending ids in [0, 40), each once"),
    "no id": (maps(d2t=np.zeros(0, dtype=np.int64)), "ascending ids in [0, 40), each once"),
    "flags of other tokens": (maps(t2d=swapped(maps()["t2d"])), "d2t and t2d contradict each other"),
    "flags of a smaller target": (maps(t2d=maps()["t2d"][:-1]), "ascending ids in [0, 39), each once"),
    "no flags": ({"d2t": maps()["d2t"]}, "is missing or damaged"),
}


@pytest.mark.parametrize(("tensors", "words"), VOCABULARIES.values(), ids=VOCABULARIES.keys())
def test_a_damaged_vocabulary_names_its_file_and_the_remedy(new_run, tensors, words):
    run = new_run()
    file = run.folder / "run" / "data" / "vocab.safetensors"
    save_maps(tensors, file)
    message = message_of(run)
    assert message.startswith(f"{file} ")
    assert words in message
    assert message.endswith(": run `python -m data_prep` again")
    assert not run.train.exists()


# ---------------------------------------------------------------- ids and weights in the store


def rewrite(run, name, change):
    """Change tensors of a file of the store, and list it as if it had been written so; returns its path."""
    store = run.folder / "run" / "store"
    tensors = load_file(store / name)
    change(tensors)
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, store / name)
    reseal(store)
    return store / name


def put(name, value):
    """Put a value where an assistant's token follows: of the same sample, since each begins with the user's."""

    def change(tensors):
        tensors[name][tensors["loss_mask"].nonzero()[2, 0] - 1] = value

    return change


IDS = {
    "a token past the vocabulary": ("tokens", VOCAB, rf"holds tokens from \d+ to {VOCAB}, outside the {VOCAB} tokens"),
    "an arg-max past the vocabulary": ("top1", VOCAB + 7, f"holds top1 from -1 to {VOCAB + 7}, outside the {VOCAB}"),
    "no arg-max where one teaches": ("top1", -1, r"lacks the target's arg-max \(top1\) before some of the assistant's"),
}


@pytest.mark.parametrize(("name", "value", "words"), IDS.values(), ids=IDS.keys())
@pytest.mark.parametrize("shard", ["train-00000", "heldout-00000"])
def test_ids_that_the_vocabulary_lacks_name_the_shard(new_run, shard, name, value, words):
    run = new_run()
    file = rewrite(run, f"shards/{shard}.safetensors", put(name, value))
    message = message_of(run, "train.max_steps=12")
    assert re.match(re.escape(f"{file} (samples 0 to ") + rf"\d of {shard[:-6]}\) " + words, message)
    assert message.endswith(f": see `python -m eagle31_train.store verify {run.folder / 'run' / 'store'}`")
    assert not (run.train / "manifest.json").exists()


def cut(name, rows, columns=None):
    def change(tensors):
        tensors[name] = tensors[name][:rows] if columns is None else tensors[name][:rows, :columns]

    return change


WEIGHTS = {
    "lm_head": (cut("lm_head", VOCAB - 1), f"lm_head [{VOCAB - 1}, {HIDDEN}], but its store says [{VOCAB}, {HIDDEN}]"),
    "embedding": (
        cut("embed_tokens", VOCAB - 3),
        f"embed_tokens [{VOCAB - 3}, {HIDDEN}], but its store says [{VOCAB}, {HIDDEN}]",
    ),
    "width": (cut("embed_tokens", VOCAB, 8), f"embed_tokens [{VOCAB}, 8], but its store says [{VOCAB}, {HIDDEN}]"),
    "norm": (cut("norm", 5), f"norm [5], but its store says [{HIDDEN}]"),
}


@pytest.mark.parametrize(("change", "words"), WEIGHTS.values(), ids=WEIGHTS.keys())
def test_weights_of_another_target_in_the_store_are_named(new_run, change, words):
    run = new_run()
    file = rewrite(run, "target.safetensors", change)
    message = message_of(run)
    assert message == f"{file} holds {words} of the target: {REMAKE}"
    assert not run.checkpoints.exists()


@pytest.mark.parametrize("share", ["true", "false"])
def test_a_padded_embedding_trains_what_the_same_without_padding_does(new_run, share):
    def pad(tensors):
        tensors["embed_tokens"] = torch.cat([tensors["embed_tokens"], torch.full((3, HIDDEN), float("nan"))])

    padded = new_run()
    rewrite(padded, "target.safetensors", pad)
    options = ["train.max_steps=2", f"drafter.share_embedding={share}"]
    assert_close(padded.fit(*options).weights(), new_run().fit(*options).weights(), 0)
