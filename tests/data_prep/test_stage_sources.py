"""The stage on several sources: counted and held out each by itself, and prompts that they share."""

import json
from collections import Counter

import pytest
from datasets import load_from_disk

from data_prep import collect as collect_module
from data_prep.split import is_heldout
from data_prep.stage import prepare
from eagle31_train.schema import Config, DataConfig, GenerateConfig, TargetConfig, UserError

SHARE = 0.2


def chat(question, answer="the fox"):
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def questions(name, count, held=None):
    """Questions of a source; with `held` only such as are held out, or none of them."""
    found = []
    for i in range(10_000):
        text = f"{name} question {i}"
        if held is None or is_heldout(chat(text), SHARE) == held:
            found.append(text)
        if len(found) == count:
            return found
    raise AssertionError


@pytest.fixture
def config(tmp_path, tiny_target):
    en = [{"id": i, "messages": chat(text)} for i, text in enumerate(questions("en", 60), 1)]
    zh = [{"id": i, "messages": chat(text, "hello")} for i, text in enumerate(questions("zh", 50), 1)]
    zh[4]["messages"][1]["content"] = "fox " * 300  # cut
    zh[5]["messages"].pop()  # no answer
    zh[6]["messages"][0]["role"] = "wizard"
    zh[7]["finish_reason"] = "length"
    sources = {
        "en": {"path": write(tmp_path / "en.jsonl", en), "weight": 1},
        "zh": {"path": write(tmp_path / "zh.jsonl", zh), "weight": 1},
    }
    data = DataConfig(sources=sources, rows=98, heldout=SHARE, max_length=200, draft_vocab_size=40)
    target = TargetConfig(path=str(tiny_target), dtype="float32", device="cpu")
    return Config(name="t", run_dir=str(tmp_path / "run"), target=target, data=data)


def manifest_of(tmp_path):
    return json.loads((tmp_path / "run" / "data" / "manifest.json").read_text())


def rows_of(tmp_path):
    splits = load_from_disk(str(tmp_path / "run" / "data" / "dataset"))
    return {name: split.to_list() for name, split in splits.items()}


def recount(rows):
    found = {}
    for row in rows:
        count = found.setdefault(row["source"], Counter())
        count.update(conversations=1, tokens=len(row["input_ids"]), assistant_tokens=sum(row["loss_mask"]))
    return found


def test_every_source_is_counted_and_held_out_by_itself(config, tmp_path, capsys):
    prepare(config)
    manifest, rows = manifest_of(tmp_path), rows_of(tmp_path)
    assert manifest["sources"] == {
        "en": {"weight": 1.0, "read": 60, "taken": 49, "refused": 0, "cut": 0, "no_end_of_turn": 0},
        # All but the wizard's row are taken; the one without an answer is found out later.
        "zh": {"weight": 1.0, "read": 50, "taken": 49, "refused": 2, "cut": 1, "no_end_of_turn": 1},
    }
    assert [(e["id"], e["source"], e["reason"]) for e in manifest["refused"]] == [
        ("zh/6", "zh", "no assistant turn"), ("zh/7", "zh", "unknown role 'wizard'"),
    ]  # fmt: skip
    texts = {f"{name}/{i}": text for name in ("en", "zh") for i, text in enumerate(questions(name, 60), 1)}
    for split, held in (("train", False), ("heldout", True)):
        assert manifest["splits"][split]["by_source"] == recount(rows[split])
        assert {row["source"] for row in rows[split]} == {"en", "zh"}
        assert all(is_heldout(chat(texts[row["id"]]), SHARE) == held for row in rows[split])
    assert sum(map(len, rows.values())) == 97
    assert manifest["not_held_out"] == []
    coverage = manifest["draft_vocab"]["coverage_by_source"]
    assert set(coverage) == {"en", "zh"}
    assert min(coverage.values()) <= manifest["draft_vocab"]["coverage"]["train"] <= max(coverage.values())
    line = next(line for line in capsys.readouterr().out.splitlines() if line.split()[:1] == ["zh"])
    assert line.split()[1:5] == ["50", "49", "2", "1"]


def test_counts_by_source_that_are_mixed_up_are_caught(config, tmp_path, monkeypatch, capsys):
    right = collect_module.refusal
    monkeypatch.setattr(collect_module, "refusal", lambda row, *rest: {**right(row, *rest), "source": "en"})
    with pytest.raises(AssertionError):
        test_every_source_is_counted_and_held_out_by_itself(config, tmp_path, capsys)


def test_training_and_held_out_rows_alternate(config, tmp_path):
    prepare(config)
    order = [row["source"] for row in rows_of(tmp_path)["train"]]
    assert max(len(run) for run in "".join("e" if s == "en" else "z" for s in order).split("z")) <= 5
    before = rows_of(tmp_path)["train"]
    config.data.shuffle, config.overwrite = 3, True
    prepare(config)
    after = rows_of(tmp_path)["train"]
    assert after != before
    assert sorted(after, key=str) == sorted(before, key=str)


