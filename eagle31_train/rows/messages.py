"""One message of a conversation: its role, its text and, in an answer, its thought, tool calls and token ids."""

import json
from typing import Any

from eagle31_train.common import foreign
from eagle31_train.common.errors import Refused

ROLES = {
    "system": ("system", "developer"),
    "user": ("user", "human"),
    "assistant": ("assistant", "gpt", "chatgpt", "model", "bot"),
    "tool": ("tool", "function", "observation"),
}
ROLE_OF = {alias: role for role, aliases in ROLES.items() for alias in aliases}
# Besides role and content: fields that chat templates may read, and facts about an answer.
PASSED_ON = {"name": str, "tool_call_id": str, "finish_reason": str, "tokens": int}
TEXT_PARTS = ("text", "input_text", "output_text")
# Beside the text, of a row or of a turn: their part of the prompt would be lost.
MEDIA = ("image", "images", "video", "videos", "audio", "audios")
# Other names of finish_reason "length": those of Anthropic, Gemini and Mistral, a filter's and an aborted request's.
CUT = ("length", "max_tokens", "model_length", "content_filter", "abort")
NOT_LEARNT = ("train", "loss")  # axolotl's and ms-swift's names for OpenAI's weight 0, if false
THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # names in use for the thought before an answer

Message = dict[str, Any]  # role, content; perhaps reasoning_content, tool_calls, …
Tool = dict[str, Any]
Tools = list[Tool] | None  # of one conversation


def message_from(role: Any, content: Any, extra: dict[str, Any]) -> Message:
    """Return the message of a turn in any common format; `extra`: all that the turn has. Refused if it is of no use."""
    if role == "function_call":  # LLaMA-Factory's
        role, content, extra = "assistant", None, {**extra, "tool_calls": _function_calls(content)}
    if not isinstance(role, str) or role not in ROLE_OF:
        raise Refused(f"unknown role {role!r}")
    message: Message = {"role": ROLE_OF[role], "content": _joined(content) if isinstance(content, list) else content}
    message |= {key: extra[key] for key in PASSED_ON if extra.get(key) is not None}
    check_media(extra, "a turn")
    if wrong := [key for key, kind in PASSED_ON.items() if not isinstance(message.get(key, kind()), kind)]:
        raise Refused(f"{wrong[0]} of a turn is not {'a number' if wrong[0] == 'tokens' else 'text'}")
    if "finish_reason" in message:
        message["finish_reason"] = reason_of(message["finish_reason"])
    if message["role"] == "assistant":
        message |= _of_answer(extra)
        if content is None and ("reasoning_content" in message or "tool_calls" in message):
            message["content"] = ""  # beside them an answer may be empty
    if not isinstance(message["content"], str):
        raise Refused(f"a turn of role {role} without text")
    return message


def _joined(parts: list[Any]) -> str:
    if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts):
        raise Refused("content is not only text")
    if others := [str(kind) for part in parts if (kind := part.get("type") or "text") not in TEXT_PARTS]:
        raise Refused(f"content has a part of type {others[0]}")
    return "".join(part["text"] for part in parts)


def _of_answer(extra: dict[str, Any]) -> dict[str, Any]:
    """Return what only an answer has beside its content: weight, thought, tool calls and token ids, as far as given."""
    if extra.get("function_call"):
        raise Refused("a function_call, which OpenAI's API has replaced with tool_calls")
    if (weight := extra.get("weight")) not in (None, 0, 1):
        raise Refused("weight of a turn is neither 0 nor 1")
    if extra.get("channel") in ("analysis", "commentary"):  # harmony's parts of an answer
        raise Refused(f"a turn of channel {extra['channel']}: put thoughts into the answer's reasoning_content")
    found: dict[str, Any] = {}
    if weight == 0 or any(str(extra.get(key)).lower() in ("false", "0", "0.0") for key in NOT_LEARNT):
        found["weight"] = 0
    if (thought := next((extra[key] for key in THOUGHTS if extra.get(key)), None)) is not None:
        if not isinstance(thought, str):
            raise Refused("a thought that is not text")
        found["reasoning_content"] = thought
    if calls := tool_calls(extra.get("tool_calls")):
        found["tool_calls"] = calls
    if (ids := extra.get("token_ids")) is not None:  # all that it wrote, including the end of its turn
        found["token_ids"] = token_ids_of(ids)
    return found


def reason_of(given: str) -> str:
    """Return why an answer ended: "length" if it was cut off, under any of its names."""
    return "length" if given.lower() in CUT else given


