"""One row of a file as a conversation: the formats in which people keep them, and the messages that come out.

A row that is of no known format ends the run; one that is readable but cannot be learnt from carries its
`problem`, and is counted and named later.
"""

import json
from dataclasses import dataclass, field
from typing import Any

from eagle31_train.schema import UserError

FORMATS = ("messages", "sharegpt", "alpaca", "turns", "prompt")
ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}
# What chat templates may read beside role and content.
PASSED_ON = ("name", "tool_call_id")
THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # names in use for what was thought before an answer

Message = dict[str, Any]
Tool = dict[str, Any]


class UnusableError(Exception):
    """Why a readable row cannot be learnt from."""


@dataclass
class Row:
    """One conversation or prompt, and where it stands."""

    id: str
    source: str
    where: str  # file:line
    messages: list[Message] = field(default_factory=list)  # role, content, perhaps finish_reason and tokens
    problem: str | None = None
    tools: list[Tool] | None = None  # what the assistant may call, as OpenAI's API defines tools


def parse(value: Any, form: str, where: str, default_id: str) -> Row:
    """One row of any known format.

    Raises:
        UserError: the value is of no known format, or not of the one that was asked for.
    """
    found = detect(value) if form == "auto" else form
    if found is None or not isinstance(value, dict):
        keys = ", ".join(list(value)[:8]) if isinstance(value, dict) else type(value).__name__
        raise UserError(
            f"{where}: no known format (has {keys}): a row needs messages, conversations, instruction, turns or prompt"
        )
    # Further samples of one prompt share its id; "#1" tells them apart.
    sample = value.get("sample") or 0
    identity = str(value.get("id") or default_id) + (f"#{sample}" if sample else "")
    source = str(value.get("source") or value.get("category") or default_id.rsplit("-", 1)[0])
    # The row is named by these wherever it is refused, so they are mended, and not refused themselves.
    row = Row(_as_text(identity), _as_text(source), where)
    try:
        row.messages = _READERS[found](value)
        row.tools = _tools(value.get("tools"))
        check_text([row.messages, row.tools])
    except KeyError as error:
        raise UserError(f"{where}: data.format={found} needs the key {error.args[0]!r}") from None
    except UnusableError as error:
        row.problem = str(error)
        return row
    if not row.messages:
        row.problem = "no messages"
    reason = value.get("finish_reason")
    if reason and row.messages and row.messages[-1]["role"] == "assistant":
        row.messages[-1].setdefault("finish_reason", reason)
    return row


def detect(value: Any) -> str | None:
    """The format of one row, by its keys; None if it has none of them."""
    if not isinstance(value, dict):
        return None
    if isinstance(value.get("messages"), list):
        return "messages"
    if isinstance(value.get("conversations"), list):
        return "sharegpt"
    if "instruction" in value:
        return "alpaca"
    if isinstance(value.get("turns"), list):
        return "turns"
    if "prompt" in value:
        return "prompt"
    return None


def check_text(value: Any) -> None:
    """Refuse half a surrogate pair: JSON can spell it (text cut by UTF-16 length has it), and no tokenizer takes it.

    Raises:
        UnusableError: somewhere in `value` there is one.
    """
    text = json.dumps(value, ensure_ascii=False, default=str)
    if text != _as_text(text):
        raise UnusableError("text with half of a surrogate pair, which is no Unicode")


def _as_text(text: str) -> str:
    return text.encode(errors="replace").decode()


def _message(role: Any, content: Any, extra: dict[str, Any]) -> Message:
    if not isinstance(role, str) or role not in ROLES:
        raise UnusableError(f"unknown role {role!r}")
    if isinstance(content, list):
        if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
            raise UnusableError("content is not only text")
        content = "".join(part["text"] for part in content)
    message: Message = {"role": ROLES[role], "content": content}
    for key in (*PASSED_ON, "finish_reason", "tokens"):
        if extra.get(key) is not None:
            message[key] = extra[key]
    if ROLES[role] == "assistant":
        _parts(message, extra)
    if not isinstance(message["content"], str):
        raise UnusableError(f"a {role} turn without text")
    return message


