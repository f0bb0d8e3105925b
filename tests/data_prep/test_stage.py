"""The whole stage on a small target: what it writes, when it does nothing, and what it refuses."""

import json
import shutil

import numpy as np
import pytest
from datasets import load_from_disk

from data_prep import stage
from data_prep.split import is_heldout
from data_prep.stage import prepare
from data_prep.template import ChatTemplate
from eagle31_train import artifacts, vocab
from eagle31_train.schema import Config, DataConfig, GenerateConfig, TargetConfig, UserError
from eagle31_train.tokenizer import vocabulary_fingerprint

WORDS = ["hello", "the fox", "how are you", "quick", "lazy dog", "brown"]


def chats(count):
    return [
        {
            "id": f"c{i}",
            "source": ("a", "b")[i % 2],
            "messages": [
                {"role": "user", "content": f"question {i}"},
                {"role": "assistant", "content": f"{WORDS[i % len(WORDS)]} {i}"},
            ],
        }
        for i in range(count)
    ]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


@pytest.fixture
def config(tmp_path, tiny_target):
    write(tmp_path / "chats.jsonl", chats(60))
    data = DataConfig(conversations=str(tmp_path / "chats.jsonl"), heldout=0.2, max_length=64, draft_vocab_size=300)
    target = TargetConfig(path=str(tiny_target), dtype="float32", device="cpu")
    return Config(name="t", run_dir=str(tmp_path / "run"), target=target, data=data)


def manifest_of(tmp_path, run="run"):
    return json.loads((tmp_path / run / "data" / "manifest.json").read_text())


def rows_of(tmp_path, split):
    return load_from_disk(str(tmp_path / "run" / "data" / "dataset"))[split].to_list()


def test_a_shuffled_training_split_is_the_same_conversations_in_the_seeds_order(config, tmp_path):
    orders, fingerprints = [], []
    for seed in (None, 1, 2, 1):
        config.data.shuffle, config.overwrite = seed, True
        prepare(config)
        orders.append(rows_of(tmp_path, "train"))
        fingerprints.append(manifest_of(tmp_path)["dataset_fingerprint"])
        held = rows_of(tmp_path, "heldout")
        assert held == sorted(held, key=lambda row: int(row["id"][1:])), "only training is shuffled"
    as_read, one, other, again = orders
    assert [row["id"] for row in as_read] == sorted((row["id"] for row in as_read), key=lambda name: int(name[1:]))
    assert one == again != other
    assert len(set(fingerprints)) == 3
    for order in (one, other):
        assert order != as_read
        assert sorted(order, key=lambda row: int(row["id"][1:])) == as_read


def test_what_is_written(config, tmp_path):
    prepare(config)
    manifest = manifest_of(tmp_path)
    splits = load_from_disk(str(tmp_path / "run" / "data" / "dataset"))
    assert set(splits) == {"train", "heldout"}
    assert splits["train"].column_names == ["id", "source", "input_ids", "loss_mask"]
    held = {row["id"] for row in chats(60) if is_heldout(row["messages"], 0.2)}
    assert set(splits["heldout"]["id"]) == held
    assert set(splits["train"]["id"]) == {f"c{i}" for i in range(60)} - held
    template = ChatTemplate.load(config.target)
    by_id = {row["id"]: row["messages"][-1]["content"] for row in chats(60)}
    for split in splits.values():
        for row in split:
            ids = np.array(row["input_ids"])[np.array(row["loss_mask"])]
            assert template.decode(ids.tolist()) == by_id[row["id"]] + "<|im_end|>"
    # The counts say what the data set holds.
    for name, split in splits.items():
        told = manifest["splits"][name]
        assert told["conversations"] == len(split) == sum(s["conversations"] for s in told["by_source"].values())
        assert told["tokens"] == sum(map(len, split["input_ids"]))
        assert told["assistant_tokens"] == sum(map(sum, split["loss_mask"]))
        assert set(told["by_source"]) == {"a", "b"}
    assert (manifest["refused"], manifest["cut"], manifest["no_end_of_turn"]) == ([], 0, 0)
    assert manifest["vocabulary"] == vocabulary_fingerprint(template.tokenizer)
    assert artifacts.first_damaged(tmp_path / "run" / "data", manifest["files"]) is None
    assert {"vocab.safetensors", "dataset/dataset_dict.json"} < set(manifest["files"])
    assert not (tmp_path / "run" / ".data.tmp").exists()


