"""Read one answer as text: the prompt that the target sees in serving, and all that the target writes after it.

Only the answer's words are known. What the target wrote is rebuilt from them in one of three ways:

    as it stands    The words have the target's thought among them, so they are all that it wrote.
    as rendered     The template writes the answer after its generation prompt, as most do. What it puts between is the
                    target's own: an empty thought (Qwen3), a channel (harmony). An answer may change how the template
                    writes earlier turns (Kimi, harmony).
    plain           The template does not write answers where its generation prompt ends, but the target does: they
                    differ in white space, or only the prompt has an empty thought. The words are all that it wrote.

A turn is refused if its text cannot be read back as the message that it was made from (markup.py).
"""

import re
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile

from data_prep.sample import EMPTY
from eagle31_train.common.errors import Refused
from eagle31_train.rows.messages import Message, Tools, is_cut
from eagle31_train.targets import markup
from eagle31_train.targets.chat import ChatTemplate
from eagle31_train.targets.markup import CLOSE, EMPTY_THOUGHT, OPEN, apart, meant, opens_thought

NO_END = "no end-of-turn token after the answer"
UNCLOSED = "the generation prompt opens a thought that the answer does not close"
ASK: Message = {"role": "user", "content": "x"}
PLAIN: Message = {"role": "assistant", "content": "x"}  # an answer that shows what the template writes around one


@dataclass(frozen=True)
class Span:
    """An answer in a text."""

    start: int  # the first character
    end: int  # the first one after its end-of-turn token
    content: str
    cut: bool  # the end-of-turn token is not the target's
    inserted: bool = False  # the template put an empty thought before it


@dataclass(frozen=True)
class Turn:
    """An answer after its prompt, as text with the end-of-turn token."""

    text: str
    answer: Span

    def continues(self, earlier: "Turn") -> bool:
        """Return whether the prompt begins with all of an earlier turn."""
        return self.text.startswith(earlier.text, 0, self.answer.start)


def read_turn(template: ChatTemplate, messages: list[Message], tools: Tools = None) -> Turn:
    """Return the last message as the target writes it in serving; Refused if its text cannot be known exactly."""
    history, message = template.history(messages[:-1]), messages[-1]
    prompt = template.render(history, add_generation_prompt=True, tools=tools)
    asked = Asked(template, history, tools, prompt)
    _check(asked, message)
    if _has_own_thought(asked, message):
        if not message.get("tool_calls"):
            return _as_it_stands(asked, message)
        message = apart(message)
    if message.get("tool_calls"):
        with suppress(Refused):  # their arguments in the target's own spelling, if the template keeps it
            return _as_rendered(asked, message, verbatim=True)
    return _as_rendered(asked, message)


@dataclass(frozen=True)
class Asked:
    """A conversation in which an answer is due."""

    template: ChatTemplate
    history: list[Message]
    tools: Tools
    prompt: str  # up to and including the generation prompt

    @property
    def opened(self) -> bool:
        """Whether the prompt ends inside a thought."""
        return opens_thought(self.prompt)

    def answered(self, message: Message, verbatim: bool = False) -> str:
        """Return the conversation with an answer; see `ChatTemplate.render`."""
        return self.template.render([*self.history, message], tools=self.tools, verbatim=verbatim)

    @cached_property
    def _answered_plainly(self) -> str:
        return self.answered(PLAIN)

    def after_prompt(self, whole: str) -> str | None:
        """Return what the answered conversation has after the generation prompt; None if it does not continue that."""
        if whole.startswith(self.prompt):
            return whole[len(self.prompt) :]
        # An answer may change how earlier turns are written. A plain one then shows where it begins.
        unanswered = self.template.render(self.history, tools=self.tools)
        if not self.prompt.startswith(unanswered):
            return None
        opening = self.prompt[len(unanswered) :]
        header = opening.split(OPEN)[0]
        start = self._answered_plainly.rfind(header) if header.strip() else -1
        if start < 0 or not whole.startswith(self._answered_plainly[:start] + opening):
            return None
        return whole[start + len(opening) :]

    @cached_property
    def lead(self) -> str:
        """What the template writes between generation prompt and answer, without white space around it."""
        after = self.after_prompt(self._answered_plainly) or ""
        return after.partition(PLAIN["content"])[0].strip()

    def turn(self, message: Message, whole: str, answer: str, inserted: bool = False) -> Turn:
        """Return the turn of an answer, as the target writes it, with the end that it has in the conversation."""
        followed_by = "tool" if message.get("tool_calls") else "user"
        text = self.prompt + answer + _end_of_turn(self.template, whole, followed_by)
        words = message["content"]
        content = answer if words != words.rstrip() else answer.rstrip()  # without what the template puts behind it
        return Turn(text, Span(len(self.prompt), len(text), content, is_cut(message), inserted))


