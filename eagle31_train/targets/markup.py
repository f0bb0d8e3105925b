"""Read back what a target writes after the generation prompt: its thought, its text and its tool calls.

This ensures that no text is trained on that differs from its message. The markup tells which form it has:

    thoughts      <think>…</think>; the prompt may hold the beginning
    Kimi          <|tool_calls_section_begin|><|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{…}…
    Qwen, Hermes  <tool_call>{"name": …, "arguments": {…}}</tool_call>, one or more
    Llama 3       {"name": …, "parameters": {…}}, perhaps after <|python_tag|>, several with ; between them
    harmony       <|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…
"""

import json
import re
from dataclasses import dataclass, field
from typing import Any

from eagle31_train.common import foreign
from eagle31_train.common.errors import Refused
from eagle31_train.rows.messages import Message, arguments, check_text

OPEN, CLOSE = "<think>", "</think>"
KIMI, HERMES, PYTHON, CHANNEL = "<|tool_calls_section_begin|>", "<tool_call>", "<|python_tag|>", "<|channel|>"

# A thought in front of an answer; its opening tag may be in the prompt.
THOUGHT = re.compile(rf"\s*(?:{OPEN})?(.*?){CLOSE}\s*", re.DOTALL)

# An empty thought: <think></think>, Gemma's <|channel>thought<channel|>.
EMPTY_THOUGHT = r"<\|?([\w:]+)\|?>[\s\w]*<[/|]?\1\|?>"

Call = tuple[str, dict[str, Any]]  # name and arguments
CALLS_DEEP = 16  # nesting levels reserved for the file or journal around them


@dataclass(frozen=True)
class Parts:
    """The parts of an answer, without the white space around them."""

    reasoning: str = ""
    content: str = ""
    calls: list[Call] = field(default_factory=list)
    thought: tuple[int, int] | None = None  # start and end of the thought in the text, even of an empty one

    def difference(self, other: "Parts") -> str | None:
        """Return the name of the first part that differs, or None. JSON is compared by value, not by spelling."""
        if self.reasoning != other.reasoning:
            return "thought"
        if self.content != other.content:
            return "answer"
        return None if _spelt(self.calls) == _spelt(other.calls) else "tool calls"


def opens_thought(prompt: str) -> bool:
    """Return whether a prompt ends inside a thought."""
    return prompt.rstrip().endswith(OPEN)


def apart(message: Message) -> Message:
    """Return a message with the thought in front of its answer moved to a separate field, as servers return it."""
    match = THOUGHT.match(message["content"]) if message["role"] == "assistant" else None
    if match is None or message.get("reasoning_content"):
        return message
    return {**message, "content": message["content"][match.end() :], "reasoning_content": match[1].strip()}


def meant(message: Message) -> Parts:
    """Return the parts of a message, which its rendered text must be read back as."""
    calls = [(c["function"]["name"], arguments(c["function"]["arguments"])) for c in message.get("tool_calls") or []]
    return Parts((message.get("reasoning_content") or "").strip(), message["content"].strip(), calls)


def parse(text: str, opened: bool = False, calls: bool = False) -> Parts:
    """Parse an answer's text, without its end-of-turn token, into parts; Refused for damaged or unknown tool calls.
    `opened`: the prompt ends inside a thought. `calls`: look for tool calls; else they are part of the answer."""
    if text.lstrip().startswith((CHANNEL, "to=")) and "<|message|>" in text:
        return _harmony(text)
    match = re.match(r"(.*?)</think>" if opened else r"\s*<think>(.*?)</think>", text, re.DOTALL)
    reasoning, rest, thought = "", text, None
    if match is not None:
        reasoning, rest, thought = match[1].strip(), text[match.end() :], match.span(1)
    content, tool_calls = _calls(rest) if calls else (rest, [])
    return Parts(reasoning, content.strip(), tool_calls, thought)


def take_apart(text: str, opened: bool, calls: bool) -> Message | None:
    """Return a message with the parts of `text`; None if it has neither channels nor tool calls (looked for only with
    `calls`), or cannot be parsed."""
    try:
        parts = parse(text, opened, calls)
        foreign.check_depth([given for _, given in parts.calls], foreign.DEEPEST - CALLS_DEEP)
        check_text(parts.calls)
    except (Refused, ValueError):
        return None
    if not parts.calls and CHANNEL not in text:
        return None
    message: Message = {"role": "assistant", "content": parts.content}
    if parts.reasoning:
        message["reasoning_content"] = parts.reasoning
    ids = re.findall(r"<\|tool_call_begin\|>\s*(.*?)\s*<\|tool_call_argument_begin\|>", text)
    if parts.calls:
        message["tool_calls"] = [
            {**({"id": ids[i]} if ids else {}), "type": "function", "function": {"name": name, "arguments": given}}
            for i, (name, given) in enumerate(parts.calls)
        ]
    return message


