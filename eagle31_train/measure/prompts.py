"""What the evaluation decodes: prompts of the held-out split, or of files, as token ids, evenly of every source."""

import contextlib
import glob
import json
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import DatasetDict

from eagle31_train.measure.rendering import Message, Rendering, Tool, UnfitError
from eagle31_train.schema import UserError


@dataclass(frozen=True)
class Prompt:
    """Token ids up to and with the generation prompt, and, where they are known, the messages that they say."""

    id: str
    source: str
    ids: list[int]
    messages: list[Message] | None = None
    tools: list[Tool] | None = None


def choose(prompts: list[Prompt], count: int, longest: int) -> tuple[list[Prompt], list[str]]:
    """`count` distinct prompts of at most `longest` tokens, in turns of every source, in its order; also the ids of
    those passed over as longer.

    A source that runs out leaves its turns to the others.

    Raises:
        UserError: none is left.
    """
    by_source: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        by_source.setdefault(prompt.source, []).append(prompt)
    waiting = deque(iter(by_source[source]) for source in sorted(by_source))
    chosen: dict[tuple[int, ...], Prompt] = {}
    too_long: list[str] = []
    while waiting and len(chosen) < count:
        source = waiting.popleft()
        for prompt in source:
            if len(prompt.ids) > longest:
                too_long.append(prompt.id)
            elif tuple(prompt.ids) not in chosen:
                chosen[tuple(prompt.ids)] = prompt
                waiting.append(source)
                break
    if not chosen:
        raise UserError(
            f"none of {len(prompts)} prompts has at most {longest} tokens, which is what target and drafter leave "
            "beside evaluate.max_new_tokens: lower that"
        )
    return list(chosen.values()), too_long


def from_heldout(dataset: Path, rendering: Rendering | None = None) -> list[Prompt]:
    """Of every held-out conversation what stands before the assistant's first word, in the split's order.

    The data have tokens alone; with `rendering` the messages are read off them, where they are the user's, perhaps
    after a system message.
    """
    prompts = []
    for row in DatasetDict.load_from_disk(str(dataset))["heldout"]:
        ids = row["input_ids"][: row["loss_mask"].index(True)]
        messages = rendering.messages_of(ids) if rendering else None
        prompts.append(Prompt(row["id"], row["source"], ids, messages))
    return prompts


def files_of(pattern: str, option: str = "evaluate.prompts") -> list[Path]:
    """The files that an option names."""
    files = [Path(name) for name in sorted(glob.glob(pattern, recursive=True))]  # noqa: PTH207 (absolute patterns)
    if not files:
        raise UserError(f"{option}={pattern} is no file: give JSONL with prompt, turns or messages in each line")
    return files


def lines_of(files: list[Path]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Where each line stands, a name for it, and the object that it holds."""
    for file in files:
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise UserError(f"{file} is not UTF-8 text ({error}): save it as that") from None
        # Not splitlines, which ends a line at U+2028 too: JSON may hold it, and text from the web does.
        for number, line in enumerate(text.split("\n"), 1):
            if not line.strip():
                continue
            where = f"{file}, line {number}"
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise UserError(f"{where} is not JSON ({error}): mend or remove it") from None
            if not isinstance(row, dict):
                raise UserError(f"{where} is no object: give one with prompt, turns or messages")
            yield where, f"{file.stem}-{number}", row


def rendered(
    row: dict[str, Any],
    messages: list[Message],
    name: str,
    rendering: Rendering,
    where: str,
    source: str | None = None,
) -> Prompt:
    """The prompt of a row's messages; `name` and `source` stand in for what the row does not say."""
    tools = _tools(row.get("tools"), where)
    try:
        ids = rendering.ids(messages, tools)
    except UnfitError as error:
        raise UserError(f"{where}: {error}: change it") from None
    named = row.get("id", row.get("question_id", name))
    of = row.get("source") or row.get("category") or source or name.rpartition("-")[0]
    return Prompt(str(named), str(of), ids, messages, tools)


def _tools(value: Any, where: str) -> list[Tool] | None:
    """Tools as a list, or as JSON text of one; none, and an empty list, are None."""
    if isinstance(value, str) and value.strip():
        with contextlib.suppress(json.JSONDecodeError):  # what is no list is told below
            value = json.loads(value)
    if value and not isinstance(value, list):
        raise UserError(f"{where} has tools that are no list: give OpenAI's form of tools")
    return value or None


def conversation(row: dict[str, Any], where: str) -> list[Message]:
    """The messages before the first answer, of a row in one of the forms that need no explaining."""
    match row:
        case {"prompt": str(text)} | {"turns": [str(text), *_]}:
            return [{"role": "user", "content": text}]
        case {"messages": [_, *_] as messages}:
            return before_answer(messages, where)
    raise UserError(f"{where} has no prompt: give prompt (a text), turns (texts) or messages (role, content)")


def before_answer(messages: list[Any], where: str) -> list[Message]:
    """The messages before the assistant's first."""
    kept: list[Message] = []
    for message in messages:
        match message:
            case {"role": "assistant"}:
                break
            case {"role": str(role), "content": str(content)}:
                kept.append({"role": role, "content": content})
            case _:
                raise UserError(f"{where} has a message without role or content text: mend or remove it")
    if not kept:
        raise UserError(f"{where} begins with the assistant: there is nothing to answer")
    return kept
