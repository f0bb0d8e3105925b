"""Exact loss masks of conversations given as text: the tokens that the target itself would generate. For answers whose
token ids are known, see written.py.

The mask is exact or the turn is refused. The answers are located by rendering prefixes of the conversation and
comparing them; then the masked tokens are decoded and compared with the answer.

Templates of thinking models rewrite earlier turns, so no single sequence holds what the target saw and wrote at every
turn. Each turn by itself does: the prompt as rendered in serving, and the answer as the target writes it. Turns whose
prompt continues exactly where the previous turn ended (e.g. a chain of tool calls) share one sample.

All that the target generates after the generation prompt is supervised: thought, answer, tool calls with all their
markup, the end-of-turn token. An empty thought in the generation prompt (thinking switched off) belongs to the prompt.
One that the template writes into a plain answer is supervised, and counted as `inserted`. A turn is refused by name if
its text cannot be read back as the message that it was made from (markup.py).
"""

import re
import unicodedata
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby, takewhile

import numpy as np
from numpy.typing import NDArray

from data_prep.tokens import INSIDE, Tokens
from eagle31_train.common.errors import Refused
from eagle31_train.rows.formats import Message, Tool, is_learnt
from eagle31_train.targets import markup
from eagle31_train.targets.chat import ChatTemplate
from eagle31_train.targets.markup import CLOSE, EMPTY_THOUGHT, OPEN, apart

NO_END = "no end-of-turn token after the answer"
NO_ANSWER = "no assistant turn"
UNWEIGHTED = "every answer has weight 0"
EMPTY = "an empty answer"
ENDED = "an end-of-turn token inside the answer"
BEYOND = "no part of an answer lies within data.max_length: raise it"
UNCLOSED = "the generation prompt opens a thought that the answer does not close"
Tools = list[Tool] | None


@dataclass(frozen=True)
class Sample:
    """Token ids and loss mask, of one length T."""

    input_ids: NDArray[np.int32]  # [T]
    loss_mask: NDArray[np.bool_]  # [T]
    cut: bool  # it was longer than max_length
    open_turns: int  # answers without an end-of-turn token


@dataclass
class Samples:
    """The result for a conversation: samples and refused turns, each with the suffix of its id."""

    samples: list[tuple[str, Sample]] = field(default_factory=list)
    refused: list[tuple[str, str]] = field(default_factory=list)
    split: bool = False  # the conversation is not one whole sample
    inserted: int = 0  # answers before which the template put an empty thought


def samples(template: ChatTemplate, messages: list[Message], max_length: int, tools: Tools = None) -> Samples:
    """Return the conversation as one sample or, if the template rewrites it or a turn has no exact mask, as several;
    Refused if no turn has an exact mask."""
    if not any(map(is_learnt, messages)):
        raise Refused(UNWEIGHTED if any(message["role"] == "assistant" for message in messages) else NO_ANSWER)
    try:
        return Samples([("", one_sample(template, messages, max_length, tools))])
    except Refused as error:
        try:
            return _by_turn(template, messages, max_length, tools)
        except Refused:
            if str(error) == NO_END:  # the reason for refusing a turn by itself may just follow from this one
                raise error from None
            raise


def given(template: ChatTemplate, tokens: tuple[list[int], list[bool]], max_length: int) -> Samples:
    """Return the sample of given token ids and loss mask; Refused if the target lacks an id, or no answer is left."""
    ids, mask = tokens
    template.with_rows(ids)
    if not any(mask[:max_length]):
        raise Refused(BEYOND)
    answers = [[i for i, _ in run] for learnt, run in groupby(zip(ids, mask, strict=True), lambda t: t[1]) if learnt]
    open_turns = sum(not set(answer) & set(template.end_ids) for answer in answers)
    kept = np.asarray(ids[:max_length], dtype=np.int32)
    return Samples([("", Sample(kept, np.asarray(mask[:max_length]), len(ids) > max_length, open_turns))])


# ---------------------------------------------------------------- from spans of text to a mask


@dataclass(frozen=True)
class Span:
    start: int  # the first character
    end: int  # the first one after its end-of-turn token
    content: str
    cut: bool  # the end-of-turn token is not the target's


