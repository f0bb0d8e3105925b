"""A store that is read while it is written: waiting for the other side, the bound on bytes, and consumed shards.

The two sides communicate through two small files. The extraction writes `stream.json`: how many bytes it may keep, and
how many processes write. The training writes `consumed.json`: which shards it has used up. It records them before it
removes them.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Annotated

from pydantic import Field

from eagle31_train.common import foreign
from eagle31_train.common.console import note
from eagle31_train.common.errors import UserError
from eagle31_train.store.backends import Storage
from eagle31_train.store.format import CONSUMED, REMAKE, STREAM, Bound, read_record
from eagle31_train.store.sealed import DamagedError, seal
from eagle31_train.store.shard_plan import PlannedShard

POLL = 0.5  # seconds between checks of what other processes have done
Pause = Callable[[float], bool | None]  # sleeps so many seconds; returns True once nobody waits any more


def wait(
    until: Callable[[], bool],
    what: str,
    patience: float,
    progress: Callable[[], object] = lambda: None,
    pause: Pause = time.sleep,
) -> None:
    """Poll until a condition holds. If it does not hold at once, print `what`, which says who waits for what.

    UserError after `patience` seconds without any change of `progress()`. RuntimeError if the `pause` between two polls
    returns True: nobody waits any more."""
    if until():
        return
    note(f"{what} …", error=True)
    began, seen = time.monotonic(), progress()
    while not until():
        if time.monotonic() - began > patience:
            if (now := progress()) == seen:
                raise UserError(f"{what}: nothing came for {patience:,.0f} s (store.patience): check the other process")
            began, seen = time.monotonic(), now
        if pause(POLL):
            raise RuntimeError(f"{what}: stopped")


@dataclass(frozen=True)
class Consumed:
    """What the training `by` (a fingerprint) has used up of a store. `finished`: it needs no more shards."""

    by: Annotated[str, Field(min_length=1)]
    shards: list[Annotated[str, Field(pattern=r"^shards/train-[0-9]{5,9}\.safetensors$")]]  # these may be removed
    finished: bool
    store: str = ""


def read_consumed(storage: Storage, store: str) -> Consumed:
    """Return what a training has used up of the store with this fingerprint. UserError if the record is damaged."""
    try:
        return read_record(storage, CONSUMED, partial(foreign.typed, Consumed), store) or Consumed("", [], False)
    except DamagedError as error:
        raise UserError(f"{error}: remove the store and extract again") from None


def check_consumer(storage: Storage, store: str, by: str) -> Consumed:
    """Return what is used up already. UserError if another training than `by` has used it up."""
    consumed = read_consumed(storage, store)
    if consumed.by not in ("", by):
        text = f"parts of {storage.location} were used up and removed by another training ({consumed.by}, this is {by})"
        raise UserError(f"{text}: continue that one, or remove the store and extract again")
    return consumed


def consume(storage: Storage, store: str, shards: Sequence[PlannedShard], by: str, finished: bool) -> None:
    """Record that training `by` has used up these shards, in addition to earlier ones, then remove them."""
    before = check_consumer(storage, store, by)
    names = list(dict.fromkeys([*before.shards, *(shard.name for shard in shards)]))
    after = Consumed(by, names, finished, store)
    if after != before:
        storage.write(CONSUMED, seal(asdict(after), indent=2))
    there = storage.sizes("shards")
    for shard in shards:
        if shard.name in there:
            storage.remove(shard.name)


def read_bound(storage: Storage, store: str) -> Bound | None:
    """Return the bound of the store's running extraction; None if it is over. UserError if the record is damaged."""
    try:
        return read_record(storage, STREAM, partial(foreign.typed, Bound), store)
    except DamagedError as error:
        raise UserError(f"{error}: {REMAKE}") from None
