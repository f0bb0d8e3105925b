"""What stage 1 makes of a conversation: samples, each of token ids with a loss mask, and turns that it refuses."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self

from eagle31_train.common.errors import Refused
from eagle31_train.rows.messages import Message, is_learnt
from eagle31_train.targets.chat import ChatTemplate

EMPTY = "an empty answer"
ENDED = "an end-of-turn token inside the answer"
BEYOND = "no part of an answer lies within data.max_length: raise it"


@dataclass(frozen=True)
class Sample:
    """Token ids and loss mask, of one length T."""

    input_ids: NDArray[np.int32]  # [T]
    loss_mask: NDArray[np.bool_]  # [T]
    cut: bool  # it was longer than max_length
    open_turns: int  # answers without an end-of-turn token
    inserted: int = 0  # answers before which the template put an empty thought

    @classmethod
    def within(cls, max_length: int, ids: list[int], mask: list[bool], open_turns: int, inserted: int = 0) -> "Sample":
        """Return the sample of these ids and mask, cut to `max_length`; Refused if no part of an answer is left."""
        kept = np.asarray(mask[:max_length], dtype=np.bool_)
        if not kept.any():
            raise Refused(BEYOND)
        input_ids = np.asarray(ids[:max_length], dtype=np.int32)
        return cls(input_ids, kept, len(ids) > max_length, open_turns, inserted)


@dataclass(frozen=True)
class Samples:
    """The result for a conversation: samples and refused turns, each with the suffix of its id."""

    samples: list[tuple[str, Sample]]
    refused: list[tuple[str, str]]
    split: bool  # the conversation is not one whole sample

    @classmethod
    def whole(cls, sample: Sample) -> "Samples":
        return cls([("", sample)], [], split=False)

    @property
    def inserted(self) -> int:
        """How many learnt answers have an empty thought before them that the template put there."""
        return sum(sample.inserted for _, sample in self.samples)


class AnyTurn(Protocol):
    """An answer to learn, after its prompt."""

    def continues(self, earlier: Self) -> bool:
        """Return whether the prompt begins with all of an earlier turn."""


T = TypeVar("T", bound=AnyTurn)
Outcome = tuple[int, int, Sample | Refused]  # of consecutive answers, by the numbers of the first and the last, from 1


def of_turns(messages: list[Message], read: Callable[[int], T], sample: Callable[[list[T]], Sample]) -> Samples:
    """Return the samples of all answers to learn; Refused if there is none. `read` reads the answer at an index. Turns
    that continue each other share one `sample`; if that is refused, each is tried by itself."""
    outcomes: list[Outcome] = []
    stretches: list[list[tuple[int, T]]] = []
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    for number, i in enumerate(answers, start=1):
        if not is_learnt(messages[i]):
            continue
        try:
            turn = read(i)
        except Refused as error:
            outcomes.append((number, number, error))
            continue
        if not stretches or not turn.continues(stretches[-1][-1][1]):
            stretches.append([])
        stretches[-1].append((number, turn))
    for stretch in stretches:
        outcomes += _of_stretch(stretch, sample)
    split = len(outcomes) > 1
    samples: list[tuple[str, Sample]] = []
    refused: list[tuple[str, str]] = []
    for first, last, outcome in outcomes:
        suffix = f"~turn{first}" if first == last else f"~turn{first}-{last}"
        if isinstance(outcome, Refused):
            refused.append((suffix, str(outcome)))
        else:
            samples.append((suffix if split else "", outcome))
    if not samples:
        raise Refused(refused[0][1])
    return Samples(samples, refused, split)


def _of_stretch(stretch: list[tuple[int, T]], sample: Callable[[list[T]], Sample]) -> list[Outcome]:
    first, last = stretch[0][0], stretch[-1][0]
    try:
        return [(first, last, sample([turn for _, turn in stretch]))]
    except Refused as error:
        if len(stretch) == 1:
            return [(first, last, error)]
        return [outcome for one in stretch for outcome in _of_stretch([one], sample)]


def given(template: ChatTemplate, tokens: tuple[list[int], list[bool]], max_length: int) -> Samples:
    """Return the sample of a row of ids and loss mask; Refused if the target lacks an id, or no answer is left."""
    ids, mask = tokens
    template.with_rows(ids)
    answers = [[i for i, _ in run] for learnt, run in groupby(zip(ids, mask, strict=True), lambda t: t[1]) if learnt]
    open_turns = sum(not set(answer) & set(template.end_ids) for answer in answers)
    return Samples.whole(Sample.within(max_length, ids, mask, open_turns))
