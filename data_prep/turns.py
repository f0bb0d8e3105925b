"""Conversations turn by turn, as serving has them: the prompt as it is rendered then, and what the target wrote.

Templates of thinking models drop the thoughts of earlier turns, and give a plain answer an empty one, so no
single sequence holds what the target saw and wrote at every turn. Each turn by itself does. Turns whose prompt
goes on exactly where the turn before ended (a chain of tool calls, say) share one sample.

What is learnt is what the target generates after the generation prompt: thought, answer, tool calls with all
their markup, the end-of-turn token. What the prompt holds is not: headers, tool results, earlier turns as the
template now writes them. That decides on empty thoughts too. `<think></think>` in the generation prompt
(thinking switched off) is prompt; one that the template writes into a plain answer after a prompt that asks for
thinking is what the target would have to write there, so it is learnt, and counted as `inserted`.

A turn's text must be read back as the message it was made from (formats.py), or the turn is refused by name.
"""

import re
from dataclasses import dataclass, field

import numpy as np

from data_prep import formats
from data_prep.formats import CLOSE, OPEN, apart
from data_prep.messages import Message, Tool
from data_prep.template import ChatTemplate, RefusedError, RewrittenError, Sample
from data_prep.tokens import Tokens


@dataclass
class Samples:
    """What a conversation gives: samples and refused turns, each with what its id gets as a suffix."""

    samples: list[tuple[str, Sample]] = field(default_factory=list)
    refused: list[tuple[str, str]] = field(default_factory=list)
    split: bool = False  # not one sample for the whole conversation
    inserted: int = 0  # answers before which the template put an empty thought

    @property
    def respelt(self) -> int:
        """Answers that have not as many tokens here as the target wrote."""
        return sum(sample.respelt for _, sample in self.samples)


@dataclass(frozen=True)
class Turn:
    """An answer in its place; `cut`: it has no end of its own. Text until tokens are needed."""

    number: int  # of the assistant's turns, from 1
    prompt: str
    answer: str
    end: str  # the end-of-turn token
    cut: bool
    inserted: bool
    tokens: int | None = None  # that the target wrote, where that is known

    @property
    def text(self) -> str:
        return self.prompt + self.answer + self.end


def samples(
    template: ChatTemplate, messages: list[Message], max_length: int, tools: list[Tool] | None = None
) -> Samples:
    """The conversation as one sample or, where the template rewrites it, as several.

    Raises:
        RefusedError: no turn of it has an exact mask.
    """
    try:
        return Samples([("", template.sample(messages, max_length, tools))])
    except RewrittenError:
        result = Samples()
    indices = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    groups: list[list[Turn]] = []
    for number, i in enumerate(indices, start=1):
        try:
            turn = read_turn(template, messages[: i + 1], tools, number)
        except RefusedError as error:
            result.refused.append((f"~turn{number}", str(error)))
            continue
        if groups and turn.prompt.startswith(groups[-1][-1].text):
            groups[-1].append(turn)
        else:
            groups.append([turn])
    result.split = len(groups) != 1 or len(groups[0]) != len(indices)
    while groups:
        group = groups.pop(0)
        try:
            sample = masked(template, group, max_length)
        except RefusedError as error:
            if len(group) > 1:  # which of them it is, each by itself tells
                groups[:0] = [[turn] for turn in group]
                result.split = True
            else:
                result.refused.append((f"~turn{group[0].number}", str(error)))
            continue
        result.samples.append((_suffix(group) if result.split else "", sample))
        result.inserted += sum(turn.inserted for turn in group)
    if not result.samples:
        raise RefusedError(result.refused[0][1])
    return result


def _suffix(group: list[Turn]) -> str:
    first, last = group[0].number, group[-1].number
    return f"~turn{first}" if first == last else f"~turn{first}-{last}"


def masked(template: ChatTemplate, turns: list[Turn], max_length: int) -> Sample:
    """Token ids and loss mask of turns of which each goes on where the one before it ended.

    Raises:
        RefusedError: its mask cannot be known exactly, or would be empty.
    """
    tokens = Tokens(template, turns[-1].text)
    mask = np.zeros(len(tokens.ids), dtype=np.bool_)
    length = respelt = 0
    for turn in turns:
        first, last = template.learnt(tokens, len(turn.prompt), len(turn.text), turn.answer)
        if not tokens.is_prompt(first, len(turn.prompt)):
            raise RefusedError("a boundary inside a token")  # serving tokenizes the prompt alone
        length = last if turn.cut else last + 1
        mask[first:length] = True
        respelt += turn.tokens not in (None, length - first)
    if not mask[: min(length, max_length)].any():
        raise RefusedError("nothing of the answers lies within max_length")
    ids = np.asarray(tokens.ids[:length], dtype=np.int32)[:max_length]
    open_turns = sum(turn.cut for turn in turns)
    return Sample(ids, mask[:length][:max_length], length > max_length, open_turns, respelt)


def read_turn(
    template: ChatTemplate, messages: list[Message], tools: list[Tool] | None = None, number: int = 1
) -> Turn:
    """The last turn as the target writes it in serving.

    Raises:
        RefusedError: its text cannot be known exactly.
    """
    history, message = template.history(messages[:-1]), messages[-1]
    prompt = template.render(history, add_generation_prompt=True, tools=tools)
    opened = prompt.rstrip().endswith(OPEN)
    cut = message.get("finish_reason") == "length"
    _check(message, cut)
    if prompt.rstrip().endswith(CLOSE) and apart(message).get("reasoning_content"):
        raise RefusedError("the prompt switches thinking off, and the answer has a thought")
    # Thoughts among the words of the answer: the target's own text, of which the template would only move parts.
    words = message["content"]
    thinks = OPEN in words or CLOSE in words or (opened and cut and not message.get("reasoning_content"))
    if thinks and message.get("tool_calls"):
        message, thinks = apart(message), False
    if thinks:
        whole = template.render([*history, message], tools=tools)
        answer, inserted = _own_words(words, opened, cut), False
    else:
        whole, answer, inserted = _written(template, history, message, prompt, tools)
    return Turn(number, prompt, answer, _end_of_turn(template, whole), cut, inserted, message.get("tokens"))


