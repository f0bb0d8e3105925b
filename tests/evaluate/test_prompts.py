"""Which prompts are decoded."""

import pytest

from eagle31_train.prompts import Prompt, choose
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
