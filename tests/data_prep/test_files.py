"""Files of every kind, folders and hub data sets: the same rows, ids that stay, and damage named by its place."""

import csv
import gzip
import json
from functools import partial

import datasets
import made
import pyarrow
import pytest
from pyarrow import parquet

from data_prep.sources import Corpus, Source
from eagle31_train.config import Config, DataConfig
from eagle31_train.rows.files import open_files

CHAT = [{"role": "user", "content": 'Which is "ü",\na or b?'}, {"role": "assistant", "content": "b 😀"}]
ROWS = [{"messages": CHAT}, {"messages": [{"role": "user", "content": "second"}]}]
AS_TEXT = [{"messages": json.dumps(row["messages"])} for row in ROWS]


def write_jsonl(path, rows, open=open):
    with open(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    return path


def write_csv(path, rows, open=open, encoding="utf-8"):
    with open(path, "wt", encoding=encoding, newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def write_parquet(path, rows):
    parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=1)
    return path


def rows_of(spec, form="auto", stream_rows=None):
    files = open_files(str(spec), "train", "data.prompts", stream_rows)
    return list(Source(files, form, f"data.prompts={spec}").read())


def message_of(spec, form="auto", **options):
    return made.message_of(rows_of, spec, form, **options)


KINDS = {
    "a.jsonl": lambda path: write_jsonl(path, ROWS),
    "a.jsonl.gz": lambda path: write_jsonl(path, ROWS, gzip.open),
    "a.json": lambda path: path.write_text(json.dumps(ROWS)),
    "marked.json": lambda path: path.write_text(json.dumps(ROWS), "utf-8-sig"),
    "lines.json": lambda path: write_jsonl(path, ROWS),
    "a.json.gz": lambda path: path.write_bytes(gzip.compress(json.dumps(ROWS).encode())),
    "a.csv": lambda path: write_csv(path, AS_TEXT),
    "a.CSV.gz": lambda path: write_csv(path, AS_TEXT, gzip.open, "utf-8-sig"),  # as spreadsheets write it
    "a.parquet": lambda path: write_parquet(path, ROWS),
    "text.parquet": lambda path: write_parquet(path, AS_TEXT),
    "lines.txt": lambda path: write_jsonl(path, ROWS),
}


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_gives_the_same_rows_and_ids_by_file_and_place(tmp_path, name):
    KINDS[name](tmp_path / name)
    rows, stem = rows_of(tmp_path / name), name.split(".")[0]
    first = 2 if "csv" in name.lower() else 1  # CSV's first line names the columns
    assert [row.messages for row in rows] == [row["messages"] for row in ROWS]
    assert [(row.id, row.where) for row in rows] == [(f"{stem}-{n}", f"{name}:{n}") for n in (first, first + 1)]
    assert rows[0].source == stem


def test_rows_of_csv_are_known_by_their_first_line(tmp_path):
    long = "word " * 50_000  # longer than Python's csv takes by itself
    cells = [("a\n\nb", "", "yes", ""), ("NA", "007", "null", "mine"), (long, "007", "null", "")]
    names = ("instruction", "input", "output", "id")
    path = write_csv(tmp_path / "a.csv", [dict(zip(names, row, strict=True)) for row in cells])
    path.write_text(path.read_text().replace("word word", "\nword word", 1))  # an empty line counts
    rows = rows_of(path)
    assert [row.id for row in rows] == ["a-2", "mine", "a-7"]
    assert [row.messages[0]["content"] for row in rows] == ["a\n\nb", "NA\n\n007", f"{long}\n\n007"]
    assert [row.messages[1]["content"] for row in rows] == ["yes", "null", "null"]


def test_a_cell_of_conversation_is_json_or_a_text_of_no_meaning(tmp_path):
    asked = [{"role": "user", "content": "hi"}]
    for cells, messages in [
        ({"conversation": json.dumps(CHAT)}, CHAT),
        ({"conversation": "[INST] a b", "prompt": "hi"}, asked),
    ]:
        (row,) = rows_of(write_csv(tmp_path / "a.csv", [cells]))
        assert row.messages == messages


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.jsonl", b'{"prompt": "a"}\n{"prompt": "b"}\n\n{"prompt": "c"\n', "a.jsonl:4 cannot be read"),
        ("a.txt", b"Why is the sky blue?\n", "it was read as JSON lines, as its name does not end in one of .jsonl, "),
        ("a.jsonl", b'{"prompt": "a"}\n{"te\\nxt": "b"}\n', "a.jsonl:2: the row's format is unknown (it has te xt)"),
        ("a.jsonl", b'{"id": "x", "prompt": "a"}\n{"id": "x", "prompt": "b"}', ":2: id 'x' is also used at a.jsonl:1"),
        ("a.jsonl", b'{"messages": []}', "a.jsonl:1: data.format=alpaca needs the key 'instruction'"),
        ("a.json", b'{"prompt": "0"}\n{"prompt": "1"\n', "a.json:2 cannot be read"),
        ("a.json", b'{\n"data": []}\n', "it does not begin with [, so it was read as JSON lines"),
        ("a.csv", b'prompt,id\n"q\n\nr",1\nq,2,3\n', "a.csv:5 cannot be read (it has 3 cells"),
        ("a.csv", b"prompt,prompt\nq,1\n", "a.csv:1 cannot be read (a column name occurs twice"),
        ("a.csv", b'prompt\nq\n"r"s\n', "a.csv:3 cannot be read"),
        ("a.csv", "prompt\nq\nGrün\n".encode("latin-1"), "invalid start byte): save it as UTF-8"),
        ("a.csv", b"messages\n[]\n[{'role': 'user'}]\n", "a.csv:3 cannot be read (the cell of messages is not JSON"),
        ("a.parquet", b"PAR1 and nothing more", "a.parquet:1 cannot be read"),
        ("a.jsonl.gz", b'{"prompt": "a"}\n', "a.jsonl.gz:1 cannot be read"),
        *((name, b"", f"{name} has no rows") for name in ("a.jsonl", "a.json", "a.csv", "a.jsonl.gz")),
    ],
)
def test_damage_is_named_by_its_place(tmp_path, name, content, words):
    (tmp_path / name).write_bytes(content)
    assert words in message_of(tmp_path / name, "alpaca" if "alpaca" in words else "auto")


