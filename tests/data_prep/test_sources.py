"""Formats, files, and the errors that name what is wrong and where."""

import json

import pytest

from data_prep.messages import detect, parse
from data_prep.sources import open_sources, read
from eagle31_train.schema import UserError

ASKED = [{"role": "user", "content": "hi"}]
ANSWERED = [*ASKED, {"role": "assistant", "content": "yes"}]

FORMATS = [
    ("messages", {"messages": ANSWERED}, ANSWERED),
    ("messages", {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}, ANSWERED[1]]}, ANSWERED),
    ("sharegpt", {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}]}, ANSWERED),
    ("sharegpt", {"conversations": ANSWERED}, ANSWERED),
    ("alpaca", {"instruction": "hi", "input": "", "output": "yes"}, ANSWERED),
    ("turns", {"turns": ["hi"]}, ASKED),
    ("prompt", {"prompt": "hi"}, ASKED),
]


HALF = "text with half of a surrogate pair, which is no Unicode"


def called(arguments):
    return {"type": "function", "function": {"name": "find", "arguments": arguments}}


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def rows_of(spec, form="auto"):
    return list(read(open_sources(str(spec), "train", "data.conversations"), form))


@pytest.mark.parametrize(("form", "value", "messages"), FORMATS)
@pytest.mark.parametrize("forced", [False, True])
def test_formats(form, value, messages, forced):
    assert detect(value) == form
    assert parse(value, form if forced else "auto", "f:1", "f-1").messages == messages


def test_alpaca_joins_instruction_and_input():
    assert parse({"instruction": "Sum:", "input": "1 2"}, "auto", "f:1", "f-1").messages[0]["content"] == "Sum:\n\n1 2"


def test_system_prompts_come_first():
    for value in ({"turns": ["hi"], "system": "be kind"}, {"instruction": "hi", "system": "be kind"}):
        assert [m["role"] for m in parse(value, "auto", "f:1", "f-1").messages] == ["system", "user"]
    chat = {"conversations": [{"from": "human", "value": "hi"}], "system": "be kind"}
    for value in (chat, {"messages": ASKED, "system": "be kind"}, {"prompt": ASKED, "system": "be kind"}):
        first, *rest = parse(value, "auto", "f:1", "f-1").messages
        assert first == {"role": "system", "content": "be kind"}
        assert rest == ASKED
        own = parse({**value, **{key: [first, *ASKED] for key in value if key != "system"}}, "auto", "f:1", "f-1")
        assert own.messages == [first, *ASKED]
    assert parse({"messages": ASKED, "system": {"x": 1}}, "auto", "f:1", "f-1").problem == "a system turn without text"


def test_ids_sources_samples_and_finish_reasons():
    row = parse({"messages": ANSWERED}, "auto", "chats.jsonl:7", "chats-7")
    assert (row.id, row.source, row.where) == ("chats-7", "chats", "chats.jsonl:7")
    assert "finish_reason" not in row.messages[-1]
    value = {"id": "a", "category": "code", "sample": 2, "finish_reason": "length", "messages": ANSWERED}
    row = parse(value, "auto", "f:1", "f-1")
    assert (row.id, row.source) == ("a#2", "code")
    assert row.messages[-1]["finish_reason"] == "length"
    own = [*ASKED, {**ANSWERED[1], "finish_reason": "stop"}]
    assert parse({**value, "messages": own}, "auto", "f:1", "f-1").messages[-1]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ([{"role": "wizard", "content": "hi"}], "unknown role 'wizard'"),
        ([{"role": "user", "content": None}], "a user turn without text"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "content is not only text"),
        (["hi"], "messages is no list of turns"),
        ([], "no messages"),
        ([{"role": ["user"], "content": "hi"}], "unknown role ['user']"),
        ([{"role": "user", "content": "hi \ud83d"}], HALF),
        ([{"role": "assistant", "content": "hi", "reasoning_content": "\ud83d"}], HALF),
        ([{"role": "assistant", "content": None, "tool_calls": [called({"a": "\ud83d"})]}], HALF),
        ([{"role": "assistant", "content": None, "tool_calls": [called(r'{"a": "\ud83d"}')]}], HALF),
    ],
)
def test_unusable_rows_say_why(messages, problem):
    assert parse({"messages": messages}, "auto", "f:1", "f-1").problem == problem


