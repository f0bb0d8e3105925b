"""Suites: sets of prompts, of a file of JSON lines, of the hub, or as `datasets` saved them.

How a row becomes a question, its suite says. Rows of our own forms, with prompt, turns or messages, need no explaining:
a file of them can stand in for any suite.
"""

import difflib
import re
import string
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from eagle31_train.measure.prompts import Prompt, before_answer, conversation, files_of, lines_of, rendered
from eagle31_train.measure.rendering import Message, Rendering
from eagle31_train.schema import UserError

OWN = ("prompt", "turns", "messages")
KINDS: dict[str, Any] = {"only": dict, "subset": (str, list)}  # of a suite's fields that are no texts


@dataclass(frozen=True)
class Suite:
    """Where a set of prompts lies and how a row becomes a question.

    path: a file or glob of JSON lines, a folder that `datasets` saved or can load, or a hub id.
    prompt: a column (a text, texts of which the first is asked, or messages), or a text with {column}s in it.
    tools, id, source: columns. only: {column: value, or list of values} that rows must have.
    placeholder: what stands in rows whose text is not public; they are left out.
    subset, split, revision: of a data set, and not looked at where path is a file; of several subsets each is a source
    of its own.
    """

    path: str
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
        """The columns that the question is made of."""
        if self.prompt is None or "{" not in self.prompt:
            return {self.prompt} if self.prompt else set()
        names = [name for _, name, _, _ in string.Formatter().parse(self.prompt) if name is not None]
        return {re.split(r"[.\[]", name)[0] for name in names}

    @property
    def is_hub_id(self) -> bool:
        """Whether it lies on the hub, or in its cache, and not here."""
        path = Path(self.path)
        named = re.fullmatch(r"[\w.-]+/[\w.-]+", self.path) is not None
        return named and path.suffix not in (".json", ".jsonl") and not path.exists()


def suite_of(name: str, given: Any) -> Suite:
    """The suite that an option describes: a path, or a mapping of `Suite`'s fields.

    Raises:
        UserError: another kind of thing, a key that is unknown, or no path.
    """
    where = f"evaluate.suites.{name}"
    if isinstance(given, str):
        given = {"path": given}
    if not isinstance(given, dict):
        raise UserError(f"{where}={given} is no suite: give {{path: FILE or hub id, …}}")
    known = [each.name for each in fields(Suite)]
    for key in given:
        if key not in known:
            close = difflib.get_close_matches(str(key), known, n=1, cutoff=0.5)
            hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(known)}"
            raise UserError(f"{where} has no option {key!r}: {hint}")
    for key, value in given.items():
        if value is not None and not isinstance(value, KINDS.get(key, str)):
            raise UserError(f"{where}.{key}={value} is of the wrong kind: docs/evaluation.md shows a suite of your own")
    if not given.get("path"):
        raise UserError(f"{where} has no path: give a file of JSON lines or a hub id such as org/name")
    try:
        suite = Suite(**{key: value for key, value in given.items() if value is not None})
        _ = suite.columns
    except ValueError as error:
        raise UserError(f"{where}.prompt={given['prompt']!r} is no template ({error}): write {{column}}") from None
    return suite


def read(name: str, suite: Suite, option: str, rendering: Rendering) -> tuple[list[Prompt], list[str]]:
    """The prompts of a suite, and what is to be told of them.

    `name` is the source of those that have none; without one, each file is a source.

    Raises:
        UserError: it cannot be read, a row lacks its columns, an id stands there twice, or no row is left.
    """
    prompts: dict[str, Prompt] = {}
    seen: Counter[str] = Counter()
    named = {column: key for key in ("tools", "id", "source") if (column := getattr(suite, key))}
    stands_in = not Path(suite.path).is_dir() and not suite.is_hub_id  # a file, which has its own names for things
    for where, default, source, row in _rows(name, suite, option):
        _require(suite.only, row, where)
        if any(row[column] not in _listed(wanted) for column, wanted in suite.only.items()):
            continue
        wanted = suite.columns | (named.keys() if stands_in else set())
        asked = suite if wanted <= row.keys() or not row.keys() & set(OWN) else replace(suite, prompt=None)
        messages, turns = _asked(asked, row, where)
        if suite.placeholder and any(suite.placeholder in message["content"] for message in messages):
            seen["placeholders"] += 1
            continue
        if asked.prompt is not None:
            _require(named, row, where)
            row = {key: row[column] for column, key in named.items()}
        elif suite.prompt is None:  # rows of our own form, some of whose columns have other names
            _require(named, row, where)
            row = {**row, **{key: row[column] for column, key in named.items()}}
        prompt = rendered(row, messages, default, rendering, where, source)
        if prompt.id in prompts:
            raise UserError(f"{where}: the id {prompt.id!r} stands there twice: make ids unique")
        prompts[prompt.id] = prompt
        seen["several"] += turns > 1
        seen["tools unread"] += bool(prompt.tools) and prompt.ids == rendering.ids(messages)
    if not prompts:
        why = "; all that were found are placeholders of texts that are not public" if seen["placeholders"] else ""
        raise UserError(f"{option}={suite.path} has no prompts{why}: give another file, split or filter")
    told = {
        "several": f"of several turns the first is asked, in {seen['several']} of {len(prompts)} prompts",
        "placeholders": f"{seen['placeholders']} rows are placeholders of texts that are not public, and left out",
        "tools unread": f"the target's chat template reads no tools: those of {seen['tools unread']} prompts are lost",
    }
    return list(prompts.values()), [text for key, text in told.items() if seen[key]]


