"""Iterate over the rows of files, folders and hub data sets. Each row comes with its number from 1: that of its line in
text files (in CSV its first line), else that of the row. File name and number make the row's default id."""

import codecs
import csv
import gzip
import os
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.compute as pc
from pyarrow import types
from pyarrow.parquet import ParquetFile

from eagle31_train.common import artifacts, foreign
from eagle31_train.common.errors import UserError, first_line
from eagle31_train.common.locations import matching
from eagle31_train.config import ROW_FILES, is_hub_set
from eagle31_train.rows.formats import LIST_KEYS, TOKEN_KEYS, detect

ROWS_AT_ONCE = 1024  # Parquet rows decoded together
LINE, LIST = 1 << 28, 1 << 32  # most unpacked bytes of a line, and of a JSON list: each is read whole
ENTRIES = 1 << 25  # most list entries of a Parquet column in a row group: all may be one row's (a message has a text)
OBJECT = 64  # least bytes of a Python object, references to it included
DAMAGE = (ValueError, EOFError, OSError, ArithmeticError, csv.Error, zlib.error, pyarrow.ArrowException)


@dataclass
class Place:
    """The number of the row being read."""

    number: int = 1


@dataclass(frozen=True)
class File:
    """A file, or a hub data set, with a fingerprint of its content."""

    name: str  # as shown in errors and records
    fingerprint: str
    stem: str  # prefix of its rows' default ids
    values: Callable[[], Iterator[tuple[int, Any]]]  # like `read`
    on_hub: bool = False


