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

    def fingerprints(self) -> list[list[str]]:
        """Name and fingerprint of every file."""
        return [[file.name, file.fingerprint] for file in self.files]


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
        if named(data):
            return cls(_open_sources(data), True, config.seed, data.rows)
        spec: str | None = getattr(data, option)
        if spec is None:
            raise UserError(_nothing_given(data, option))
        if data.rows is not None:
            raise UserError(f"data.rows={data.rows} is of data.sources, which are not given: set them, or no data.rows")
        return cls(_streamed([_source_of(data, f"data.{option}", spec)], data))

    def inputs(self) -> dict[str, Any]:
        """All that the rows depend on."""
        if not self.mixed:
            (source,) = self.sources
            return {"sources": source.fingerprints(), "format": source.format}
        return {
            "sources": {
                source.name: {"files": source.fingerprints(), "weight": str(source.weight), "format": source.format}
                for source in self.sources
            },
            "rows": self.rows,
            "mixed_by": self.seed,
        }

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
    """The entries of `data.sources`; one that is null is a recipe's that somebody does not want."""
    return {str(name): value for name, value in sorted(data.sources.items(), key=str) if value is not None}


def _open_sources(data: DataConfig) -> list[Source]:
    """The sources by name, so that their order in a file or on a command line says nothing."""
    if given := [f"data.{name}=null" for name in ("conversations", "prompts") if getattr(data, name) is not None]:
        raise UserError(f"data.sources replaces data.conversations and data.prompts: set {' '.join(given)}")
    sources = [_open_source(name, value, data) for name, value in named(data).items()]
    seen: dict[str, str] = {}
    for source in sources:
        for file in source.files:
            if (other := seen.setdefault(file.fingerprint, source.name)) != source.name:
                raise UserError(f"data.sources.{other} and .{source.name} hold the same: {file.name}; name it once")
    return _streamed(sources, data)


def _streamed(sources: list[Source], data: DataConfig) -> list[Source]:
    """The sources; a UserError where data.stream_rows is given and none of them is a hub data set."""
    if data.stream_rows is not None and all(file.path for source in sources for file in source.files):
        raise UserError(
            f"data.stream_rows={data.stream_rows} is of hub data sets, and {sources[0].given} is none: leave it out"
        )
    return sources


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
    given = f"data.prompts={data.prompts}"
    if data.prompts == SELF:
        return f"{given} has the target write prompts, and answer them: set regenerate=true"
    rows = _source_of(data, "data.prompts", data.prompts).read()
    messages = next((row.messages for row in rows if row.problem is None), [])
    if any(message["role"] == "assistant" for message in messages):
        return (
            f"{given} holds conversations with answers: to learn these, give it as data.conversations; for the target "
            "to answer anew, set regenerate=true"
        )
    return f"{given} holds prompts without answers: set regenerate=true, and the target answers them"


def _open_source(name: str, value: Any, data: DataConfig) -> Source:
    where = f"data.sources.{name}"
    options = value if isinstance(value, dict) else {}
    path, weight = options.get("path"), options.get("weight", 1)
    form, split = options.get("format", data.format), options.get("split", data.split)
    stream_rows = options.get("stream_rows", data.stream_rows)
    if not re.fullmatch(r"[\w-]+", name) or not isinstance(path, str) or not path or options.keys() - set(OPTIONS):
        raise UserError(
            f"{where}={value!r} is no source: write data.sources.NAME='{{path: FILE, weight: 1}}', with any of "
            f"{', '.join(OPTIONS)}, NAME of letters, digits, _ and -; or set {where}=null"
        )
    if path == SELF:  # still, so nobody has written them
        raise UserError(f"{where}.path={SELF} has the target write prompts, and answer them: set regenerate=true")
    # A boolean is an int to Python.
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < math.inf:
        raise UserError(f"{where}.weight={weight} is no weight: set a number above 0")
    check_value(f"{where}.format", form, {"choices": FORMATS})
    if stream_rows is not None and (isinstance(stream_rows, bool) or not isinstance(stream_rows, int)):
        raise UserError(f"{where}.stream_rows={stream_rows} is no number of rows")
    check_value(f"{where}.stream_rows", stream_rows, {"bounds": {"at_least": 1}})
    files = open_files(path, str(split), f"{where}.path", stream_rows)
    if "stream_rows" in options and files[0].path:
        raise UserError(f"{where}.stream_rows={stream_rows} is of hub data sets, and {path} is none: leave it out")
    # Through its decimal text: 0.7 and 0.3 are to be exactly that.
    return Source(files, form, f"{where}.path={path}", name, Fraction(str(weight)))