def masked(template: ChatTemplate, text: str, spans: list[Span], max_length: int, keep_rest: bool) -> Sample:
    """Return token ids and loss mask of a text with answers in it; without `keep_rest`, it ends with the last answer.
    Refused if the mask cannot be known exactly, or would be empty."""
    tokens = Tokens(template, text)
    mask = np.zeros(len(tokens.ids), dtype=np.bool_)
    end = 0
    for span in spans:
        first, end_of_turn = supervised(template, tokens, span.start, span.end, span.content)
        if not tokens.is_prompt(first, span.start):
            raise Refused(INSIDE)  # serving tokenizes the prompt alone
        end = end_of_turn if span.cut else end_of_turn + 1
        if span.cut and span.content == span.content.rstrip():
            # White space that the template puts before its end-of-turn token (Llama 2) is not the answer's.
            while end > first and not template.decode([tokens.ids[end - 1]]).strip():
                end -= 1
        mask[first:end] = True
    length = len(tokens.ids) if keep_rest else end
    stop = min(length, max_length)
    if not mask[:stop].any():
        raise Refused(BEYOND)
    ids = np.asarray(tokens.ids[:stop], dtype=np.int32)
    return Sample(ids, mask[:stop], length > max_length, sum(span.cut for span in spans))


def supervised(template: ChatTemplate, tokens: Tokens, start: int, end: int, content: str) -> tuple[int, int]:
    """Return the tokens [first, last) of an answer at characters [start, end); `last` is its end-of-turn token."""
    first, stop = tokens.boundary(start), tokens.boundary(end)
    ends = [i for i in range(first, stop) if tokens.ids[i] in template.end_ids]
    if not ends:  # the next turn's first token may end it (GLM), which only `_by_turn` finds
        raise Refused(NO_END)
    last = ends[0]
    # A template may close the conversation with one more (Phi).
    if template.decode([i for i in tokens.ids[last + 1 : stop] if i not in template.end_ids]).strip():
        raise Refused(ENDED if len(ends) > 1 else "text after the answer's end-of-turn token")
    body = tokens.text_between(first, last)
    # Use offsets if the tokenizer has them: a text that it normalised has another length.
    before_end = start + len(body) if tokens.offsets is None else tokens.offsets[last][0]
    if not _same(tokens.text[start:before_end], body):
        raise Refused(INSIDE)
    if not _same(body.strip(), content.strip()):
        if (after := body.strip().removeprefix(content.strip()).strip()) in template.added.values():
            raise Refused(f"answers end with {after}, which is not in eos_token_id of generation_config.json: add it")
        raise Refused("the template alters the answer")
    if not body:
        raise Refused(EMPTY)
    return first, last


def _same(left: str, right: str) -> bool:
    # Tokenizers may normalise to NFC; nothing else is forgiven.
    return unicodedata.normalize("NFC", left) == unicodedata.normalize("NFC", right)


# ---------------------------------------------------------------- the whole conversation


def one_sample(template: ChatTemplate, messages: list[Message], max_length: int, tools: Tools = None) -> Sample:
    """Return the whole conversation as it is rendered; Refused as by `masked`. The end-of-turn token of an answer with
    `finish_reason` "length" is not supervised; if such an answer is the last message, the sample ends with it."""
    answers = [message for message in messages if message["role"] == "assistant"]
    if any(m.get("reasoning_content") or m.get("tool_calls") for m in template.history(answers)):
        raise Refused("answers of several parts are taken turn by turn")
    text = template.render(messages, tools=tools)
    spans = prefix_spans(template, messages, text, tools)
    ends_open = is_learnt(messages[-1]) and spans[-1].cut
    return masked(template, text, spans, max_length, keep_rest=not ends_open)


def prefix_spans(template: ChatTemplate, messages: list[Message], text: str, tools: Tools) -> list[Span]:
    """Find the answers to learn in `text` by what each adds to the rendered conversation."""
    spans = []
    for i, message in enumerate(messages):
        if not is_learnt(message):
            continue
        before = template.render(messages[:i], add_generation_prompt=True, tools=tools)
        after = template.render(messages[: i + 1], tools=tools)
        if not text.startswith(after) or not text.startswith(before):
            raise Refused("the template rewrites history")
        if before.rstrip().endswith(OPEN) and CLOSE not in message["content"]:
            raise Refused(UNCLOSED)  # or it is cut inside its thought, which `_by_turn` can tell
        if len(after) < len(before):
            raise Refused("the generation prompt is longer than the turn")
        cut = message.get("finish_reason") == "length"
        spans.append(Span(len(before), len(after), message["content"], cut))
    return spans


# ---------------------------------------------------------------- turn by turn


@dataclass(frozen=True)
class RenderedTurn:
    """An answer after its prompt, as text with the end-of-turn token."""

    number: int  # of the conversation's answers, from 1
    text: str
    span: Span
    inserted: bool  # the template put an empty thought before it


