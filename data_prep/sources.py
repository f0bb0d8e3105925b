"""Conversations and prompts as people keep them: JSON lines in several formats, files, globs or hub data sets.

A line that is no JSON, or of no known format, ends the run with its file and line number. A row
that is readable but cannot be learnt from carries its `problem`, and is counted and named later.
"""

import glob
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eagle31_train import artifacts
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
PASSED_ON = ("name", "tool_calls", "tool_call_id", "reasoning_content")

Message = dict[str, Any]


@dataclass
class Row:
    """One conversation or prompt, and where it stands."""

    id: str
    source: str
    where: str  # file:line
    messages: list[Message] = field(default_factory=list)  # role, content, and perhaps finish_reason
    problem: str | None = None


@dataclass(frozen=True)
class Source:
    """Something to read rows from, with a fingerprint of its content."""

    name: str
    fingerprint: str
    path: Path | None = None
    dataset: Any = None


def open_sources(spec: str, split: str, option: str) -> list[Source]:
    """The files, or the hub data set, that `spec` names.

    Args:
        spec: a file, a glob, or a hub id such as `org/name`.
        split: split of a hub data set.
        option: the option that holds `spec`, for the errors.

    Raises:
        UserError: there is no such file, no file matches, or the hub data set cannot be loaded.
    """
    paths = [Path(spec)] if Path(spec).is_file() else []
    if not paths and any(sign in spec for sign in "*?["):
        names = sorted(glob.glob(spec, recursive=True))  # noqa: PTH207 (Path.glob takes no absolute pattern)
        paths = [Path(name) for name in names if Path(name).is_file()]
        if not paths:
            raise UserError(f"{option}={spec} matches no file: check the pattern")
    if paths:
        return [Source(path.name, artifacts.file_sha256(path), path=path) for path in paths]
    if re.fullmatch(r"[\w.-]+/[\w.-]+", spec) and Path(spec).suffix not in (".json", ".jsonl"):
        return [_open_hub(spec, split, option)]
    raise UserError(f"{option}={spec} is missing: give a file, a glob, or a hub id such as org/name")


def _open_hub(spec: str, split: str, option: str) -> Source:
    from datasets import load_dataset

    try:
        dataset = load_dataset(spec, split=split)
    except Exception as error:
        # The hub's client raises a dozen unrelated types: no network, no such set, split or permission.
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{option}={spec} is no file, and no hub data set could be loaded: {reason}") from None
    return Source(spec, f"{split}:{dataset._fingerprint}", dataset=dataset)


def read(sources: list[Source], form: str) -> Iterator[Row]:
    """Every row of the sources, in order.

    Raises:
        UserError: a damaged line, a row of no known format, or an id used twice.
    """
    if form not in ("auto", *FORMATS):
        raise UserError(f"data.format={form} is none of auto, {', '.join(FORMATS)}")
    seen: dict[str, str] = {}
    for source in sources:
        for number, value in _values(source):
            where = f"{source.name}:{number}"
            stem = source.path.stem if source.path else source.name
            row = parse(value, form, where, f"{stem}-{number}")
            if row.id in seen:
                raise UserError(f"{where}: id {row.id!r} is also that of {seen[row.id]}: make ids unique")
            seen[row.id] = where
            yield row


def _values(source: Source) -> Iterator[tuple[int, Any]]:
    """(line number or item number, JSON value)."""
    if source.path is None:
        yield from enumerate(source.dataset, start=1)
        return
    if source.path.suffix == ".json":
        yield from enumerate(_json_list(source.path), start=1)
        return
    with source.path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                yield number, json.loads(line)
            except (json.JSONDecodeError, UnicodeDecodeError) as error:
                raise UserError(f"{source.path}:{number} is not JSON ({error}): mend or remove this line") from None


def _json_list(path: Path) -> list[Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise UserError(f"{path}:{error.lineno} is not JSON ({error.msg}): mend this line") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 ({error}): save it as UTF-8") from None
    if not isinstance(value, list):
        raise UserError(f"{path} holds no JSON list: give a list of conversations, or JSON lines as .jsonl")
    return value


# ---------------------------------------------------------------- formats


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
    row = Row(identity, source, where)
    try:
        row.messages = _READERS[found](value)
    except KeyError as error:
        raise UserError(f"{where}: data.format={found} needs the key {error.args[0]!r}") from None
    except _UnusableError as error:
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


class _UnusableError(Exception):
    """Why a readable row cannot be learnt from."""


def _message(role: Any, content: Any, extra: dict[str, Any]) -> Message:
    if role not in ROLES:
        raise _UnusableError(f"unknown role {role!r}")
    if isinstance(content, list):
        if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
            raise _UnusableError("content is not only text")
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise _UnusableError(f"a {role} turn without text")
    message = {"role": ROLES[role], "content": content}
    for key in (*PASSED_ON, "finish_reason"):
        if extra.get(key) is not None:
            message[key] = extra[key]
    return message


def _from_messages(value: dict[str, Any], key: str = "messages") -> list[Message]:
    if not isinstance(value[key], list) or not all(isinstance(turn, dict) for turn in value[key]):
        raise _UnusableError(f"{key} is no list of turns")
    return [
        _message(turn.get("role", turn.get("from")), turn.get("content", turn.get("value")), turn)
        for turn in value[key]
    ]


def _from_sharegpt(value: dict[str, Any]) -> list[Message]:
    messages = _from_messages(value, "conversations")
    if isinstance(value.get("system"), str) and value["system"] and _first_role(messages) != "system":
        messages.insert(0, {"role": "system", "content": value["system"]})
    return messages


def _first_role(messages: list[Message]) -> str | None:
    return messages[0]["role"] if messages else None


def _from_alpaca(value: dict[str, Any]) -> list[Message]:
    asked = value["instruction"]
    if value.get("input"):
        asked = f"{asked}\n\n{value['input']}"
    messages = [_message("user", asked, {})]
    if value.get("system"):
        messages.insert(0, _message("system", value["system"], {}))
    if value.get("output"):
        messages.append(_message("assistant", value["output"], {}))
    return messages


def _from_turns(value: dict[str, Any]) -> list[Message]:
    if not isinstance(value["turns"], list):
        raise _UnusableError("turns is no list")
    messages = [_message("user", turn, {}) for turn in value["turns"]]
    if value.get("system"):
        messages.insert(0, _message("system", value["system"], {}))
    return messages


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
