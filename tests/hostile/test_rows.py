"""Rows of data, broken: JSON lines and lists of every format, CSV, Parquet, compressed files; prompts of evaluation."""

import gzip
import json
from contextlib import suppress

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import strategies as st
from mutating import UNREADABLE, VALUES, cases, documents, outcome, spoil, texts, torn
from talking import make_template

from data_prep.masks import samples
from data_prep.sample import given
from data_prep.sources import Source
from eagle31_train.common.errors import Refused, UserError
from eagle31_train.config import FORMATS
from eagle31_train.evaluation import prompts
from eagle31_train.rows import files
from eagle31_train.rows.files import open_files
from eagle31_train.rows.formats import parse

CALL = {"id": "c", "type": "function", "function": {"name": "find", "arguments": '{"a": 1}'}}
TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    {"role": "assistant", "content": "hello", "reasoning_content": "hm", "tool_calls": [CALL]},
    {"role": "tool", "content": "3", "tool_call_id": "c"},
    {"role": "assistant", "content": "it is 3", "tokens": 4, "finish_reason": "stop"},
]
TOOLS = [{"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}]
ROWS = {
    "messages": {"id": "a", "messages": TURNS, "tools": TOOLS, "source": "x", "sample": 1},
    "sharegpt": {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]},
    "alpaca": {"instruction": "say", "input": "this", "output": "that", "system": "Be brief."},
    "turns": {"turns": ["hi", "and then?"], "category": "y", "question_id": 3},
    "prompt": {"prompt": "hi", "id": 7, "finish_reason": "stop"},
    "tokens": {"input_ids": [5, 6, 7, 2], "loss_mask": [0, 0, 1, 1], "conversations": TURNS},
}
assert set(ROWS) | {"auto"} == set(FORMATS) | {"auto"}
NAMES = ["messages", "conversations", "turns", "prompt", "tools", "tool_calls", "sample", "name", "tokens", "thinking"]
TEXTS = ['{"a": ' * 200 + "1" + "}" * 200, "[" * 5000, '{"a": "\\ud800"}', "\ud800", "<|im_end|>", "user", "gpt"]
TEMPLATE = make_template()


def learned(row):
    with suppress(Refused):
        if row.tokens:
            given(TEMPLATE, row.tokens, 512)
        elif row.problem is None:
            samples(TEMPLATE, row.messages, 512, row.tools)


ROW = documents(list(ROWS.values()), NAMES, TEXTS)


@cases(st.tuples(ROW, st.sampled_from(["auto", *FORMATS])), quick=180, thorough=15_000)
def test_rows(case):
    value, form = case
    outcome(lambda: learned(parse(value, form, "f.jsonl:1", "f-1")))


@st.composite
def data_files(draw):
    """Name and bytes of a file with a few rows."""
    rows = draw(st.lists(texts(ROW), min_size=1, max_size=3))
    kind = draw(st.sampled_from(["jsonl", "json", "csv", "parquet", "jsonl.gz"]))
    if kind == "csv":
        cells = [json.dumps(value) for value in draw(st.lists(st.sampled_from(VALUES[:20]), min_size=1, max_size=4))]
        data = "\n".join(["prompt,messages", *(f'"{cell}",{cell}' for cell in cells)]).encode("utf-8", "replace")
    elif kind == "parquet":
        sink = pyarrow.BufferOutputStream()
        columns = {"prompt": ["hi", None, "x"], "messages": ["[]", "[[[", json.dumps(TURNS)]}
        columns["when"] = pyarrow.array([0, 2**62, -(2**62)], pyarrow.timestamp("us"))
        pyarrow.parquet.write_table(pyarrow.table(columns), sink)
        data = sink.getvalue().to_pybytes()
    else:
        data = b"[" + b",".join(rows) + b"]" if kind == "json" else b"\n".join(rows)
        data = gzip.compress(data, 1) if kind == "jsonl.gz" else data
    return f"rows.{kind}", draw(torn(data)) if draw(st.booleans()) else data


@cases(data_files(), quick=110, thorough=12_000)
def test_files(case, tmp_path):
    name, data = case
    (tmp_path / name).write_bytes(data)

    def read():
        source = Source(open_files(str(tmp_path / name), "train", "data.prompts"), "auto", "data.prompts")
        for row in source.read():
            learned(row)

    outcome(read)


@cases(st.tuples(texts(ROW), st.sampled_from([None, "prompt", "{prompt} {id!r:>9}"])), quick=110, thorough=8_000)
def test_prompts_of_an_evaluation(case, tmp_path):
    data, column = case
    (tmp_path / "suite.jsonl").write_bytes(data + b"\n")
    suite = prompts.Suite(path=str(tmp_path / "suite.jsonl"), prompt=column)
    outcome(lambda: prompts.from_suite("s", suite, "evaluate.suites.s", TEMPLATE))


def read_whole(path):
    return outcome(lambda: list(open_files(str(path), "train", "o")[0].values()))


@pytest.mark.parametrize("name", ["bomb.jsonl.gz", "bomb.json.gz", "bomb.csv.gz"])
def test_a_few_bytes_that_unpack_to_a_line_without_end(tmp_path, monkeypatch, name):
    monkeypatch.setattr(files, "LINE", 1 << 20)
    monkeypatch.setattr(files, "LIST", 1 << 20)
    (tmp_path / name).write_bytes(gzip.compress(b" " * (1 << 24)))
    assert "1,048,576 bytes or more" in str(read_whole(tmp_path / name))


def test_rows_that_are_nested_deeper_than_any_format_are_damaged(tmp_path):
    """Python itself gives up ten times deeper, and some of what walks over a row does earlier."""
    (tmp_path / "deep.jsonl").write_text('{"prompt": ' + "[" * 150 + "]" * 150 + "}\n")
    said = "deep.jsonl:1 cannot be read (it is nested more than 100 deep)"
    assert said in str(read_whole(tmp_path / "deep.jsonl"))


TOO_LONG = "(a row of more than 268,435,456 bytes)"
ENTRIES = "(turns.list.element has more than 4,194,304 entries in a row group: write"


def bomb(path, column, times, value):
    """A few bytes of Parquet: a row whose list has one value again and again."""
    column_of = pyarrow.ListArray.from_arrays(pyarrow.array([0, times], pyarrow.int32()), value)
    pyarrow.parquet.write_table(pyarrow.table({column: column_of, "prompt": ["Hi"]}), path, compression="zstd")
    assert path.stat().st_size < 10_000
    return path


def megabyte(times):
    """A text of a megabyte, which takes 4 bytes where it stands again."""
    text = pyarrow.array(["x" * (1 << 20)])
    return pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * times, pyarrow.int32()), text)


