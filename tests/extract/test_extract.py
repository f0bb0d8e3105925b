"""The extraction stage on a tiny target: what is stored, and what happens when it is stopped or misused."""

import json
from dataclasses import asdict

import numpy as np
import pytest
import torch
from datasets import DatasetDict
from made import message_of
from pipeline import AUX, LENGTHS, VOCAB, contents, save_quietly, tiny_config, tiny_llama, write_data
from talking import whole_words

from eagle31_train.common.artifacts import fingerprint, weights_fingerprint
from eagle31_train.store import Store
from eagle31_train.store.document import Document
from eagle31_train.targets import extraction as stage
from eagle31_train.targets.description import describe_target
from eagle31_train.targets.extraction import Agreement, extract
from eagle31_train.targets.hf import HiddenStateTarget
from eagle31_train.targets.pretrained import vocabulary_fingerprint


def refused(folder, *more):
    """The one line of an extraction that is refused."""
    return message_of(extract, tiny_config(folder, *more))


def record(folder, **more):
    """Add to what stage 1's manifest says."""
    manifest = folder / "run" / "data" / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), **more}))


@pytest.mark.core
@torch.no_grad()
def test_every_sample_is_stored_with_the_states_and_choices_of_running_it_alone(extracted):
    store, taught = Store(extracted / "run" / "store"), 0
    data = DatasetDict.load_from_disk(str(extracted / "run" / "data" / "dataset"))
    target = HiddenStateTarget(tiny_llama(), AUX)
    for name in ("train", "heldout"):
        split = store.split(name)
        assert split.lengths == LENGTHS[name]
        for index, row in enumerate(data[name]):
            document = split.read(index)
            assert document.tokens.tolist() == row["input_ids"]
            assert document.loss_mask.tolist() == row["loss_mask"]
            tokens = document.tokens[None]
            (aux,), (last,) = target.states(tokens, torch.ones_like(tokens))
            # Auxiliary states as far as a slot sees, last ones where they teach.
            aux, last = aux[: document.attended], last[document.supervised]
            # One step of bf16 apart at most: the batch that it was computed in may round otherwise.
            torch.testing.assert_close(document.aux.decode().float(), aux, rtol=0.008, atol=1e-5)
            torch.testing.assert_close(document.last.decode().float(), last, rtol=0.008, atol=1e-5)
            # Top-1 where the next token is the assistant's: of the states before they are rounded, the very choice.
            teaches = torch.cat([document.loss_mask[1:], torch.tensor([False])])
            assert torch.equal(document.top1 == -1, ~teaches)
            assert torch.equal(document.top1[teaches], target.model(tokens).logits[0][teaches].argmax(-1))
            taught += int(teaches.sum())
    assert taught > 50


def test_how_far_answers_are_the_targets_own_is_counted_and_said(run, capsys):
    drafted, states = np.arange(VOCAB) < 10, torch.zeros(5, 1, 4)

    def counted(top1, answers):
        mask = torch.tensor([False, False, *[answers] * 3])
        document = Document.of(torch.tensor([5, 6, 7, 8, 9]), mask, torch.tensor(top1), states, states[:, 0])
        return Agreement.of(document, drafted)

    assert Agreement.of_all([]).lines(Agreement.of_all([])) == []
    # Supervised are positions 1 to 3: the next token is the assistant's, and one comes before.
    agreement = counted([-1, 7, 30, 9, -1], answers=True)
    assert (agreement.positions, agreement.own, agreement.outside, agreement.bare) == (3, 2, 1, 0)
    line, warning = agreement.lines(agreement)
    assert "write 66.7% of the 3 answer tokens; 33.3% of its choices" in line
    assert "can never be drafted" in warning
    outside, unanswered = counted([-1, 30, 30, 30, -1], answers=True), counted([-1] * 5, answers=False)
    together = Agreement.of_all((agreement, outside, unanswered))
    lines = together.lines(together)
    assert lines[1] == "extract: 2 of 3 conversations have nothing to train on"
    extract(tiny_config(run))
    said = capsys.readouterr().out
    assert "few of these answers are the target's own" in said
    assert "other weights, another chat template" in said
    # What an earlier start has counted counts: a kill just before the end loses no warning.
    (run / "run" / "store" / "manifest.json").unlink()
    extract(tiny_config(run))
    assert capsys.readouterr().out == said


