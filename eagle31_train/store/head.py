"""A store without its states: what its small files say, complete or begun, and what is wrong with them."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

from eagle31_train import artifacts, foreign
from eagle31_train.console import note
from eagle31_train.errors import UserError
from eagle31_train.provenance import Provenance
from eagle31_train.store.backends import Storage
from eagle31_train.store.format import (
    PLAN,
    PROVENANCE,
    REMAKE,
    SHARDS,
    TARGET,
    TRAJECTORIES,
    Line,
    Manifest,
    Origin,
    line_name,
    parse_line,
)
from eagle31_train.store.sealed import DamagedError, checksum, unseal
from eagle31_train.store.shard_plan import Plan, PlannedShard
from eagle31_train.store.stream import read_bound, read_consumed


@dataclass(frozen=True)
class Problem:
    """Something wrong, in one line; with the file in shards/ that must go, so that extraction makes it anew."""

    text: str
    file: str | None = None


@dataclass
class Head:
    """What the small files of a store say.

    manifest: None while it is unfinished, or damaged. provenance, plan: None where they are missing or damaged.
    lines: of committed shards, as far as they are read: see `read_head` and `read_lines`.
    consumed: names of shards that a training has used up.
    """

    storage: Storage
    manifest: dict[str, Any] | None
    provenance: dict[str, Any] | None
    plan: Plan | None
    lines: dict[str, Line] = field(default_factory=dict)
    consumed: set[str] = field(default_factory=set)


def read_head(storage: Storage) -> tuple[Head, list[Problem]]:
    """The small files, with the lines of a complete store, and what is wrong with them; missing files are not."""
    problems: list[Problem] = []
    manifest = _read(storage, artifacts.MANIFEST, Manifest, problems)
    bad = set()
    if manifest is not None:  # a changed length or layer id would be read as wrong states, and silently
        files = manifest["files"]
        for name in dict.fromkeys([PROVENANCE, PLAN, SHARDS, *files]):
            unlisted = f"{storage.location}/{artifacts.MANIFEST} does not list {name}"
            if damage := difference(storage, name, files[name]) if name in files else unlisted:
                problems.append(Problem(damage))
                bad.add(name)
    provenance = None if PROVENANCE in bad else _read(storage, PROVENANCE, Origin, problems)
    raw = None if PLAN in bad else _read(storage, PLAN, dict[str, Any], problems)
    head = Head(storage, manifest, provenance, None if raw is None else _plan(storage, raw, provenance, problems))
    if provenance is not None:
        try:
            if manifest is None:
                read_bound(storage, provenance["fingerprint"])
            head.consumed = set(read_consumed(storage, provenance["fingerprint"]).shards)
        except UserError as error:
            problems.append(Problem(str(error)))
    if head.plan is not None and provenance is not None and storage.size(SHARDS) is not None:
        head.lines, damaged = merged_lines(storage, head.plan, provenance["fingerprint"])
        problems += damaged
    return head, problems


def _plan(
    storage: Storage, raw: dict[str, Any], provenance: dict[str, Any] | None, problems: list[Problem]
) -> Plan | None:
    where, store = f"{storage.location}/{PLAN}", (provenance or {}).get("fingerprint")
    try:
        plan = Plan.from_json(raw)
    except ValueError as error:
        problems.append(Problem(f"{where} is damaged ({error})"))
        return None
    # Of a complete store the manifest knows its checksum; that of earlier versions does not say whose it is.
    if store is not None and (other := raw.get("store", store)) != store:
        problems.append(Problem(f"{where} belongs to another store, {other} (this is {store})"))
        return None
    return plan


def _read(storage: Storage, name: str, kind: Any, problems: list[Problem]) -> dict[str, Any] | None:
    """A sealed file of a kind, with all that it holds."""
    try:
        value = unseal(storage.read(name))
        foreign.typed(kind, value)
        return value
    except FileNotFoundError:
        return None
    except ValueError as error:
        problems.append(Problem(f"{storage.location}/{name} is damaged ({error})"))
        return None


def read_lines(storage: Storage, shards: Sequence[PlannedShard], store: str) -> tuple[dict[str, Line], list[Problem]]:
    """The lines of an unfinished store that are there, by shard, and those that are damaged."""
    lines: dict[str, Line] = {}
    problems: list[Problem] = []
    there = set(storage.names("shards")) if len(shards) > 1 else {shard.line for shard in shards}
    for shard in shards:
        if shard.line not in there:
            continue
        try:
            lines[shard.name] = parse_line(storage.read(shard.line), store, shard.name)
        except FileNotFoundError:  # not there, or gone since the listing
            pass
        except DamagedError as error:
            text = f"{storage.location}/{shard.line} (of {shard.samples()}) is damaged ({error})"
            problems.append(Problem(text, shard.line))
    return lines, problems


def merged_lines(storage: Storage, plan: Plan, store: str) -> tuple[dict[str, Line], list[Problem]]:
    """The lines in shards.jsonl, by shard, and what is wrong with them; FileNotFoundError before it is written."""
    where = f"{storage.location}/{SHARDS}"
    samples = {shard.name: f"{shard.name} ({shard.samples()})" for shard in plan.shards}
    lines: dict[str, Line] = {}
    names, problems = [], []
    for number, text in enumerate(storage.read(SHARDS).splitlines(keepends=True), 1):
        try:
            line = parse_line(text, store)
            lines[line.name] = line
            names.append(line.name)
        except DamagedError as error:
            problems.append(f"{where}:{number} is damaged ({error})")
    for name, wanted in zip_longest(names, [name for name in samples if name in lines]):
        if name != wanted:
            problems.append(f"{where} names {samples.get(name, name)} in the place of {samples.get(wanted, 'nothing')}")
            break
    problems += [f"{where} has no line for {text}" for name, text in samples.items() if name not in lines]
    return {name: line for name, line in lines.items() if name in samples}, list(map(Problem, problems))


def committed_lines(
    storage: Storage, plan: Plan, shards: Sequence[PlannedShard], store: str
) -> tuple[dict[str, Line], list[Problem]]:
    """The lines of these shards that are there, in files of their own or merged (then of all), and what is damaged."""
    lines, problems = read_lines(storage, shards, store)
    # Merged ones last: the first process may be merging them just now, and removes the others then.
    with suppress(FileNotFoundError):
        merged, damaged = merged_lines(storage, plan, store)
        lines, problems = merged | lines, problems + damaged
    return lines, problems


def read_line(storage: Storage, name: str, store: str) -> Line:
    """The line of a big file beside the shards.

    Raises:
        UserError: it is missing or damaged.
    """
    where = f"{storage.location}/{line_name(name)}"
    try:
        return parse_line(storage.read(line_name(name)), store, name)
    except FileNotFoundError:
        raise UserError(f"{where} is missing: {REMAKE}") from None
    except DamagedError as error:
        raise UserError(f"{where} is damaged ({error}): {REMAKE}") from None


def difference(storage: Storage, name: str, entry: dict[str, Any]) -> str | None:
    """How a file differs from the manifest's entry for it, in words; None if it does not."""
    where = f"{storage.location}/{name}"

    def damage(path: Path) -> str | None:
        if (size := path.stat().st_size) != entry["bytes"]:
            return f"{where} has {size} bytes, not {entry['bytes']}: truncated or replaced"
        if checksum(path) != entry["checksum"]:
            return f"{where} is not as it was written (its checksum differs)"
        return None

    try:
        text = storage.opened(name, damage)
        if text and storage.remote:  # the copy may be damaged, or of an earlier store, where the original is not
            storage.forget(name)
            text = storage.opened(name, damage)
        return text
    except FileNotFoundError:
        return f"{where} is missing"


