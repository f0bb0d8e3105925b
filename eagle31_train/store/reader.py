"""Reading a store, complete or still being written.

Each sample is checked when it is read, instead of its whole shard: otherwise every process of a training would read the
whole store. Shards of earlier versions have no checksums of their samples, and are compared whole when first opened."""

import threading
import time
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from torch import Tensor

from eagle31_train.common import artifacts
from eagle31_train.common.errors import UserError
from eagle31_train.store import format as files
from eagle31_train.store.backends import Storage, open_storage
from eagle31_train.store.document import Document
from eagle31_train.store.head import near, read_head, read_lines, read_tensors
from eagle31_train.store.sealed import DamagedError
from eagle31_train.store.shard import ShardFile, open_shard
from eagle31_train.store.shard_plan import PlannedShard
from eagle31_train.store.stream import Pause, read_bound, read_consumed, wait

OPEN = {"local": 1024, "remote": 8}  # mapped shards: a cached copy that is evicted frees its bytes only once unmapped


class Store:
    """A store, opened for reading.

    Args:
        storage: the store's storage, or its folder.
        follow: read it while it is being written, waiting for shards that are not there yet.
        patience: seconds to wait for a shard.
        pause: sleeps between checks whether the store is begun; may raise.

    UserError if the store is missing, incomplete (without `follow`) or damaged, or if a shard is when it is read.
    """

    def __init__(
        self, storage: Storage | Path, follow: bool = False, patience: float = 3600.0, pause: Pause = time.sleep
    ) -> None:
        self.storage = open_storage(str(storage), Path(), 0) if isinstance(storage, Path) else storage
        self.location = self.storage.location
        self.follow, self.patience = follow, patience
        head, problems = read_head(self.storage)
        if head.manifest is None and not follow and (there := near(self.storage)):
            raise UserError(f"there is no store in {self.location}: use {there}")
        if head.manifest is None and not problems:
            if not follow:
                begun = self.storage.size(files.PROVENANCE) is not None
                hint = ", or set store.follow=true to train while it is being written" if begun else ""
                raise UserError(f"{self.location}/{artifacts.MANIFEST} is missing: run `{files.EXTRACT}` first{hint}")
            first = {files.PROVENANCE, files.TARGET_LINE}
            what = f"train: waiting for `{files.EXTRACT}` to begin {self.location}"
            wait(lambda: first <= self.storage.sizes("").keys(), what, patience, pause=pause)
            head, problems = read_head(self.storage)
        if problems:
            raise UserError(f"{problems[0].text}: {files.REMAKE}")
        if head.provenance is None or head.plan is None:
            raise UserError(f"{self.location} lacks {files.PROVENANCE} or {files.PLAN}: {files.REMAKE}")
        self.manifest, self.plan = head.manifest, head.plan
        self._provenance = head.provenance
        self.fingerprint: str = head.provenance["fingerprint"]
        self.inputs: dict[str, Any] = head.provenance["inputs"]
        self.states: dict[str, Any] = head.provenance["states"]  # what the states mean
        self._lines = head.lines
        self._compared: dict[str, tuple[int, int]] = {}  # shards of earlier versions → inode and time when compared
        self._bound: int | None = None
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._open: OrderedDict[str, ShardFile] = OrderedDict()

    @cached_property
    def target(self) -> dict[str, Tensor]:
        """The target's weights: embed_tokens [V, H], norm [H] (effective), lm_head [V, H]."""
        weights = self._tensors(files.TARGET)
        weights.setdefault("lm_head", weights["embed_tokens"])
        return weights

    @cached_property
    def trajectories(self) -> dict[str, Tensor]:
        """The target's own answers to some held-out prompts, as `evaluation/trajectories.py` names them; {} if none."""
        return self._tensors(files.TRAJECTORIES) if self.storage.size(files.TRAJECTORIES_LINE) is not None else {}

    def _tensors(self, name: str) -> dict[str, Tensor]:
        try:
            return read_tensors(self.storage, name, self._provenance)
        except DamagedError as error:
            raise UserError(f"{error}: {files.REMAKE}") from None

    @property
    def max_bytes(self) -> int | None:
        """The extraction's bound, current or last known. With one, a training that follows removes what it used up."""
        bound = read_bound(self.storage, self.fingerprint)
        if bound and bound["max_bytes"] is not None:  # no record once extraction is over; the rest is used up as before
            self._bound = bound["max_bytes"]
        return self._bound

    def close(self) -> None:
        """Stop reading: end waits for shards, and stop prefetching."""
        self._stopped.set()
        self.storage.close()

    def split(self, name: str) -> "StoreSplit":
        return StoreSplit(self, name)

    def wait_for(self, shards: Iterable[PlannedShard], pause: Pause | None = None) -> None:
        """Wait until all of these shards are committed. UserError if one does not come.

        `pause` sleeps between checks and may raise; without it, `close` ends the wait."""
        for shard in shards:
            if shard.name not in self._lines:
                wait(
                    partial(self._arrived, shard),
                    f"train: waiting for {shard.name}",
                    self.patience,
                    lambda: len(self.storage.sizes("shards")),
                    pause or self._stopped.wait,
                )

    def _arrived(self, shard: PlannedShard) -> bool:
        lines, problems = read_lines(self.storage, self.plan, [shard], self.fingerprint)
        if problems and shard.name not in lines:
            raise UserError(f"{problems[0].text}: {files.REMAKE}")
        self._lines |= lines
        return shard.name in self._lines

    def open(self, shard: PlannedShard, whole: bool = False) -> ShardFile:
        """Map a shard, checked against its line. With `whole`, map it anew, comparing all of it with its checksum."""
        self.wait_for([shard])
        with self._lock:  # batches are read in the background while held-out samples are read
            if whole:
                self._open.pop(shard.name, None)
                self.storage.forget(shard.name)
            if shard.name not in self._open:
                self._open[shard.name] = self._map(shard, whole)
            self._open.move_to_end(shard.name)
            while len(self._open) > OPEN["remote" if self.storage.remote else "local"]:
                self._open.popitem(last=False)
            return self._open[shard.name]

    def _map(self, shard: PlannedShard, whole: bool) -> ShardFile:
        line = self._lines[shard.name]
        try:
            status = self.storage.opened(shard.name, Path.stat)
            version = status.st_ino, status.st_mtime_ns  # changes if the shard is replaced or fetched again
            unknown = not line.checksums and self._compared.get(shard.name) != version
            file = open_shard(self.storage, self.plan, shard, line, self.states, whole or unknown)
            self._compared[shard.name] = version
            return file
        except DamagedError as error:
            raise UserError(f"{error}: see `eagle31 store verify {self.location}`") from None
        except FileNotFoundError:
            where = f"{self.location}/{shard.name} ({shard.samples()})"
            consumed = read_consumed(self.storage, self.fingerprint)
            if shard.name in consumed.shards:
                text = f"{where} was used up and removed by the training {consumed.by}"
                raise UserError(f"{text}: remove the store and extract again") from None
            raise UserError(f"{where} is missing: see `eagle31 store verify {self.location}`") from None

    def release(self, shards: Sequence[PlannedShard]) -> None:
        """Unmap shards that are no longer needed, so that removing them frees their bytes."""
        with self._lock:
            for shard in shards:
                self._open.pop(shard.name, None)


