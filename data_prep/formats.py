"""What a target writes after the generation prompt, read back: its thought, its text and its tool calls.

A template turns a message into text. Here the text becomes a message again, so that nothing is learnt that says
something else than the message did. Which form it is in, the markup in the text tells, not the name of a model:

    thoughts      <think>…</think>, of which the prompt may hold the beginning
    Kimi          <|tool_calls_section_begin|><|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{…}…
    Qwen, Hermes  <tool_call>{"name": …, "arguments": {…}}</tool_call>, one or more
    Llama 3       {"name": …, "parameters": {…}}, perhaps after <|python_tag|>, several with ; between them
    harmony       <|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…
"""

import json
import re
from dataclasses import dataclass, field
from typing import Any

from data_prep.messages import Message, arguments

OPEN, CLOSE = "<think>", "</think>"
KIMI, HERMES, PYTHON, CHANNEL = "<|tool_calls_section_begin|>", "<tool_call>", "<|python_tag|>", "<|channel|>"
# Markup that a server leaves out of its text where these are special tokens of the target.
MARKUP = (OPEN, CLOSE, KIMI, HERMES, PYTHON, CHANNEL)

# A thought in front of an answer, whose beginning the prompt may have held.
THOUGHT = re.compile(rf"\s*(?:{OPEN})?(.*?){CLOSE}\s*", re.DOTALL)

Call = tuple[str, dict[str, Any]]  # name and arguments


class UnreadableError(Exception):
    """Why a turn cannot be read back."""


@dataclass(frozen=True)
class Turn:
    """A turn in its parts, without the white space around them."""

    reasoning: str = ""
    content: str = ""
    calls: list[Call] = field(default_factory=list)
    thought: tuple[int, int] | None = None  # where the text's thought begins and ends, if it has one, even an empty one

    def difference(self, other: "Turn") -> str | None:
        """Which part of the two is not the same; JSON values are compared, not their spelling."""
        if self.reasoning != other.reasoning:
            return "thought"
        if self.content != other.content:
            return "answer"
        return None if _spelt(self.calls) == _spelt(other.calls) else "tool calls"


def apart(message: Message) -> Message:
    """A message with the thought in front of its answer in a field of its own, as servers hand it on."""
    found = THOUGHT.match(message["content"]) if message["role"] == "assistant" else None
    if found is None or message.get("reasoning_content"):
        return message
    return {**message, "content": message["content"][found.end() :], "reasoning_content": found[1].strip()}


def meant(message: Message) -> Turn:
    """What a message says: the turn that its text must be read back as."""
    calls = [(c["function"]["name"], arguments(c["function"]["arguments"])) for c in message.get("tool_calls") or []]
    return Turn((message.get("reasoning_content") or "").strip(), message["content"].strip(), calls)


def parse(text: str, opened: bool = False, calls: bool = False) -> Turn:
    """A turn's text, without its end-of-turn token, in its parts.

    Args:
        text: what follows the generation prompt.
        opened: the prompt ends inside a thought.
        calls: tool calls are looked for; without them what looks like one is part of the answer.

    Raises:
        UnreadableError: tool calls that are in none of the forms, or damaged.
    """
    if text.lstrip().startswith((CHANNEL, "to=")) and "<|message|>" in text:
        return _harmony(text)
    found = re.match(r"(.*?)</think>" if opened else r"\s*<think>(.*?)</think>", text, re.DOTALL)
    reasoning, rest, thought = "", text, None
    if found is not None:
        reasoning, rest, thought = found[1].strip(), text[found.end() :], found.span(1)
    content, made = _calls(rest) if calls else (rest, [])
    return Turn(reasoning, content.strip(), made, thought)


def take_apart(text: str, opened: bool) -> Message | None:
    """A message of the parts of `text`; None where it has no tool calls and no channels to be taken apart at."""
    try:
        found = parse(text, opened, calls=True)
    except UnreadableError:
        return None
    if not found.calls and CHANNEL not in text:
        return None
    message: Message = {"role": "assistant", "content": found.content}
    if found.reasoning:
        message["reasoning_content"] = found.reasoning
    ids = re.findall(r"<\|tool_call_begin\|>\s*(.*?)\s*<\|tool_call_argument_begin\|>", text)
    if found.calls:
        message["tool_calls"] = [
            {**({"id": ids[i]} if ids else {}), "type": "function", "function": {"name": name, "arguments": given}}
            for i, (name, given) in enumerate(found.calls)
        ]
    return message


