"""Parse one row of a file as a conversation, in any common format. A row of unknown format ends the run. A row that
is of no use for training gets a `problem`, and is counted."""

import json
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from eagle31_train.common import foreign
from eagle31_train.common.errors import Refused, UserError
from eagle31_train.config import FORMATS
from eagle31_train.rows.messages import (
    THOUGHTS,
    Message,
    Tools,
    as_text,
    check_media,
    check_text,
    is_empty,
    message_from,
    parsed,
    reason_of,
    token_ids_of,
    tools_of,
)

LIST_KEYS = {"messages": "messages", "conversations": "sharegpt", "turns": "turns"}
TEXT_KEYS = {"instruction": "alpaca", "prompt": "prompt"}
TOKEN_KEYS = ("input_ids", "loss_mask")  # any text beside them is for people only
WHOLE = "primary_id"  # speculators' name for the id of the conversation that a row of tokens is a turn of
TEMPLATE = "template_fingerprint"
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


@dataclass
class Row:
    id: str
    source: str
    where: str  # file:line
    messages: list[Message] = field(default_factory=list)
    problem: str | None = None  # why it is of no use
    tools: Tools = None  # what the assistant may call, as OpenAI's API defines tools
    sample: int = 0  # which of several answers to one prompt
    template: Any = None  # the `ChatTemplate.identity` under which its token ids were written, if known
    tokens: tuple[list[int], list[bool]] | None = None  # ids and loss mask, of equal length, in place of messages
    template_args: dict[str, Any] = field(default_factory=dict)  # variables of the chat template for this row alone
    conversation: str | None = None  # the conversation that `tokens` are part of, if known


def parse(value: Any, form: str, where: str, default_id: str) -> Row:
    """Parse one row of any known format; UserError if it has none, or not the one that `form` names."""
    found = detect(value) if form == "auto" else form
    if found is None or not isinstance(value, dict):
        raise UserError(f"{where}: the row's format is unknown {_what_it_has(value)}")
    sample = _sample(value.get("sample"), where)
    given = value.get("id")
    # Further samples of one prompt share its id; "#1" tells them apart.
    identity = str(default_id if given in (None, "") else given) + (f"#{sample}" if sample else "")
    source = str(value.get("source") or value.get("category") or default_id.rsplit("-", 1)[0])
    # Refusals name the row by these two, so bad text in them is replaced, not refused.
    row = Row(as_text(identity), as_text(source), where, sample=sample, template=value.get(TEMPLATE))
    try:
        if found == "tokens":
            _add_tokens(row, value)
        else:
            _add_conversation(row, value, found)
    except KeyError as error:
        raise UserError(f"{where}: data.format={found} needs the key {error.args[0]!r}") from None
    except Refused as error:
        row.problem = str(error)
    return row


def _what_it_has(value: Any) -> str:
    """Return what is in a row of unknown format, and what it needs."""
    keys = " ".join(", ".join(value).split()) if isinstance(value, dict) else type(value).__name__
    needs = "a row needs messages, conversations, instruction, turns, prompt, question and answer, or "
    needs += " and ".join(TOKEN_KEYS)
    if isinstance(value, dict) and "question" in value and (more := next(filter(value.get, BESIDE_QUESTIONS), "")):
        needs = f"its question may be only a part of the prompt, beside {more}: write both into a column prompt"
    return f"(it has {keys[:200]}): {needs}"


def _sample(given: Any, where: str) -> int:
    if isinstance(given, str) and given.isdecimal():  # CSV has text only
        return int(given)
    if not isinstance(given or 0, int):
        raise UserError(f"{where}: sample is not a whole number: set it to the answer's number for its prompt, from 0")
    return given or 0


def detect(value: Any) -> str | None:
    """Return the format of one row, judged by its keys; None if it has none."""
    if not isinstance(value, dict):
        return None
    if all(isinstance(value.get(key), list) for key in TOKEN_KEYS):
        return "tokens"
    # The surest first: a format's own column, then one of another name, then its own column, left empty by this row.
    own = {form for key, form in LIST_KEYS.items() if isinstance(value.get(key), list)}
    own |= {form for key, form in TEXT_KEYS.items() if value.get(key) is not None}
    aliased = {"sharegpt"} if isinstance(value.get("conversation"), list) else set[str]()
    answered = isinstance(value.get("question"), str) and isinstance(cell(value, "completion"), str)
    if answered and not any(map(value.get, BESIDE_QUESTIONS)):
        aliased.add("prompt")
    empty = {form for key, form in TEXT_KEYS.items() if key in value}
    return next((form for forms in (own, aliased, empty) for form in FORMATS if form in forms), None)


def cell(value: dict[str, Any], name: str) -> Any:
    """Return a row's column under the first of its names that is not empty, else that is present; None if none is."""
    given = [value[key] for key in COLUMNS[name] if key in value]
    return next(filter(None, given), given[0] if given else None)


def _own_or_text(value: dict[str, Any], name: str) -> Any:
    """Return a column whatever it holds, or one of its other names if that is text: they may mean something else."""
    return value.get(name) or (other if isinstance(other := cell(value, name), str) else None)


def _needed(value: dict[str, Any], name: str) -> Any:
    if not any(key in value for key in COLUMNS[name]):
        raise KeyError(name)
    return cell(value, name)


# ---------------------------------------------------------------- rows of each kind


def _add_tokens(row: Row, value: dict[str, Any]) -> None:
    row.tokens = _tokens(*(value[key] for key in TOKEN_KEYS))
    row.conversation = None if (whole := value.get(WHOLE)) is None else str(whole)


