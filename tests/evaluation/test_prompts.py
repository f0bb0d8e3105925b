"""How rows of many kinds of sets become prompts."""

# ruff: noqa: F811 (fixtures)

import json

import pytest
from datasets import Dataset, DatasetDict

from eagle31_train.cli import CONFIGS
from eagle31_train.errors import UserError
from eagle31_train.evaluation.prompts import Prompt, choose, suite_of
from tests.evaluation.prompting import GOOD, MANIFEST, place  # noqa: F401 (fixtures)

ROWS = [
    {"question": "hello", "kind": "a", "number": 7, "turns2": ["first", "second"], "talk": [{"value": "deep"}]},
    {"question": "world", "kind": "b", "number": 8, "turns2": ["one", "two"], "talk": [{"value": "deeper"}]},
]


@pytest.mark.parametrize(
    ("options", "texts"),
    [
        ({"prompt": "question"}, ["hello", "world"]),
        ({"prompt": "turns2"}, ["first", "one"]),
        ({"prompt": "'{talk[0][value]}: {question} {{x}}'"}, ["deep: hello {x}", "deeper: world {x}"]),
        ({"prompt": "question", "only.kind": "b"}, ["world"]),
        ({"prompt": "question", "only.kind": "[a,b]", "only.number": 7}, ["hello"]),
        ({"prompt": "question", "placeholder": "hell"}, ["world"]),
    ],
)
def test_rows_are_read_as_the_suite_says(place, options, texts):
    DatasetDict({"test": Dataset.from_list(ROWS)}).save_to_disk(str(place.folder / "rows"))
    found = place.suite(path=place.folder / "rows", id="number", source="kind", **options)
    assert place.texts(found) == texts
    by_number = {row["number"]: row["kind"] for row in ROWS}
    assert [p.source for p in found.prompts] == [by_number[int(p.id)] for p in found.prompts]


def test_subsets_are_sources_of_their_own(place):
    """A folder that `datasets` loads as it loads the hub's: subsets by its README, splits by their files."""
    folder = place.folder / "exam"
    (folder / "law").mkdir(parents=True)
    (folder / "art").mkdir()
    for name in ("law", "art"):
        place.write(f"exam/{name}/val.jsonl", *({"q": f"{name} {i}"} for i in range(2)))
    configs = "".join(
        f"- config_name: {name}\n  data_files:\n  - split: val\n    path: {name}/val.jsonl\n" for name in ("law", "art")
    )
    (folder / "README.md").write_text(f"---\nconfigs:\n{configs}---\n")
    found = place.suite(path=folder, subset="[law,art]", split="val", prompt="q")
    assert [(p.id, p.source) for p in found.prompts] == [
        ("art-1", "art"), ("law-1", "law"), ("art-2", "art"), ("law-2", "law"),
    ]  # fmt: skip
    assert place.texts(found) == ["art 0", "law 0", "art 1", "law 1"]


TOOLS = [{"type": "function", "function": {"name": "look_up"}}]


@pytest.mark.parametrize(
    ("row", "options", "prompt"),
    [
        (
            {"question_id": 81, "category": "", "turns": ["hello", "world"]},
            {"prompt": "'{problem} {answer}'", "id": "unique_id", "source": "subject", "tools": "functions"},
            ("81", "s", None),
        ),
        (
            {"prompt": "hello", "key": "k1", "kind": "math", "functions": TOOLS},
            {"id": "key", "source": "kind", "tools": "functions"},
            ("k1", "math", TOOLS),
        ),
    ],
)
def test_a_file_of_our_own_form_stands_in_for_any_suite(place, row, options, prompt):
    """And may call its columns otherwise."""
    found = place.suite(path=place.write("mine.jsonl", row), **options)
    assert [(p.id, p.source, p.tools) for p in found.prompts] == [prompt]
    assert place.texts(found) == ["hello"]


@pytest.mark.parametrize(
    ("options", "rows", "message"),
    [
        ({"promt": "q"}, [GOOD], "promt"),
        ({"prompt": "'{q} {p}'"}, [GOOD], "has no column 'p'"),
        ({"prompt": "q", "id": "n"}, [GOOD, GOOD], "line 2: the id '1' stands there twice"),
    ],
)
def test_mistakes_are_named_in_one_line(place, options, rows, message):
    file = place.write("rows.jsonl", *rows)
    with pytest.raises(UserError, match=message):
        place.suite(path=file, **options)


# ---------------------------------------------------------------- those that come with the project


def test_suites_of_the_project_have_known_options(place):
    """Every file in configs/suite/."""
    for file in (CONFIGS / "suite").glob("*.yaml"):
        for name, given in place.config(f"suite={file.stem}").evaluate.suites.items():
            assert suite_of(name, given).is_hub_id, name


# ---------------------------------------------------------------- which of them


def of(text):
    """Prompts from "a1 b22 …": a letter for the source, and as many tokens as digits."""
    return [Prompt(word, word[0], [int(digit) for digit in word[1:]]) for word in text.split()]


@pytest.mark.parametrize(
    ("given", "count", "chosen", "too_long"),
    [
        ("a1 a2 a3 b4 b5 b6", 4, "a1 b4 a2 b5", ""),
        ("b4 b5 a1 a2", 3, "a1 b4 a2", ""),  # whichever comes first in the split
        ("a1 a2 a3 b4", 4, "a1 b4 a2 a3", ""),  # one that runs out leaves its turns to the others
        ("a1 a2 b1 b3 c1 c2", 4, "a1 b3 c2", ""),  # the same prompt counts once, for the first whose turn it is
        ("a111 a2 b3 b444", 3, "a2 b3", "a111 b444"),  # the next of the source takes its place
    ],
)
def test_sources_take_turns(given, count, chosen, too_long):
    prompts, longer = choose(of(given), count, 2)
    assert (" ".join(prompt.id for prompt in prompts), " ".join(longer)) == (chosen, too_long)


def test_a_line_ends_where_json_lines_do(place):
    """And not at every character that Unicode takes for the end of one, as text from the web has them."""
    texts = ["hello\u2028world", "world\x85hello", "hello"]
    lines = "\r\n".join(json.dumps({"prompt": text}, ensure_ascii=False) for text in texts)
    (place.folder / "web.jsonl").write_text(lines, encoding="utf-8")
    (found,) = place.workloads(f"evaluate.prompts={place.folder / 'web.jsonl'}", data=None)
    assert [prompt.id for prompt in found.prompts] == ["web-1", "web-2", "web-3"]