def read(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield (number, JSON value) of every row of a file; UserError that names the place of a damaged row."""
    return _numbered(partial(READERS.get(kind_of(path), _json_lines), path), path, DAMAGE)


def count(path: Path) -> int:
    """Count the rows of a file, decoding no more than needed; raises one of DAMAGE if the file is damaged."""
    if kind_of(path) == ".parquet":
        return ParquetFile(path).metadata.num_rows
    rows = read(path) if kind_of(path) in (".json", ".csv") else filter(bytes.strip, _lines(path))
    return sum(1 for _ in rows)


def _numbered(
    rows: Callable[[Place], Iterator[Any]], where: object, damage: type[Exception] | tuple[type[Exception], ...]
) -> Iterator[tuple[int, Any]]:
    place = Place()
    try:
        for value in rows(place):
            yield place.number, value
    except damage as error:
        remedy = "fix it, or copy the file again"
        if isinstance(where, Path) and kind_of(where) not in READERS:
            remedy = f"it was read as JSON lines, as its name does not end in one of {', '.join(READERS)}"
        if isinstance(error, UnicodeDecodeError):
            remedy = "save it as UTF-8"
        raise UserError(f"{where}:{place.number} cannot be read ({first_line(error)}): {remedy}") from None


def open_files(
    spec: str,
    split: str,
    option: str,
    stream_rows: int | None = None,
    subset: str | None = None,
    revision: str | None = None,
) -> list[File]:
    """Return the files that `spec` names: a file, a folder, a glob, or a hub data set such as `org/name`, to which all
    other arguments but `option` apply. UserError, naming `option`, if there is none, or a folder holds other files."""
    files = find_files(spec, option)
    if not files:
        return [_open_hub(spec, split, option, stream_rows, subset, revision)]
    return [File(name, artifacts.file_sha256(path), stem_of(name), partial(read, path)) for name, path in files]


def find_files(spec: str, option: str) -> list[tuple[str, Path]]:
    """Return (name in records, path) of the local files that `spec` names; none for a hub data set.
    UserError, naming `option`, if there is nothing of that name."""
    if Path(spec).is_file():
        return [(Path(spec).name, Path(spec))]
    if Path(spec).is_dir():
        return _in_folder(Path(spec), option)
    if any(sign in spec for sign in "*?["):
        files = [path for path in matching(spec) if path.is_file()]
        if not files:
            raise UserError(f"{option}={spec} matches no file: check the pattern")
        names = [path.name for path in files]
        if len(set(names)) < len(names):  # they are in several folders
            root = os.path.commonpath([path.parent for path in files])
            names = [path.relative_to(root).as_posix() for path in files]
        return list(zip(names, files, strict=True))
    if is_hub_set(spec):
        return []
    raise UserError(f"{option}={spec} does not exist: set it to a file, a folder, a glob or a hub id (org/name)")


def kind_of(path: Path) -> str:
    """Return the suffix, ignoring `.gz`, that decides how a file is read."""
    return Path(path.name.lower().removesuffix(".gz")).suffix


def stem_of(name: str) -> str:
    """Return a file's name (see `find_files`) without what tells its kind; compressing the file does not change it."""
    stem = re.sub(r"\.gz$", "", name, flags=re.IGNORECASE)
    return stem.removesuffix(Path(stem).suffix)


def _in_folder(folder: Path, option: str) -> list[tuple[str, Path]]:
    """List all files in a folder, at any depth, by name. As in pyarrow, names with a leading `.` or `_` are no data."""
    names = [path.relative_to(folder) for path in _within(folder)]
    names = sorted(name for name in names if not any(part.startswith((".", "_")) for part in name.parts))
    kinds = ", ".join(READERS)
    if not names:
        raise UserError(f"{option}={folder} has no data files: add some ({kinds})")
    if unknown := [name for name in names if kind_of(name) not in READERS]:
        saved = unknown[0].suffix == ".arrow"  # written by `datasets`
        remedy = "save the data set as Parquet (load_from_disk(…).to_parquet(FILE))" if saved else "use a glob"
        raise UserError(f"{option}={folder} holds {unknown[0]}, which is not a data file ({kinds}): {remedy}")
    if lost := [name for name in names if not (folder / name).is_file()]:
        raise UserError(f"{option}={folder} holds {lost[0]}, a broken symbolic link: fix or remove it")
    return [(name.as_posix(), folder / name) for name in names]


def _within(folder: Path) -> Iterator[Path]:
    """Yield all files in a folder and its subfolders, then in folders behind links; each folder is visited once."""
    waiting, seen = [folder], set[Path]()
    for top in waiting:
        for path, folders, files in os.walk(top):
            here = Path(path)
            if (real := here.resolve()) in seen:
                folders.clear()
                continue
            seen.add(real)
            yield from (here / name for name in files)
            waiting += [here / name for name in sorted(folders) if (here / name).is_symlink()]


# ---------------------------------------------------------------- kinds of files


def _opened(path: Path) -> Any:
    return gzip.open(path) if path.suffix.lower() == ".gz" else path.open("rb")


def _lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file, compressed or not. ValueError for one of LINE bytes: a few gzipped bytes may unpack to
    a line that no memory holds."""
    with _opened(path) as file:
        while line := file.readline(LINE):
            if len(line) == LINE:
                raise ValueError(f"a line of {LINE:,} bytes or more")
            yield line


def _json_lines(path: Path, place: Place) -> Iterator[Any]:
    for line in _lines(path):
        if line.strip():
            yield foreign.parse_json(line)
        place.number += 1


def _json(path: Path, place: Place) -> Iterator[Any]:
    """Read a JSON list, or JSON lines, which benchmarks often name .json."""
    with _opened(path) as file:
        is_list = file.read(1 << 12).removeprefix(codecs.BOM_UTF8).lstrip()[:1] in (b"[", b"")
    if not is_list:
        try:
            yield from _json_lines(path, place)
        except ValueError as error:
            raise ValueError(f"{error}; it does not begin with [, so it was read as JSON lines") from None
        return
    text = bytearray()
    with _opened(path) as file:
        while part := file.read(1 << 20):  # in parts: read(LIST) would allocate LIST bytes at once
            text += part
            if len(text) >= LIST:
                raise ValueError(f"a list of {LIST:,} bytes or more is too large: write JSON lines, .jsonl")
    for row in foreign.parse_json(text) if text.strip() else []:
        yield row
        place.number += 1


def _csv(path: Path, place: Place) -> Iterator[Any]:
    csv.field_size_limit(2**31 - 1)  # bytes of a cell; Python's own limit is smaller than some conversations
    # Decode line by line, so that errors name the row of a byte that is not UTF-8. Spreadsheets write a BOM first.
    text = (line.decode("utf-8" if number else "utf-8-sig") for number, line in enumerate(_lines(path)))
    rows = csv.reader(text, strict=True)
    header: list[str] = []
    for cells in rows:  # no cells: an empty line, which counts in line numbers
        if cells and not header:
            header = cells
            if len(set(header)) < len(header):
                raise ValueError("a column name occurs twice")
        elif cells and len(cells) != len(header):
            raise ValueError(f"it has {len(cells)} cells, but the first line names {len(header)} columns")
        elif cells:
            yield with_lists(dict(zip(header, cells, strict=True)))
        place.number = rows.line_num + 1


def _parquet(path: Path, place: Place) -> Iterator[Any]:
    with ParquetFile(path) as file:
        columns, metadata = [file.schema.column(number) for number in range(len(file.schema))], file.metadata
    used = _used(columns)
    for number, column in enumerate(columns):
        entries = [metadata.row_group(group).column(number).num_values for group in range(metadata.num_row_groups)]
        if column.max_repetition_level and _name(column) in used and max(entries, default=0) > ENTRIES:
            raise ValueError(
                f"{column.path} has more than {ENTRIES:,} entries in a row group: write smaller row groups"
            )
    # Texts stay dictionary-encoded: a megabyte of text, repeated in a thousand rows, is a file of 3 KB. pyarrow unpacks
    # texts in lists to 2 GiB at most.
    texts = [c.path for c in columns if c.physical_type == "BYTE_ARRAY" and not c.max_repetition_level]
    with ParquetFile(path, read_dictionary=texts) as file:
        for batch in file.iter_batches(ROWS_AT_ONCE, columns=sorted(used)):
            for row in _unpacked(batch):
                yield with_lists(row)
                place.number += 1


def _used(columns: list[Any]) -> set[str]:
    """Return the names of the columns to read: not those of lists of numbers, unless they are of tokens. Nothing else
    uses such lists, and a few bytes may unpack to more than memory holds."""
    used = {_name(c) for c in columns if c.physical_type == "BYTE_ARRAY" or not c.max_repetition_level}
    return used | set(TOKEN_KEYS) if set(TOKEN_KEYS) <= set(map(_name, columns)) else used


def _name(column: Any) -> str:
    """Return the name of the column that a leaf is of."""
    return str(column.path.partition(".")[0])


def _unpacked(batch: pyarrow.RecordBatch) -> Iterator[dict[str, Any]]:
    """Yield the rows of a batch, unpacking no more than LINE bytes at once."""
    if sum(map(_unpacked_bytes, batch.columns)) <= LINE:
        yield from batch.to_pylist()
    elif len(batch) == 1:
        raise ValueError(f"a row of more than {LINE:,} bytes")
    else:
        half = len(batch) // 2
        yield from _unpacked(batch[:half])
        yield from _unpacked(batch[half:])


def _unpacked_bytes(values: Any) -> int:
    """Return how many bytes an array of any type takes as Python objects, dictionary references resolved."""
    kind = values.type
    if types.is_dictionary(kind):
        return pc.sum(pc.take(pc.binary_length(values.dictionary), values.indices)).as_py() or 0
    if types.is_map(kind):
        return OBJECT * len(values) + _unpacked_bytes(values.keys) + _unpacked_bytes(values.items)
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return OBJECT * len(values) + _unpacked_bytes(values.flatten())
    inner = sum(map(_unpacked_bytes, values.flatten())) if types.is_struct(kind) else values.nbytes
    return inner + OBJECT * len(values)


READERS = dict(zip(ROW_FILES, (_json_lines, _json, _csv, _parquet), strict=True))


def with_lists(row: dict[str, Any]) -> dict[str, Any]:
    """Return a table's row with JSON text parsed in cells that should hold a list."""
    for key in LIST_KEYS:
        if isinstance(text := row.get(key), str) and text.strip():
            try:
                row[key] = foreign.parse_json(text)
            except ValueError as error:
                raise ValueError(f"the cell of {key} is not JSON: {error}") from None
    other = row.get("conversation")
    if isinstance(other, str) and other.lstrip().startswith("["):
        with suppress(ValueError):  # it may be plain text, beside one of the others
            row["conversation"] = foreign.parse_json(other)
    return row


def _open_hub(spec: str, split: str, option: str, first: int | None, subset: str | None, revision: str | None) -> File:
    import datasets

    try:
        if first is None:
            dataset: Any = datasets.load_dataset(spec, subset, split=split, revision=revision)
            content = f"{split}:{dataset._fingerprint}"  # covers the subset and the commit, too
        else:
            builder = datasets.load_dataset_builder(spec, subset, revision=revision)
            dataset = builder.as_streaming_dataset(split)
            content = f"{split}:{builder.config_id}:{builder.hash}:{first}"  # the hash is the hub's commit
    except Exception as error:  # the hub's client raises a dozen unrelated types
        remedy = "check its name, its split, and its subset and revision if it needs them"
        raise UserError(
            f"{option}={spec} is not a local file, and the hub data set cannot be loaded ({first_line(error)}): "
            f"{remedy}"
        ) from None

    def rows(place: Place) -> Iterator[Any]:
        for row in islice(dataset, first):
            yield row if detect(row) else with_lists(row)
            place.number += 1

    return File(spec, content, spec, partial(_numbered, rows, spec, Exception), on_hub=True)
