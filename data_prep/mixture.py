"""The rows of a run: of one file, glob or data set as they stand there, or mixed of `data.sources` by weight.

A weight is a share of rows. Which rows of a source are taken depends on the seed, the source's name and the
rows' ids alone: they are ranked by a hash of these, and the first so many are taken. So another source, or
more rows, changes none of the others' choices beyond their number, and a larger number only adds. Rows keep
the order of their source; the sources alternate so that every stretch of the mixture has its shares.
"""

import difflib
import hashlib
import heapq
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

from tqdm import tqdm

from data_prep.messages import FORMATS, Row
from data_prep.sources import Source, open_sources, read
from eagle31_train.schema import Config, DataConfig, UserError

OPTIONS = ("path", "weight", "format", "split")


@dataclass(frozen=True)
class Part:
    """Files or a data set that are read as one; `name` and `weight` are those of `data.sources`, if it is one."""

    sources: list[Source]
    format: str
    name: str | None = None
    weight: Fraction = Fraction(1)

    def read(self) -> Iterator[Row]:
        """Its rows in order; of a named part with its name as their source and before their ids."""
        for row in read(self.sources, self.format):
            yield replace(row, id=f"{self.name}/{row.id}", source=self.name) if self.name is not None else row

    def only(self, kept: set[str]) -> Iterator[Row]:
        """The rows of these ids, in order."""
        return (row for row in self.read() if row.id in kept)


@dataclass
class Corpus:
    """What a run reads; `counts` says of every source how many rows it has and gave, once they have been read.

    A row with a `problem` counts as read and never as taken.
    """

    parts: list[Part]
    mixed: bool = False
    seed: int = 0
    rows: int | None = None
    counts: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def open(cls, config: Config, option: str) -> "Corpus":
        """What `data.sources` names or else the option `conversations` or `prompts`.

        Raises:
            UserError: neither or both are given, an entry of `data.sources` is wrong, or there is no such file.
        """
        data = config.data
        if named(data):
            return cls(_parts(data), True, config.seed, data.rows)
        spec: str | None = getattr(data, option)
        if spec is None:
            raise UserError(
                "regenerate=true needs prompts to answer: set data.prompts or data.sources"
                if option == "prompts"
                else "no conversations: set data.conversations or data.sources, or data.prompts and regenerate=true"
            )
        if data.rows is not None:
            raise UserError(f"data.rows={data.rows} is of data.sources, which are not given: set them, or no data.rows")
        return cls([Part(open_sources(spec, data.split, f"data.{option}"), data.format)])

    def inputs(self) -> dict[str, Any]:
        """All that the rows depend on."""
        if not self.mixed:
            (part,) = self.parts
            return {"sources": _fingerprints(part), "format": part.format}
        return {
            "sources": {
                str(part.name): {"files": _fingerprints(part), "weight": str(part.weight), "format": part.format}
                for part in self.parts
            },
            "rows": self.rows,
            "mixed_by": self.seed,
        }

    def read(self) -> Iterator[Row]:
        """The rows, and last the rows that cannot be used where there are several sources to choose from.

        Raises:
            UserError: see `sources.read` and `quotas`.
        """
        self.counts = {}
        return self._mix() if self.mixed else self._all()

    def _all(self) -> Iterator[Row]:
        for row in self.parts[0].read():
            count = self.counts.setdefault(row.source, {"read": 0, "taken": 0})
            count["read"] += 1
            count["taken"] += row.problem is None
            yield row

    def _mix(self) -> Iterator[Row]:
        """In two passes: the first holds ids alone, the second no more than it yields."""
        ranked: dict[str, list[tuple[bytes, str]]] = {}
        unusable: list[Row] = []
        for part in self.parts:
            name = str(part.name)
            found = ranked[name] = []
            rows = 0
            for row in tqdm(part.read(), desc=f"reading {name}", unit="row", dynamic_ncols=True, leave=False):
                rows += 1
                if row.problem is None:
                    found.append((rank(self.seed, name, row.id), row.id))
                else:
                    unusable.append(row)
            if not found:
                reason = f": none of its {rows} rows can be used ({unusable[-1].problem})" if rows else " is empty"
                raise UserError(f"data.sources.{name}{reason}: mend it or leave it out")
            self.counts[name] = {"weight": float(part.weight), "read": rows}
        weights = {str(part.name): part.weight for part in self.parts}
        taken = quotas(weights, {name: len(found) for name, found in ranked.items()}, self.rows)
        chosen: dict[str, set[str]] = {}
        for name, found in ranked.items():
            self.counts[name]["taken"] = taken[name]
            chosen[name] = {identity for _, identity in sorted(found)[: taken[name]]}
        del ranked
        streams = [
            placed(part.only(chosen[str(part.name)]), taken[str(part.name)], str(part.name)) for part in self.parts
        ]
        for *_, row in heapq.merge(*streams, key=lambda entry: entry[:2]):
            yield row
        yield from unusable