def _check(asked: Asked, message: Message) -> None:
    """Refuse an answer whose parts contradict each other or the prompt."""
    said = meant(message)
    if not (said.content or said.reasoning or said.calls):
        raise Refused(EMPTY)
    if is_cut(message) and said.calls:
        raise Refused("an answer that was cut off within its tool calls")
    if said.reasoning and _has_tags(message):
        raise Refused("a thought within the answer's content, and another in a field of its own")
    if asked.prompt.rstrip().endswith(CLOSE) and meant(apart(message)).reasoning:
        raise Refused("the prompt switches thinking off, but the answer has a thought")
    asked.template.check_calls(message, asked.tools)


def _has_tags(message: Message) -> bool:
    return OPEN in message["content"] or CLOSE in message["content"]


def _has_own_thought(asked: Asked, message: Message) -> bool:
    """Return whether the answer's words have its thought among them, or are part of it."""
    if not _has_tags(message):
        return asked.opened and is_cut(message) and not meant(message).reasoning  # cut inside its thought
    if asked.opened or not asked.lead:
        return True
    # What the template writes before an answer is the target's own, too (harmony's channel), and the tags are words;
    # but a thought takes the place of an empty one.
    return message["content"].lstrip().startswith(OPEN) and not re.sub(EMPTY_THOUGHT, "", asked.lead)


# ---------------------------------------------------------------- the three ways


def _as_it_stands(asked: Asked, message: Message) -> Turn:
    """Take the answer's words, thought included. The template would only move parts of them."""
    words = message["content"]
    if asked.opened:
        if CLOSE not in words and not is_cut(message):
            raise Refused(UNCLOSED)
        words = re.sub(rf"^\s*{OPEN}\n?", "", words)  # the prompt has it already
    return asked.turn(message, asked.answered(message), words)


def _as_rendered(asked: Asked, message: Message, verbatim: bool = False) -> Turn:
    """Take what the template writes after its generation prompt; `verbatim`: see `ChatTemplate.render`."""
    whole = asked.answered(message, verbatim)
    body = asked.after_prompt(whole)
    if body is None:
        _check_plain(asked, message)
        return asked.turn(message, whole, message["content"])
    answer, inserted = _read_back(asked, message, body)
    return asked.turn(message, whole, answer, inserted)


