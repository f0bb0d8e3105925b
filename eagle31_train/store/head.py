"""What a store's small files say, complete or begun, and what is wrong with them."""

from dataclasses import dataclass, field
from typing import Any

from eagle31_train import artifacts
from eagle31_train.place import Place
from eagle31_train.schema import UserError
from eagle31_train.store.ledger import (
    PLAN,
    PROVENANCE,
    SHARDS,
    STREAM,
    Line,
    check_merged,
    difference,
    parse_line,
    refuse_old,
)
from eagle31_train.store.plan import Plan, PlannedShard, Shape, shape_of
from eagle31_train.store.sealed import DamagedError, unseal
from eagle31_train.store.stream import read_consumed


@dataclass(frozen=True)
class Problem:
    """Something wrong, in one line; with the shard that must be made anew, or the file in shards/ that must go."""

    text: str
    shard: PlannedShard | None = None
    stray: str | None = None


@dataclass
class Head:
    """A store without its states.

    manifest: None while it is unfinished, or damaged.
    lines: of the committed shards.
    consumed: names of shards that a training has used up.
    """

    place: Place
    provenance: dict[str, Any]
    plan: Plan
    manifest: dict[str, Any] | None
    lines: dict[str, Line] = field(default_factory=dict)
    consumed: set[str] = field(default_factory=set)

    @property
    def shape(self) -> Shape:
        """Of the states."""
        return shape_of(self.provenance["states"])


def read_head(place: Place) -> tuple[Head | None, list[Problem]]:
    """The head, or None where it cannot be read, and everything that is wrong with it.

    Raises:
        UserError: there is no store, or one of an earlier version.
    """
    refuse_old(place)
    found: list[Problem] = []
    manifest, provenance, plan = (_read(place, name, found) for name in (artifacts.MANIFEST, PROVENANCE, PLAN))
    if not found and manifest is provenance is None and not place.names("shards"):  # a plan alone is no store yet
        raise UserError(f"there is no store in {place.location}: correct the address")
    for name, entry in (manifest or {"files": {}})["files"].items():
        if damage := difference(place, name, entry):
            found.append(Problem(damage))
    if manifest is None and place.size(SHARDS) is not None and place.size(artifacts.MANIFEST) is None:
        found.append(Problem(f"{place.location}/{artifacts.MANIFEST} is missing, though all shards were there"))
    for name, value in ((PROVENANCE, provenance), (PLAN, plan)):
        if value is None:
            found.append(Problem(f"{place.location}/{name} is not there whole, and no shard can be checked without it"))
    if manifest is None:
        _read(place, STREAM, found)
    if provenance is None or plan is None:
        return None, found
    head = Head(place, provenance, Plan.from_json(plan), manifest)
    try:
        head.consumed = set(read_consumed(place).shards)
    except UserError as error:
        found.append(Problem(str(error)))
    _read_lines(head, found)
    return head, found


def _read(place: Place, name: str, found: list[Problem]) -> dict[str, Any] | None:
    try:
        return unseal(place.read(name))
    except FileNotFoundError:
        return None
    except DamagedError as error:
        found.append(Problem(f"{place.location}/{name} is damaged ({error})"))
        return None


def _read_lines(head: Head, found: list[Problem]) -> None:
    place, store = head.place, head.provenance["fingerprint"]
    if place.size(SHARDS) is not None:
        for problem, line in check_merged(place, head.plan, store):
            if line is None:
                found.append(Problem(str(problem)))
            else:
                head.lines[line.name] = line
    there = set(place.names("shards"))
    for shard in head.plan.shards:
        if shard.line in there and head.manifest is None:
            try:
                head.lines[shard.name] = parse_line(place.read(shard.line), store, shard.name)
            except DamagedError as error:
                text = f"{place.location}/{shard.line} (of {shard.samples()}) is damaged ({error})"
                found.append(Problem(text, shard))
