"""Reading a store: complete, or while it is still being written. The samples that are read are checked first, and not
the whole shard: else every process of a training would read the whole store."""

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
        storage: where it lies, or its folder.
        follow: read it while it is being written, waiting for shards that are not there yet.
        patience: seconds to wait for one.
        pause: sleeps between looks at whether the store is begun; may raise.

    UserError if the store is missing, incomplete (without `follow`) or damaged, or, while reading, a shard is.
    """

    def __init__(
        self, storage: Storage | Path, follow: bool = False, patience: float = 3600.0, pause: Pause = time.sleep
    ) -> None:
        self.storage = open_storage(str(storage), Path(), 0) if isinstance(storage, Path) else storage
        self.location = self.storage.location
        self.follow, self.patience = follow, patience
        head, problems = read_head(self.storage)
        if head.manifest is None and not follow and (there := near(self.storage)):
            raise UserError(f"there is no store in {self.location}: give {there}")
        if head.manifest is None and not problems:
            if not follow:
                begun = self.storage.size(files.PROVENANCE) is not None
                hint = ", or give store.follow=true to train while it is being written" if begun else ""
                raise UserError(f"{self.location}/{artifacts.MANIFEST} is missing: run `{files.EXTRACT}` first{hint}")
            first = {files.PROVENANCE, files.TARGET_LINE}
            what = f"train: waiting for {self.location} to be begun by `{files.EXTRACT}`"
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
        self.states: dict[str, Any] = head.provenance["states"]  # what they mean
        self._lines = head.lines
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
        """The target's own answers to some held-out prompts, as `evaluation/trajectories.py` names them; {} without."""
        return self._tensors(files.TRAJECTORIES) if self.storage.size(files.TRAJECTORIES_LINE) is not None else {}

    def _tensors(self, name: str) -> dict[str, Tensor]:
        try:
            return read_tensors(self.storage, name, self._provenance)
        except DamagedError as error:
            raise UserError(f"{error}: {files.REMAKE}") from None

    @property
    def max_bytes(self) -> int | None:
        """The bound that the extraction keeps, or kept last: with one, who follows removes what it used up."""
        bound = read_bound(self.storage, self.fingerprint)
        if bound and bound["max_bytes"] is not None:  # gone once it is over, and what is left is used up all the same
            self._bound = bound["max_bytes"]
        return self._bound

    def close(self) -> None:
        """Nothing more is read: waits for a shard end, and nothing is fetched ahead any more."""
        self._stopped.set()
        self.storage.close()

    def split(self, name: str) -> "StoreSplit":
        return StoreSplit(self, name)

    def wait_for(self, shards: Iterable[PlannedShard], pause: Pause | None = None) -> None:
        """Return once all of these shards are committed, at once in a complete store; UserError if one does not come.
        `pause` sleeps between looks and may raise; without it, `close` ends the wait."""
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
        """A shard, mapped, as its line says; `whole`: mapped anew, once all of it is compared with its checksum."""
        self.wait_for([shard])
        with self._lock:  # batches are read in the background, and held-out samples beside that
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
            return open_shard(self.storage, self.plan, shard, line, self.states, whole or not line.checksums)
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
        """Unmap shards that are needed no more, so that their bytes are free once they are removed."""
        with self._lock:
            for shard in shards:
                self._open.pop(shard.name, None)


class StoreSplit:
    """The samples of one split, in the order of the data set: `lengths` in tokens, and the `shards` that hold them."""

    def __init__(self, store: Store, name: str) -> None:
        self.store = store
        self.lengths = store.plan.lengths[name]
        self.supervised = store.plan.supervised.get(name)  # positions of each; None in stores of earlier versions
        self.shards = store.plan.of(name)
        self._firsts = [shard.first for shard in self.shards]  # a pair for each of 10^7 samples would take 800 MB

    def __len__(self) -> int:
        return len(self.lengths)

    def shard_of(self, index: int) -> PlannedShard:
        if not 0 <= index < len(self):
            raise IndexError(f"there is no sample {index} among {len(self):,}")
        return self.shards[bisect_right(self._firsts, index) - 1]

    def sizes(self, indices: Sequence[int]) -> tuple[list[int], list[int] | None]:
        """Of these samples the tokens, and the supervised positions, as far as these are known."""
        counts = self.supervised
        return [self.lengths[i] for i in indices], None if counts is None else [counts[i] for i in indices]

    def wait_for(self, indices: Iterable[int]) -> None:
        """Return once all of these samples can be read; at once in a complete store."""
        self.store.wait_for(dict.fromkeys(self.shard_of(index) for index in indices))

    def passed(self, step: int) -> None:
        """What steps up to this one read has been read: none of it is fetched ahead any more."""
        self.store.storage.passed(step)

    def read(self, index: int, states: bool = True) -> Document:
        """One sample, with the states that are needed (see `Document`), mapped from the file until they are used."""
        shard = self.shard_of(index)
        with suppress(DamagedError):
            return self.store.open(shard).read(index - shard.first, states)
        # A disk may err for once. Not while the error is handled, see `read_twice`.
        return self.store.open(shard, whole=True).read(index - shard.first, states)

    def read_all(self, indices: Iterable[int]) -> list[Document]:
        return [self.read(index) for index in indices]