def test_a_folder_is_all_its_files_in_order_and_nothing_else(tmp_path):
    folder = tmp_path / "ü [1]"
    (folder / "sub").mkdir(parents=True)
    write_jsonl(folder / "b.jsonl", ROWS)
    write_parquet(folder / "sub" / "b.parquet", ROWS)
    write_csv(folder / "a.csv", AS_TEXT)
    (folder / "_SUCCESS").touch()
    (folder / ".DS_Store").touch()
    assert [row.id for row in rows_of(folder)] == ["a-2", "a-3", "b-1", "b-2", "sub/b-1", "sub/b-2"]
    assert [row.id for row in rows_of(folder / "*.jsonl")] == ["b-1", "b-2"]
    assert {row.id for row in rows_of(folder / "**" / "*.parquet")} == {"b-1", "b-2"}
    (folder / "sub" / "a.csv").symlink_to(folder / "a.csv")
    assert [row.id for row in rows_of(folder / "**" / "a.csv")] == ["a-2", "a-3", "sub/a-2", "sub/a-3"]
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "there").symlink_to(folder)
    (folder / "sub" / "back").symlink_to(tmp_path / "linked")
    (tmp_path / "linked" / "again").symlink_to(folder / "sub")
    assert len(rows_of(tmp_path / "linked")) == 8, "of each file once"
    (tmp_path / "gone").mkdir()
    (tmp_path / "gone" / "moved.jsonl").symlink_to(tmp_path / "elsewhere.jsonl")
    (folder / "sub" / "notes.md").touch()
    (tmp_path / "none" / "below").mkdir(parents=True)
    datasets.Dataset.from_list([{"prompt": "hello"}]).save_to_disk(str(tmp_path / "saved"))
    for spec, words in [
        (folder, "holds sub/notes.md, which is not a data file"),
        (tmp_path / "saved", "save the data set as Parquet (load_from_disk(…).to_parquet(FILE))"),
        (tmp_path / "gone", "holds moved.jsonl, a broken symbolic link"),
        (tmp_path / "none", "none has no data files"),
        (folder / "*.txt", "matches no file"),
        ("~/none.csv", "does not exist: set it to a file"),
        ("none/there.csv.gz", "does not exist: set it to a file"),  # which is no data set's id
    ]:
        assert words in message_of(spec)