def placed(rows: Iterator[Row], count: int, name: str) -> Iterator[tuple[float, str, Row]]:
    """`count` rows with their places in a mixture that is as long as 1, evenly spread."""
    for number, row in enumerate(rows):
        yield (2 * number + 1) / (2 * count), name, row


def rank(seed: int, name: str, identity: str) -> bytes:
    """Where a row stands among those of its source: the smallest are taken."""
    return hashlib.sha256(json.dumps([seed, name, identity]).encode()).digest()[:16]


def quotas(weights: Mapping[str, Fraction], have: Mapping[str, int], rows: int | None) -> dict[str, int]:
    """How many rows of each source: its weight's share, rounded by largest remainder, ties by name.

    Args:
        have: rows of each source that can be used.
        rows: how many in all; None for the most with which no share is larger than its source.

    Raises:
        UserError: a source has fewer than its share, or its share is no row at all.
    """
    whole = sum(weights.values())
    total = rows if rows is not None else min(have[name] * whole // weight for name, weight in weights.items())
    shares = {name: total * weight / whole for name, weight in weights.items()}
    taken = {name: math.floor(share) for name, share in shares.items()}
    for name in sorted(shares, key=lambda name: (taken[name] - shares[name], name))[: total - sum(taken.values())]:
        taken[name] += 1
    if short := [name for name in taken if taken[name] > have[name]]:
        told = ", ".join(f"data.sources.{name} is to give {taken[name]} and has {have[name]}" for name in short)
        raise UserError(f"data.rows={rows} asks for more rows than there are: {told}; lower data.rows or the weight")
    if empty := [name for name, count in taken.items() if not count]:
        told = f"of its {have[empty[0]]} rows" if rows is None else f"of data.rows={rows}"
        raise UserError(f"data.sources.{empty[0]} gives no row ({told}): raise its weight, its rows or data.rows")
    return taken


# ---------------------------------------------------------------- options


def named(data: DataConfig) -> dict[str, Any]:
    """The entries of `data.sources`; one that is null is a recipe's that somebody does not want."""
    return {str(name): value for name, value in sorted(data.sources.items(), key=str) if value is not None}


def _parts(data: DataConfig) -> list[Part]:
    """The sources by name, so that their order in a file or on a command line says nothing."""
    given = [f"data.{name}" for name in ("conversations", "prompts") if getattr(data, name) is not None]
    if given:
        raise UserError(
            f"data.sources and {' and '.join(given)} exclude each other: set {' '.join(f'{o}=null' for o in given)}, "
            "or no data.sources"
        )
    if data.rows is not None and data.rows < 1:
        raise UserError(f"data.rows={data.rows} takes nothing: set at least 1")
    parts = [_part(name, value, data) for name, value in named(data).items()]
    seen: dict[str, str] = {}
    for part in parts:
        for source in part.sources:
            if (other := seen.setdefault(source.fingerprint, str(part.name))) != part.name:
                raise UserError(f"data.sources.{other} and .{part.name} hold the same: {source.name}; name it once")
    return parts


def _part(name: str, value: Any, data: DataConfig) -> Part:
    where = f"data.sources.{name}"
    if not re.fullmatch(r"[\w-]+", name):
        raise UserError(f"{where}: a source's name is letters, digits, _ and -: rename it")
    if not isinstance(value, dict):
        raise UserError(f"{where}={value!r} is no set of options: write {where}='{{path: FILE, weight: 1}}'")
    for key in value:
        if key not in OPTIONS:
            close = difflib.get_close_matches(str(key), OPTIONS, n=1, cutoff=0.5)
            hint = f": did you mean {close[0]!r}?" if close else f" (there are {', '.join(OPTIONS)})"
            raise UserError(f"no option {f'{where}.{key}'!r}{hint}")
    path, weight = value.get("path"), value.get("weight", 1)
    form, split = value.get("format", data.format), value.get("split", data.split)
    if not isinstance(path, str) or not path:
        raise UserError(
            f"{where}.path is missing: give a file, a glob, or a hub id such as org/name, or set {where}=null"
        )
    # A boolean is an int to Python.
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < math.inf:
        raise UserError(f"{where}.weight={weight} is no weight: set a number above 0")
    if form not in ("auto", *FORMATS):
        close = difflib.get_close_matches(str(form), FORMATS, n=1, cutoff=0.5)
        hint = f": did you mean {close[0]!r}?" if close else ""
        raise UserError(f"{where}.format={form} is none of auto, {', '.join(FORMATS)}{hint}")
    if not isinstance(split, str):
        raise UserError(f"{where}.split={split} is no name of a split")
    # Through its decimal text: 0.7 and 0.3 are to be exactly that.
    return Part(open_sources(path, split, f"{where}.path"), form, name, Fraction(str(weight)))


def _fingerprints(part: Part) -> list[list[str]]:
    return [[source.name, source.fingerprint] for source in part.sources]
