"""Parse one row of a file as a conversation, in any common format. A row of unknown format ends the run. A row that
is of no use for training gets a `problem`, and is counted."""

import json
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from eagle31_train.common import foreign
from eagle31_train.common.errors import Refused, UserError
from eagle31_train.config import FORMATS

LIST_KEYS = {"messages": "messages", "conversations": "sharegpt", "turns": "turns"}
TEXT_KEYS = {"instruction": "alpaca", "prompt": "prompt"}
TOKEN_KEYS = ("input_ids", "loss_mask")  # any text beside them is for people only
WHOLE = "primary_id"  # speculators' name for the id of the conversation that a row of tokens is a turn of
TEMPLATE_ARGS = "chat_template_kwargs"  # vLLM's API name for variables of the template
# Columns under all names that public data sets use for them.
COLUMNS = {
    "conversations": ("conversations", "conversation"),
    "prompt": ("prompt", "question"),
    "system": ("system", "system_prompt"),
    "input": ("input", "context"),
    "output": ("output", "response"),
    "completion": ("completion", "response", "answer"),
}
# If a row has one of these, its question is not the whole prompt.
BESIDE_QUESTIONS = ("context", "input", "choices", "options", "passage", "article", "document", "text")
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
TEMPLATE = "template_fingerprint"
THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # names in use for the thought before an answer

Message = dict[str, Any]
Tool = dict[str, Any]
Tools = list[Tool] | None  # of one conversation


@dataclass
class Row:
    id: str
    source: str
    where: str  # file:line
    messages: list[Message] = field(default_factory=list)  # role, content; perhaps reasoning_content, tool_calls, …
    problem: str | None = None  # why it is of no use
    tools: Tools = None  # what the assistant may call, as OpenAI's API defines tools
    sample: int = 0  # which of several answers to one prompt
    template: Any = None  # the `ChatTemplate.identity` under which its token ids were written, if known
    tokens: tuple[list[int], list[bool]] | None = None  # ids and loss mask, of equal length, in place of messages
    template_args: dict[str, Any] = field(default_factory=dict)  # variables of the chat template for this row alone
    conversation: str | None = None  # the conversation that `tokens` are part of, if known


def parse(value: Any, form: str, where: str, default_id: str) -> Row:
    """Parse one row of any known format; UserError if it has none, or not the one that `form` names."""
    form_here = detect(value) if form == "auto" else form
    if form_here is None or not isinstance(value, dict):
        keys = " ".join(", ".join(value).split()) if isinstance(value, dict) else type(value).__name__
        needs = "a row needs messages, conversations, instruction, turns, prompt, question and answer, or "
        needs += " and ".join(TOKEN_KEYS)
        if isinstance(value, dict) and "question" in value and (more := next(filter(value.get, BESIDE_QUESTIONS), "")):
            needs = f"its question may be only a part of the prompt, beside {more}: write both into a column prompt"
        raise UserError(f"{where}: the row's format is unknown (it has {keys[:200]}): {needs}")
    # Further samples of one prompt share its id; "#1" tells them apart.
    sample = value.get("sample") or 0
    if isinstance(sample, str) and sample.isdecimal():  # CSV has text only
        sample = int(sample)
    if not isinstance(sample, int):
        raise UserError(f"{where}: sample is not a whole number: set it to the answer's number for its prompt, from 0")
    given = value.get("id")
    identity = str(default_id if given in (None, "") else given) + (f"#{sample}" if sample else "")
    source = str(value.get("source") or value.get("category") or default_id.rsplit("-", 1)[0])
    # Refusals name the row by these two, so bad text in them is replaced, not refused.
    row = Row(_as_text(identity), _as_text(source), where, sample=sample, template=value.get(TEMPLATE))
    try:
        if form_here == "tokens":
            row.tokens = _tokens(*(value[key] for key in TOKEN_KEYS))
            row.conversation = None if (whole := value.get(WHOLE)) is None else str(whole)
            return row
        check_beside(value)
        row.messages = messages_of(value, form_here)
        row.tools = tools_of(value.get("tools"))
        row.template_args = template_args(value.get(TEMPLATE_ARGS))
        check_text([row.messages, row.tools, row.template_args])
    except KeyError as error:
        raise UserError(f"{where}: data.format={form_here} needs the key {error.args[0]!r}") from None
    except Refused as error:
        row.problem = str(error)
        return row
    if not row.messages:
        row.problem = "no messages"
    elif isinstance(reason := value.get("finish_reason"), str) and row.messages[-1]["role"] == "assistant":
        row.messages[-1].setdefault("finish_reason", _reason(reason))
    return row


