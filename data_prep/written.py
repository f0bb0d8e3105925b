"""Samples of answers whose token ids are known, as of every target that answers here: what it saw and what it wrote.

The ids decide what is learnt; the words beside them are for people, and for the prompt of the next turn. Answers of
which the words alone are known: masks.py.
"""

from dataclasses import dataclass, field

import numpy as np

from data_prep.masks import BEYOND, Sample, Samples
from eagle31_train.common.errors import Refused
from eagle31_train.rows.formats import Message, Tool
from eagle31_train.targets import markup
from eagle31_train.targets.chat import ChatTemplate
from eagle31_train.targets.markup import OPEN

PARTS = ("content", "reasoning_content", "tool_calls")  # what a message says


@dataclass
class Stretch:
    """Turns in a row, each of whose prompts goes on exactly from what was written before."""

    first: int  # of the conversation's answers, from 1
    last: int = 0
    ids: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    open_turns: int = 0


def known(messages: list[Message]) -> bool:
    """Whether there are answers, and the token ids of all are known."""
    answers = [message for message in messages if message["role"] == "assistant"]
    return bool(answers) and all("token_ids" in message for message in answers)


def message_of(template: ChatTemplate, prompt: list[int], ids: list[int]) -> Message:
    """What a target says with `ids`, which may end with an end token, after those of a prompt; in its parts where it
    calls tools or writes in channels. Special tokens are no words, unless they are its markup."""
    said = ids[:-1] if ids and ids[-1] in template.end_ids else ids
    message = markup.take_apart(template.decode(said), opened=template.decode(prompt).rstrip().endswith(OPEN))
    plain = template.decode(said, skip_special_tokens=not template.hides_markup)
    return message or {"role": "assistant", "content": plain}


def samples(template: ChatTemplate, messages: list[Message], max_length: int, tools: list[Tool] | None) -> Samples:
    """One sample of all turns or, where a later prompt is not what was seen and written before, as with templates that
    drop thoughts, several. Refused where ids are not those of their words, or nothing lies within max_length."""
    stretches: list[Stretch] = []
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        number = stretches[-1].last + 1 if stretches else 1
        prompt, ids = template.prompt_ids(messages[:i], tools), template.with_rows(message["token_ids"])
        _check(template, prompt, message)
        if not stretches or prompt[: len(stretches[-1].ids)] != stretches[-1].ids:
            stretches.append(Stretch(number))
        stretch = stretches[-1]
        stretch.mask += [False] * (len(prompt) - len(stretch.ids)) + [True] * len(ids)
        stretch.ids, stretch.last = prompt + ids, number
        stretch.open_turns += message.get("finish_reason") == "length"
    found = Samples(split=len(stretches) > 1)
    for stretch in stretches:
        turns = f"{stretch.first}" if stretch.first == stretch.last else f"{stretch.first}-{stretch.last}"
        suffix = f"~turn{turns}" if found.split else ""
        mask = np.asarray(stretch.mask[:max_length])
        if mask.any():
            kept = np.asarray(stretch.ids[:max_length], dtype=np.int32)
            sample = Sample(kept, mask, len(stretch.ids) > max_length, stretch.open_turns)
            found.samples.append((suffix, sample))
        else:
            found.refused.append((suffix, BEYOND))
    if not found.samples:
        raise Refused(BEYOND)
    return found


def _check(template: ChatTemplate, prompt: list[int], message: Message) -> None:
    """Refuse an answer without words, and one of other words than its ids spell."""
    ids = message["token_ids"]
    if not ids or ids[0] in template.end_ids:
        raise Refused("an empty answer")
    said = message_of(template, prompt, ids)
    if any((said.get(part) or None) != (message.get(part) or None) for part in PARTS):
        raise Refused("the token_ids of an answer spell other words than it has: leave them out where it was changed")