def _read_back(asked: Asked, message: Message, after_prompt: str) -> tuple[str, bool]:
    """Return the answer in what the template wrote after the prompt, and whether it begins with an empty thought."""
    said, calls, opened = meant(message), bool(message.get("tool_calls")), asked.opened
    body = _before_end(asked.template, after_prompt)
    end = after_prompt[len(body) :]
    parts = markup.parse(body, opened, calls)
    if said.reasoning and not parts.reasoning and parts.thought:
        # The template (Kimi's) drops the thought even of a last answer. Put it back where the template left an empty
        # one: in the middle of the white space there or, if the prompt opens the thought, at its beginning.
        first, last = parts.thought
        middle = first if opened else (first + last) // 2
        body = body[:middle] + message["reasoning_content"] + body[middle:]
        parts = markup.parse(body, opened, calls)
    difference = parts.difference(said)
    if difference == "answer" and parts.content.startswith(said.content):
        _check_end(asked.template, parts.content.removeprefix(said.content) + end)
    if difference is not None:
        raise Refused(f"the template alters the {difference}")
    if opened and not parts.thought:
        raise Refused(UNCLOSED)
    if parts.thought and not parts.content and is_cut(message):  # inside its thought
        first, last = parts.thought
        return body[: first + len(body[first:last].rstrip())], False
    return body, parts.thought is not None and not parts.reasoning


def _check_plain(asked: Asked, message: Message) -> None:
    """Refuse an answer in several parts, and one that the target would not write after this generation prompt."""
    if meant(message).reasoning or message.get("tool_calls"):
        raise Refused("the template rewrites more of the turn than its text")
    if asked.opened:
        raise Refused(UNCLOSED)
    by_target = "tokens" in message or "token_ids" in message  # which did continue the prompt like that
    if not by_target and _begins_other_than_plain(asked.template):
        end = asked.prompt.rstrip().splitlines()[-1][-40:]
        raise Refused(
            f"the generation prompt ends with {end!r}, which the target would not continue like this; if it did, add "
            '"tokens": 0, or their number, to the turn'
        )


def _begins_other_than_plain(template: ChatTemplate) -> bool:
    """Return whether the generation prompt opens something (e.g. a thought) that the template does not write before an
    answer: the target would not continue it with a plain answer. White space and an empty thought do not count."""
    base, prompt = template.render([ASK]), template.render([ASK], add_generation_prompt=True)
    whole = template.render([ASK, PLAIN])
    if not (prompt.startswith(base) and whole.startswith(base)):
        return False
    prompt, whole = "".join(prompt.split()), "".join(whole.split())  # some templates differ in white space alone
    shared = "".join(a for a, _ in takewhile(lambda pair: pair[0] == pair[1], zip(prompt, whole, strict=False)))
    shared = re.sub(r"<[^>]*$", "", shared)  # without half of a tag
    return re.sub(EMPTY_THOUGHT, "", prompt[len(shared) :]) != ""


# ---------------------------------------------------------------- the end of the turn


def _check_end(template: ChatTemplate, after: str) -> None:
    """Refuse an end at which the target does not stop, or none. `after`: all that stands after an answer's words."""
    if (end := _before_end(template, after).strip()) in template.added.values():
        raise Refused(f"answers end with {end}, which is not in eos_token_id of generation_config.json: add it")
    if not any(end in after for end in _ends(template)):
        raise Refused(NO_END)


def _ends(template: ChatTemplate) -> list[str]:
    """Return how the end-of-turn tokens are spelt."""
    return [end for end in map(template.decode, ([token] for token in template.end_ids)) if end]


def _before_end(template: ChatTemplate, text: str) -> str:
    """Strip the end-of-turn tokens after a text: one, two (Phi's at the end of a conversation) or none (GLM)."""
    ends = _ends(template)
    while end := next((end for end in ends if text.rstrip().endswith(end)), ""):
        text = text.rstrip().removesuffix(end)
    return text


def _end_of_turn(template: ChatTemplate, whole: str, followed_by: str) -> str:
    """Return the token that ends the answer or, if the template writes none (GLM), begins the next message."""
    rest = whole[len(_before_end(template, whole)) :]
    if not rest:
        chat = [ASK, {"role": "assistant", "content": "y"}]
        longer = template.render([*chat, {"role": followed_by, "content": "z"}])
        rest = longer.removeprefix(template.render(chat))
    first = template.encode(rest.lstrip())[:1]
    if not first or first[0] not in template.end_ids:
        raise Refused(NO_END)
    return template.decode(first)
