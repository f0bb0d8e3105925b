"""Prompts as token ids: from the held-out split, JSON lines, the Hugging Face hub, or a folder that `datasets` saved.

A `Suite` says how a row becomes a question. Rows of our own forms, with prompt, turns or messages, need no such help.
"""

import re
import string
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from eagle31_train.common import foreign
from eagle31_train.common.errors import Refused, UserError, first_line
from eagle31_train.config import is_hub_set
from eagle31_train.rows import samples
from eagle31_train.rows.files import find_files, read, stem_of
from eagle31_train.rows.formats import COLUMNS, TEMPLATE_ARGS, check_beside, messages_of, template_args
from eagle31_train.rows.messages import Message, Tool, tools_of
from eagle31_train.targets.chat import ChatTemplate

OWN_FORMS = ("messages", "turns", "prompt")  # the first that a row has, as in stage 1


@dataclass(frozen=True)
class Prompt:
    """Token ids up to and including the generation prompt, and, if known, the messages that they encode."""

    id: str
    source: str
    ids: list[int]
    messages: list[Message] | None = None
    tools: list[Tool] | None = None


@dataclass(frozen=True)
class Suite:
    """Where a set of prompts is, and how a row becomes a question.

    path: a file or glob of JSON lines, a folder that `datasets` saved or can load, or a hub id.
    prompt: a column (a text, texts of which the first is asked, or messages), or a text with {column}s in it.
    tools, id, source: columns. only: {column: value, or list of values} that rows must have.
    placeholder: the text in rows whose own text is not public; such rows are left out.
    subset, split, revision: of a data set; ignored if path is a file. Each of several subsets is a source.
    """

    path: Annotated[str, Field(min_length=1)]
    prompt: str | None = None
    tools: str | None = None
    id: str | None = None
    source: str | None = None
    only: dict[str, Any] = field(default_factory=dict)
    placeholder: str | None = None
    subset: str | list[str] | None = None
    split: str = "test"
    revision: str | None = None

    @property
    def columns(self) -> set[str]:
        if self.prompt is None or "{" not in self.prompt:
            return {self.prompt} if self.prompt else set()
        try:
            names = [name for _, name, _, _ in string.Formatter().parse(self.prompt) if name is not None]
        except ValueError as error:
            raise UserError(f"prompt={self.prompt!r} is not a template ({error}): write {{column}}") from None
        return {re.split(r"[.\[]", name)[0] for name in names}


def suite_of(name: str, given: Any) -> Suite:
    """Return the suite that an option describes: a path, or a mapping of `Suite`'s fields. UserError for any other."""
    options = {"path": given} if isinstance(given, str) else given
    if isinstance(options, dict):
        options = {key: value for key, value in options.items() if value is not None}
    try:
        suite: Suite = foreign.typed(Suite, options)
    except ValueError as error:
        known = ", ".join(each.name for each in fields(Suite))
        raise UserError(
            f"evaluate.suites.{name}={given} is not a suite ({error}): write {{path: FILE or hub id, …}} with {known}"
        ) from None
    return suite


def choose(prompts: list[Prompt], count: int, longest: int) -> tuple[list[Prompt], list[str]]:
    """Choose up to `count` distinct prompts of at most `longest` tokens: one from each source in turn, in its order.

    Also return the ids of longer prompts, which were passed over. UserError if no prompt is left."""
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
    if longest < 1:
        room = "evaluate.max_new_tokens leaves no room for a prompt in the positions of target and drafter"
        raise UserError(f"{room}: lower it by {1 - longest} or more")
    if not chosen:
        raise UserError(f"none of {len(prompts)} prompts has at most {longest} tokens: lower evaluate.max_new_tokens")
    return list(chosen.values()), too_long


def from_heldout(dataset: Path, template: ChatTemplate | None = None) -> list[Prompt]:
    """Return what precedes the assistant's first word in every held-out conversation, in the split's order.

    With `template`, messages are read off the tokens, if they are the user's, perhaps after a system message."""
    prompts = [prompt_of(row) for row in samples.load(dataset, "heldout") if any(row["loss_mask"])]
    return [replace(one, messages=template.messages_of(one.ids)) for one in prompts] if template else prompts