def test_what_the_mixture_depends_on_is_of_the_fingerprint(config):
    prepare(config)
    config.seed = 1
    with pytest.raises(UserError, match="mixed_by: 0 there, 1 here"):
        prepare(config)
    config.seed, config.data.rows = 0, 40
    with pytest.raises(UserError, match="rows: 98 there, 40 here"):
        prepare(config)
    config.data.rows, config.data.sources["zh"]["weight"] = 98, 0.5
    with pytest.raises(UserError, match=r"sources\.zh\.weight: 1 there, 1/2 here"):
        prepare(config)


def test_a_source_without_a_held_out_prompt_is_named(config, tmp_path, capsys):
    rows = [{"messages": chat(text)} for text in questions("few", 20, held=False)]
    config.data.sources["few"] = {"path": write(tmp_path / "few.jsonl", rows), "weight": 0.4}
    config.data.rows = 96
    prepare(config)
    assert manifest_of(tmp_path)["not_held_out"] == ["few"]
    assert "NOT HELD OUT: no prompt of few, which evaluation will not measure" in capsys.readouterr().out
    config.overwrite, config.data.heldout = True, 0.0
    prepare(config)
    assert manifest_of(tmp_path)["not_held_out"] == [], "nothing is to be held out"


@pytest.mark.parametrize("held", [False, True])
def test_a_prompt_of_two_sources_falls_on_one_side_and_is_named(config, tmp_path, capsys, held):
    (text,) = questions("shared", 1, held)
    for name, answer in (("a", "hello"), ("b", "quick")):
        rows = [{"id": "x", "messages": chat(text, answer)}, {"id": "y", "messages": chat(text + " too", answer + "!")}]
        if name == "b":
            rows.pop()
            rows.append({"id": "z", "messages": chat(f" {text}\n", "brown")})
        config.data.sources[name] = {"path": write(tmp_path / f"{name}.jsonl", rows), "weight": 2 / 49}
    config.data.rows = 102
    prepare(config)
    manifest, found = manifest_of(tmp_path), rows_of(tmp_path)
    side = {row["id"] for row in found["heldout" if held else "train"]}
    assert {"a/x", "b/x", "b/z"} <= side
    assert manifest["shared_prompts"] == {"rows": 2, "named": [["a/x", "b/x"], ["a/x", "b/z"]]}
    assert "prompt another source has too, on the same side of the split: 2 (b/x asks what a/x does)" in (
        capsys.readouterr().out
    )


def test_a_source_of_which_nothing_is_left_is_a_mistake(config, tmp_path):
    rows = [{"prompt": f"question {i}"} for i in range(5)]
    config.data.sources["prompts"] = {"path": write(tmp_path / "p.jsonl", rows), "weight": 0.05}
    config.data.rows = None
    with pytest.raises(UserError, match=r"data\.sources\.prompts: no conversation of it .* \(2 × no assistant turn\)"):
        prepare(config)
    assert not (tmp_path / "run" / "data").exists()


def test_prompts_are_mixed_before_they_are_answered(config, tmp_path, capsys):
    """With two samples of each; ids and sources go on into the data set."""
    config.regenerate, config.data.rows = True, 24
    config.data.generate = GenerateConfig(max_new_tokens=4, batch_size=12, samples=2, temperature=0.9)
    prepare(config)
    asked = {name: {f"{name}/{i}" for i in range(1, 61)} for name in ("en", "zh")}
    lines = (tmp_path / "run" / "conversations.jsonl").read_text().splitlines()
    answers = [json.loads(line) for line in lines]
    assert Counter(row["source"] for row in answers) == {"en": 24, "zh": 24}
    assert all(row["id"] in asked[row["source"]] for row in answers)
    manifest = manifest_of(tmp_path)
    told = {name: (found["read"], found["taken"]) for name, found in manifest["sources"].items()}
    assert told == {"en": (60, 12), "zh": (50, 12)}, "of prompts, not of answers"
    kept = [row["id"].split("#")[0] for rows in rows_of(tmp_path).values() for row in rows]
    assert set(kept) <= {row["id"] for row in answers}
    config.data.sources["zh"]["weight"] = 2
    with pytest.raises(UserError, match=r"prompts\.sources\.zh\.weight: 1 there, 2 here"):
        prepare(config)


def test_rows_that_name_thousands_of_sources_are_counted_together(config, tmp_path, capsys):
    """Each source's count takes as many numbers as the target has tokens."""
    rows = [{"id": i, "source": f"https://{i}", "messages": chat(text)} for i, text in enumerate(questions("x", 100))]
    config.data.sources, config.data.rows = {}, None
    config.data.conversations = write(tmp_path / "x.jsonl", rows)
    prepare(config)
    manifest = manifest_of(tmp_path)
    assert manifest["draft_vocab"]["coverage_by_source"] == {}
    assert 0 < manifest["draft_vocab"]["coverage"]["train"] <= 1
    assert len(manifest["sources"]) == 100
    printed = capsys.readouterr().out
    assert "… and 80 more in the manifest" in printed
    assert len(printed.splitlines()) < 40
