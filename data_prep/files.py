"""The rows of files, of folders of them, and of hub data sets, one by one, each with its number.

A number is that of the line in text files (of the row's first line in CSV), and of the row in JSON lists, Parquet and
hub data sets, from 1. With the name of the file it makes the row's default id, so it never depends on other files.
"""

import csv
import gzip
import json
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from data_prep.formats import LIST_KEYS, TEXT_KEYS, detect
from eagle31_train import artifacts
from eagle31_train.errors import UserError
from eagle31_train.locations import matching

ROWS_AT_ONCE = 1024  # of Parquet, decoded together
Numbered = Iterator[tuple[int, Any]]


@dataclass(frozen=True)
class File:
    """A file, or a hub data set, with a fingerprint of its content.

    name: as errors and records have it. stem: what the default ids of its rows begin with.
    first: how many rows of the data set are read; None for all.
    """

    name: str
    fingerprint: str
    stem: str
    path: Path | None = None
    dataset: Any = None
    first: int | None = None

    def values(self) -> Numbered:
        """(number, JSON value) of every row; a damaged one is a UserError that names its place."""
        if self.path is None:
            return _of_data_set(self)
        return READERS.get(kind_of(self.path), _json_lines)(self.path)


def open_files(spec: str, split: str, option: str, stream_rows: int | None = None) -> list[File]:
    """The files that `spec` names: a file, a folder, a glob, or a hub data set such as `org/name`.

    Args:
        split: of a hub data set. stream_rows: read only its first so many rows, as they come.
        option: holds `spec`, for the errors.

    Raises:
        UserError: there is nothing of that name, or a folder holds no data files, or others too.
    """
    if Path(spec).is_file():
        return [_open_file(Path(spec), Path(spec).name)]
    if Path(spec).is_dir():
        return _open_folder(Path(spec), option)
    if any(sign in spec for sign in "*?["):
        files = [path for path in matching(spec) if path.is_file()]
        if not files:
            raise UserError(f"{option}={spec} matches no file: check the pattern")
        return [_open_file(path, path.name) for path in files]
    if re.fullmatch(r"[\w.-]+/[\w.-]+", spec) and kind_of(Path(spec)) not in READERS:
        return [_open_hub(spec, split, option, stream_rows)]
    hint = ", with the home folder spelt out" if spec.startswith("~") else ""
    raise UserError(f"{option}={spec} is missing: give a file, a folder, a glob, or a hub id such as org/name{hint}")


def kind_of(path: Path) -> str:
    """The suffix that tells how a file is read, without `.gz`."""
    return Path(path.name.lower().removesuffix(".gz")).suffix


def _open_file(path: Path, name: str) -> File:
    stem = re.sub(r"\.gz$", "", name, flags=re.IGNORECASE)
    stem = stem.removesuffix(Path(stem).suffix)  # the same before and after it is compressed
    return File(name, artifacts.file_sha256(path), stem, path=path)


def _open_folder(folder: Path, option: str) -> list[File]:
    """Every file in it and its subfolders, by name; as in pyarrow, names that begin with `.` or `_` are no data."""
    names = [path.relative_to(folder) for path in sorted(folder.rglob("*")) if path.is_file()]
    names = [name for name in names if not any(part.startswith((".", "_")) for part in name.parts)]
    kinds = ", ".join(READERS)
    if not names:
        raise UserError(
            f"{option}={folder} is a folder without data files: it takes {kinds}, all but Parquet as .gz too"
        )
    if unknown := [name for name in names if kind_of(name) not in READERS]:
        raise UserError(
            f"{option}={folder} holds {unknown[0]}, which is no data file ({kinds}): move it away, or name the files "
            f"that are to be read with a glob such as {folder}/*.jsonl"
        )
    return [_open_file(folder / name, name.as_posix()) for name in names]


