"""How rows of many kinds of sets become prompts."""

# ruff: noqa: F811 (fixtures)

import pytest
from datasets import Dataset, DatasetDict

from eagle31_train.cli import CONFIGS
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