def _by_turn(template: ChatTemplate, messages: list[Message], max_length: int, tools: Tools) -> Samples:
    result = Samples()
    answers = enumerate((i for i, message in enumerate(messages) if message["role"] == "assistant"), start=1)
    learnt = [(number, i) for number, i in answers if is_learnt(messages[i])]
    groups: list[list[RenderedTurn]] = []
    for number, i in learnt:
        try:
            turn = read_turn(template, messages[: i + 1], tools, number)
        except Refused as error:
            result.refused.append((f"~turn{number}", str(error)))
            continue
        if groups and turn.text.startswith(groups[-1][-1].text, 0, turn.span.start):
            groups[-1].append(turn)
        else:
            groups.append([turn])
    result.split = len(groups) != 1 or len(groups[0]) != len(learnt)
    while groups:
        group = groups.pop(0)
        try:
            sample = masked(template, group[-1].text, [turn.span for turn in group], max_length, keep_rest=False)
        except Refused as error:
            if len(group) > 1:  # try each by itself to find the one to refuse
                groups[:0] = [[turn] for turn in group]
                result.split = True
            else:
                result.refused.append((f"~turn{group[0].number}", str(error)))
            continue
        first, last = group[0].number, group[-1].number
        suffix = f"~turn{first}" if first == last else f"~turn{first}-{last}"
        result.samples.append((suffix if result.split else "", sample))
        result.inserted += sum(turn.inserted for turn in group)
    if not result.samples:
        raise Refused(result.refused[0][1])
    return result


def read_turn(template: ChatTemplate, messages: list[Message], tools: Tools = None, number: int = 1) -> RenderedTurn:
    """Return the last message as the target writes it in serving; Refused if its text cannot be known exactly."""
    history, message = template.history(messages[:-1]), messages[-1]
    prompt = template.render(history, add_generation_prompt=True, tools=tools)
    cut = message.get("finish_reason") == "length"
    _check(message, prompt, cut)
    if message.get("tool_calls") and "tool_calls" not in template.text(tools):
        raise Refused(f"the chat template of {template.name} writes no tool calls")
    opened = prompt.rstrip().endswith(OPEN)
    # A thought within the answer's content is the target's own text: the template would only move parts of it.
    words = message["content"]
    thinks = opened and cut and not message.get("reasoning_content")
    if OPEN in words or CLOSE in words:
        # Unless the template writes something before an answer (harmony's channel): that is the target's own, too.
        lead = _lead(template, history, prompt, tools)
        thinks = opened or not lead or (words.lstrip().startswith(OPEN) and not re.sub(EMPTY_THOUGHT, "", lead))
    if thinks and message.get("tool_calls"):
        message, thinks = apart(message), False
    if not thinks:
        whole, answer, inserted = _written(template, history, message, prompt, tools)
    else:
        if opened and CLOSE not in words and not cut:
            raise Refused(UNCLOSED)
        whole, inserted = template.render([*history, message], tools=tools), False
        answer = re.sub(rf"^\s*{OPEN}\n?", "", words) if opened else words  # the prompt holds it already
    text = prompt + answer + _end_of_turn(template, whole, "tool" if message.get("tool_calls") else "user")
    content = answer if words != words.rstrip() else answer.rstrip()  # without what the template puts behind it
    return RenderedTurn(number, text, Span(len(prompt), len(text), content, cut), inserted)


def _check(message: Message, prompt: str, cut: bool) -> None:
    content, reasoning, calls = message["content"], message.get("reasoning_content") or "", message.get("tool_calls")
    if not (content.strip() or reasoning.strip() or calls):
        raise Refused(EMPTY)
    if cut and calls:
        raise Refused("an answer that was cut off within its tool calls")
    if reasoning and (OPEN in content or CLOSE in content):
        raise Refused("a thought within the answer's content, and another in a field of its own")
    if prompt.rstrip().endswith(CLOSE) and apart(message).get("reasoning_content"):
        raise Refused("the prompt switches thinking off, but the answer has a thought")


def _written(
    template: ChatTemplate, history: list[Message], message: Message, prompt: str, tools: Tools
) -> tuple[str, str, bool]:
    """Return the rendered conversation, the answer in it, and whether that begins with an empty thought. Arguments of
    tool calls keep the target's own spelling if the template does."""
    if message.get("tool_calls"):
        with suppress(Refused):
            return _written_as(template, history, message, prompt, tools, verbatim=True)
    return _written_as(template, history, message, prompt, tools, verbatim=False)