def detect(value: Any) -> str | None:
    """Return the format of one row, judged by its keys; None if it has none."""
    if not isinstance(value, dict):
        return None
    if all(isinstance(value.get(key), list) for key in TOKEN_KEYS):
        return "tokens"
    given = {form for key, form in LIST_KEYS.items() if isinstance(value.get(key), list)}
    given |= {form for key, form in TEXT_KEYS.items() if value.get(key) is not None}
    null = {form for key, form in TEXT_KEYS.items() if key in value}  # a column that this row does not fill
    aliased = {"sharegpt"} if isinstance(value.get("conversation"), list) else set[str]()
    answered = isinstance(value.get("question"), str) and isinstance(cell(value, "completion"), str)
    if answered and not any(map(value.get, BESIDE_QUESTIONS)):
        aliased.add("prompt")
    return next((form for forms in (given, aliased, null) for form in FORMATS if form in forms), None)


def cell(value: dict[str, Any], name: str) -> Any:
    """Return a row's column under the first of its names that is not empty, else that is present; None if none is."""
    given = [value[key] for key in COLUMNS[name] if key in value]
    return next(filter(None, given), given[0] if given else None)


def _text_of(value: dict[str, Any], name: str) -> str | None:
    """Return a column under any of its names if it is text: elsewhere, such a name may mean something else."""
    return answer if isinstance(answer := cell(value, name), str) else None


def _needed(value: dict[str, Any], name: str) -> Any:
    if not any(key in value for key in COLUMNS[name]):
        raise KeyError(name)
    return cell(value, name)


