"""Windows: the stretches of a split that are shuffled and trained one after another, and when each is used up. With
them, a store need not be present as a whole, neither in the cache of a remote store nor on the disk of one that is
still being written."""

from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np
from accelerate import Accelerator

from eagle31_train.common.errors import UserError
from eagle31_train.store import PlannedShard, Store, StoreSplit
from eagle31_train.store.backends import Use
from eagle31_train.store.stream import check_consumer, consume
from train import launch

Window = list[PlannedShard]


def cut(split: StoreSplit, tokens: int | None) -> list[Window]:
    """Cut into windows of consecutive shards with at least `tokens` tokens (the last may have fewer); one if None."""
    windows: list[Window] = []
    held = 0  # tokens of the last window, not summed anew each time: it may have 10^5 shards
    for shard in split.shards:
        if not windows or (tokens is not None and held >= tokens):
            windows.append([])
            held = 0
        windows[-1].append(shard)
        held += shard.tokens
    return windows


def samples(windows: Sequence[Window]) -> list[range]:
    return [range(window[0].first, window[-1].end) for window in windows]


def check(store: Store, windows: Sequence[Window], epochs: int, cache_bytes: int) -> None:
    """Raise UserError if the bound of a followed store, or the cache of a remote one, cannot hold these windows, or if
    a second epoch would need what the first one removes."""
    largest = max((sum(shard.bytes for shard in window) for window in windows), default=0)
    heldout = sum(shard.bytes for shard in store.plan.of("heldout"))
    needs = f"the held-out split takes {heldout:,} bytes and a window {largest:,}"
    needs += ": raise it, or lower train.window_tokens"
    if store.storage.remote and heldout + 2 * largest > cache_bytes:  # half of the cache is for what is fetched ahead
        raise UserError(f"store.cache_bytes={cache_bytes:,} cannot hold two windows of {store.location}: {needs}")
    if store.follow and store.manifest is None and len(windows) == 1:
        raise UserError(
            f"{store.location} is still being written, and one window holds its whole training split: set (or lower) "
            "train.window_tokens, or train once the store is complete"
        )
    if bounded(store) and heldout + largest > (most := store.max_bytes or 0):
        raise UserError(f"store.max_bytes={most:,} cannot hold a window: {needs}")
    if bounded(store) and epochs != 1:
        raise UserError(
            f"train.epochs={epochs}: store.max_bytes removes shards after their first use: set train.epochs=1"
        )


def bounded(store: Store) -> bool:
    """Return whether used-up shards are removed: the store is followed, and its extraction keeps to a bound."""
    return store.follow and store.max_bytes is not None


class Usage:
    """Knows which shards later steps need; unmaps the others, and removes them from a bounded store. schedule: samples
    of every step, those of step i + 1 at i. fingerprint: of this training; no other one may use up the store."""

    def __init__(
        self, store: Store, split: StoreSplit, schedule: list[list[int]], windows: list[Window], fingerprint: str
    ) -> None:
        self._store, self._shards, self._schedule, self._fingerprint = store, split.shards, schedule, fingerprint
        # Arrays, not dicts: there may be 10^7 samples and 10^5 shards. _last_use is 0 for a shard that no step uses.
        self._owner = np.repeat(np.arange(len(split.shards), dtype=np.int32), [s.end - s.first for s in split.shards])
        self._last_use = np.zeros(len(split.shards), dtype=np.int64)
        for step, batch in enumerate(schedule, 1):
            self._last_use[self._owner[batch]] = step
        sizes = [len(window) for window in windows]
        self._window = np.repeat(np.arange(len(windows), dtype=np.int32), sizes)  # the window of each shard
        ends = np.cumsum(sizes)[:-1]
        self._window_ends = {int(last.max(initial=0)) for last in np.split(self._last_use, ends)}

    def begin(self, done: int, remove: bool, ended: bool = False) -> None:
        """Prepare for the steps after `done`, of which there are none if the run has `ended`: `release` what earlier
        launches used up, and prefetch what is needed. Raise UserError if that was removed, by another training or
        before a checkpoint that is damaged now."""
        store, last = self._store, len(self._schedule) if ended else done
        gone = set(check_consumer(store.storage, store.fingerprint, self._fingerprint).shards)
        if gone and (gone := gone & {use.name for use in self.uses_after(last)}):
            raise UserError(
                f"{len(gone)} shards of {store.location} that the steps after {done} need were removed after their "
                "use: restore this run's later checkpoint, which is missing or damaged, or remove store and training "
                "and start over"
            )
        if not store.follow:
            store.storage.prefetch(self.uses_after(last))
        self.release(done, remove, ended)

    def frees_shards(self, step: int, accelerator: Accelerator) -> bool:
        """Return whether a window of a bounded store is used up after this step, so that extraction waits for its
        removal. Every rank must call this. All get the main process's answer: the bound may come or go meanwhile."""
        if not self._store.follow or step not in self._window_ends:
            return False
        return bool(launch.agreed(accelerator, lambda: bounded(self._store)))

    def release(self, step: int, remove: bool, ended: bool = False) -> None:
        """Unmap the shards that no step after `step` reads. With `remove`, which one process sets, also remove them
        from a bounded store. `ended`: the run ends with this step, not with its schedule, so extraction may stop."""
        shards, store = self.used_up(step), self._store
        store.release(shards)
        if remove and bounded(store):
            consume(store.storage, store.fingerprint, shards, self._fingerprint, ended or step == len(self._schedule))

    def uses_after(self, step: int) -> Iterator[Use]:
        """Yield the shards that later steps read, each at the first step of its window that reads it, and again in
        every epoch, since it may have left the cache."""
        window, seen = -1, set[int]()
        for turn, batch in enumerate(islice(self._schedule, step, None), step + 1):
            for i in self._owner[batch].tolist():
                if self._window[i] != window:  # a step keeps to one window
                    window, seen = self._window[i], set()
                if i not in seen:
                    seen.add(i)
                    yield Use(turn, self._shards[i].name, self._shards[i].bytes)

    def used_up(self, step: int) -> list[PlannedShard]:
        """Return the shards that steps up to this one read and no later one does, in order."""
        return [self._shards[i] for i in np.flatnonzero((self._last_use > 0) & (self._last_use <= step))]