def _calls(text: str) -> tuple[str, list[Call]]:
    """The text before the tool calls, and these."""
    if KIMI in text:
        content, _, section = text.partition(KIMI)
        pattern = r"<\|tool_call_begin\|>(.*?)<\|tool_call_argument_begin\|>(.*?)<\|tool_call_end\|>"
        found = _whole(pattern, section.rstrip().removesuffix("<|tool_calls_section_end|>"))
        return content, [(_kimi_name(found_id), _json(given)) for found_id, given in found]
    if HERMES in text:
        content, _, _ = text.partition(HERMES)
        found = _whole(r"<tool_call>(.*?)</tool_call>", text[len(content) :])
        return content, [_named(_json(call), "arguments") for (call,) in found]
    if text.strip().startswith((PYTHON, "{")):
        return "", _llama(text.strip().removeprefix(PYTHON))
    raise UnreadableError(
        "tool calls in a form that cannot be read back: known are those of Kimi, Qwen and Hermes, Llama 3, and harmony"
    )


def _kimi_name(text: str) -> str:
    found = re.fullmatch(r"functions\.(.+):\d+", text.strip())
    if found is None:
        raise UnreadableError(f"the id of a tool call is {text.strip()!r}, and the target writes functions.NAME:INDEX")
    return found[1]


def _llama(text: str) -> list[Call]:
    decoder, calls = json.JSONDecoder(), []
    while text := text.lstrip("; \n"):
        try:
            value, end = decoder.raw_decode(text)
        except ValueError:
            raise UnreadableError("a tool call that is no JSON") from None
        calls.append(_named(value, "parameters" if "parameters" in value else "arguments"))
        text = text[end:]
    return calls


def _harmony(text: str) -> Turn:
    """Messages in channels: analysis is thought, a recipient makes a tool call, the others are the answer."""
    pattern = (
        r"(?:<\|start\|>assistant)?(?: ?to=([^\s<]+))?<\|channel\|>(\w+)(?: to=([^\s<]+))?"
        r"(?: ?<\|constrain\|>\w+| \w+)?<\|message\|>(.*?)(?:<\|end\|>|<\|call\|>|<\|return\|>|$)"
    )
    reasoning, content, calls, thought, at = [], [], [], None, 0
    for found in re.finditer(pattern, text, re.DOTALL):
        if text[at : found.start()].strip():
            break
        at = found.end()
        to, channel, body = found[1] or found[3], found[2], found[4]
        if to:
            calls.append((to.removeprefix("functions."), _json(body)))
        elif channel == "analysis":
            reasoning.append(body)
            thought = found.span(4)
        else:
            content.append(body)
    if text[at:].strip():
        raise UnreadableError("a channel that cannot be read back")
    return Turn("".join(reasoning).strip(), "".join(content).strip(), calls, thought)


def _whole(pattern: str, text: str) -> list[tuple[str, ...]]:
    """Every match; nothing but white space may stand between them."""
    found = [match.groups() for match in re.finditer(pattern, text, re.DOTALL)]
    if not found or re.sub(pattern, "", text, flags=re.DOTALL).strip():
        raise UnreadableError("a damaged tool call")
    return found


def _json(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        raise UnreadableError("a tool call that is no JSON") from None
    if not isinstance(value, dict):
        raise UnreadableError("a tool call without an object of arguments")
    return value


def _named(value: dict[str, Any], key: str) -> Call:
    if set(value) != {"name", key} or not isinstance(value[key], dict):
        raise UnreadableError(f"a tool call without name and {key}")
    return value["name"], value[key]


def _spelt(calls: list[Call]) -> list[tuple[str, str]]:
    # As text, since Python holds 1, 1.0 and True for equal.
    return [(name, json.dumps(given, sort_keys=True)) for name, given in calls]
