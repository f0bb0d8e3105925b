"""Which prompts are decoded."""

import json
from collections import Counter

import pytest

from eagle31_train.measure.prompts import Prompt, choose
from eagle31_train.measure.suites import workloads
from eagle31_train.schema import UserError


def prompts(*rows):
    return [Prompt(f"p{i}", "made", ids) for i, ids in enumerate(rows)]


def ids_of(chosen):
    return [prompt.id for prompt in chosen]


def test_the_first_distinct_prompts_in_order():
    chosen, too_long = choose(prompts([1, 2], [3], [1, 2], [4], [5]), 3, 10)
    assert (ids_of(chosen), too_long) == (["p0", "p1", "p3"], [])


def test_longer_ones_are_named_and_replaced_by_the_next():
    chosen, too_long = choose(prompts([1] * 4, [2] * 3, [3] * 5, [4], [5] * 9), 2, 3)
    assert (ids_of(chosen), too_long) == (["p1", "p3"], ["p0", "p2"])


def test_fewer_than_asked_for_are_all_taken():
    assert ids_of(choose(prompts([1], [2]), 20, 3)[0]) == ["p0", "p1"]


def test_none_that_fits():
    with pytest.raises(UserError, match="none of 2 prompts has at most 3 tokens"):
        choose(prompts([1] * 4, [2] * 5), 20, 3)


def of(text):
    """Prompts from "a1 b2 …": a letter for the source, a number for the only token."""
    return [Prompt(word, word[0], [int(word[1:])]) for word in text.split()]


@pytest.mark.parametrize(
    ("given", "count", "chosen"),
    [
        ("a1 a2 a3 b4 b5 b6", 4, "a1 b4 a2 b5"),
        ("b4 b5 a1 a2", 3, "a1 b4 a2"),  # whichever comes first in the split
        ("a1 a2 a3 b4", 4, "a1 b4 a2 a3"),  # one that runs out leaves its turns to the others
        ("a1 a2 b1 b3 c1 c2", 4, "a1 b3 c2"),  # the same prompt counts once, for the first whose turn it is
        ("a1 b2 c3 d4", 2, "a1 b2"),
    ],
)
def test_sources_take_turns(given, count, chosen):
    assert " ".join(ids_of(choose(of(given), count, 9)[0])) == chosen


def test_a_source_passes_over_what_is_too_long_for_its_turn():
    given = [Prompt("a1", "a", [1, 1]), Prompt("a2", "a", [2]), Prompt("b3", "b", [3]), Prompt("b4", "b", [4] * 3)]
    chosen, too_long = choose(given, 3, 1)
    assert (ids_of(chosen), too_long) == (["a2", "b3"], ["a1", "b4"])


def test_as_many_of_each_as_can_be():
    """Whatever the sizes, no source has two more than another that has prompts left."""
    sizes = {"a": 30, "b": 3, "c": 11, "d": 1}
    given = [
        Prompt(f"{name}{i}", name, [100 * number + i]) for number, name in enumerate(sizes) for i in range(sizes[name])
    ]
    for count in range(1, 46):
        found = Counter(prompt.source for prompt in choose(given, count, 9)[0])
        assert sum(found.values()) == count
        open_ones = [found[name] for name in sizes if found[name] < sizes[name]]
        assert max(found.values()) <= min(open_ones, default=99) + 1


def test_a_line_ends_where_json_lines_do(run, tmp_path):
    """And not at every character that Unicode takes for the end of one, as text from the web has them."""
    file = tmp_path / "web.jsonl"
    texts = ["hello world", "world hello", "hello"]
    spelt = [text.replace(" ", sign) for text, sign in zip(texts, "\u2028\x85 ", strict=True)]
    file.write_text("\r\n".join(json.dumps({"prompt": text}, ensure_ascii=False) for text in spelt), encoding="utf-8")
    (found,) = workloads(run.config(f"evaluate.prompts={file}"), None, 99)
    assert [prompt.id for prompt in found.prompts] == ["web-1", "web-2", "web-3"]