def test_half_a_surrogate_pair_is_refused_under_a_name_that_can_be_written():
    tool = {"type": "function", "function": {"name": "find", "description": "\ud83d"}}
    row = parse({"id": "x\ud83d", "source": "\ude00y", "messages": ASKED, "tools": [tool]}, "auto", "f:1", "f-1")
    assert (row.id, row.source, row.problem) == ("x?", "?y", HALF)
    whole = json.loads(r'{"prompt": "hi \ud83d\ude00"}')
    assert parse(whole, "auto", "f:1", "f-1").problem is None


def test_corrupt_line_is_named(tmp_path):
    path = write(tmp_path / "chats.jsonl", [{"prompt": "a"}, {"prompt": "b"}])
    path.write_text(path.read_text() + '\n{"prompt": "c"\n')
    with pytest.raises(UserError, match=r"chats\.jsonl:4 is not JSON"):
        rows_of(path)


def test_line_that_is_not_utf8_is_named(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"prompt": "a"}\n{"prompt": "\xff"}\n')
    with pytest.raises(UserError, match=r"a\.jsonl:2 is not JSON"):
        rows_of(tmp_path / "a.jsonl")


def test_unknown_format_is_named(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"prompt": "a"}, {"text": "b"}])
    with pytest.raises(UserError, match=r"a\.jsonl:2: no known format \(has text\)"):
        rows_of(path)
    with pytest.raises(UserError, match=r"a\.jsonl:1: data\.format=messages needs the key 'messages'"):
        rows_of(path, "messages")
    with pytest.raises(UserError, match=r"data\.format=csv is none of auto"):
        rows_of(path, "csv")


def test_duplicate_ids_are_named(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"id": "x", "prompt": "a"}, {"id": "x", "prompt": "b"}])
    with pytest.raises(UserError, match=r"a\.jsonl:2: id 'x' is also that of a\.jsonl:1"):
        rows_of(path)


def test_globs_are_read_in_order_and_json_lists_too(tmp_path):
    write(tmp_path / "b.jsonl", [{"prompt": "2"}])
    (tmp_path / "a.json").write_text(json.dumps([{"prompt": "0"}, {"prompt": "1"}]))
    rows = rows_of(tmp_path / "*.json*")
    assert [row.messages[0]["content"] for row in rows] == ["0", "1", "2"]
    assert [row.id for row in rows] == ["a-1", "a-2", "b-1"]


def test_damaged_json_list_is_named(tmp_path):
    (tmp_path / "a.json").write_text('[{"prompt": "0"},\n{"prompt"]')
    with pytest.raises(UserError, match=r"a\.json:2 is not JSON"):
        rows_of(tmp_path / "a.json")
    (tmp_path / "lines.json").write_text('{"prompt": "0"}\n{"prompt": "1"}\n')
    with pytest.raises(UserError, match=r"lines\.json:2 is not JSON .*JSON lines, rename it to \.jsonl"):
        rows_of(tmp_path / "lines.json")
    (tmp_path / "b.json").write_text("{}")
    with pytest.raises(UserError, match="holds no JSON list"):
        rows_of(tmp_path / "b.json")


@pytest.mark.parametrize("spec", ["nowhere.jsonl", "data/nowhere.jsonl", "/no/such/place.jsonl"])
def test_missing_file(spec):
    with pytest.raises(UserError, match=r"data\.conversations=.* is missing: give a file, a glob, or a hub id"):
        open_sources(spec, "train", "data.conversations")


def test_glob_without_match(tmp_path):
    with pytest.raises(UserError, match="matches no file"):
        open_sources(str(tmp_path / "*.jsonl"), "train", "data.conversations")


def test_hub_ids_go_through_datasets(monkeypatch):
    import datasets

    asked = []

    def load(spec, split):
        asked.append((spec, split))
        if spec == "org/none":
            raise FileNotFoundError("no such\nset")
        return datasets.Dataset.from_list([{"messages": ANSWERED}])

    monkeypatch.setattr(datasets, "load_dataset", load)
    (source,) = open_sources("org/chats", "test", "data.conversations")
    assert asked == [("org/chats", "test")]
    (row,) = read([source], "auto")
    assert row.messages == ANSWERED
    assert source.fingerprint.startswith("test:")
    with pytest.raises(UserError, match=r"org/none .*no such set"):
        open_sources("org/none", "test", "data.conversations")
