"""The whole stage on a small target: what it writes, when it does nothing, and what it refuses."""

import html
import json
import re
import shutil
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from datasets import Dataset, load_from_disk
from families import FAMILIES, load, write_rows
from made import message_of
from planting import interrupt

from data_prep import preview, stage
from data_prep.dataset import Split, collect, place
from data_prep.sample import BEYOND, Sample
from data_prep.stage import prepare
from eagle31_train.common import artifacts
from eagle31_train.common.errors import UserError
from eagle31_train.config import Config, DataConfig, GenerateConfig, TargetConfig
from eagle31_train.model import vocab
from eagle31_train.rows.formats import Row
from eagle31_train.targets.chat import ChatTemplate
from eagle31_train.targets.pretrained import vocabulary_fingerprint

WORDS = ["hello", "the fox", "how are you", "quick", "lazy dog", "brown"]
SHARE = 0.2


def chat(question, answer="the fox", system=None):
    head = [{"role": "system", "content": system}] if system else []
    return [*head, {"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def chats(count):
    return [
        {"id": f"c{i}", "source": "ab"[i % 2], "messages": chat(f"question {i}", f"{WORDS[i % len(WORDS)]} {i}")}
        for i in range(count)
    ]


@pytest.fixture
def config(tmp_path, tiny_target):
    chats_file = write_rows(tmp_path / "chats.jsonl", chats(60))
    data = DataConfig(conversations=chats_file, heldout=SHARE, max_length=64, draft_vocab_size=300)
    target = TargetConfig(path=str(tiny_target), dtype="float32", device="cpu")
    return Config(name="t", run_dir=str(tmp_path / "run"), target=target, data=data)


def manifest_of(tmp_path, run="run"):
    return json.loads((tmp_path / run / "data" / "manifest.json").read_text())


def rows_of(tmp_path):
    splits = load_from_disk(str(tmp_path / "run" / "data" / "dataset"))
    return {name: split.to_list() for name, split in splits.items()}


def test_a_target_that_changed_since_is_recorded_anew(config, tmp_path, tiny_target, capsys):
    """Training derives the drafter of it, and the samples stay."""
    config.target.path = str(shutil.copytree(tiny_target, tmp_path / "target"))
    prepare(config)
    before, file = manifest_of(tmp_path), tmp_path / "target" / "config.json"
    raw = json.loads(file.read_text())
    file.write_text(json.dumps({**raw, "max_position_embeddings": 123}))
    capsys.readouterr()
    prepare(config)
    assert "the target has changed (max_position_embeddings:" in capsys.readouterr().out
    now = manifest_of(tmp_path)
    assert now["target"]["max_position_embeddings"] == 123
    assert {**now, "target": None} == {**before, "target": None}
    prepare(config)
    assert "anew" not in capsys.readouterr().out


def test_what_is_written(config, tmp_path):
    config.data.draft_vocab_size = 12  # few enough that some of 26 tokens that occur are missing
    prepare(config)
    manifest, rows = manifest_of(tmp_path), rows_of(tmp_path)
    folder = tmp_path / "run" / "data"
    draft, template = vocab.read(folder / "vocab.safetensors"), ChatTemplate.load(config.target)
    assert (len(draft), draft.target_size) == (12, 448)  # the model's rows, not the tokenizer's tokens
    held = {row["id"] for row in chats(60) if place(row["messages"]) < SHARE}
    assert [{row["id"] for row in rows[name]} for name in ("train", "heldout")] == [
        {f"c{i}" for i in range(60)} - held, held,
    ]  # fmt: skip
    assert set(rows["train"][0]) == {"id", "source", "input_ids", "loss_mask"}
    answers = {row["id"]: row["messages"][-1]["content"] for row in chats(60)}
    for name, split in rows.items():
        supervised = {row["id"]: np.array(row["input_ids"])[np.array(row["loss_mask"])] for row in split}
        for i, ids in supervised.items():
            assert template.decode(ids.tolist()) == answers[i] + "<|im_end|>"
        ids = np.concatenate(list(supervised.values()))
        assert manifest["draft_vocab"]["coverage"][name] == pytest.approx(draft.t2d[ids].mean())
        if name == "train":  # the draft vocabulary holds what shapes turns, and the most frequent of training answers
            assert template.kept_ids() == [1, 2]  # of the special tokens 0 to 2
            chosen = vocab.choose(np.bincount(ids, minlength=448), [1, 2], 12)
            assert draft.target_ids.tolist() == chosen.target_ids.tolist()
    assert (manifest["refused"], manifest["cut"], manifest["no_end_of_turn"]) == ([], 0, 0)
    assert manifest["vocabulary"] == vocabulary_fingerprint(template.tokenizer)
    assert artifacts.first_damaged(folder, manifest["files"]) is None
    assert {"vocab.safetensors", "dataset/dataset_dict.json"} < set(manifest["files"])
    assert not (tmp_path / "run" / ".data.tmp").exists()


def test_prompts_asked_twice_and_answers_without_end_are_told(config, tmp_path, capsys):
    rows = [{**row, "id": f"again{i}"} for i, row in enumerate(chats(60)[:2])]
    rows += [{**rows[0], "sample": 1}, {**chats(1)[0], "id": "apart", "source": "c"}]
    rows.append({"id": "longer", "source": "a", "messages": [*chat("question 0"), *chat("and then?")]})
    for cut, told in [(20, False), (50, True)]:
        some = [{**row, "finish_reason": "length"} if i < cut else row for i, row in enumerate([*chats(60), *rows])]
        write_rows(tmp_path / "chats.jsonl", some)
        config.run_dir = str(tmp_path / f"run{cut}")
        prepare(config)
        sources = manifest_of(tmp_path, f"run{cut}")["sources"]
        assert [sources[name]["repeated"] for name in "abc"] == [1, 1, 1]
        out = capsys.readouterr().out
        assert "prompts that occur twice, both times on the same side of the split: 3\n" in out
        assert ("MOST ANSWERS HAVE NO END, so a drafter learns little of how they end: provide whole" in out) == told


def test_the_split_depends_on_the_prompt_alone():
    # Written down once: a change here would move prompts between the splits of existing runs.
    assert place(chat("why do cats knead blankets?")) * 2**32 == 2_631_719_248
    more, hello = {"role": "user", "content": "and?"}, {"role": "assistant", "content": "hello"}
    for begin in ([], [hello]):
        same = [chat("why?"), chat("why?", "no"), [*chat("why?"), more], chat("  why?\n"), chat("why?")[:1]]
        other = [chat("who?"), chat("why?", system="be brief"), [more]]
        assert len({place([*begin, *messages]) for messages in same}) == 1
        assert len({place([*begin, *messages]) for messages in [same[0], *other, []]}) == 5
    prompts = [chat(f"question {i}") for i in range(4000)]
    none, small, large = ({i for i, p in enumerate(prompts) if place(p) < share} for share in (0.0, 0.05, 0.2))
    assert 150 < len(small) < 250 < 720 < len(large) < 880
    assert none < small < large


def test_same_input_same_bytes_and_nothing_done_twice(config, tmp_path, capsys):
    config.data.draft_vocab_size = 32000  # of 448 tokens: all, as without it
    prepare(config)
    config.data.draft_vocab_size = None
    before = (tmp_path / "run" / "data" / "manifest.json").stat().st_mtime_ns  # reading it may change other times
    prepare(config)
    assert "up to date" in capsys.readouterr().out
    assert (tmp_path / "run" / "data" / "manifest.json").stat().st_mtime_ns == before
    config.run_dir = str(tmp_path / "again")
    prepare(config)
    one, other = manifest_of(tmp_path), manifest_of(tmp_path, "again")
    assert {**one, "seconds": 0} == {**other, "seconds": 0}  # checksums of the Arrow files included
    assert one["draft_vocab"]["size"] == 448
    config.data.format = "messages"  # of the same file it may make other conversations
    assert "data.format: auto there, messages here" in message_of(prepare, config)


def test_any_seed_shuffles_the_training_conversations_alone(config, tmp_path):
    config.overwrite, orders, heldout = True, [], []
    for config.data.shuffle in (None, 0, 1):
        prepare(config)
        rows = rows_of(tmp_path)
        orders.append([row["id"] for row in rows["train"]])
        heldout.append(rows["heldout"])
    assert orders[0] == [row["id"] for row in chats(60) if row["id"] in orders[0]], "as read"
    assert len(set(map(tuple, orders))) == 3
    assert sorted(orders[0]) == sorted(orders[1]) == sorted(orders[2])
    assert heldout[0] == heldout[1] == heldout[2]


def test_a_kill_leaves_nothing_that_counts_and_is_gone_on_from(config, tmp_path):
    """The same command again: after a kill of the first run, and of runs that replace damaged or other data."""
    interrupt(artifacts, "write_json", prepare, config)
    folder = tmp_path / "run" / "data"
    assert not folder.exists()
    prepare(config)
    (folder / "vocab.safetensors").write_bytes(b"spoilt")
    for length in (64, 32):
        if length == 32:
            config.data.max_length = length
            with pytest.raises(UserError, match=r"max_length: 64 there, 32 here.*overwrite=true"):
                prepare(config)
            config.overwrite = True
        interrupt(stage, "collect", prepare, config)
        prepare(config)
        manifest = manifest_of(tmp_path)
        assert manifest["inputs"]["max_length"] == length
        assert artifacts.first_damaged(folder, manifest["files"]) is None


def test_what_cannot_be_met_is_refused_before_the_work_starts(config, tmp_path, monkeypatch):
    monkeypatch.setattr(stage, "regenerate", lambda *_: pytest.fail("answered first"))
    config.regenerate, config.data.prompts, config.data.draft_vocab_size = True, "nowhere.jsonl", 1
    assert "no room for the 2 special tokens" in message_of(prepare, config)
    config.target.chat_template = str(tmp_path / "own.jinja")
    (tmp_path / "own.jinja").write_text("{% for m in messages %}{{ m.role }}:{{ m.content }}<|im_start|>{% endfor %}")
    assert "ends an answer with <|im_start|>, at which the target does not stop" in message_of(prepare, config)
    monkeypatch.setenv("WORLD_SIZE", "2")  # each process would answer every prompt, and write over the others
    assert "WORLD_SIZE is set: start it without a launcher" in message_of(prepare, config)
    monkeypatch.undo()
    config.regenerate, config.data.draft_vocab_size, config.target.chat_template = False, 300, None
    theirs = tmp_path / "run" / "data" / "thesis.txt"
    theirs.parent.mkdir(parents=True)
    theirs.write_text("ten years of work")
    monkeypatch.setattr(stage, "regenerate", lambda *_: pytest.fail("answered first"))
    asked = DataConfig(prompts=write_rows(tmp_path / "asked.jsonl", [{"prompt": "a"}]), heldout=0.0)
    for given in (config, replace(config, regenerate=True, data=asked)):
        assert "is not an output of this stage: move it" in message_of(prepare, given)
    assert theirs.read_text() == "ten years of work"
    theirs.unlink()
    prepare(config)  # and data of conversations are not those of answers
    assert "was made from other inputs" in message_of(prepare, replace(config, regenerate=True, data=asked))


QWEN = {"temperature": 0.6, "top_p": 0.95, "top_k": 20}


@pytest.mark.parametrize(
    ("named", "generate", "told"),
    [
        (QWEN, {"temperature": 0.6, "top_p": 0.9}, ["top_p 0.95, top_k 20", "top_p=0.9, data.generate.top_k=null"]),
        (QWEN, QWEN, []),
        (QWEN, {}, []),  # greedy
        ({"temperature": 0.6, "top_p": 1.0, "top_k": -1}, {"temperature": 0.6}, []),
        ({}, QWEN, []),
    ],
)
def test_a_target_that_is_served_with_another_sampling_is_told(config, tmp_path, capsys, named, generate, told):
    config.target.path = str(shutil.copytree(config.target.path, tmp_path / "target"))
    (tmp_path / "target" / "generation_config.json").write_text(json.dumps({"eos_token_id": [2], **named}))
    config.regenerate, config.data.generate = True, GenerateConfig(**generate)
    interrupt(stage, "_open", prepare, config)
    lines = [line for line in capsys.readouterr().out.splitlines() if "vLLM serves" in line]
    texts = [f"with {told[0]} (its generation_config.json); these answers use data.generate.{told[1]}"] if told else []
    assert lines == [f"data: vLLM serves target {text}" for text in texts]


def test_a_switch_of_the_template_as_text_is_refused(config, tmp_path):
    template = tmp_path / "own.jinja"
    template.write_text("{% if thinking %}hm{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}")
    config.target = replace(config.target, chat_template=str(template), template_args={"thinking": "false"})
    assert "target.template_args.thinking=false is text" in message_of(prepare, config)


def test_a_file_in_the_wrong_place_says_what_to_set(config, tmp_path):
    asked = write_rows(tmp_path / "asked.jsonl", [{"prompt": f"question {i}"} for i in range(3)])
    given = config.data.conversations
    hub = "is only for hub data sets, not data"
    for options, words in [
        ({"prompts": asked}, f"data.prompts={asked} needs answers, but regenerate=false: set regenerate=null"),
        ({"conversations": asked}, f"3 × no assistant turn; set data.prompts={asked} instead of data.conv"),
        ({"sources": {"en": {"path": given}, "zh": {"path": asked}}}, "zh: none of its conversations is left"),
        ({"conversations": given}, "regenerate=true answers data.prompts, not data.conversations="),
        ({}, "no conversations: set data.prompts (self: the target writes them), data.conversations or data.sources"),
        ({"conversations": given, "heldout": 0.9999}, "data.heldout=0.9999 holds out every prompt"),
        ({"conversations": given, "heldout": 1e-9}, "data.heldout=1e-09 holds out none of 60 prompts"),
        ({"conversations": given, "stream_rows": 3}, f"stream_rows=3 {hub}.conv"),
        ({"conversations": given, "subset": "main"}, f"subset=main {hub}.conv"),
        ({"conversations": given, "split": "test"}, f"split=test {hub}.conv"),
        ({"sources": {"en": {"path": given, "revision": "v1"}}}, f"revision=v1 {hub}.s"),
        ({"sources": {"en": {"path": given, "stream_rows": 3}}}, f"{hub}.sources.en="),
        ({"sources": {"en": {"path": given, "stream_rows": 0}}}, "stream_rows: Input should be greater than"),
    ]:
        config.regenerate = words.startswith("regenerate=true")
        config.data = DataConfig(**{"heldout": SHARE, **options})
        assert words in message_of(prepare, config)
    assert not (tmp_path / "run" / "data").exists()


def questions(name, count):
    return [f"{name} question {i}" for i in range(count)]


def test_every_source_is_counted_and_held_out_by_itself(config, tmp_path, capsys):
    en = [{"id": i, "messages": chat(text)} for i, text in enumerate(questions("en", 60), 1)]
    zh = [{"id": i, "messages": chat(text, "hello")} for i, text in enumerate(questions("zh", 50), 1)]
    zh[4]["messages"][1]["content"] = "fox " * 300  # cut
    zh[5]["messages"].pop()  # no answer
    zh[6]["messages"][0]["role"] = "wizard"
    zh[7]["finish_reason"] = "length"
    zh[8]["tools"] = [{"type": "function", "function": {"name": "find", "parameters": {}}}]
    call = {"type": "function", "function": {"name": "find"}}
    zh[9]["messages"][1] = {"role": "assistant", "content": "a fox", "tool_calls": [call]}
    sources = {
        "en": {"path": write_rows(tmp_path / "en.jsonl", en), "weight": 1},
        "zh": {"path": write_rows(tmp_path / "zh.jsonl", zh), "weight": 1},
    }
    config.data = DataConfig(sources=sources, rows=98, heldout=SHARE, max_length=200, draft_vocab_size=40)
    prepare(config)
    manifest, rows = manifest_of(tmp_path), rows_of(tmp_path)
    assert manifest["sources"] == {
        "en": {"weight": 1.0, "read": 60, "taken": 49, "refused": 0, "repeated": 0, "cut": 0, "no_end_of_turn": 0},
        # All but the wizard's row are taken; those without an answer, or with a call, are found out later.
        "zh": {"weight": 1.0, "read": 50, "taken": 49, "refused": 3, "repeated": 0, "cut": 1, "no_end_of_turn": 1},
    }
    reasons = {"6": "no assistant turn", "10": f"the chat template of {config.target.name} writes no tool calls"}
    reasons["7"] = "unknown role 'wizard'"
    assert manifest["refused"] == [
        {"id": f"zh/{i}", "source": "zh", "where": f"zh.jsonl:{i}", "reason": reason} for i, reason in reasons.items()
    ]
    assert (manifest["cut"], manifest["no_end_of_turn"], manifest["tools_unread"]) == (1, 1, 1)
    assert manifest["from_words"] == 96
    texts = {f"{name}/{i}": text for name in ("en", "zh") for i, text in enumerate(questions(name, 60), 1)}
    for split, held in (("train", False), ("heldout", True)):
        counts = {name: Counter() for name in ("en", "zh")}
        for row in rows[split]:
            tokens = {"tokens": len(row["input_ids"]), "assistant_tokens": sum(row["loss_mask"])}
            counts[row["source"]].update(conversations=1, **tokens)
        assert manifest["splits"][split] == {**sum(counts.values(), Counter()), "by_source": counts}
        assert all((place(chat(texts[row["id"]])) < SHARE) == held for row in rows[split])
    assert sum(map(len, rows.values())) == 96
    coverage = manifest["draft_vocab"]["coverage_by_source"]
    assert set(coverage) == {"en", "zh"}
    assert min(coverage.values()) <= manifest["draft_vocab"]["coverage"]["train"] <= max(coverage.values())
    out = capsys.readouterr().out
    assert "REFUSED: 3" in out
    assert "zh/7 (zh.jsonl:7): unknown role 'wizard'" in out
    config.seed = 1
    assert "mixed_by: 0 there, 1 here" in message_of(prepare, config)
    config.seed, config.data.sources["zh"]["weight"] = 0, 0.5
    assert "sources.zh.weight: 1 there, 1/2 here" in message_of(prepare, config)
    config.data.sources["zh"]["weight"], config.data.rows = 1, 96
    assert "rows: 98 there, 96 here" in message_of(prepare, config)


def test_other_masks_ids_and_sources_are_other_data():
    ids = np.arange(4, dtype=np.int32)
    one, other = (np.array(mask) for mask in ([False, True, True, True], [False, False, True, True]))
    rows = [("a", "s", one), ("a", "s", other), ("b", "s", one), ("a", "t", one)]
    made = [Split([(name, source, Sample(ids, mask, False, 0))]).dataset("train") for name, source, mask in rows]
    assert len({data._fingerprint for data in made}) == len(rows)


def test_samples_of_one_conversation_have_ids_of_their_own():
    row = Row("a", "s", "f:1", [*chat("hi"), *chat("and?", "lazy dog")])
    found = collect(iter([row]), load(FAMILIES["qwen3"], {}), 1000, 0.0)
    assert [identity for identity, _, _ in found.splits["train"].rows] == ["a~turn1", "a~turn2"]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_rows_of_tokens_are_the_samples_that_they_are(config, tmp_path, name):
    """As speculators writes them: the words beside them are for people."""
    end = ChatTemplate.load(config.target).end_ids[0]
    rows = {"a": ([5, 6, end], [0, 1, 1]), "open": ([5, 6, 9, 8], [0, 0, 1, 1])}
    rows["fits"], rows["long"] = ([5] * 5 + [end], [0] * 5 + [1]), ([*range(5, 11), 9, end], [0, 1] * 4)
    rows |= {"beyond": ([5] * 7, [0] * 6 + [1]), "no row": ([5, 448], [0, 1])}
    given = [{"id": i, "input_ids": ids, "loss_mask": m, "conversations": chat("q")} for i, (ids, m) in rows.items()]
    Dataset.from_list(given).to_parquet(tmp_path / "rows.parquet")
    write_rows(tmp_path / "rows.jsonl", given)
    config.data = DataConfig(conversations=str(tmp_path / name), heldout=0.0, max_length=6)
    prepare(config)
    manifest = manifest_of(tmp_path)
    found = {row["id"]: (row["input_ids"], row["loss_mask"]) for row in rows_of(tmp_path)["train"]}
    assert found == {**{name: rows[name] for name in ("a", "open", "fits")}, "long": ([*range(5, 11)], [0, 1] * 3)}
    assert [manifest[count] for count in ("cut", "no_end_of_turn", "from_words", "given_ids")] == [1, 4, 0, 4]
    reasons = {entry["id"]: entry["reason"] for entry in manifest["refused"]}
    assert reasons == {"beyond": BEYOND, "no row": "token 448, which has no row in the target's embedding"}
    config.regenerate, config.data.prompts, config.run_dir = True, config.data.conversations, str(tmp_path / "answered")
    assert "input_ids cannot be answered: set data.format to" in message_of(prepare, config)


def test_rows_of_tokens_are_held_out_by_the_ids_before_the_first_that_is_learnt(chatml):
    def split(ids, mask):
        found = collect(iter([Row("a", "s", "f:1", tokens=(ids, mask))]), chatml, 100, 0.5)
        return [name for name, one in found.splits.items() if one.rows], found.places

    places = [split([prompt, 6, answer], [False, False, True]) for prompt in range(20) for answer in (1, 2)]
    assert places[::2] == places[1::2], "the answer has no say"
    assert {name for (name,), _ in places} == {"train", "heldout"}
    turns = [Row(str(n), "s", "f:1", tokens=([n, 6], [False, True]), conversation="c") for n in range(20)]
    assert len(collect(iter(turns), chatml, 100, 0.5).places) == 1, "of one conversation on one side"
    rows = [Row(name, "s", "f:1", tokens=([5, 6], [False, True])) for name in "ab"]
    assert collect(iter(rows), chatml, 100, 0.0).counts["s"]["repeated"] == 1
    more = [Row(str(n), "s", "f:1", tokens=([5, 6, n, 7], [False, True] * 2)) for n in (8, 9)]
    assert collect(iter(more), chatml, 100, 0.0).counts["s"]["repeated"] == 0, "asked on otherwise"


def test_a_conversation_beyond_the_targets_positions_is_refused_here_and_not_in_extraction(config, monkeypatch):
    monkeypatch.setattr(stage, "target_positions", lambda *_: 5)
    assert message_of(prepare, config).endswith(" tokens, but the target has only 5 positions: set data.max_length=5")
    config.extract.engine = "vllm"  # which may be told of more
    prepare(config)


def test_a_page_marks_what_is_learnt(chatml):
    learnt = collect(iter([Row("a<b", "s", "f:1", chat("hi & you"))]), chatml, 1000, 0.0).splits
    ((_, source, sample),) = learnt["train"].rows
    whole = Split([(f"a<b{n}", source, sample) for n in range(preview.EACH + 1)])
    text = preview.page({"train": whole}, chatml)
    assert text.count("<h2>train, s: a&lt;b") == preview.EACH
    body = text.partition('<pre class="sample">')[2].partition("</pre>")[0]
    assert html.unescape(re.sub("</?mark>", "", body)) == chatml.decode(sample.input_ids.tolist())
    marked = "".join(re.findall("<mark>(.*?)</mark>", body, re.DOTALL))
    assert html.unescape(marked) == chatml.decode(sample.input_ids[sample.loss_mask].tolist())
    assert "hi &amp; you" in body
