"""A store without its states, complete or begun: what its small files say, and what is wrong with them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from eagle31_train.common import artifacts, foreign
from eagle31_train.common.console import note
from eagle31_train.provenance import Provenance
from eagle31_train.store import format as files
from eagle31_train.store.backends import Storage, at_once
from eagle31_train.store.format import Line
from eagle31_train.store.sealed import DamagedError
from eagle31_train.store.shard_plan import Plan, PlannedShard
from eagle31_train.store.stream import read_consumed
from eagle31_train.store.tensors import first_not_finite, wrong_shape


@dataclass(frozen=True)
class Problem:
    """Something wrong, in one line, and the file to remove, if any, so that extraction makes it anew."""

    text: str
    file: str | None = None


@dataclass
class Head:
    """What the small files of a store say, as far as they exist and are intact.

    lines: the lines of committed shards, by name. consumed: names of shards that a training has used up."""

    storage: Storage
    manifest: dict[str, Any] | None = None
    provenance: dict[str, Any] | None = None
    plan: Plan | None = None
    lines: dict[str, Line] = field(default_factory=dict)
    consumed: set[str] = field(default_factory=set)


def near(storage: Storage) -> Path | None:
    """Return the store of a run if the storage is that run's folder, or one in it, and no store itself; else None."""
    if storage.size(files.PROVENANCE) is not None:
        return None
    folder = Path(storage.location)
    places = (folder / "store", folder.parent / "store")
    return next((place for place in places if (place / files.PROVENANCE).is_file()), None)


def read_head(storage: Storage, every_line: bool = False) -> tuple[Head, list[Problem]]:
    """Read the small files, and find what is wrong with them. A missing file is wrong only in a complete store.

    UserError for a damaged record of what a training has used up, which extraction cannot make again. every_line: also
    read lines in separate files, of which there is one per shard while a store is being written."""
    problems: list[Problem] = []

    def read(name: str, parse: Callable[[Any], Any], store: str | None = None) -> Any:
        try:
            return files.read_record(storage, name, parse, store)
        except DamagedError as error:
            problems.append(Problem(str(error)))
            return None

    head = Head(storage)
    head.manifest = read(artifacts.MANIFEST, partial(foreign.typed, files.Manifest))
    if head.manifest is not None:
        there = storage.sizes("")
        problems += [Problem(f"{storage.location}/{name} is missing") for name in files.NEEDED if name not in there]
    head.provenance = read(files.PROVENANCE, partial(foreign.typed, files.Origin))
    store = head.provenance["fingerprint"] if head.provenance is not None else None
    head.plan = read(files.PLAN, Plan.from_json, store)
    if store is None:
        return head, problems
    if head.manifest is None:
        read(files.STREAM, partial(foreign.typed, files.Bound), store)
    head.consumed = set(read_consumed(storage, store).shards)
    if head.plan is not None:
        head.lines, damaged = read_lines(storage, head.plan, head.plan.shards if every_line else [], store)
        problems += damaged
    return head, problems


def read_lines(
    storage: Storage, plan: Plan, shards: Sequence[PlannedShard], store: str
) -> tuple[dict[str, Line], list[Problem]]:
    """Return the lines of these shards found in separate files, or of all if they are merged, and what is damaged."""

    def read(shard: PlannedShard) -> Line | Problem | None:
        try:
            return files.read_line(storage, shard.name, store)
        except DamagedError as error:
            return Problem(f"{error}, of {shard.samples()}", shard.line)

    there = storage.sizes("shards").keys() if len(shards) > 1 else {shard.line for shard in shards}
    own = at_once(read, [shard for shard in shards if shard.line in there])
    # Merged lines last: the first process may be merging them right now, and then removes the separate files.
    merged = _merged_lines(storage, store)
    found = {one.name: one for one in [*(merged or []), *own] if isinstance(one, Line)}
    lines = {shard.name: found[shard.name] for shard in plan.shards if shard.name in found}
    problems = [one for one in [*own, *(merged or [])] if isinstance(one, Problem)]
    for shard in plan.shards if merged is not None else []:
        if shard.name not in lines:
            what = f"has no line for {shard.name} ({shard.samples()})"
            problems.append(Problem(f"{storage.location}/{files.SHARDS} {what}"))
    return lines, problems