def finished(storage: Storage, provenance: Provenance, overwrite: bool) -> dict[str, Any] | None:
    """The manifest of a complete store of these inputs; None if there is work to do.

    Of shards only sizes are compared; `eagle31 store verify` reads every byte. A store that is
    damaged is complete no more: its manifest is removed.

    Raises:
        UserError: the storage holds a store of other inputs and `overwrite` is off.
    """
    head, problems = read_head(storage)
    if head.manifest is None:
        damage = problems[0].text if problems and storage.size(artifacts.MANIFEST) is not None else None
    else:
        provenance.refuse_other(storage.location, head.manifest, overwrite)
        if not provenance.matches(head.manifest):
            return None
        damage = problems[0].text if problems else _first_of_another_size(head, head.manifest["fingerprint"])
    if damage:
        note(f"{damage}; making it again")
        storage.remove(artifacts.MANIFEST)
        return None
    return head.manifest


def _first_of_another_size(head: Head, store: str) -> str | None:
    """Name the first big file of a complete store that is missing or not as long as it was written."""
    storage = head.storage
    whole = [name for name in (TARGET, TRAJECTORIES) if name == TARGET or storage.size(line_name(name)) is not None]
    try:
        lines = [read_line(storage, name, store) for name in whole]
    except UserError as error:  # the manifest does not list that of trajectories
        return str(error)
    wanted = {line.name: line.size for line in head.lines.values() if line.name not in head.consumed}
    sizes = storage.sizes("shards")
    if storage.remote:  # no download only to compare
        wanted |= {line.name: line.size for line in lines}
        sizes |= storage.sizes("")
    elif damage := next(filter(None, (difference(storage, line.name, line.entry) for line in lines)), None):
        return damage
    for name, size in wanted.items():
        if sizes.get(name) != size:
            what = f"has {sizes[name]} bytes, not {size}: truncated or replaced" if name in sizes else "is missing"
            return f"{storage.location}/{name} {what}"
    return None