# ---------------------------------------------------------------- kinds of files


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines of a file, which may be compressed, by number."""
    number = 0
    with gzip.open(path) if path.suffix.lower() == ".gz" else path.open("rb") as file:
        try:
            for number, line in enumerate(file, start=1):
                yield number, line
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise UserError(
                f"{path}:{number + 1} cannot be read, gzip is damaged ({error}): copy the file anew"
            ) from None


def _json_lines(path: Path) -> Numbered:
    for number, line in _lines(path):
        if not line.strip():
            continue
        try:
            yield number, json.loads(line)
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise UserError(f"{path}:{number} is not JSON ({error}): mend or remove this line") from None


def _json_list(path: Path) -> Numbered:
    text = b"".join(line for _, line in _lines(path))
    try:
        value = json.loads(text.decode()) if text.strip() else []
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not JSON ({error}): mend it, or rename JSON lines to .jsonl") from None
    if not isinstance(value, list):
        raise UserError(f"{path} holds no JSON list: give a list of conversations, or JSON lines as .jsonl")
    yield from enumerate(value, start=1)


def _csv(path: Path) -> Numbered:
    csv.field_size_limit(2**31 - 1)  # bytes of a cell; Python's own limit is smaller than some conversations
    rows = csv.reader(_text(path), strict=True)
    header: list[str] = []
    number = 1
    while True:
        try:
            cells = next(rows)
        except StopIteration:
            return
        except csv.Error as error:
            raise UserError(f"{path}:{number} is not CSV ({error}): mend this row") from None
        if cells and not header:
            header = cells
            _check_header(header, f"{path}:{number}")
        elif cells and len(cells) != len(header):
            raise UserError(
                f"{path}:{number} has {len(cells)} cells, and the first line names {len(header)} columns: mend this "
                "row (cells with commas, quotes or line breaks stand in double quotes)"
            )
        elif cells:
            yield number, with_lists(dict(zip(header, cells, strict=True)), f"{path}:{number}")
        number = rows.line_num + 1


def _text(path: Path) -> Iterator[str]:
    """Lines as text, so that a byte that is none is found in its line; spreadsheets put a mark before the first."""
    for number, line in _lines(path):
        try:
            yield line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise UserError(f"{path}:{number} is not UTF-8 ({error}): save the file as UTF-8") from None


def _check_header(names: list[str], where: str) -> None:
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UserError(f"{where} names the column {twice!r} twice: rename one of them")
    if not {*LIST_KEYS, *TEXT_KEYS}.intersection(names):
        shown = " ".join(", ".join(names).split())[:60]
        raise UserError(
            f"{where} names no column of a known format (it is {shown!r}): the first line of a CSV file names its "
            "columns, with commas between them, such as prompt, or instruction,input,output, or messages"
        )


def _parquet(path: Path) -> Numbered:
    import pyarrow
    from pyarrow.parquet import ParquetFile

    number = 0
    try:
        with ParquetFile(path) as file:
            for batch in file.iter_batches(ROWS_AT_ONCE):
                for row in batch.to_pylist():
                    number += 1
                    yield number, with_lists(row, f"{path}:{number}")
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path}:{number + 1} cannot be read as Parquet ({_one_line(error)}): write it anew") from None


READERS = {".jsonl": _json_lines, ".json": _json_list, ".csv": _csv, ".parquet": _parquet}


def with_lists(row: dict[str, Any], where: str) -> dict[str, Any]:
    """A table's row; cells that hold a conversation as JSON text, since the table has no lists, become it."""
    for key in LIST_KEYS:
        if isinstance(text := row.get(key), str) and text.strip():
            try:
                row[key] = json.loads(text)
            except json.JSONDecodeError as error:
                raise UserError(f"{where}: the cell of {key} is not JSON ({error}): write it as JSON does") from None
    return row


# ---------------------------------------------------------------- hub data sets


def _open_hub(spec: str, split: str, option: str, first: int | None) -> File:
    import datasets

    try:
        if first is None:
            dataset: Any = datasets.load_dataset(spec, split=split)
            content = f"{split}:{dataset._fingerprint}"
        else:
            builder = datasets.load_dataset_builder(spec)
            dataset = builder.as_streaming_dataset(split)
            content = f"{split}:{builder.config_id}:{builder.hash}:{first}"  # the hash is that of the hub's commit
    except Exception as error:
        # The hub's client raises a dozen unrelated types: no network, no such set, split or permission.
        raise UserError(
            f"{option}={spec} is no file, and no hub data set could be loaded: {_one_line(error)}"
        ) from None
    return File(spec, content, spec, dataset=dataset, first=first)


def _of_data_set(file: File) -> Numbered:
    number = 0
    rows = iter(file.dataset if file.first is None else islice(file.dataset, file.first))
    while True:
        try:
            row = next(rows)
        except StopIteration:
            return
        except Exception as error:
            # As above, and whatever a stream meets on its way.
            raise UserError(f"{file.name}:{number + 1} cannot be read: {_one_line(error)}") from None
        number += 1
        yield number, row if detect(row) else with_lists(row, f"{file.name}:{number}")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