def answered(
    template: ChatTemplate, messages: list[Message], text: str, finish_reason: str, tools: list[Tool] | None = None
) -> Message:
    """The message of an answer that is known as text with all its markup: as a server would take it apart.

    In its parts only where the template then writes the very same text; else the text is its content. Thoughts
    in front of an answer stay there: `ChatTemplate.history` and `read_turn` know them.
    """
    plain: Message = {"role": "assistant", "content": text}
    prompt = template.render(template.history(messages), add_generation_prompt=True, tools=tools)
    found = formats.take_apart(text, prompt.rstrip().endswith(OPEN))
    if found is None:
        return plain
    try:
        turn = read_turn(template, [*messages, {**found, "finish_reason": finish_reason}], tools)
    except RefusedError:
        return plain
    return found if turn.answer.strip() == text.strip() else plain


def _check(message: Message, cut: bool) -> None:
    content, reasoning, calls = message["content"], message.get("reasoning_content") or "", message.get("tool_calls")
    if not (content.strip() or reasoning.strip() or calls):
        raise RefusedError("an empty answer")
    if cut and calls:
        raise RefusedError("an answer that was cut off among its tool calls")
    if reasoning and (OPEN in content or CLOSE in content):
        raise RefusedError("a thought within the answer, and another beside it")


def _own_words(words: str, opened: bool, cut: bool) -> str:
    if not opened:
        return words
    if CLOSE not in words and not cut:
        raise RefusedError("the generation prompt opens a thought that the answer does not close")
    return re.sub(rf"^\s*{OPEN}\n?", "", words)  # the prompt holds it already


def _written(
    template: ChatTemplate, history: list[Message], message: Message, prompt: str, tools: list[Tool] | None
) -> tuple[str, str, bool]:
    """The rendered conversation, the answer as the template writes it, and whether it begins with an empty thought.

    Tool calls are taken with the target's own spelling of their arguments where the template keeps it.
    """
    problem: RefusedError | None = None
    for verbatim in (True, False) if message.get("tool_calls") else (False,):
        whole = template.render([*history, message], tools=tools, verbatim=verbatim)
        try:
            return whole, *_read_back(template, history, message, prompt, whole, tools)
        except RefusedError as error:
            problem = error
    assert problem is not None
    raise problem


def _read_back(
    template: ChatTemplate, history: list[Message], message: Message, prompt: str, whole: str, tools: list[Tool] | None
) -> tuple[str, bool]:
    reasoning, calls = (message.get("reasoning_content") or ""), bool(message.get("tool_calls"))
    opened = prompt.rstrip().endswith(OPEN)
    body = _body(template, history, prompt, whole, tools)
    if body is None:
        if reasoning.strip() or calls:
            raise RefusedError("the template rewrites more of the turn than its text")
        if opened:
            raise RefusedError("the generation prompt opens a thought that the answer does not close")
        return message["content"], False
    body = body.rstrip().removesuffix(_end_of_turn(template, whole))
    try:
        found = formats.parse(body, opened, calls)
        if reasoning.strip() and not found.reasoning and found.thought:
            # Even a last answer has lost its thought to the template (Kimi's): it goes where the template left
            # an empty one, half of the white space there before it unless the prompt has that.
            start, end = found.thought
            middle = start if opened else (start + end) // 2
            body = body[:middle] + reasoning + body[middle:]
            found = formats.parse(body, opened, calls)
        difference = found.difference(formats.meant(message))
    except formats.UnreadableError as error:
        raise RefusedError(str(error)) from None
    if difference:
        raise RefusedError(f"the template alters the {difference}")
    if message.get("finish_reason") == "length" and found.thought and not found.content:
        start, end = found.thought
        return body[: start + len(body[start:end].rstrip())], False  # cut inside its thought
    return body, found.thought is not None and not found.reasoning


def _body(
    template: ChatTemplate, history: list[Message], prompt: str, whole: str, tools: list[Tool] | None
) -> str | None:
    """What `whole` has after the generation prompt; None if it does not go on as the prompt does.

    A last answer may change how the turns before it are written: Kimi's and harmony's templates keep the
    thoughts of a chain of tool calls until then. So only the last turn is taken from `whole`. Where it begins
    is found with another, plain answer in its place, which is all header up to its words.
    """
    if whole.startswith(prompt):
        return whole[len(prompt) :]
    base = template.render(history, tools=tools)
    if not prompt.startswith(base):
        return None
    opening = prompt[len(base) :]
    header = opening.split(OPEN)[0]
    probe = template.render([*history, {"role": "assistant", "content": "x"}], tools=tools)
    start = probe.rfind(header) if header.strip() else -1
    if start < 0 or not whole.startswith(probe[:start] + opening):
        return None
    return whole[start + len(opening) :]


def _end_of_turn(template: ChatTemplate, whole: str) -> str:
    """The end-of-turn token with which the template ends the last turn."""
    for token in template.end_ids:
        if (text := template.decode([token])) and whole.rstrip().endswith(text):
            return text
    raise RefusedError("no end-of-turn token after the answer")
