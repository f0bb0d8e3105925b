"""What extraction stores of the target's own answers, and of which prompts."""

import re
from collections import Counter
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from datasets import DatasetDict
from made import message_of
from pipeline import AUX, END, answered, contents, make_run, tiny_config, tiny_llama
from planting import watched

from eagle31_train.common import artifacts, console
from eagle31_train.evaluation import trajectories
from eagle31_train.evaluation.prompts import Prompt
from eagle31_train.evaluation.trajectories import choose_prompts, read
from eagle31_train.extract import extract
from eagle31_train.store import Store, StoreWriter, open_storage
from eagle31_train.store.__main__ import check
from eagle31_train.targets.hf import HiddenStateTarget

FILES = {"trajectories.safetensors", "trajectories.json"}


@pytest.fixture
def run(tmp_path):
    make_run(tmp_path)
    return tmp_path


def store_of(folder):
    return folder / "run" / "store"


@torch.no_grad()
def test_each_is_the_targets_own_answer_and_its_states(run, monkeypatch, capsys):
    chosen = watched(monkeypatch, trajectories, "choose_prompts")
    monkeypatch.setattr(console, "EVERY", 0.0)
    extract(tiny_config(run, "evaluate.max_new_tokens=20", "evaluate.max_speculative_tokens=5"))
    shown = re.findall(r"held-out answers: (\d+) %, (\d) of 2, ", capsys.readouterr().err)
    assert shown[-1] == ("100", "2"), "how many are answered"
    assert [given[-1] for given in chosen] == [128 - 20 - 4], "tokens of a prompt, with room for all that is followed"
    found = read(Store(store_of(run)), 5)
    heldout = DatasetDict.load_from_disk(str(run / "run" / "data" / "dataset"))["heldout"]
    assert [one.prompt for one in found] == [heldout[at]["input_ids"][:3] for at in (3, 2)], "half, from the end"
    model = tiny_llama()
    target = HiddenStateTarget(model, AUX)
    for one in found:
        text = answered(model, [one.prompt], 3 + 20 + 4)[0][3:]  # the reference: the whole text is read for each token
        end = text.index(END) + 1 if END in text[:20] else 20
        assert (one.output, one.beyond) == (text[:end], text[end : end + 4])
        tokens = torch.tensor([[*one.prompt, *one.output]])
        states = target.states(tokens, torch.ones_like(tokens))[0][0]
        torch.testing.assert_close(one.aux, states[: len(one.aux)], rtol=1e-4, atol=1e-4)
        assert len(one.aux) == 3 + end - 2


def test_the_shards_know_nothing_of_them(run, tmp_path_factory, monkeypatch):
    """And they are there before a training that follows the extraction may begin."""
    right, there = StoreWriter.write_tensors, []

    def write_tensors(self, file, tensors):
        there.append((file, self.has_trajectories))
        right(self, file, tensors)

    monkeypatch.setattr(StoreWriter, "write_tensors", write_tensors)
    extract(tiny_config(run))
    assert there == [("trajectories.safetensors", False), ("target.safetensors", True)]
    other = tmp_path_factory.mktemp("other")
    make_run(other)
    extract(tiny_config(other, "extract.trajectories=0"))
    ours, theirs = contents(store_of(run)), contents(store_of(other))
    assert ours.keys() - theirs.keys() == FILES
    shards = {name for name in theirs if name.startswith("shards/")}
    assert {name: ours[name] for name in shards} == {name: theirs[name] for name in shards}
    assert read(Store(store_of(other)), 3) == []
    assert not list(check(open_storage(str(store_of(run)), run, 0), Counter()))


def test_an_extraction_that_goes_on_keeps_them_and_makes_what_is_damaged(run, capsys):
    extract(tiny_config(run))
    store = store_of(run)
    before = contents(store)
    for damage in (None, *FILES):
        if damage:  # a store that is complete, too, is found wanting
            (store / damage).write_bytes(b"no")
        else:
            (store / artifacts.MANIFEST).unlink()
        capsys.readouterr()
        extract(tiny_config(run))
        assert ("answered 2 held-out prompts" in capsys.readouterr().out) == (damage is not None)
        assert {name: contents(store)[name] for name in FILES} == {name: before[name] for name in FILES}


def test_a_target_or_engine_that_cannot_decode_here_is_extracted_all_the_same(run, monkeypatch, capsys):
    monkeypatch.setattr(trajectories, "decode_plain", Mock(side_effect=TypeError("no such cache")))
    extract(tiny_config(run))
    assert "training will not measure acceptance: TypeError: no such cache" in capsys.readouterr().out
    assert Store(store_of(run)).trajectories == {}
    config = SimpleNamespace(extract=SimpleNamespace(trajectories=8), evaluate=None)
    writer = SimpleNamespace(has_trajectories=False)
    trajectories.record(config, SimpleNamespace(name="vllm"), writer, {"heldout": [1]})
    assert "training will not measure acceptance: extract.engine=vllm cannot decode" in capsys.readouterr().out


def test_at_most_half_of_each_sources_prompts_are_taken_from_its_end_and_evaluation_comes_first():
    counts = {"a": 5, "b": 2, "c": 1}
    heldout = [Prompt(f"{name}{i}", name, [ord(name), i]) for name, count in counts.items() for i in range(count)]
    chosen = [[97, 4], [98, 1], [97, 3]]
    assert choose_prompts(heldout, 8, 0, 9) == chosen
    assert choose_prompts([*heldout, *heldout], 8, 0, 9) == chosen, "asked twice, and once a prompt"
    assert choose_prompts(heldout, 1, 0, 9) == chosen[:1]
    assert len(choose_prompts(heldout, 8, 5, 9)) == 3, "five of eight are left for evaluation"
    assert len(choose_prompts(heldout, 8, 6, 9)) == len(choose_prompts(heldout, 8, 20, 9)) == 2
    assert choose_prompts([*heldout, Prompt("long", "a", [97] * 10)], 8, 0, 9) == chosen
    once = [heldout[-1], Prompt("again", "c", heldout[-1].ids)]
    assert "no source has two held-out prompts" in message_of(choose_prompts, once, 8, 0, 9)