def _written_as(
    template: ChatTemplate, history: list[Message], message: Message, prompt: str, tools: Tools, verbatim: bool
) -> tuple[str, str, bool]:
    whole = template.render([*history, message], tools=tools, verbatim=verbatim)
    body = _body(template, history, prompt, whole, tools)
    if body is not None:
        return whole, *_read_back(message, prompt, _before_end(template, body))
    # The template does not write the answer right after its generation prompt.
    if (message.get("reasoning_content") or "").strip() or message.get("tool_calls"):
        raise Refused("the template rewrites more of the turn than its text")
    if prompt.rstrip().endswith(OPEN):
        raise Refused(UNCLOSED)
    written = "tokens" in message or "token_ids" in message  # by the target, which did continue like that
    if not written and _begins(template):
        end = prompt.rstrip().splitlines()[-1][-40:]
        raise Refused(
            f"the generation prompt ends with {end!r}, which the target would not continue like this; if it did, add "
            '"tokens": 0, or their number, to the turn'
        )
    return whole, message["content"], False


def _read_back(message: Message, prompt: str, body: str) -> tuple[str, bool]:
    """Return the answer that the template wrote as `body`, and whether it begins with an empty thought."""
    opened = prompt.rstrip().endswith(OPEN)
    reasoning, calls = message.get("reasoning_content") or "", bool(message.get("tool_calls"))
    parts = markup.parse(body, opened, calls)
    if reasoning.strip() and not parts.reasoning and parts.thought:
        # The template (Kimi's) drops the thought even of a last answer. Put it back where the template left an empty
        # one: in the middle of the white space there or, if the prompt opens the thought, at its beginning.
        start, end = parts.thought
        middle = start if opened else (start + end) // 2
        body = body[:middle] + reasoning + body[middle:]
        parts = markup.parse(body, opened, calls)
    if difference := parts.difference(markup.meant(message)):
        raise Refused(f"the template alters the {difference}")
    cut = message.get("finish_reason") == "length"
    if opened and not parts.thought and not cut:
        raise Refused(UNCLOSED)
    if cut and parts.thought and not parts.content:
        start, end = parts.thought
        return body[: start + len(body[start:end].rstrip())], False  # cut inside its thought
    return body, parts.thought is not None and not parts.reasoning


def _body(template: ChatTemplate, history: list[Message], prompt: str, whole: str, tools: Tools) -> str | None:
    """Return what `whole` has after the generation prompt; None if it does not continue that prompt. A last answer may
    change how earlier turns are written (Kimi's and harmony's templates): a plain answer then shows its place."""
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


def _lead(template: ChatTemplate, history: list[Message], prompt: str, tools: Tools) -> str:
    """Return what the template writes between generation prompt and answer, without white space around it."""
    whole = template.render([*history, {"role": "assistant", "content": "x"}], tools=tools)
    return (_body(template, history, prompt, whole, tools) or "").partition("x")[0].strip()


def _begins(template: ChatTemplate) -> bool:
    """Return whether the generation prompt opens something (e.g. a thought) that the template does not write before an
    answer: the target would not continue it with a plain answer. White space and an empty thought do not count."""
    ask: list[Message] = [{"role": "user", "content": "x"}]
    base, prompt = template.render(ask), template.render(ask, add_generation_prompt=True)
    whole = template.render([*ask, {"role": "assistant", "content": "x"}])
    if not (prompt.startswith(base) and whole.startswith(base)):
        return False
    prompt, whole = "".join(prompt.split()), "".join(whole.split())  # some templates differ in white space alone
    shared = "".join(a for a, _ in takewhile(lambda pair: pair[0] == pair[1], zip(prompt, whole, strict=False)))
    shared = re.sub(r"<[^>]*$", "", shared)  # without half of a tag
    return re.sub(EMPTY_THOUGHT, "", prompt[len(shared) :]) != ""


def _before_end(template: ChatTemplate, text: str) -> str:
    """Strip the end-of-turn tokens after a text: one, two (Phi's at the end of a conversation) or none (GLM)."""
    ends = [end for end in map(template.decode, ([token] for token in template.end_ids)) if end]
    while end := next((end for end in ends if text.rstrip().endswith(end)), ""):
        text = text.rstrip().removesuffix(end)
    return text


def _end_of_turn(template: ChatTemplate, whole: str, followed_by: str) -> str:
    """Return the token that ends the answer or, if the template writes none (GLM), begins the next message."""
    rest = whole[len(_before_end(template, whole)) :]
    if not rest:
        chat = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
        longer = template.render([*chat, {"role": followed_by, "content": "z"}])
        rest = longer.removeprefix(template.render(chat))
    first = template.encode(rest.lstrip())[:1]
    if not first or first[0] not in template.end_ids:
        raise Refused(NO_END)
    return template.decode(first)