def is_learnt(message: Message) -> bool:
    """Return whether a message is an answer that a drafter learns: OpenAI's weight 0 excludes it."""
    return message["role"] == "assistant" and message.get("weight") != 0


def is_cut(message: Message) -> bool:
    """Return whether an answer was cut off, so that the target did not end it."""
    return message.get("finish_reason") == "length"


def token_ids_of(value: Any, name: str = "token_ids of a turn") -> list[int]:
    try:
        return list(foreign.typed(list[foreign.Width], value))
    except ValueError:
        raise Refused(f"{name} are not a list of token ids") from None


# ---------------------------------------------------------------- tools


def tool_calls(value: Any) -> list[dict[str, Any]]:
    """Return tool calls in the form of OpenAI's API (others are Refused). Arguments stay as given, text or object."""
    if value is None:
        return []
    if not isinstance(value, list) or not all(map(_has_function_name, value)):
        raise Refused("tool_calls is not a list of calls with function.name")
    calls = []
    for call in value:
        given = call["function"].get("arguments")
        arguments(given)
        calls.append({**call, "type": "function", "function": {**call["function"], "arguments": given or {}}})
    return calls


def _function_calls(content: Any) -> list[Any]:
    """Return the calls of a turn whose content is their JSON: one object with name and arguments, or a list of them."""
    try:
        calls = foreign.parse_json(content) if isinstance(content, str) else content
    except ValueError:
        raise Refused("a function_call turn that is not JSON") from None
    return [{"function": call} for call in (calls if isinstance(calls, list) else [calls])]


def arguments(value: Any) -> dict[str, Any]:
    """Return a tool call's arguments, given as an object or as JSON text (else Refused); an empty object for none."""
    if value is None or (isinstance(value, str) and not value.strip()):
        return {}
    if isinstance(value, str):
        try:
            value = foreign.parse_json(value)
        except ValueError:
            value = None
    if not isinstance(value, dict):
        raise Refused("the arguments of a tool call are not a JSON object")
    check_text(value)  # JSON text may escape half a surrogate pair, which the check of the row does not see
    return value


def tools_of(value: Any) -> Tools:
    """Return tool definitions, given as a list or JSON text, in OpenAI's wrapping or bare; None for an empty list."""
    value = parsed(value, "tools")
    if not value:
        return None
    if isinstance(value, list):
        value = list(map(_wrapped, value))
    if not isinstance(value, list) or not all(map(_has_function_name, value)):
        raise Refused("tools is not a list of tools with function.name, in OpenAI's format")
    if any(map(_has_null_property, value)):
        raise Refused("a tool has properties that are null (a table of objects gives each those of all): use JSON text")
    return value


def _wrapped(tool: Any) -> Any:
    if not isinstance(tool, dict) or "function" in tool or "parameters" not in tool:
        return tool
    return {"type": "function", "function": {key: part for key, part in tool.items() if key != "type"}}


def _has_null_property(tool: Tool) -> bool:
    parameters = tool["function"].get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, dict) else None
    return isinstance(properties, dict) and None in properties.values()


def _has_function_name(entry: Any) -> bool:
    function = entry.get("function") if isinstance(entry, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


# ---------------------------------------------------------------- values


def parsed(value: Any, name: str) -> Any:
    """Return a column that may be given as JSON text (blank for nothing); Refused if that is not JSON."""
    if not isinstance(value, str):
        return value
    try:
        return foreign.parse_json(value) if value.strip() else None
    except ValueError:
        raise Refused(f"{name} is not JSON") from None


def check_text(value: Any) -> None:
    """Refuse half a surrogate pair. JSON can spell it (e.g. text cut by UTF-16 length), but no tokenizer takes it."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    if text != as_text(text):
        raise Refused("text with half of a surrogate pair, which is not valid Unicode")


def as_text(text: str) -> str:
    return text.encode(errors="replace").decode()


def check_media(value: dict[str, Any], where: str) -> None:
    """Refuse what comes with pictures or sound, of which its text is only a part."""
    if media := [key for key in MEDIA if not is_empty(value.get(key))]:
        raise Refused(f"{where} with {media[0]}, but eagle31 reads only text")


def is_empty(value: Any) -> bool:
    """Return whether a column says that there is nothing: a table fills it with null in some form."""
    if isinstance(value, list | dict):
        return all(map(is_empty, value.values() if isinstance(value, dict) else value))
    return value in (None, "", "[]", False)