def _merged_lines(storage: Storage, store: str) -> list[Line | Problem] | None:
    """Read the lines of shards.jsonl, twice if some seem damaged. Return None if it is missing."""

    def parse(number: int, text: bytes) -> Line | Problem:
        where = f"{storage.location}/{files.SHARDS}:{number}"
        try:
            return files.parse_record(text, where, partial(foreign.typed, Line), store)
        except DamagedError as error:
            return Problem(str(error))

    def read() -> list[Line | Problem]:
        return [parse(*line) for line in enumerate(storage.read(files.SHARDS).splitlines(keepends=True), 1)]

    try:
        lines = read()
        if any(isinstance(line, Problem) for line in lines):
            storage.forget(files.SHARDS)
            lines = read()
    except FileNotFoundError:
        return None
    return lines


def big_files(storage: Storage) -> list[str]:
    """Name the big files beside the shards: the target's weights, and trajectories in stores that have them."""
    trajectories = storage.size(files.TRAJECTORIES_LINE) is not None
    return [files.TARGET, files.TRAJECTORIES] if trajectories else [files.TARGET]


def read_tensors(storage: Storage, name: str, provenance: Mapping[str, Any]) -> dict[str, Tensor]:
    """Map a big file beside the shards.

    DamagedError, naming it, if it is missing or altered, holds a value that is not finite, or holds target weights of
    another size than the store's provenance says."""

    def load(path: Path) -> dict[str, Tensor]:
        tensors = load_file(path)
        if wrong := first_not_finite(tensors):
            raise DamagedError(f"holds {wrong} with values that are not finite")
        states = provenance["states"]
        if name == files.TARGET and (wrong := wrong_shape(tensors, states["vocab_size"], states["hidden_size"])):
            raise DamagedError(wrong)
        return tensors

    line = _line_of(storage, name, provenance)
    try:
        return files.open_checked(storage, line, load)
    except FileNotFoundError:
        raise DamagedError(f"{storage.location}/{name} is missing") from None


def _line_of(storage: Storage, name: str, provenance: Mapping[str, Any]) -> Line:
    line = files.read_line(storage, name, provenance["fingerprint"])
    if line is None:
        raise DamagedError(f"{storage.location}/{files.line_name(name)} is missing")
    return line


def finished(storage: Storage, provenance: Provenance, overwrite: bool) -> dict[str, Any] | None:
    """Return the manifest of a complete store of these inputs, or None if there is work to do.

    Of shards, only sizes are compared. A damaged store loses its manifest. UserError for a store of other inputs,
    unless `overwrite`."""
    if storage.size(artifacts.MANIFEST) is None:
        return None
    head, problems = read_head(storage)
    damage = problems[0].text if problems else None
    if head.manifest is not None:
        provenance.refuse_other(storage.location, head.manifest, overwrite)
        if not provenance.matches(head.manifest):
            return None
        if damage is None and head.provenance is not None:  # never None if nothing is damaged
            damage = _first_damage(head, head.provenance)
    if damage:
        note(f"{damage}; making it again")
        storage.remove(artifacts.MANIFEST)
        return None
    return head.manifest


def _first_damage(head: Head, provenance: Mapping[str, Any]) -> str | None:
    """Describe the first big file of a complete store that is missing or damaged.

    Of shards, and of every file of a remote store, only sizes are compared."""
    storage = head.storage
    try:
        lines = [_line_of(storage, name, provenance) for name in big_files(storage)]
        if not storage.remote:  # do not download only to compare
            for line in lines:
                read_tensors(storage, line.name, provenance)
    except DamagedError as error:
        return str(error)
    sizes = storage.sizes("") | storage.sizes("shards")
    for line in [*lines, *head.lines.values()]:
        if line.name not in head.consumed and sizes.get(line.name) != line.size:
            return f"{storage.location}/{line.name} has {sizes.get(line.name, 'no')} bytes, not {line.size}"
    return None