def check_text(value: Any) -> None:
    """Refuse half a surrogate pair. JSON can spell it (e.g. text cut by UTF-16 length), but no tokenizer takes it."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    if text != _as_text(text):
        raise Refused("text with half of a surrogate pair, which is not valid Unicode")


def _as_text(text: str) -> str:
    return text.encode(errors="replace").decode()


# ---------------------------------------------------------------- formats


def messages_of(value: dict[str, Any], form: str) -> list[Message]:
    """Return a row's messages. Its `system` goes first, unless they begin with a system message; the answer to a prompt
    goes last. Refused if they are of no use."""
    if form == "messages":
        messages = _from_list(value["messages"], "messages")
    elif form == "sharegpt":
        messages = _from_list(_needed(value, "conversations"), "conversations")
    elif form == "alpaca":
        about = cell(value, "input")
        parts = [value["instruction"], *([about] if about else [])]
        if not all(isinstance(part, str) for part in parts):
            raise Refused("an instruction or input without text")
        messages = [_message("user", "\n\n".join(part for part in parts if part), {})]
        if answer := value.get("output") or _text_of(value, "output"):
            messages.append(_message("assistant", answer, {}))
    elif form == "prompt":
        messages = _prompt_and_answer(_needed(value, "prompt"), cell(value, "completion"))
    else:
        if not isinstance(value["turns"], list):
            raise Refused("turns is not a list")
        messages = [_message("user", turn, {}) for turn in value["turns"]]
    if form in ("alpaca", "prompt") and messages:
        at = int(messages[0]["role"] == "system")
        messages[at:at] = _history(value.get("history"))
        _add_thought(messages[-1], value)
    if (system := value.get("system") or _text_of(value, "system")) and messages and messages[0]["role"] != "system":
        messages.insert(0, _message("system", system, {}))
    return messages


def _history(value: Any) -> list[Message]:
    """Return the turns before a question, LLaMA-Factory's pairs of question and answer, perhaps as JSON text."""
    try:
        pairs = foreign.parse_json(value.strip() or "[]") if isinstance(value, str) else value
    except ValueError:
        raise Refused("history is not JSON") from None
    if not pairs:
        return []
    if not isinstance(pairs, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        raise Refused("history is not a list of [question, answer] pairs")
    return [_message(role, said, {}) for pair in pairs for role, said in zip(("user", "assistant"), pair, strict=True)]


def _add_thought(answer: Message, value: dict[str, Any]) -> None:
    """Add a row's thought to its answer, from a column of its own. Such a column may also hold a label (on, direct),
    and the answer may have the thought already."""
    texts = [value[key].strip() for key in THOUGHTS if isinstance(value.get(key), str)]
    thought = next(filter(None, texts), "")
    label = thought.isascii() and len(thought.split()) < 2
    if answer["role"] == "assistant" and not label and "</think>" not in answer["content"]:
        answer.setdefault("reasoning_content", thought)


def check_beside(value: dict[str, Any]) -> None:
    """Refuse a row with parts of a prompt beside its text, which would be lost."""
    _check_media(value, "a row")
    if _is_empty(value.get("tools")) and any(isinstance(one.get("name"), str) for one in _objects(value, "functions")):
        raise Refused("functions, which OpenAI's API has replaced with tools: rename them")
    chat = any(isinstance(value.get(key), list) for key in ("messages", *COLUMNS["conversations"]))
    if chat and _objects(value, "documents"):
        raise Refused(f"documents beside the messages: put them into {TEMPLATE_ARGS}")


def _objects(value: dict[str, Any], key: str) -> list[dict[str, Any]]:
    """Return the objects of a column with a list, perhaps as JSON text."""
    given = value.get(key)
    if isinstance(given, str):
        with suppress(ValueError):
            given = foreign.parse_json(given)
    return [one for one in given if isinstance(one, dict)] if isinstance(given, list) else []


def _check_media(value: dict[str, Any], where: str) -> None:
    """Refuse what comes with pictures or sound, of which its text is only a part."""
    if media := [key for key in MEDIA if not _is_empty(value.get(key))]:
        raise Refused(f"{where} with {media[0]}, but eagle31 reads only text")


def _is_empty(value: Any) -> bool:
    """Return whether a column says that there is nothing: a table fills it with null in some form."""
    if isinstance(value, list | dict):
        return all(map(_is_empty, value.values() if isinstance(value, dict) else value))
    return value in (None, "", "[]", False)


def _prompt_and_answer(prompt: Any, answer: Any) -> list[Message]:
    """Both are text or messages. An answer that is neither (e.g. a number to compare with) is not learnt."""
    messages = _from_list(prompt, "prompt") if isinstance(prompt, list) else [_message("user", prompt, {})]
    if not messages or messages[-1]["role"] == "assistant":
        return messages
    if isinstance(answer, str) and answer:
        return [*messages, _message("assistant", answer, {})]
    is_answer = isinstance(answer, list) and all(isinstance(t, dict) and t.get("role") == "assistant" for t in answer)
    return messages + (_from_list(answer, "completion") if is_answer else [])


def _from_list(turns: Any, key: str) -> list[Message]:
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise Refused(f"{key} is not a list of turns")
    return [
        _message(turn.get("role", turn.get("from")), turn.get("content", turn.get("value")), turn) for turn in turns
    ]


def _message(role: Any, content: Any, extra: dict[str, Any]) -> Message:
    if role == "function_call":  # LLaMA-Factory's
        role, content, extra = "assistant", None, {**extra, "tool_calls": _function_calls(content)}
    if not isinstance(role, str) or role not in ROLE_OF:
        raise Refused(f"unknown role {role!r}")
    if isinstance(content, list):
        if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
            raise Refused("content is not only text")
        if others := [str(kind) for part in content if (kind := part.get("type") or "text") not in TEXT_PARTS]:
            raise Refused(f"content has a part of type {others[0]}")
        content = "".join(part["text"] for part in content)
    message: Message = {"role": ROLE_OF[role], "content": content}
    message |= {key: extra[key] for key in PASSED_ON if extra.get(key) is not None}
    _check_media(extra, "a turn")
    if wrong := [key for key, kind in PASSED_ON.items() if not isinstance(message.get(key, kind()), kind)]:
        raise Refused(f"{wrong[0]} of a turn is not {'a number' if wrong[0] == 'tokens' else 'text'}")
    if "finish_reason" in message:
        message["finish_reason"] = _reason(message["finish_reason"])
    if message["role"] == "assistant":
        if extra.get("function_call"):
            raise Refused("a function_call, which OpenAI's API has replaced with tool_calls")
        if (weight := extra.get("weight")) not in (None, 0, 1):
            raise Refused("weight of a turn is neither 0 nor 1")
        if extra.get("channel") in ("analysis", "commentary"):  # harmony's parts of an answer
            raise Refused(f"a turn of channel {extra['channel']}: put thoughts into the answer's reasoning_content")
        if weight == 0 or any(str(extra.get(key)).lower() in ("false", "0", "0.0") for key in NOT_LEARNT):
            message["weight"] = 0
        thought = next((extra[key] for key in THOUGHTS if extra.get(key)), None)
        if thought is not None and not isinstance(thought, str):
            raise Refused("a thought that is not text")
        parts = {"reasoning_content": thought, "tool_calls": tool_calls(extra.get("tool_calls"))}
        message |= {key: part for key, part in parts.items() if part}
        if (ids := extra.get("token_ids")) is not None:  # all that it wrote, including the end of its turn
            message["token_ids"] = _token_ids(ids)
        if content is None and any(parts.values()):  # beside them an answer may be empty
            message["content"] = ""
    if not isinstance(message["content"], str):
        raise Refused(f"a turn of role {role} without text")
    return message


def _reason(given: str) -> str:
    """Return why an answer ended: "length" if it was cut off, under any of its names."""
    return "length" if given.lower() in CUT else given


def is_learnt(message: Message) -> bool:
    """Return whether a message is an answer that a drafter learns: OpenAI's weight 0 excludes it."""
    return message["role"] == "assistant" and message.get("weight") != 0


def is_cut(message: Message) -> bool:
    """Return whether an answer was cut off, so that the target did not end it."""
    return message.get("finish_reason") == "length"


def _token_ids(value: Any, name: str = "token_ids of a turn") -> list[int]:
    try:
        return list(foreign.typed(list[foreign.Width], value))
    except ValueError:
        raise Refused(f"{name} are not a list of token ids") from None


def _tokens(ids: Any, mask: Any) -> tuple[list[int], list[bool]]:
    ids = _token_ids(ids, "input_ids")
    if not isinstance(mask, list) or len(mask) != len(ids) or any(bit not in (0, 1) for bit in mask):
        raise Refused("loss_mask does not have a 0 or 1 for each of the input_ids")
    if not any(mask) or mask[0]:
        raise Refused("loss_mask has no 1, or no 0 before the first 1 (the prompt's tokens need 0)")
    return ids, list(map(bool, mask))


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
    if isinstance(value, str):
        try:
            value = foreign.parse_json(value) if value.strip() else None
        except ValueError:
            raise Refused("tools is not JSON") from None
    if not value:
        return None
    if isinstance(value, list):
        value = list(map(_wrapped, value))
    if not isinstance(value, list) or not all(map(_has_function_name, value)):
        raise Refused("tools is not a list of tools with function.name, in OpenAI's format")
    if any(map(_has_null_property, value)):
        raise Refused("a tool has properties that are null (a table of objects gives each those of all): use JSON text")
    return value


def template_args(value: Any) -> dict[str, Any]:
    try:
        value = foreign.parse_json(value) if isinstance(value, str) and value.strip() else value
    except ValueError:
        raise Refused(f"{TEMPLATE_ARGS} is not JSON") from None
    if value and not isinstance(value, dict):
        raise Refused(f"{TEMPLATE_ARGS} is not a JSON object")
    try:
        json.dumps(value)
    except (TypeError, ValueError):  # e.g. a date from Parquet
        raise Refused(f"{TEMPLATE_ARGS} is not JSON") from None
    return {name: one for name, one in (value or {}).items() if one is not None}  # in Parquet, every row has all names


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
