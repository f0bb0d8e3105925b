"""The rows of a run: those of one option in their own order, or several of `data.sources` mixed by weight.

A weight is a share of rows. A hash of the seed, the source's name and a row's id ranks the rows, and the first ones are
taken. So another source, or more rows, changes at most how many rows the others give. Rows keep the order of their
source; the sources alternate so that every stretch of the mixture has its shares.
"""

import hashlib
import heapq
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from eagle31_train.common import foreign
from eagle31_train.common.console import Progress
from eagle31_train.common.errors import UserError
from eagle31_train.config import FORMATS, SELF, SELF_WRITTEN, Config, DataConfig, check_value
from eagle31_train.rows.files import File, open_files
from eagle31_train.rows.formats import Row, parse

# ---------------------------------------------------------------- sources


@dataclass(frozen=True)
class Source:
    """Files or a data set that are read as one. given: the option that names them; name, weight: of `data.sources`."""

    files: list[File]
    format: str
    given: str
    name: str = ""
    weight: Fraction = Fraction(1)

    def read(self) -> Iterator[Row]:
        """Yield its rows in order; a named source's ids begin with its name. UserError for damage, and for no row."""
        seen: dict[str, str] = {}
        for file in self.files:
            number = 0
            for number, value in file.values():
                where = f"{file.name}:{number}"
                row = parse(value, self.format, where, f"{file.stem}-{number}")
                if row.id in seen:
                    raise UserError(f"{where}: id {row.id!r} is also used at {seen[row.id]}: make ids unique")
                seen[row.id] = where
                yield replace(row, id=f"{self.name}/{row.id}", source=self.name) if self.name else row
            if not number:
                raise UserError(f"{self.given}: {file.name} has no rows: add some, or remove the file")

    def inputs(self, files: str) -> dict[str, Any]:
        """Return all that its rows depend on; name and fingerprint of every file under the key `files`."""
        return {files: [[file.name, file.fingerprint] for file in self.files], "format": self.format}


@dataclass
class Corpus:
    """What a run reads. `counts`: how many rows of every source were read, and taken; none with a problem is taken."""

    sources: list[Source]
    mixed: bool = False
    seed: int = 0
    rows: int | None = None
    counts: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def open(cls, config: Config, option: str) -> "Corpus":
        """Open what `data.sources` names, or else the option `conversations` or `prompts`; UserError if it is wrong."""
        data, entries, spec = config.data, named(config.data), getattr(config.data, option)
        if entries and (data.conversations is not None or data.prompts is not None):
            raise UserError("data.sources replaces data.conversations and data.prompts: set both of these to null")
        if not entries and spec is None:
            raise UserError(_nothing_given(data, option))
        named_sources = [_open_source(config, f"data.sources.{name}", value, name) for name, value in entries.items()]
        sources = named_sources or [_open_source(config, f"data.{option}", {"path": spec})]
        return cls(sources, bool(entries), config.seed, data.rows)

    def inputs(self) -> dict[str, Any]:
        if not self.mixed:
            return self.sources[0].inputs("sources")
        sources = {source.name: {**source.inputs("files"), "weight": str(source.weight)} for source in self.sources}
        return {"sources": sources, "rows": self.rows, "mixed_by": self.seed}

    def read(self) -> Iterator[Row]:
        """Yield the rows; in a mixture, rows of no use come last. Raises UserError: see `Source.read` and `quotas`."""
        self.counts = {}
        if self.mixed:
            yield from self._mix()
            return
        for row in self.sources[0].read():
            count = self.counts.setdefault(row.source, {"read": 0, "taken": 0})
            count["read"] += 1
            count["taken"] += row.problem is None
            yield row

    def _mix(self) -> Iterator[Row]:
        """Mix in two passes: the first holds only ids and rows of no use, the second no more than it yields."""
        usable: dict[str, list[str]] = {}
        unusable: list[Row] = []
        for source in self.sources:
            name = source.name
            ids: list[str] = []
            bad: list[Row] = []
            for row in Progress(source.read(), desc=f"reading {name}", unit="row", leave=False):
                if row.problem is None:
                    ids.append(row.id)
                else:
                    bad.append(row)
            if not ids:
                reason = f"none of its {len(bad)} rows can be used ({bad[-1].problem})"
                raise UserError(f"data.sources.{name}: {reason}: fix them, or set data.sources.{name}=null")
            usable[name] = ids
            unusable += bad
            self.counts[name] = {"weight": float(source.weight), "read": len(ids) + len(bad)}
        weights = {source.name: source.weight for source in self.sources}
        taken = quotas(weights, {name: len(ids) for name, ids in usable.items()}, self.rows)
        streams = []
        for source in self.sources:
            self.counts[source.name]["taken"] = taken[source.name]
            streams.append(self._chosen(source, usable[source.name], taken[source.name]))
        for *_, row in heapq.merge(*streams, key=lambda entry: entry[:2]):
            yield row
        yield from unusable

    def _chosen(self, source: Source, ids: list[str], count: int) -> Iterator[tuple[float, str, Row]]:
        """Yield `count` of the source's rows of these ids in order, each with a place in [0, 1), evenly spread."""

        def rank(identity: str) -> bytes:
            return hashlib.sha256(json.dumps([self.seed, source.name, identity]).encode()).digest()[:16]

        chosen = set(heapq.nsmallest(count, ids, key=rank))
        for number, row in enumerate(row for row in source.read() if row.id in chosen):
            yield (2 * number + 1) / (2 * count), source.name, row