def prompt_of(row: Mapping[str, Any]) -> Prompt:
    """Return what precedes the assistant's first word in a conversation of stage 1."""
    return Prompt(row["id"], row["source"], row["input_ids"][: row["loss_mask"].index(True)])


def from_suite(name: str, suite: Suite, option: str, template: ChatTemplate) -> tuple[list[Prompt], list[str]]:
    """Return the prompts of a suite, and notes for readers of its numbers. UserError if the suite cannot be read.

    `name` is the source of prompts that have none; if it is empty, each file is a source."""
    prompts: dict[str, Prompt] = {}
    seen: Counter[str] = Counter()
    for where, default, source, columns in _rows(name, suite, option):
        _require(suite.only, columns, where)
        if any(columns[column] not in (v if isinstance(v, list) else [v]) for column, v in suite.only.items()):
            continue
        row, asked = _own_form(suite, columns, where)
        messages, turns = _messages(row, asked, where)
        if suite.placeholder and any(suite.placeholder in message["content"] for message in messages):
            seen["placeholders"] += 1
            continue
        prompt = _rendered(row, messages, default, source, template, where)
        if prompt.id in prompts:
            raise UserError(f"{where}: the id {prompt.id!r} occurs twice: make ids unique")
        prompts[prompt.id] = prompt
        seen["several"] += turns > 1
        seen["tools unread"] += bool(prompt.tools) and prompt.ids == template.prompt_ids(messages)
    if not prompts:
        hidden = f", but {seen['placeholders']} placeholders for texts that are not public" * (seen["placeholders"] > 0)
        raise UserError(f"{option}={suite.path} has no prompts{hidden}: choose another file, split or filter")
    notes = {
        "several": f"only the first of several turns is asked, in {seen['several']} of {len(prompts)} prompts",
        "placeholders": f"left out {seen['placeholders']} rows, placeholders for texts that are not public",
        "tools unread": f"the target's chat template ignores tools: those of {seen['tools unread']} prompts are lost",
    }
    return list(prompts.values()), [text for key, text in notes.items() if seen[key]]


def _rows(name: str, suite: Suite, option: str) -> Iterator[tuple[str, str, str, dict[str, Any]]]:
    """Yield for each row where it stands, an id and a source in case it has none, and its columns."""
    folder = Path(suite.path).is_dir() and (option != "evaluate.prompts" or _is_saved(suite.path))
    if not folder and not is_hub_set(suite.path):
        for path, file in find_files(suite.path, option):
            for number, row in read(file):
                if not isinstance(row, dict):
                    raise UserError(f"{file}:{number} is not a JSON object: fix or remove it")
                yield f"{file}:{number}", f"{stem_of(path)}-{number}", name or stem_of(path), row
        return
    given = None if _is_saved(suite.path) else suite.subset
    subsets = given if isinstance(given, list) else [given]
    for subset in subsets:
        source = str(subset) if len(subsets) > 1 else name or Path(suite.path).name
        for number, row in enumerate(_dataset(suite, subset, option), 1):
            yield f"{suite.path} ({suite.split}), row {number}", f"{source}-{number}", source, dict(row)


def _dataset(suite: Suite, subset: str | None, option: str) -> Any:
    from datasets import DatasetDict, get_dataset_split_names, load_dataset, load_from_disk

    try:
        if _is_saved(suite.path):
            saved = load_from_disk(suite.path)
            return saved[_split(suite, option, lambda: list(saved))] if isinstance(saved, DatasetDict) else saved
        split = _split(suite, option, lambda: get_dataset_split_names(suite.path, subset, revision=suite.revision))
        return load_dataset(suite.path, subset, split=split, revision=suite.revision)
    except Exception as error:
        # The hub's client raises a dozen unrelated types: no network, no such set, split or permission.
        at = f"{option}={suite.path} ({', '.join(filter(None, [subset, suite.split]))})"
        raise UserError(f"{at} cannot be loaded ({first_line(error)}): use a file, {option}=FILE") from None