def test_a_good_store_is_not_replaced_where_data_dir_or_the_targets_weights_may_be_wrong(run):
    write_data(run / "other", seed=1)
    extract(tiny_config(run))
    wrong = f"data_dir={run / 'other' / 'data'}"
    instead = f": correct {wrong}, or choose another name=… or run_dir=…"
    assert refused(run, wrong).endswith(instead)
    (run / "run" / "store" / "manifest.json").unlink()  # begun, and not finished
    assert refused(run, wrong).endswith(instead)
    save_quietly(tiny_llama(seed=1), run / "target")
    message = refused(run)
    assert str(run / "run" / "store") in message
    assert "target.weights: " in message


def give_words(folder, swapped=False, **more):
    """A tokenizer in folder/target, two of its words swapped or not; what stage 1 records of it."""
    words = ["<unk>", "one", "two", *(f"word{i}" for i in range(3, VOCAB))]
    if swapped:
        words[1:3] = reversed(words[1:3])
    tokenizer = whole_words(words, **more)
    tokenizer.save_pretrained(folder / "target")
    return vocabulary_fingerprint(tokenizer)


def test_data_of_another_tokenizer_is_refused_before_the_target_is_loaded(run, monkeypatch):
    record(run, vocabulary=give_words(run))
    extract(tiny_config(run))
    give_words(run, swapped=True)
    monkeypatch.setattr(stage, "make_engine", None)
    message = refused(run, f"store_dir={run / 'other'}")
    made_for = f"{run / 'run' / 'data'} was not made for target.path={run / 'target'}, but for a target with another"
    assert message.startswith(f"{made_for} tokenizer: ")
    assert message.endswith("run `eagle31 data` for this target")
    assert not (run / "other").exists()


@pytest.mark.parametrize("changed", ["nothing", "config", "template", "weights", "record"])
def test_a_target_that_changed_since_stage_1_is_told_of(run, capsys, changed):
    """Its states are of other prompts than it will see, or of answers that it would not write; and training derives the
    drafter of what stage 1 recorded of it."""
    text = "{{ messages[0]['content'] }}"
    words = {"vocabulary": give_words(run, chat_template=text), "end_ids": [2]}
    manifest = json.loads((run / "run" / "data" / "manifest.json").read_text())
    made = {**manifest["inputs"], "template": fingerprint(text), "sources": [["conversations.jsonl", "of these"]]}
    described = asdict(describe_target(tiny_config(run).target))
    other = {"rope_theta": 777.0 if changed == "config" else described["rope_theta"]}
    record(run, inputs=made, target={**described, **other, "sources": {"rope_theta": "in other words"}}, **words)
    wrote = {"target": "target", "weights": weights_fingerprint(str(run / "target"))}
    answers = {"inputs": wrote, "files": {"conversations.jsonl": {"sha256": "of these"}}}
    (run / "run" / "conversations.manifest.json").write_text(json.dumps(answers))
    if changed == "template":
        give_words(run, chat_template=f"{text}!")
    elif changed == "weights":
        save_quietly(tiny_llama(seed=1), run / "target")
    elif changed == "record":  # which extraction does not need
        (run / "run" / "conversations.manifest.json").write_text("{")
    extract(tiny_config(run))
    said = capsys.readouterr().out
    assert (f"(rope_theta: 777.0 there, {described['rope_theta']} here): run" in said) == (changed == "config")
    told = "target renders or ends conversations otherwise than in "
    assert (told in said) == (changed == "template")
    assert ("the weights or config.json of target have changed since it answered" in said) == (changed == "weights")


def test_each_kind_of_state_has_its_own_codec_and_bytes_are_counted(run):
    extract(tiny_config(run, "store.aux_codec=fp8", "store.last_codec=int8_channel"))
    store = Store(run / "run" / "store")
    document = store.split("train").read(0)
    assert (document.aux.codec, document.last.codec) == ("fp8", "int8_channel")
    bytes_of_shards = sum(map(len, contents(run / "run" / "store" / "shards").values()))
    assert store.manifest["bytes_per_token"] == bytes_of_shards / sum(map(sum, LENGTHS.values()))