def quotas(weights: Mapping[str, Fraction], have: Mapping[str, int], rows: int | None) -> dict[str, int]:
    """Return how many rows each source gives: its weight's share by largest remainder, ties by name. UserError if one
    has fewer, or its share is no row. `have`: usable rows. `rows`: in total; None for as many as fill each share."""
    whole = sum(weights.values())
    total = rows if rows is not None else min(have[name] * whole // weight for name, weight in weights.items())
    shares = {name: total * weight / whole for name, weight in weights.items()}
    taken = {name: math.floor(share) for name, share in shares.items()}
    for name in sorted(shares, key=lambda name: (taken[name] - shares[name], name))[: total - sum(taken.values())]:
        taken[name] += 1
    for name, count in taken.items():
        if count > have[name]:
            raise UserError(
                f"data.sources.{name} must give {count} rows, but has only {have[name]}: lower data.rows={rows}"
            )
        if not count:
            raise UserError(
                f"data.sources.{name} would give no rows: raise its weight, its number of rows or data.rows"
            )
    return taken


# ---------------------------------------------------------------- options


def named(data: DataConfig) -> dict[str, Any]:
    """Return the entries of `data.sources` in the order of their names, without those that are null."""
    return {str(name): value for name, value in sorted(data.sources.items(), key=str) if value is not None}


def _nothing_given(data: DataConfig, option: str) -> str:
    """Return what to do if `data.{option}` is not set; the other of the two may be."""
    if option == "prompts" and data.conversations is not None:
        answers = f"regenerate=true answers data.prompts, not data.conversations={data.conversations}"
        return f"{answers}: set data.prompts, or regenerate=false to train on the conversations"
    if option == "conversations" and data.prompts is not None:
        needs = f"data.prompts={data.prompts} needs answers, but regenerate=false"
        return f"{needs}: set regenerate=null, or data.conversations"
    prompts = "data.prompts (self: the target writes them)"
    return f"no {option}: set {prompts}, data.conversations or data.sources (of prompts with regenerate=true)"


@dataclass(frozen=True)
class SourceOptions:
    path: str
    format: str
    split: str
    subset: str | None
    revision: str | None
    stream_rows: Annotated[int, Field(ge=1)] | None
    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0


OF_HUB_SETS = ("split", "subset", "revision", "stream_rows")


def _open_source(config: Config, where: str, value: Any, name: str = "") -> Source:
    data, entry = config.data, value if isinstance(value, dict) else {}
    defaults = {name: getattr(data, name) for name in ("format", *OF_HUB_SETS)}
    try:
        if (name and not re.fullmatch(r"[\w-]+", name)) or not entry.get("path"):
            raise ValueError("it needs a path, and a name of letters, digits, _ and -")
        options: SourceOptions = foreign.typed(SourceOptions, {**defaults, **entry})
    except ValueError as error:
        raise UserError(f"{where}={value!r}: {error}: write {{path: FILE, weight: 1}}, or {where}=null") from None
    path, form = options.path, options.format
    if path == SELF:
        if not config.regenerate:
            given = f"{where}.path" if name else where
            raise UserError(f"{given}={SELF}: such prompts need answers, but regenerate=false: set regenerate=null")
        path, form = str(Path(config.run_dir) / SELF_WRITTEN), "auto"
    check_value(f"{where}.format", form, {"choices": FORMATS})
    files = open_files(path, options.split, where, options.stream_rows, options.subset, options.revision)
    own = entry if name else defaults
    for option in OF_HUB_SETS:
        if own.get(option) not in (None, getattr(DataConfig, option)) and not files[0].on_hub:
            of = where if name else "data"
            kind = f"{of}.{option}={own[option]} is only for hub data sets"
            raise UserError(f"{kind}, not {where}={path}: remove {of}.{option}")
    # Via decimal text, so that 0.7 and 0.3 are exact.
    return Source(files, form, f"{where}={path}", name, Fraction(str(options.weight)))