def test_draft_vocabulary_counts_training_answers_only(config, tmp_path):
    prepare(config)
    folder, manifest = tmp_path / "run" / "data", manifest_of(tmp_path)
    draft = vocab.read(folder / "vocab.safetensors")
    assert (len(draft), draft.target_size) == (300, 448)  # the model's rows, not the tokenizer's tokens
    template = ChatTemplate.load(config.target)
    splits = load_from_disk(str(folder / "dataset"))
    for name, split in splits.items():
        answers = np.concatenate([np.array(r["input_ids"])[np.array(r["loss_mask"])] for r in split])
        assert manifest["draft_vocab"]["coverage"][name] == pytest.approx(draft.t2d[answers].mean())
    # Few enough that some are missing: the most frequent of the training answers are in.
    config.run_dir, config.data.draft_vocab_size = str(tmp_path / "small"), 12
    prepare(config)
    small = vocab.read(tmp_path / "small" / "data" / "vocab.safetensors")
    assert template.special_ids() == [0, 1, 2]
    assert {0, 1, 2} <= set(small.target_ids.tolist())  # among 26 tokens that occur, though two of these never do
    train = np.concatenate([np.array(r["input_ids"])[np.array(r["loss_mask"])] for r in splits["train"]])
    counts = np.bincount(train, minlength=448)
    kept = [i for i in small.target_ids if i not in template.special_ids()]
    assert counts[kept].min() >= np.delete(counts, small.target_ids).max()


def test_same_input_same_bytes_and_nothing_done_twice(config, tmp_path, capsys):
    prepare(config)
    before = (tmp_path / "run" / "data" / "manifest.json").stat().st_mtime_ns  # reading it may change other times
    prepare(config)
    assert "up to date" in capsys.readouterr().out
    assert (tmp_path / "run" / "data" / "manifest.json").stat().st_mtime_ns == before
    config.run_dir = str(tmp_path / "again")
    prepare(config)
    one, other = manifest_of(tmp_path), manifest_of(tmp_path, "again")
    del one["seconds"], other["seconds"]
    assert one == other  # checksums of the Arrow files included


def test_other_options_do_not_replace_finished_data_unasked(config, tmp_path):
    prepare(config)
    config.data.max_length = 32
    with pytest.raises(UserError, match=r"max_length: 64 there, 32 here.*overwrite=true"):
        prepare(config)
    config.overwrite = True
    prepare(config)
    assert manifest_of(tmp_path)["inputs"]["max_length"] == 32


def test_damaged_data_is_made_again(config, tmp_path):
    prepare(config)
    whole = (tmp_path / "run" / "data" / "vocab.safetensors").read_bytes()
    (tmp_path / "run" / "data" / "vocab.safetensors").write_bytes(whole[:-1])
    prepare(config)
    assert (tmp_path / "run" / "data" / "vocab.safetensors").read_bytes() == whole


