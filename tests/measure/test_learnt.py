"""What was learnt is known by its tokens and lengths, and what nobody knows is told."""

import numpy as np
import pytest
from datasets import Dataset, DatasetDict

from eagle31_train.measure import learnt
from eagle31_train.measure.learnt import Learnt

OURS = {"data": "d1", "store": "s1", "seed": 0, "train": {"lr": 0.001, "epochs": 1}}


def doubts(trainings, data):
    manifests = {name: [one and {"inputs": one} for one in some] for name, some in trainings.items()}
    return list(learnt.doubts(manifests, data))


@pytest.mark.parametrize("rows", [7, 2500])  # more than are read at a time
def test_samples_are_known_by_what_is_asked_and_by_their_lengths(tmp_path, rows):
    generator = np.random.default_rng(0)
    asked = [generator.integers(0, 50_000, size=generator.integers(3, 9)).tolist() for _ in range(rows)]
    answers = [generator.integers(0, 50_000, size=generator.integers(1, 9)).tolist() for _ in range(rows)]
    # In samples of several turns, answers are not all at the end.
    columns = {
        "input_ids": [a + b + [5] for a, b in zip(asked, answers, strict=True)],
        "loss_mask": [[False] * len(a) + [True] * len(b) + [False] for a, b in zip(asked, answers, strict=True)],
    }
    split = Dataset.from_dict(columns)
    DatasetDict({"train": split, "heldout": split.select([])}).save_to_disk(str(tmp_path))
    known = Learnt(tmp_path)
    assert known.lengths.tolist() == [len(ids) for ids in columns["input_ids"]]
    assert all(ids in known for ids in asked)
    assert not any(ids[:-1] in known or [*ids, 7] in known or ids[::-1] in known for ids in asked)


def test_what_nobody_knows():
    named = {"ours": [OURS], "theirs": [None], "other": [OURS, {**OURS, "data": "d2", "seed": 1}]}
    found = doubts(named, "d1")
    assert found[:2] == [f"nobody knows whether {name} was trained on these prompts" for name in ("theirs", "other")]
    assert doubts({"ours": [OURS]}, "d2") == ["nobody knows whether ours was trained on these prompts"]
    assert doubts({"mixed": [OURS, None]}, "d1")[1:] == [
        "nobody knows whether trainings 1 and 2 of mixed differ in their seed alone"
    ]


def test_what_a_warm_start_had_learnt_nobody_knows():
    begun = {**OURS, "train": {**OURS["train"], "init_from": "0123456789abcdef"}}
    told = "nobody knows whether the weights that warm began with were trained on these prompts"
    assert doubts({"afresh": [OURS], "warm": [begun]}, "d1") == [told]
    assert doubts({"warm": [{**OURS, "train": {**OURS["train"], "init_from": None}}]}, "d1") == []


def test_trainings_under_one_name_differ_in_their_seed_alone():
    again = {**OURS, "seed": 1}
    assert doubts({"ours": [OURS, again, {**OURS, "seed": 2}]}, "d1") == []
    planted = {**again, "train": {"lr": 0.003, "epochs": 1}}
    assert doubts({"ours": [OURS, again, planted]}, "d1") == [
        "trainings 1 (there) and 3 (here) of ours differ in more than their seed: train.lr: 0.001 there, 0.003 here"
    ]


def test_an_option_that_an_older_training_did_not_know_is_no_difference():
    """But one that changes what is trained is."""
    newer = {**OURS, "seed": 1, "train": {**OURS["train"], "optimizer": "adamw"}}
    assert doubts({"ours": [OURS, newer]}, "d1") == []
    newer["train"]["optimizer"] = "muon"
    (told,) = doubts({"ours": [OURS, newer]}, "d1")
    assert told.endswith("train.optimizer: adamw there, muon here")


def test_nothing_is_read_before_it_is_asked_for(tmp_path, monkeypatch):
    """Lengths need no hashes, which take a pass over all tokens."""
    split = Dataset.from_dict({"input_ids": [[1, 2]], "loss_mask": [[False, True]]})
    DatasetDict({"train": split}).save_to_disk(str(tmp_path))
    monkeypatch.setattr(learnt, "_digest", None)
    assert Learnt(tmp_path).lengths.tolist() == [2]
