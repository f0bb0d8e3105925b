"""Split a prompt into turns that call for an answer, and tell which of them still fit once the target has answered.

The recorded answers of a prompt are never kept: they are somebody else's words. Its tool results are kept as long as
the target's own answer calls the tools that they are results of.
"""

from dataclasses import dataclass
from typing import Any

from eagle31_train.common.errors import Refused
from eagle31_train.rows.messages import Message, Tool
from eagle31_train.targets.markup import HERMES, KIMI, PYTHON

CALLS = (KIMI, HERMES, PYTHON, "to=functions.")  # signs of tool calls in plain text; the last is harmony's


@dataclass(frozen=True)
class PromptTurn:
    """Messages up to one that calls for an answer."""

    results: list[tuple[str | None, Message]]  # tool results that begin it, each with its function's name if known
    rest: list[Message]  # system and user messages after them


def turns_of(messages: list[Message]) -> list[PromptTurn]:
    """Return a prompt's turns: each user message, and the results of each answer's tool calls, call for an answer.
    Refused for a prompt that cannot be asked."""
    turns: list[PromptTurn] = []
    results: list[tuple[str | None, Message]] = []
    rest: list[Message] = []
    calls: list[dict[str, Any]] = []
    before = None
    for i, message in enumerate(messages):
        role, after = message["role"], messages[i + 1]["role"] if i + 1 < len(messages) else None
        if role == "assistant":
            calls = message.get("tool_calls") or []
        elif role == "tool":
            if before not in ("assistant", "tool") or (turns == [] and not results):
                raise Refused("a tool result that follows no answer")
            results.append((_name(message, calls, len(results)), message))
        else:
            if role == "user" and not message["content"].strip():
                raise Refused("a blank user turn")
            rest.append(message)
        # The last of several results calls for the answer; a system message calls for none.
        if role == "user" or (role == "tool" and after != "tool"):
            turns.append(PromptTurn(results, rest))
            results, rest = [], []
        before = role
    if not turns:
        raise Refused("no user turn")
    if rest:
        raise Refused("a system turn with nothing to answer after it")
    return turns


def _name(result: Message, calls: list[dict[str, Any]], number: int) -> str | None:
    """Return the function that a recorded result is of, found by the id of its call, its own name, or its place."""
    by_id = {call["id"]: call for call in calls if call.get("id")}
    if (call := by_id.get(result.get("tool_call_id"))) is not None:
        return str(call["function"]["name"])
    if result.get("name"):
        return str(result["name"])
    return str(calls[number]["function"]["name"]) if number < len(calls) else None


def following(turn: PromptTurn, answer: Message | None, tools: list[Tool] | None = None) -> list[Message]:
    """Return the turn's messages after the target's answer; Refused if that calls tools other than the results'."""
    answer = answer or {"content": ""}
    calls = answer.get("tool_calls") or []
    if tools and not calls and any(sign in answer["content"] for sign in CALLS):
        raise Refused("the answer calls a tool in its text, in a form that cannot be parsed")
    if calls and not turn.results:
        raise Refused("the answer calls a tool, but the prompt has no result for it")
    if turn.results and not calls:
        raise Refused("the prompt continues with a tool's result, but the answer calls no tool")
    left, matched = list(turn.results), []
    for call in calls:
        entry = next((entry for entry in left if entry[0] in (call["function"]["name"], None)), None)
        if entry is not None:
            left.remove(entry)
            result = {key: value for key, value in entry[1].items() if key != "tool_call_id"}
            matched.append({**result, "tool_call_id": call["id"]} if call.get("id") else result)
    if left or len(matched) < len(calls):
        raise Refused("the answer calls other tools than the prompt has results for")
    return [*matched, *turn.rest]