def test_texts_of_parquet_that_unpack_to_more_than_memory_are_read_row_by_row(tmp_path):
    path = tmp_path / "bomb.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"prompt": megabyte(4096)}), path, compression="zstd")
    assert path.stat().st_size < 10_000
    rows = open_files(str(path), "train", "o")[0].values()
    assert outcome(lambda: sum(len(row["prompt"]) for _, row in rows)) == 1 << 32
    assert f"cannot be read {TOO_LONG}" in str(read_whole(bomb(path, "turns", 300, megabyte(300))))


@pytest.mark.parametrize(
    ("name", "value", "most", "problem"),
    [
        ("turns", pyarrow.scalar([], pyarrow.list_(pyarrow.string())), 1 << 25, TOO_LONG),
        ("states", pyarrow.scalar(True), 1 << 25, None),  # of no use, whatever it takes
        ("turns", pyarrow.scalar(None, pyarrow.string()), 1 << 25, TOO_LONG),
        ("turns", pyarrow.scalar(None, pyarrow.string()), 1 << 22, ENTRIES),
    ],
)
def test_lists_of_parquet_whose_entries_take_bits_in_the_file_and_objects_here(
    name, value, most, problem, tmp_path, monkeypatch
):
    monkeypatch.setattr(files, "ENTRIES", most)
    count = (1 << 22) + 1
    found = read_whole(bomb(tmp_path / "bomb.parquet", name, count, pyarrow.repeat(value, count)))
    assert problem in str(found) if problem else found == [(1, {"prompt": "Hi"})]


@pytest.mark.parametrize("kind", UNREADABLE)
def test_links_to_nowhere_and_to_what_never_ends(kind, tmp_path):
    path = tmp_path / "rows.jsonl"
    spoil(path, kind)
    for spec in (path, tmp_path, tmp_path / "*.jsonl"):
        assert isinstance(outcome(lambda spec=spec: open_files(str(spec), "train", "data.prompts")), UserError)
