"""Where conversations and prompts come from: JSON lines or lists, in files, globs or hub data sets.

A line that is no JSON ends the run with its file and line number.
"""

import glob
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_prep.messages import FORMATS, Row, parse
from eagle31_train import artifacts
from eagle31_train.schema import UserError


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
        mend = "it looks like JSON lines, rename it to .jsonl" if error.msg == "Extra data" else "mend this line"
        raise UserError(f"{path}:{error.lineno} is not JSON ({error.msg}): {mend}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 ({error}): save it as UTF-8") from None
    if not isinstance(value, list):
        raise UserError(f"{path} holds no JSON list: give a list of conversations, or JSON lines as .jsonl")
    return value