def test_a_stream_reads_no_more_of_a_hub_data_set_than_is_asked_for(tmp_path, monkeypatch):
    """`org/name` on a hub that is a folder, read by `datasets` itself; its second file is damaged."""
    (tmp_path / "hub").mkdir()
    write_parquet(tmp_path / "hub" / "train-0.parquet", [{"prompt": f"q{i}", "turns": None} for i in range(5)])
    (tmp_path / "hub" / "train-1.parquet").write_bytes(b"not downloaded")
    build, where = datasets.load_dataset_builder, {"org/name": str(tmp_path / "hub")}
    loaded = partial(build, cache_dir=str(tmp_path / "cache"))
    monkeypatch.setattr(datasets, "load_dataset_builder", lambda name, *given, **more: loaded(where[name], **more))
    rows = rows_of("org/name", stream_rows=4)
    assert [row.messages[0]["content"] for row in rows] == ["q0", "q1", "q2", "q3"]
    assert rows[0].id == "org/name-1"
    four, again, three = (open_files("org/name", "train", "o", n)[0].fingerprint for n in (4, 4, 3))
    assert four == again != three
    assert not any((tmp_path / "cache").rglob("*.arrow"))
    assert "org/name:6 cannot be read" in message_of("org/name", stream_rows=6)
    said = made.message_of(open_files, "org/name", "nope", "data.prompts", 4)
    assert "the hub data set cannot be loaded (Bad split: nope" in said
    write_parquet(tmp_path / "hub" / "train-0.parquet", AS_TEXT)
    assert open_files("org/name", "train", "o", 4)[0].fingerprint != four, "it is known by its content"
    assert [row.messages for row in rows_of("org/name", stream_rows=2)] == [row["messages"] for row in ROWS]


@pytest.mark.parametrize("stream_rows", [None, 1])
def test_a_subset_and_a_revision_of_a_hub_data_set_are_asked_for(tmp_path, monkeypatch, stream_rows):
    hub, asked = tmp_path / "hub", []
    for name in ("main", "more"):
        (hub / name).mkdir(parents=True)
        for split in ("train", "test"):
            write_jsonl(hub / name / f"{split}.jsonl", [{"prompt": name}])
    configs = "".join(f"- config_name: {name}\n  data_dir: {name}\n" for name in ("main", "more"))
    (hub / "README.md").write_text(f"---\nconfigs:\n{configs}---\n")
    for loader in ("load_dataset", "load_dataset_builder"):
        load = partial(getattr(datasets, loader), str(hub), cache_dir=str(tmp_path / "cache"))
        imitated = lambda _, *given, load=load, revision, **more: asked.append(revision) or load(*given, **more)  # noqa: E731
        monkeypatch.setattr(datasets, loader, imitated)

    def opened(**options):
        config = Config(name="t", data=DataConfig(prompts="org/name", stream_rows=stream_rows, **options))
        return Corpus.open(config, "prompts").sources[0].files[0]

    found = {name: opened(subset=name, revision="v1") for name in ("main", "more")}
    assert [[row["prompt"] for _, row in one.values()] for one in found.values()] == [["main"], ["more"]]
    assert asked == ["v1", "v1"]
    other = opened(subset="main", revision="v1", split="test")
    assert len({one.fingerprint for one in (*found.values(), other)}) == 3
    said = message_of("org/name", stream_rows=stream_rows)
    assert "Config name is missing. Please pick one among the available configs: ['main', 'more'])" in said
