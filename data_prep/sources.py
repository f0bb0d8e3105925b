"""The rows of a run: those of one option in their own order, or several of `data.sources` mixed by weight.

A weight is a share of rows. Which rows of a source are taken depends on the seed, the source's name and the rows' ids
alone: a hash of these ranks them, and the first so many are taken. So another source, or more rows, changes the number
of the others' rows at most, and a larger number only adds. Rows keep the order of their source; the sources alternate
so that every stretch of the mixture has its shares.
"""

import hashlib
import heapq
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

from data_prep.files import File, open_files
from data_prep.formats import Row, parse
from eagle31_train.config import FORMATS, SELF, Config, DataConfig, check_value
from eagle31_train.console import Progress
from eagle31_train.errors import UserError

OPTIONS = ("path", "weight", "format", "split", "stream_rows")

# ---------------------------------------------------------------- sources


@dataclass(frozen=True)
class Source:
    """Files or a data set that are read as one, as the option `given` says; of `data.sources` with name and weight."""

    files: list[File]
    format: str
    given: str
    name: str = ""
    weight: Fraction = Fraction(1)

    def read(self) -> Iterator[Row]:
        """Its rows in order; of a named source with its name as their source and before their ids.

        Raises UserError for a damaged line, a row of no known format, an id used twice, or no row at all.
        """
        seen: dict[str, str] = {}
        for file in self.files:
            for number, value in file.values():
                where = f"{file.name}:{number}"
                row = parse(value, self.format, where, f"{file.stem}-{number}")
                if row.id in seen:
                    raise UserError(f"{where}: id {row.id!r} is also that of {seen[row.id]}: make ids unique")
                seen[row.id] = where
                yield replace(row, id=f"{self.name}/{row.id}", source=self.name) if self.name else row
        if not seen:
            raise UserError(f"{self.given} is empty: it holds no row")

    def inputs(self, files: str) -> dict[str, Any]:
        """All that its rows depend on; name and fingerprint of every file under the key `files`."""
        return {files: [[file.name, file.fingerprint] for file in self.files], "format": self.format}


@dataclass
class Corpus:
    """What a run reads; `counts` says of every source how many rows it has and gave, once they have been read.

    A row with a `problem` counts as read and never as taken.
    """

    sources: list[Source]
    mixed: bool = False
    seed: int = 0
    rows: int | None = None
    counts: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def open(cls, config: Config, option: str) -> "Corpus":
        """What `data.sources` names or else the option `conversations` or `prompts`; a UserError where it is wrong."""
        data = config.data
        entries = named(data)
        if entries:
            if data.conversations is not None or data.prompts is not None:
                raise UserError("data.sources replaces data.conversations and data.prompts: set both of these to null")
            sources = [_open_source(name, value, data) for name, value in entries.items()]
        else:
            spec: str | None = getattr(data, option)
            if spec is None:
                raise UserError(_nothing_given(data, option))
            if data.rows is not None:
                raise UserError(f"data.rows={data.rows} is of data.sources, which are not given: leave it out")
            sources = [_source_of(data, f"data.{option}", spec)]
        if data.stream_rows is not None and all(file.path for source in sources for file in source.files):
            given = sources[0].given
            raise UserError(f"data.stream_rows={data.stream_rows} is of hub data sets, and {given} is none")
        seen: dict[str, str] = {}
        for name, file in [(source.name, file) for source in sources for file in source.files]:
            if (other := seen.setdefault(file.fingerprint, name)) != name:
                raise UserError(f"data.sources.{other} and .{name} hold the same: {file.name}; name it once")
        return cls(sources, bool(entries), config.seed, data.rows)

    def inputs(self) -> dict[str, Any]:
        """All that the rows depend on."""
        if not self.mixed:
            return self.sources[0].inputs("sources")
        sources = {source.name: {**source.inputs("files"), "weight": str(source.weight)} for source in self.sources}
        return {"sources": sources, "rows": self.rows, "mixed_by": self.seed}

    def read(self) -> Iterator[Row]:
        """The rows; of a mixture, the rows of no use come last. Raises UserError: see `Source.read` and `quotas`."""
        self.counts = {}
        return self._mix() if self.mixed else self._all()

    def _all(self) -> Iterator[Row]:
        for row in self.sources[0].read():
            count = self.counts.setdefault(row.source, {"read": 0, "taken": 0})
            count["read"] += 1
            count["taken"] += row.problem is None
            yield row

    def _mix(self) -> Iterator[Row]:
        """In two passes: the first holds ids alone, the second no more than it yields."""
        usable: dict[str, list[str]] = {}
        unusable: list[Row] = []
        for source in self.sources:
            rows, name = 0, source.name
            usable[name] = []
            for row in Progress(source.read(), desc=f"reading {name}", unit="row", leave=False):
                rows += 1
                if row.problem is None:
                    usable[name].append(row.id)
                else:
                    unusable.append(row)
            if not usable[name]:
                reason = f"none of its {rows} rows can be used ({unusable[-1].problem})"
                raise UserError(f"data.sources.{name}: {reason}: mend it or leave it out")
            self.counts[name] = {"weight": float(source.weight), "read": rows}
        weights = {source.name: source.weight for source in self.sources}
        taken = quotas(weights, {name: len(ids) for name, ids in usable.items()}, self.rows)
        streams = []
        for source in self.sources:
            name, count = source.name, taken[source.name]
            self.counts[name]["taken"] = count
            chosen = heapq.nsmallest(count, usable[name], key=lambda identity: rank(self.seed, name, identity))
            streams.append(placed(source, set(chosen)))
        for *_, row in heapq.merge(*streams, key=lambda entry: entry[:2]):
            yield row
        yield from unusable