def _tokens(ids: Any, mask: Any) -> tuple[list[int], list[bool]]:
    ids = token_ids_of(ids, "input_ids")
    if not isinstance(mask, list) or len(mask) != len(ids) or any(bit not in (0, 1) for bit in mask):
        raise Refused("loss_mask does not have a 0 or 1 for each of the input_ids")
    if not any(mask) or mask[0]:
        raise Refused("loss_mask has no 1, or no 0 before the first 1 (the prompt's tokens need 0)")
    return ids, list(map(bool, mask))


def _add_conversation(row: Row, value: dict[str, Any], form: str) -> None:
    check_beside(value)
    row.messages = messages_of(value, form)
    row.tools = tools_of(value.get("tools"))
    row.template_args = template_args(value.get(TEMPLATE_ARGS))
    check_text([row.messages, row.tools, row.template_args])
    if not row.messages:
        raise Refused("no messages")
    last, reason = row.messages[-1], value.get("finish_reason")
    if isinstance(reason, str) and last["role"] == "assistant":
        last.setdefault("finish_reason", reason_of(reason))


def check_beside(value: dict[str, Any]) -> None:
    """Refuse a row with parts of a prompt beside its text, which would be lost."""
    check_media(value, "a row")
    if is_empty(value.get("tools")) and any(isinstance(one.get("name"), str) for one in _objects(value, "functions")):
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


def template_args(value: Any) -> dict[str, Any]:
    """Return a row's variables of the chat template, given as an object or JSON text."""
    value = parsed(value, TEMPLATE_ARGS) or {}
    if not isinstance(value, dict):
        raise Refused(f"{TEMPLATE_ARGS} is not a JSON object")
    try:
        json.dumps(value)
    except (TypeError, ValueError):  # e.g. a date from Parquet
        raise Refused(f"{TEMPLATE_ARGS} is not JSON") from None
    return {name: one for name, one in value.items() if one is not None}  # in Parquet, every row has all names


# ---------------------------------------------------------------- messages of each format


def messages_of(value: dict[str, Any], form: str) -> list[Message]:
    """Return a row's messages. Its `system` goes first, unless they begin with a system message; the answer to a prompt
    goes last. Refused if they are of no use."""
    if form == "messages":
        messages = _from_list(value["messages"], "messages")
    elif form == "sharegpt":
        messages = _from_list(_needed(value, "conversations"), "conversations")
    elif form == "alpaca":
        messages = _with_columns(_alpaca(value), value)
    elif form == "prompt":
        messages = _with_columns(_prompt_and_answer(_needed(value, "prompt"), cell(value, "completion")), value)
    else:
        if not isinstance(value["turns"], list):
            raise Refused("turns is not a list")
        messages = [message_from("user", turn, {}) for turn in value["turns"]]
    if (system := _own_or_text(value, "system")) and messages and messages[0]["role"] != "system":
        messages.insert(0, message_from("system", system, {}))
    return messages


def _from_list(turns: Any, key: str) -> list[Message]:
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise Refused(f"{key} is not a list of turns")
    return [
        message_from(turn.get("role", turn.get("from")), turn.get("content", turn.get("value")), turn) for turn in turns
    ]


def _alpaca(value: dict[str, Any]) -> list[Message]:
    about = cell(value, "input")
    parts = [value["instruction"], *([about] if about else [])]
    if not all(isinstance(part, str) for part in parts):
        raise Refused("an instruction or input without text")
    messages = [message_from("user", "\n\n".join(part for part in parts if part), {})]
    if answer := _own_or_text(value, "output"):
        messages.append(message_from("assistant", answer, {}))
    return messages


def _prompt_and_answer(prompt: Any, answer: Any) -> list[Message]:
    """Both are text or messages. An answer that is neither (e.g. a number to compare with) is not learnt."""
    messages = _from_list(prompt, "prompt") if isinstance(prompt, list) else [message_from("user", prompt, {})]
    if not messages or messages[-1]["role"] == "assistant":
        return messages
    if isinstance(answer, str) and answer:
        return [*messages, message_from("assistant", answer, {})]
    is_answer = isinstance(answer, list) and all(isinstance(t, dict) and t.get("role") == "assistant" for t in answer)
    return messages + (_from_list(answer, "completion") if is_answer else [])


def _with_columns(messages: list[Message], value: dict[str, Any]) -> list[Message]:
    """Add what a row has in further columns: the turns before its question, and the thought before its answer."""
    if not messages:
        return []
    at = int(messages[0]["role"] == "system")
    messages = [*messages[:at], *_history(value.get("history")), *messages[at:]]
    _add_thought(messages[-1], value)
    return messages


def _history(value: Any) -> list[Message]:
    """Return the turns before a question, LLaMA-Factory's pairs of question and answer, perhaps as JSON text."""
    pairs = parsed(value, "history") or []
    if not isinstance(pairs, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        raise Refused("history is not a list of [question, answer] pairs")
    return [
        message_from(role, said, {}) for pair in pairs for role, said in zip(("user", "assistant"), pair, strict=True)
    ]


def _add_thought(answer: Message, value: dict[str, Any]) -> None:
    """Add a row's thought to its answer, from a column of its own. Such a column may also hold a label (on, direct),
    and the answer may have the thought already."""
    texts = [value[key].strip() for key in THOUGHTS if isinstance(value.get(key), str)]
    thought = next(filter(None, texts), "")
    label = thought.isascii() and len(thought.split()) < 2
    if answer["role"] == "assistant" and not label and "</think>" not in answer["content"]:
        answer.setdefault("reasoning_content", thought)