def _calls(text: str) -> tuple[str, list[Call]]:
    """Return the text before the tool calls, and the calls."""
    if KIMI in text:
        content, _, section = text.partition(KIMI)
        pattern = r"<\|tool_call_begin\|>(.*?)<\|tool_call_argument_begin\|>(.*?)<\|tool_call_end\|>"
        calls = _all_matches(pattern, section.rstrip().removesuffix("<|tool_calls_section_end|>"))
        return content, [(_kimi_name(call_id), _json(given)) for call_id, given in calls]
    if HERMES in text:
        content, _, _ = text.partition(HERMES)
        calls = _all_matches(r"<tool_call>(.*?)</tool_call>", text[len(content) :])
        return content, [_named(_json(call), "arguments") for (call,) in calls]
    if text.strip().startswith((PYTHON, "{")):
        return "", _llama(text.strip().removeprefix(PYTHON))
    raise Refused("tool calls in another format than that of Kimi, Qwen, Hermes, Llama 3 or harmony")


def _kimi_name(text: str) -> str:
    match = re.fullmatch(r"functions\.(.+):\d+", text.strip())
    if match is None:
        raise Refused(f"the id of a tool call is {text.strip()!r}, but the target writes functions.NAME:INDEX")
    return match[1]


def _llama(text: str) -> list[Call]:
    decoder, calls = json.JSONDecoder(), []
    while text := text.lstrip("; \n"):
        try:
            value, end = decoder.raw_decode(text)
        except (ValueError, RecursionError):
            raise Refused("a tool call that is not JSON") from None
        if not isinstance(value, dict):
            raise Refused("a tool call that is not an object")
        calls.append(_named(value, "parameters" if "parameters" in value else "arguments"))
        text = text[end:]
    return calls


def _harmony(text: str) -> Parts:
    """Parse messages in channels: analysis is thought, one with a recipient is a tool call, others are the answer."""
    pattern = (
        r"(?:<\|start\|>assistant)?(?: ?to=([^\s<]+))?<\|channel\|>(\w+)(?: to=([^\s<]+))?"
        r"(?: ?<\|constrain\|>\w+| \w+)?<\|message\|>(.*?)(?:<\|end\|>|<\|call\|>|<\|return\|>|$)"
    )
    reasoning, content, calls, thought, at = [], [], [], None, 0
    for match in re.finditer(pattern, text, re.DOTALL):
        if text[at : match.start()].strip():
            break
        at = match.end()
        to, channel, body = match[1] or match[3], match[2], match[4]
        if CHANNEL in body or "<|start|>" in body:
            raise Refused("a channel within another one")
        if to:
            calls.append((to.removeprefix("functions."), _json(body)))
        elif channel == "analysis":
            reasoning.append(body)
            thought = match.span(4)
        else:
            content.append(body)
    if text[at:].strip():
        raise Refused("a channel that cannot be read back")
    return Parts("".join(reasoning).strip(), "".join(content).strip(), calls, thought)


def _all_matches(pattern: str, text: str) -> list[tuple[str, ...]]:
    """Return the groups of every match. Only white space may stand between matches, else Refused."""
    matches = [match.groups() for match in re.finditer(pattern, text, re.DOTALL)]
    if not matches or re.sub(pattern, "", text, flags=re.DOTALL).strip():
        raise Refused("a damaged tool call")
    return matches


def _json(text: str) -> dict[str, Any]:
    try:
        value = foreign.parse_json(text)
    except ValueError:
        raise Refused("a tool call that is not JSON") from None
    if not isinstance(value, dict):
        raise Refused("a tool call without an object of arguments")
    return value


def _named(value: dict[str, Any], key: str) -> Call:
    if set(value) != {"name", key} or not isinstance(value["name"], str) or not isinstance(value[key], dict):
        raise Refused(f"a tool call without name and {key}")
    return value["name"], value[key]


def _spelt(calls: list[Call]) -> list[tuple[str, str]]:
    # As text, since 1, 1.0 and True are equal in Python.
    return [(name, json.dumps(given, sort_keys=True)) for name, given in calls]