# ---------------------------------------------------------------- rows


def _rows(name: str, suite: Suite, option: str) -> Iterator[tuple[str, str, str, dict[str, Any]]]:
    """Of each row: where it stands, an id and a source in case that it has none, and its columns."""
    if not Path(suite.path).is_dir() and not (name and suite.is_hub_id):
        for where, line, row in lines_of(files_of(suite.path, option)):
            yield where, line, name or line.rpartition("-")[0], row
        return
    given = None if _is_saved(suite.path) else suite.subset
    subsets = given if isinstance(given, list) else [given]
    for subset in subsets:
        source = str(subset) if len(subsets) > 1 else name
        for number, row in enumerate(_dataset(suite, subset, option), 1):
            yield f"{suite.path} ({suite.split}), row {number}", f"{source}-{number}", source, dict(row)


def _dataset(suite: Suite, subset: str | None, option: str) -> Any:
    from datasets import DatasetDict, load_dataset, load_from_disk

    try:
        if _is_saved(suite.path):
            saved = load_from_disk(suite.path)
            return saved[suite.split] if isinstance(saved, DatasetDict) else saved
        return load_dataset(suite.path, subset, split=suite.split, revision=suite.revision)
    except Exception as error:
        # The hub's client raises a dozen unrelated types: no network, no such set, split or permission.
        reason = " ".join(str(error).split())[:200]
        at = f"{option}={suite.path} ({', '.join(filter(None, [subset, suite.split]))})"
        raise UserError(f"{at} cannot be loaded ({reason}): give a file as {option}=FILE") from None


def _is_saved(folder: str) -> bool:
    """Whether `datasets` saved it; such a folder has splits and no subsets."""
    return any((Path(folder) / name).is_file() for name in ("dataset_dict.json", "dataset_info.json"))


def _asked(suite: Suite, row: dict[str, Any], where: str) -> tuple[list[Message], int]:
    """The messages of a row, and how many turns it has."""
    if suite.prompt is None:
        turns = row.get("turns") if "prompt" not in row else None
        return conversation(row, where), len(turns) if isinstance(turns, list) else 1
    _require(suite.columns, row, where)
    try:
        value = suite.prompt.format_map(row) if "{" in suite.prompt else row[suite.prompt]
    except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
        raise UserError(f"{where}: prompt={suite.prompt!r} cannot be filled in ({error!r}): mend it") from None
    match value:
        case str(text) if text.strip():
            return [{"role": "user", "content": text}], 1
        case [str(text), *_] if text.strip():
            return [{"role": "user", "content": text}], len(value)
        case [dict(), *_]:
            return before_answer(value, where), 1
    raise UserError(f"{where}: {suite.prompt} is no text, no texts and no messages: name another column as prompt")


def _require(columns: Any, row: dict[str, Any], where: str) -> None:
    if missing := sorted(set(columns) - row.keys()):
        raise UserError(
            f"{where} has no column {', '.join(map(repr, missing))} (it has {', '.join(row)}): name others in the "
            f"suite, or give rows with {', '.join(OWN[:-1])} or {OWN[-1]}"
        )


def _listed(wanted: Any) -> list[Any]:
    return wanted if isinstance(wanted, list) else [wanted]