def _split(suite: Suite, option: str, splits: Callable[[], list[str]]) -> str:
    """Return the suite's split, or the only one that there is if the option cannot name a split."""
    names = splits() if option == "evaluate.prompts" else []
    return names[0] if len(names) == 1 else suite.split


def _is_saved(folder: str) -> bool:
    """Return whether `datasets` saved the folder, which then has splits and no subsets."""
    return any((Path(folder) / name).is_file() for name in ("dataset_dict.json", "dataset_info.json"))


def _own_form(suite: Suite, row: dict[str, Any], where: str) -> tuple[dict[str, Any], str]:
    """Return a row in one of our own forms, which it may already have, and where its question was, in words."""
    named = {key: column for key in ("tools", "id", "source") if (column := getattr(suite, key))}
    fields = {key: row[column] for key, column in named.items() if column in row}
    columns = {*suite.columns, *named.values()}
    if suite.prompt is None or (not columns <= row.keys() and any(form in row for form in OWN_FORMS)):
        return {**row, **fields}, "prompt, turns or messages"
    _require(columns, row, where)
    try:
        filled = {column: "" if part is None else part for column, part in row.items()}
        question = suite.prompt.format_map(filled) if "{" in suite.prompt else row[suite.prompt]
    except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
        raise UserError(f"{where}: prompt={suite.prompt!r} cannot be filled in ({error!r}): fix it") from None
    system = {key: row[key] for key in COLUMNS["system"] if key in row and suite.prompt in OWN_FORMS}
    return {"prompt": question, **system, **fields}, suite.prompt


def _messages(row: dict[str, Any], asked: str, where: str) -> tuple[list[Message], int]:
    """Return a row's messages before the first answer, and how many turns it has. `asked`: its columns, in words."""
    value, turns = next((row[form] for form in OWN_FORMS if row.get(form)), None), 1
    if isinstance(value, list) and value and isinstance(value[0], str):
        value, turns = value[0], len(value)
    if not value or not (value.strip() if isinstance(value, str) else isinstance(value, list)):
        raise UserError(f"{where}: {asked} must be a text, texts or messages: fix the row, or name another column")
    history = row.get("history") if value is row.get("prompt") else None
    system = {key: row[key] for key in COLUMNS["system"] if key in row}
    try:
        check_beside(row)
        said = messages_of({"prompt": value, "history": history, **system}, "prompt")
    except Refused as error:
        raise UserError(f"{where} has a message that cannot be read ({error}): fix or remove it") from None
    if history:  # up to the last question
        last = max((at for at, message in enumerate(said) if message["role"] == "user"), default=0)
        return said[: last + 1], 1
    first = list(takewhile(lambda message: message["role"] != "assistant", said))
    return first, max(turns, sum(message["role"] == "user" for message in said[len(first) :]) + 1)


def _rendered(
    row: Mapping[str, Any], messages: list[Message], name: str, source: str, template: ChatTemplate, where: str
) -> Prompt:
    """Render the prompt of a row's messages. `name` and `source` stand in for what the row does not say."""
    try:
        if template_args(row.get(TEMPLATE_ARGS)):
            raise Refused(
                f"{TEMPLATE_ARGS} is only for training: evaluate such prompts apart, with target.template_args"
            )
        tools = tools_of(row.get("tools"))
        ids = template.prompt_ids(messages, tools)
    except Refused as error:
        raise UserError(f"{where} cannot be rendered ({error}): fix it, or its tools") from None
    named = next((row[column] for column in ("id", "question_id") if row.get(column) not in (None, "")), name)
    return Prompt(str(named), str(row.get("source") or row.get("category") or source), ids, messages, tools)


def _require(columns: Iterable[str], row: dict[str, Any], where: str) -> None:
    if missing := sorted(set(columns) - row.keys()):
        raise UserError(
            f"{where} has no column {', '.join(map(repr, missing))} (it has {', '.join(row)}): name others in the "
            "suite, or use rows with prompt, turns or messages"
        )