def _parts(message: Message, extra: dict[str, Any]) -> None:
    """An assistant's thought, under whichever name, and its tool calls; beside them it need not say anything."""
    thought = next((extra[key] for key in THOUGHTS if extra.get(key)), None)
    if thought is not None and not isinstance(thought, str):
        raise UnusableError("a thought that is not text")
    parts = {"reasoning_content": thought, "tool_calls": tool_calls(extra.get("tool_calls"))}
    message.update({key: part for key, part in parts.items() if part})
    if message["content"] is None and any(parts.values()):
        message["content"] = ""


def tool_calls(value: Any) -> list[dict[str, Any]]:
    """Tool calls as OpenAI's API gives them; arguments stay the text, or the object, that they are.

    Raises:
        UnusableError: they are in another form, or their arguments no JSON object.
    """
    if value is None:
        return []
    if not isinstance(value, list):
        raise UnusableError("tool_calls is no list")
    calls = []
    for call in value:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise UnusableError("a tool call without function.name")
        given = function.get("arguments")
        arguments(given)
        calls.append({**call, "type": "function", "function": {**function, "arguments": given or {}}})
    return calls


def arguments(value: Any) -> dict[str, Any]:
    """The arguments of a tool call, given as an object or as JSON text; none are an empty object.

    Raises:
        UnusableError: they are no JSON object.
    """
    if value is None or (isinstance(value, str) and not value.strip()):
        return {}
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            value = None
    if not isinstance(value, dict):
        raise UnusableError("the arguments of a tool call are no JSON object")
    check_text(value)  # JSON text may spell one with a backslash, so that the row about it shows none
    return value


def _tools(value: Any) -> list[Tool] | None:
    """Tool definitions, or JSON text of them; none, and an empty list, are None."""
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else None
        except ValueError:
            raise UnusableError("tools is no JSON") from None
    if not value:
        return None
    if not isinstance(value, list):
        raise UnusableError("tools is no list")
    for tool in value:
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise UnusableError("a tool without function.name: OpenAI's form of tools is needed")
    return value


def _from_messages(value: dict[str, Any], key: str = "messages") -> list[Message]:
    if not isinstance(value[key], list) or not all(isinstance(turn, dict) for turn in value[key]):
        raise UnusableError(f"{key} is no list of turns")
    messages = [
        _message(turn.get("role", turn.get("from")), turn.get("content", turn.get("value")), turn)
        for turn in value[key]
    ]
    return _with_system(messages, value)


def _with_system(messages: list[Message], value: dict[str, Any]) -> list[Message]:
    """The row's own `system` before its turns, unless they begin with one."""
    if not value.get("system") or not messages or messages[0]["role"] == "system":
        return messages
    return [_message("system", value["system"], {}), *messages]


def _from_sharegpt(value: dict[str, Any]) -> list[Message]:
    return _from_messages(value, "conversations")


def _from_alpaca(value: dict[str, Any]) -> list[Message]:
    asked = value["instruction"]
    if value.get("input"):
        asked = f"{asked}\n\n{value['input']}"
    messages = [_message("user", asked, {})]
    if value.get("output"):
        messages.append(_message("assistant", value["output"], {}))
    return _with_system(messages, value)


def _from_turns(value: dict[str, Any]) -> list[Message]:
    if not isinstance(value["turns"], list):
        raise UnusableError("turns is no list")
    return _with_system([_message("user", turn, {}) for turn in value["turns"]], value)


def _from_prompt(value: dict[str, Any]) -> list[Message]:
    if isinstance(value["prompt"], list):
        return _from_messages(value, "prompt")
    return _from_turns({**value, "turns": [value["prompt"]]})


_READERS = {
    "messages": _from_messages,
    "sharegpt": _from_sharegpt,
    "alpaca": _from_alpaca,
    "turns": _from_turns,
    "prompt": _from_prompt,
}