def placed(source: Source, ids: set[str]) -> Iterator[tuple[float, str, Row]]:
    """The source's rows of these ids, in order, with their places in a mixture that is as long as 1, evenly spread."""
    for number, row in enumerate(row for row in source.read() if row.id in ids):
        yield (2 * number + 1) / (2 * len(ids)), source.name, row


def rank(seed: int, name: str, identity: str) -> bytes:
    """Where a row stands among those of its source: the smallest are taken."""
    return hashlib.sha256(json.dumps([seed, name, identity]).encode()).digest()[:16]


def quotas(weights: Mapping[str, Fraction], have: Mapping[str, int], rows: int | None) -> dict[str, int]:
    """How many rows of each source: its weight's share, rounded by largest remainder, ties by name.

    `have`: rows of each source that can be used. `rows`: how many in all; None for the most with which no share is
    larger than its source. Raises UserError where a source has fewer than its share, or its share is no row at all.
    """
    whole = sum(weights.values())
    total = rows if rows is not None else min(have[name] * whole // weight for name, weight in weights.items())
    shares = {name: total * weight / whole for name, weight in weights.items()}
    taken = {name: math.floor(share) for name, share in shares.items()}
    for name in sorted(shares, key=lambda name: (taken[name] - shares[name], name))[: total - sum(taken.values())]:
        taken[name] += 1
    if short := [name for name in taken if taken[name] > have[name]]:
        lacking = ", ".join(f"data.sources.{name} is to give {taken[name]} and has {have[name]}" for name in short)
        raise UserError(f"data.rows={rows} asks for more rows than there are: {lacking}; lower data.rows or the weight")
    if empty := [name for name, count in taken.items() if not count]:
        share = f"of its {have[empty[0]]} rows" if rows is None else f"of data.rows={rows}"
        raise UserError(f"data.sources.{empty[0]} gives no row ({share}): raise its weight, its rows or data.rows")
    return taken


# ---------------------------------------------------------------- options


def named(data: DataConfig) -> dict[str, Any]:
    """The entries of `data.sources` by name, so that their order in a file or on a command line says nothing.

    One that is null is a recipe's that somebody does not want.
    """
    return {str(name): value for name, value in sorted(data.sources.items(), key=str) if value is not None}


def _source_of(data: DataConfig, option: str, spec: str) -> Source:
    files = open_files(spec, data.split, option, data.stream_rows)
    return Source(files, data.format, f"{option}={spec}")


def _nothing_given(data: DataConfig, option: str) -> str:
    """What to do where `data.{option}` is not set; the other of the two may be."""
    if option == "prompts" and data.conversations is not None:
        return (
            f"regenerate=true answers data.prompts, and data.conversations={data.conversations} is given: set "
            "data.prompts (answers in it are not kept), or regenerate=false to learn the answers that are there"
        )
    if data.prompts is None or option == "prompts":
        return f"no {option}: set data.{option} or data.sources (data.prompts with regenerate=true)"
    return (
        f"data.prompts={data.prompts} is of prompts that the target is to answer: set regenerate=true for that, or, to "
        "learn answers that are there, give it as data.conversations"
    )


def _open_source(name: str, value: Any, data: DataConfig) -> Source:
    where = f"data.sources.{name}"
    options: dict[str, Any] = {"weight": 1, "format": data.format, "split": data.split, "stream_rows": data.stream_rows}
    given = value if isinstance(value, dict) else {}
    options |= given
    path, weight, stream_rows = options.get("path"), options["weight"], options["stream_rows"]
    if not re.fullmatch(r"[\w-]+", name) or not isinstance(path, str) or not path or given.keys() - set(OPTIONS):
        raise UserError(
            f"{where}={value!r} is no source: write data.sources.NAME='{{path: FILE, weight: 1}}', with any of "
            f"{', '.join(OPTIONS)}, NAME of letters, digits, _ and -; or set {where}=null"
        )
    if path == SELF:  # still, so nobody has written them
        raise UserError(f"{where}.path={SELF} has the target write prompts, and answer them: set regenerate=true")
    # A boolean is an int to Python.
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < math.inf:
        raise UserError(f"{where}.weight={weight} is no weight: set a number above 0")
    if stream_rows is not None and type(stream_rows) is not int:
        raise UserError(f"{where}.stream_rows={stream_rows} is no number of rows")
    check_value(f"{where}.format", options["format"], {"choices": FORMATS})
    check_value(f"{where}.stream_rows", stream_rows, {"bounds": {"at_least": 1}})
    files = open_files(path, str(options["split"]), f"{where}.path", stream_rows)
    if "stream_rows" in given and files[0].path:
        raise UserError(f"{where}.stream_rows={stream_rows} is of hub data sets, and {path} is none")
    # Through its decimal text: 0.7 and 0.3 are to be exactly that.
    return Source(files, options["format"], f"{where}.path={path}", name, Fraction(str(weight)))
