"""The names of a store's files, and the lines by which shards are committed.

While a store is written each shard's line is a file of its own, so that any number of processes can commit
shards without a word to each other, on a disk or in a bucket. At the end they become one file.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from eagle31_train import artifacts
from eagle31_train.place import Place
from eagle31_train.schema import UserError
from eagle31_train.store.plan import Plan, PlannedShard
from eagle31_train.store.sealed import CHECK, DamagedError, checksum, seal, unseal

PROVENANCE = "provenance.json"
PLAN = "plan.json"
TARGET = "target.safetensors"
TARGET_LINE = "target.json"  # its line
SHARDS = "shards.jsonl"
STREAM = "stream.json"  # how many bytes the extraction may keep, and how many processes share it, while it runs
CONSUMED = "consumed.json"  # which shards a training has used up
EXTRACT = "python -m eagle31_train.extract"
REMAKE = f"run `{EXTRACT}` again, which makes what is damaged or missing anew"


@dataclass(frozen=True)
class Line:
    """What commits a shard, or the target's weights. `fidelity` is what the gate found where it compared the shard."""

    name: str
    store: str  # fingerprint of the store that it belongs to
    size: int  # in bytes
    checksum: str
    fidelity: list[float] | None = None

    def sealed(self) -> bytes:
        """One line of JSON with a checksum of itself."""
        return seal(asdict(self))

    @property
    def entry(self) -> dict[str, Any]:
        """As a manifest lists it."""
        return {"bytes": self.size, "checksum": self.checksum}


def parse_line(data: bytes, store: str, name: str | None = None) -> Line:
    """One line, of the store with this fingerprint, and of the shard of this name.

    Raises:
        DamagedError: it is torn or altered, or of another store or shard.
    """
    try:
        line = Line(**unseal(data))
    except TypeError as error:
        raise DamagedError(str(error)) from None
    if line.store != store:
        raise DamagedError(f"it belongs to another store, {line.store}")
    if name not in (None, line.name):
        raise DamagedError(f"it belongs to {line.name}")
    return line


def read_line(place: Place, shard: PlannedShard, store: str) -> Line | None:
    """The line of one shard while its store is being written; None if it is not there yet.

    Raises:
        UserError: it is damaged.
    """
    try:
        line = parse_line(place.read(shard.line), store, shard.name)
    except FileNotFoundError:
        return None
    except DamagedError as error:
        where = f"{place.location}/{shard.line} (of {shard.samples()})"
        raise UserError(f"{where} is damaged ({error}): {REMAKE}") from None
    return line


def read_target_line(place: Place, store: str) -> Line:
    """The line of the target's weights.

    Raises:
        UserError: it is missing or damaged.
    """
    try:
        return parse_line(place.read(TARGET_LINE), store, TARGET)
    except (FileNotFoundError, DamagedError) as error:
        what = "is missing" if isinstance(error, FileNotFoundError) else f"is damaged ({error})"
        raise UserError(f"{place.location}/{TARGET_LINE} {what}: {REMAKE}") from None


def merged_lines(place: Place, store: str) -> Iterator[tuple[int, Line | DamagedError]]:
    """Every line of shards.jsonl with its number, or what is wrong with it."""
    for number, text in enumerate(place.read(SHARDS).splitlines(keepends=True), 1):
        try:
            yield number, parse_line(text, store)
        except DamagedError as error:
            yield number, error


def read_merged(place: Place, plan: Plan, store: str) -> dict[str, Line]:
    """All lines of a finished store, by shard; empty if they are not merged yet.

    Raises:
        UserError: a line is damaged, stands twice, or is missing.
    """
    lines: dict[str, Line] = {}
    try:
        for problem, line in check_merged(place, plan, store):
            if problem:
                raise UserError(f"{problem}: {REMAKE}")
            assert line is not None
            lines[line.name] = line
    except FileNotFoundError:
        return {}
    return lines


def check_merged(place: Place, plan: Plan, store: str) -> Iterator[tuple[str | None, Line | None]]:
    """Each line of shards.jsonl against the plan: (what is wrong or None, the line or None)."""
    where = f"{place.location}/{SHARDS}"
    wanted = {shard.name: shard for shard in plan.shards}
    seen: set[str] = set()
    following = 0  # lines stand in the order of the plan: a damaged one still tells which shard it was for
    for number, line in merged_lines(place, store):
        if isinstance(line, DamagedError):
            expected = plan.shards[following] if following < len(plan.shards) else None
            of = f" (for {expected.name}, {expected.samples()})" if expected else ""
            yield f"{where}:{number}{of} is damaged ({line})", None
            seen |= {expected.name} if expected else set()
            following += 1
            continue
        shard = wanted.get(line.name)
        if shard is None:
            yield f"{where}:{number} names {line.name}, which is not in the plan", None
        elif shard.number < following:
            why = "stands there already" if line.name in seen else "belongs further up"
            yield f"{where}:{number} names {line.name} ({shard.samples()}), which {why}", None
        else:
            yield None, line
            following = shard.number + 1
        seen.add(line.name)
    for name, shard in wanted.items():
        if name not in seen:
            yield f"{where} has no line for {name} ({shard.samples()})", None


def difference(place: Place, name: str, entry: dict[str, Any]) -> str | None:
    """How a file differs from the manifest's entry for it, in words; None if it does not."""
    where = f"{place.location}/{name}"

    def damage(path: Path) -> str | None:
        if (size := path.stat().st_size) != entry["bytes"]:
            return f"{where} has {size} bytes, not {entry['bytes']}: truncated or replaced"
        if checksum(path) != entry["checksum"]:
            return f"{where} is not as it was written (its checksum differs)"
        return None

    try:
        found = place.opened(name, damage)
        if found and place.remote:  # the copy may be damaged, or of an earlier store, where the original is not
            place.forget(name)
            found = place.opened(name, damage)
        return found
    except FileNotFoundError:
        return f"{where} is missing"


def refuse_old(place: Place) -> None:
    """Refuse a store of the layout that had no plan and no seals.

    Raises:
        UserError: this is one.
    """
    if place.size(PLAN) is None and any(_unsealed(place, name) for name in (artifacts.MANIFEST, PROVENANCE)):
        raise UserError(
            f"{place.location} holds a store of an earlier version, which cannot be read any more: remove it and run "
            f"`{EXTRACT}` again, or choose another store_dir=…"
        )


def _unsealed(place: Place, name: str) -> bool:
    try:
        value = json.loads(place.read(name))
    except (FileNotFoundError, ValueError):
        return False
    return isinstance(value, dict) and CHECK not in value
