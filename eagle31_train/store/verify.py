"""Is a store whole? Every byte is compared with what was written, and what is wrong is named with its samples."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

from eagle31_train import artifacts
from eagle31_train.console import Progress
from eagle31_train.errors import UserError
from eagle31_train.store.backends import Storage
from eagle31_train.store.format import (
    FILES,
    PLAN,
    PROVENANCE,
    SHARDS,
    STREAM,
    TARGET,
    TRAJECTORIES,
    line_name,
)
from eagle31_train.store.head import Head, Problem, difference, read_head, read_line, read_lines
from eagle31_train.store.shard import ContentError, open_shard
from eagle31_train.store.shard_plan import Plan, shape_of
from eagle31_train.store.stream import read_consumed


def inspect(storage: Storage) -> tuple[Head, list[Problem]]:
    """`read_head` with every committed line, and with what is missing.

    Raises:
        UserError: there is no store.
    """
    head, problems = read_head(storage)
    if not problems and head.manifest is head.provenance is None and not storage.names("shards"):
        raise UserError(f"there is no store in {storage.location}: correct the address")  # a plan alone is none yet
    if head.manifest is None and storage.size(SHARDS) is not None and storage.size(artifacts.MANIFEST) is None:
        problems.append(Problem(f"{storage.location}/{artifacts.MANIFEST} is missing, though all shards were there"))
    for name, value in ((PROVENANCE, head.provenance), (PLAN, head.plan)):
        if value is None:
            text = f"{storage.location}/{name} is not there whole, and no shard can be checked without it"
            problems.append(Problem(text))
    if head.manifest is None and head.plan is not None and head.provenance is not None:
        lines, damaged = read_lines(storage, head.plan.shards, head.provenance["fingerprint"])
        head.lines |= lines
        problems += damaged
    return head, problems


def check(storage: Storage, checked: Counter[str]) -> Iterator[Problem]:
    """Everything that is wrong with a store, complete or begun; on the way, `checked` counts what is whole.

    It counts the shards, tokens and bytes that are whole; shards that are coming, not being committed yet, and those
    consumed by a training, which removed them. It holds `complete` where the store is.

    Raises:
        UserError: there is no store, or it cannot be read at all.
    """
    head, problems = inspect(storage)
    yield from problems
    if head.plan is None or head.provenance is None:
        return
    if head.manifest is not None:
        checked["complete"] = 1
    else:
        checked["coming"] = len(head.plan.shards) - len(head.lines)
    for name in (TARGET, TRAJECTORIES):
        # In an unfinished store the target's weights may be still to come; not every store has trajectories.
        if storage.size(line_name(name)) is None and (name == TRAJECTORIES or head.manifest is None):
            continue
        try:
            line = read_line(storage, name, head.provenance["fingerprint"])
            if damage := difference(storage, name, line.entry):
                yield Problem(damage)
        except UserError as error:
            yield Problem(str(error))
    yield from _shards(head, head.plan, head.provenance, checked)
    yield from _strays(head, head.plan)


def _shards(head: Head, plan: Plan, provenance: dict[str, Any], checked: Counter[str]) -> Iterator[Problem]:
    """Open every committed shard, and count those that were used up."""
    storage, states = head.storage, provenance["states"]
    shape = shape_of(states)
    gone = {name for name in head.consumed if storage.size(name) is None}
    checked["consumed"] = len(gone)
    shards = [shard for shard in plan.shards if shard.name in head.lines and shard.name not in gone]
    sizes = {shard.name: head.lines[shard.name].size for shard in shards}
    storage.prefetch(sizes)
    with Progress(total=sum(sizes.values()), unit="B", unit_scale=True, desc="verify", leave=False) as bar:
        for shard in shards:
            line = head.lines[shard.name]
            try:
                file = open_shard(storage, line, plan.lengths_of(shard), shape, states["vocab_size"], {})
                if bad := [str(shard.first + index) for index in file.not_finite()]:
                    where = f"{storage.location}/{shard.name}"
                    text = f"{where} holds states that are not finite, in sample {', '.join(bad)} of {shard.split}"
                    yield Problem(text, shard.name)
                else:
                    checked.update(shards=1, tokens=shard.tokens, bytes=line.size)
            except FileNotFoundError:
                if _used_up(storage, provenance["fingerprint"], shard.name):  # by a training, since we looked
                    checked["consumed"] += 1
                else:
                    yield Problem(f"{storage.location}/{shard.name} ({shard.samples()}) is missing")
            except ContentError as error:
                yield Problem(f"{storage.location}/{shard.name} ({shard.samples()}) {error}", shard.name)
            bar.update(line.size)


def _used_up(storage: Storage, store: str, name: str) -> bool:
    try:
        return name in read_consumed(storage, store).shards
    except UserError:  # which was named already
        return False


def _strays(head: Head, plan: Plan) -> Iterator[Problem]:
    """Files that are none of the store's."""
    storage, ours = head.storage, FILES - ({STREAM} if head.manifest else set())
    ours |= {shard.name for shard in plan.shards}
    if head.manifest is None:  # lines have files of their own
        ours |= {shard.line for shard in plan.shards}
    for name in [*storage.names("shards"), *storage.names("")]:
        if name not in ours:
            stray = name if "/" in name else None  # beside the shards may lie what is somebody else's
            yield Problem(f"{storage.location}/{name} is no file of this store: remove it", stray)