@pytest.mark.parametrize("why", ["damaged", "overwritten"])
def test_a_kill_while_replacing_is_gone_on_from(config, tmp_path, monkeypatch, why):
    """The same command again, after the old data were given up and before the new ones were there."""
    prepare(config)
    file = tmp_path / "run" / "data" / "vocab.safetensors"
    if why == "damaged":
        file.write_bytes(b"spoilt")
    else:
        config.data.max_length, config.overwrite = 32, True
    monkeypatch.setattr(stage, "collect", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        prepare(config)
    monkeypatch.undo()
    prepare(config)
    manifest = manifest_of(tmp_path)
    assert manifest["inputs"]["max_length"] == (64 if why == "damaged" else 32)
    assert artifacts.first_damaged(tmp_path / "run" / "data", manifest["files"]) is None


def test_several_processes_are_refused(config, monkeypatch):
    """As a launcher starts them: each would answer every prompt, and write over the others."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match=r"is one process, and WORLD_SIZE=2 is set: start it without a launcher"):
        prepare(config)


@pytest.mark.parametrize(
    ("option", "value", "told"),
    [
        ("draft_vocab_size", 449, r"draft_vocab_size=449 is not between 3 .* and 448"),
        ("draft_vocab_size", 2, "draft_vocab_size=2 is not between 3"),
        ("draft_vocab_coverage", 0.9, "exclude each other"),
        ("shuffle", -1, "shuffle=-1 is no seed"),
    ],
)
def test_what_cannot_be_met_is_refused_before_the_target_answers(config, monkeypatch, option, value, told):
    monkeypatch.setattr(stage, "regenerate", lambda *_: pytest.fail("answered first"))
    config.regenerate = True
    setattr(config.data, option, value)
    with pytest.raises(UserError, match=told):
        prepare(config)


def test_tools_that_the_template_does_not_write_are_said(config, tmp_path, capsys):
    tool = {"type": "function", "function": {"name": "find", "parameters": {}}}
    write(tmp_path / "chats.jsonl", [{**row, "tools": [tool][: i % 3]} for i, row in enumerate(chats(60))])
    prepare(config)
    assert manifest_of(tmp_path)["tools_unread"] == 40
    assert "conversations with tools, which the target's chat template does not write: 40" in capsys.readouterr().out


def test_folder_of_somebody_else_is_left_alone(config, tmp_path):
    theirs = tmp_path / "run" / "data" / "thesis.txt"
    theirs.parent.mkdir(parents=True)
    theirs.write_text("ten years of work")
    with pytest.raises(UserError, match=r"is no output of this stage: move it away"):
        prepare(config)
    assert theirs.read_text() == "ten years of work"


def test_a_killed_run_leaves_nothing_that_counts(config, tmp_path, monkeypatch):
    monkeypatch.setattr(artifacts, "write_json", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        prepare(config)
    assert not (tmp_path / "run" / "data").exists()
    monkeypatch.undo()
    prepare(config)
    assert manifest_of(tmp_path)["splits"]["train"]["conversations"] > 30


def test_refused_cut_and_open_conversations_are_counted_and_named(config, tmp_path, capsys):
    rows = chats(40)
    rows[0]["messages"].pop()
    rows[1]["messages"][0]["role"] = "wizard"
    rows[2]["messages"][1]["content"] += " fox" * 80
    rows[3]["finish_reason"] = "length"
    write(tmp_path / "chats.jsonl", rows)
    prepare(config)
    manifest = manifest_of(tmp_path)
    assert manifest["refused"] == [
        {"id": "c0", "source": "a", "where": "chats.jsonl:1", "reason": "no assistant turn"},
        {"id": "c1", "source": "b", "where": "chats.jsonl:2", "reason": "unknown role 'wizard'"},
    ]
    assert (manifest["cut"], manifest["no_end_of_turn"]) == (1, 1)
    assert sum(split["conversations"] for split in manifest["splits"].values()) == 38
    out = capsys.readouterr().out
    assert "REFUSED: 2" in out
    assert "c1 (chats.jsonl:2): unknown role 'wizard'" in out


def test_conversations_that_the_template_rewrites_are_learnt_turn_by_turn(config, tmp_path, capsys):
    own = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    (tmp_path / "own.jinja").write_text(own)
    config.target.chat_template = str(tmp_path / "own.jinja")
    rows = [{**row, "messages": row["messages"] + chats(99)[90 + i % 9]["messages"]} for i, row in enumerate(chats(40))]
    rows[7]["messages"][-1]["content"] = " "
    write(tmp_path / "chats.jsonl", rows)
    prepare(config)
    manifest = manifest_of(tmp_path)
    (entry,) = manifest["refused"]
    assert entry == {"id": "c7~turn2", "source": "b", "where": "chats.jsonl:8", "reason": "an empty answer"}
    assert (manifest["split_turns"], manifest["inserted"]) == (40, 79)
    splits = load_from_disk(str(tmp_path / "run" / "data" / "dataset"))
    held = {row["id"] for row in rows if is_heldout(row["messages"], 0.2)}
    assert 0 < len(held) < 40
    both = {f"{i}~turn{n}" for i in held for n in (1, 2)} - {"c7~turn2"}
    assert set(splits["heldout"]["id"]) == both  # all turns of a conversation on one side
    assert len(splits["train"]) + len(splits["heldout"]) == 79
    assert "one sample per answer, since the template rewrites history: 40 conversations" in capsys.readouterr().out


def test_nothing_left_and_empty_splits(config, tmp_path):
    write(tmp_path / "chats.jsonl", [{"prompt": "a"}, {"prompt": "b"}])
    with pytest.raises(UserError, match=r"no conversation is left to learn from \(2 × no assistant turn\)"):
        prepare(config)
    write(tmp_path / "chats.jsonl", chats(60))
    config.data.heldout = 1e-9
    with pytest.raises(UserError, match="holds out none of 60 conversations"):
        prepare(config)
    config.data.heldout = 1 - 1e-9
    with pytest.raises(UserError, match="holds out every prompt"):
        prepare(config)
    config.data.heldout = 1.0
    with pytest.raises(UserError, match=r"is not in \[0, 1\)"):
        prepare(config)
    assert not (tmp_path / "run").exists()


def test_a_vocabulary_that_cannot_be_made_leaves_nothing_behind(config, tmp_path):
    config.data.draft_vocab_coverage = 0.9
    with pytest.raises(UserError, match="exclude each other"):
        prepare(config)
    assert not (tmp_path / "run").exists()


def test_heldout_zero_gives_an_empty_split(config, tmp_path):
    config.data.heldout = 0.0
    prepare(config)
    splits = load_from_disk(str(tmp_path / "run" / "data" / "dataset"))
    assert (len(splits["train"]), len(splits["heldout"])) == (60, 0)
    assert manifest_of(tmp_path)["draft_vocab"]["coverage"]["heldout"] is None


def test_regenerated_answers_flow_into_the_data_set(config, tmp_path):
    write(tmp_path / "prompts.jsonl", [{"id": f"p{i}", "turns": [f"question {i}"] * (1 + i % 2)} for i in range(24)])
    config.regenerate, config.data.prompts = True, str(tmp_path / "prompts.jsonl")
    config.data.generate = GenerateConfig(max_new_tokens=4, batch_size=8, samples=2, temperature=0.9)
    prepare(config)
    manifest = manifest_of(tmp_path)
    assert sum(split["conversations"] for split in manifest["splits"].values()) + len(manifest["refused"]) == 48
    assert manifest["no_end_of_turn"] > 0  # a random model does not stop by itself in four tokens
    splits = load_from_disk(str(tmp_path / "run" / "data" / "dataset"))
    sides = [{i.split("#")[0] for i in splits[name]["id"]} for name in ("train", "heldout")]
    assert sides[0].isdisjoint(sides[1])  # samples of one prompt stay together


def test_targets_that_cannot_be_used(config, tmp_path, tiny_target):
    config.target.path = str(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"target\.path=.*nowhere cannot be loaded"):
        prepare(config)
    copy = tmp_path / "copy"
    shutil.copytree(tiny_target, copy)
    (copy / "chat_template.jinja").unlink()
    config.target.path = str(copy)
    with pytest.raises(UserError, match=r"has no chat template: give one as target\.chat_template=FILE"):
        prepare(config)
    config.target.chat_template = str(tmp_path / "none.jinja")
    with pytest.raises(UserError, match=r"none\.jinja is missing"):
        prepare(config)
    (tmp_path / "own.jinja").write_text((tiny_target / "chat_template.jinja").read_text())
    config.target.chat_template = str(tmp_path / "own.jinja")
    prepare(config)
    settings = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**settings, "vocab_size": 100}))
    with pytest.raises(UserError, match="its model only 100 rows"):
        prepare(config)
