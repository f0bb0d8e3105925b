"""Acceptance where a text repeats itself and where it does not: what stood there before could be looked up without a
drafter, and small targets repeat themselves much."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eagle31_train.evaluation.intervals import ratios
from eagle31_train.evaluation.measurement import Measurement, rounds
from eagle31_train.evaluation.prompts import Prompt

TOKENS = 4  # a text repeats itself where its newest tokens, so many, stand in this order before, in prompt or answer


def repeats(prompt: Sequence[int], output: Sequence[int]) -> NDArray[np.bool_]:
    """[N] bool: whether the text repeats itself up to each of the N tokens of the output."""
    ids, seen, found = [*prompt, *output], set[tuple[int, ...]](), []
    for end in range(1, len(ids) + 1):
        newest = tuple(ids[max(0, end - TOKENS) : end])
        found.append(newest in seen)
        seen.add(newest)
    return np.array(found[len(prompt) :], dtype=bool)


def by_repetition(
    prompts: Sequence[Prompt], trainings: Sequence[Measurement], depths: Sequence[int]
) -> Mapping[str, Mapping[str, Any]]:
    """{"repeating" or "new": {K: {acceptance_length: interval, drafts}}}; nothing where drafts were sampled, of which
    not every place was looked at. trainings: of one drafter, on these prompts."""
    if any(each.tokens > 1 and not each.accepted for one in trainings for each in one.counts):
        return {}
    again = [repeats(prompt.ids, output) for prompt, output in zip(prompts, trainings[0].outputs, strict=True)]
    result: dict[str, dict[str, Any]] = {"repeating": {}, "new": {}}
    for depth in depths:
        drafts, tokens = np.zeros((2, len(prompts), 2), dtype=np.int64)  # [prompts, new or repeating]
        for one in trainings:
            for at, counts in enumerate(one.counts):
                made = np.array(rounds(counts.accepted, depth), dtype=np.int64) + 1  # tokens, the target's own included
                begun = again[at][made.cumsum() - made].astype(int)
                np.add.at(drafts[at], begun, 1)
                np.add.at(tokens[at], begun, made)
        for kind, column in (("new", 0), ("repeating", 1)):
            (length,) = ratios(tokens[:, [column]], drafts[:, [column]]).intervals()
            result[kind][str(depth)] = {"acceptance_length": length, "drafts": int(drafts[:, column].sum())}
    return result
