"""A prompt as the turns that call for an answer, and which of them still fit once the target has answered.

The recorded answers of a prompt are never kept: they are somebody else's words. Its tool results are, as long
as the target's own answer calls the tools that they are results of.
"""

from dataclasses import dataclass
from typing import Any

from data_prep.formats import HERMES, KIMI, PYTHON
from data_prep.messages import Message, Tool, UnusableError

CALLS = (KIMI, HERMES, PYTHON, "to=functions.")  # tool calls in plain text: the last is harmony's


class EndedError(Exception):
    """Why a conversation ends before its prompt does; the text is the same for like cases."""


@dataclass(frozen=True)
class Turn:
    """Messages up to one that calls for an answer.

    results: the tool results with which it begins, each with the name of the function that was called, where
        the prompt says it.
    rest: system and user messages after them.
    """

    results: list[tuple[str | None, Message]]
    rest: list[Message]


def turns_of(messages: list[Message]) -> list[Turn]:
    """What is asked, answer by answer: each user message, and the results of each answer's tool calls.

    Raises:
        UnusableError: nothing is asked, or a turn stands where no answer could follow or precede it.
    """
    turns: list[Turn] = []
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
                raise UnusableError("a tool result that follows no answer")
            results.append((_name(message, calls, len(results)), message))
        else:
            rest.append(message)
        # Of several results the last one calls for the answer; a system message calls for none.
        if role == "user" or (role == "tool" and after != "tool"):
            turns.append(Turn(results, rest))
            results, rest = [], []
        before = role
    if not turns:
        raise UnusableError("no user turn")
    if rest:
        raise UnusableError("a system turn with nothing to answer after it")
    return turns


def _name(result: Message, calls: list[dict[str, Any]], number: int) -> str | None:
    """The function that a recorded result is of: by the id of its call, its own word, or its place."""
    by_id = {call["id"]: call for call in calls if call.get("id")}
    if (call := by_id.get(result.get("tool_call_id"))) is not None:
        return str(call["function"]["name"])
    if result.get("name"):
        return str(result["name"])
    return str(calls[number]["function"]["name"]) if number < len(calls) else None


def following(turn: Turn, answer: Message | None, tools: list[Tool] | None = None) -> list[Message]:
    """The turn's messages as they follow the target's answer: its results belong to the answer's calls.

    Raises:
        EndedError: the answer calls other tools than the turn has results of.
    """
    answer = answer or {"content": ""}
    calls = answer.get("tool_calls") or []
    if tools and not calls and any(sign in answer["content"] for sign in CALLS):
        raise EndedError("the answer calls a tool in its text, in a form that cannot be taken apart")
    if calls and not turn.results:
        raise EndedError("the answer calls a tool, and the prompt has no result for it")
    if turn.results and not calls:
        raise EndedError("the prompt goes on with a tool's result, and the answer calls no tool")
    left, matched = list(turn.results), []
    for call in calls:
        name = call["function"]["name"]
        found = next((entry for entry in left if entry[0] in (name, None)), None)
        if found is None:
            raise EndedError("the answer calls other tools than the prompt has results of")
        left.remove(found)
        result = {key: value for key, value in found[1].items() if key != "tool_call_id"}
        matched.append({**result, "tool_call_id": call["id"]} if call.get("id") else result)
    if left:
        raise EndedError("the answer calls other tools than the prompt has results of")
    return [*matched, *turn.rest]