class StoreSplit:
    """The samples of one split, in the order of the data set: `lengths` in tokens, and the `shards` that hold them."""

    def __init__(self, store: Store, name: str) -> None:
        self.store = store
        self.lengths = store.plan.lengths[name]
        self.supervised = store.plan.supervised.get(name)  # positions per sample; None in stores of earlier versions
        self.shards = store.plan.of(name)
        self._firsts = [shard.first for shard in self.shards]  # pairs per sample would take 800 MB for 10^7 of them

    def __len__(self) -> int:
        return len(self.lengths)

    def shard_of(self, index: int) -> PlannedShard:
        if not 0 <= index < len(self):
            raise IndexError(f"there is no sample {index} among {len(self):,}")
        return self.shards[bisect_right(self._firsts, index) - 1]

    def sizes(self, indices: Sequence[int]) -> tuple[list[int], list[int] | None]:
        """Return the number of tokens of each sample, and of supervised positions, or None if those are unknown."""
        counts = self.supervised
        return [self.lengths[i] for i in indices], None if counts is None else [counts[i] for i in indices]

    def wait_for(self, indices: Iterable[int]) -> None:
        """Wait until all of these samples can be read."""
        self.store.wait_for(dict.fromkeys(self.shard_of(index) for index in indices))

    def passed(self, step: int) -> None:
        """Note that everything up to this step has been read, so that none of it is prefetched any more."""
        self.store.storage.passed(step)

    def read(self, index: int, states: bool = True) -> Document:
        """Return one sample, with the states that training needs (see `Document`), mapped until they are used."""
        shard = self.shard_of(index)
        with suppress(DamagedError):
            return self.store.open(shard).read(index - shard.first, states)
        # Try again, as a disk may err once; after the `with`, for the reason in `read_twice`.
        return self.store.open(shard, whole=True).read(index - shard.first, states)

    def read_all(self, indices: Iterable[int]) -> list[Document]:
        return [self.read(index) for index in indices]
