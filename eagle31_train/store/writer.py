"""Writing a store: any number of processes commit whole shards, and never exceed a bound on bytes."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from eagle31_train.common import artifacts
from eagle31_train.common.console import Progress, note
from eagle31_train.common.errors import UserError
from eagle31_train.provenance import REPLACE
from eagle31_train.store import format as files
from eagle31_train.store.backends import Storage, at_once
from eagle31_train.store.document import Document
from eagle31_train.store.format import Line
from eagle31_train.store.head import read_lines, read_tensors
from eagle31_train.store.sealed import DamagedError, digest, seal
from eagle31_train.store.shard import write_shard
from eagle31_train.store.shard_plan import Plan, PlannedShard, shape_of
from eagle31_train.store.stream import read_bound, read_consumed, wait
from eagle31_train.store.tensors import first_not_finite, save_file


class StoreWriter:
    """Writes a store shard by shard, or continues one of the same provenance that an earlier run began.

    Args:
        provenance: what the states were made from: {"fingerprint", "inputs", "states"}.
        rank, ranks: which of several writing processes this is. Rank 0 prepares and finishes the store, and the
            others wait for it. They communicate only through files. A begun store may be continued by another number.
        max_bytes: keep no more than this; shards wait until a training has used up earlier ones.
        patience: seconds to wait for another process, or for free bytes.
        remedy: says what to do about a begun store of another provenance, given that provenance.

    UserError for a begun store of another provenance without `overwrite`, or for a bound too small for any training.
    """

    def __init__(
        self,
        storage: Storage,
        provenance: dict[str, Any],
        plan: Plan,
        *,
        rank: int = 0,
        ranks: int = 1,
        overwrite: bool = False,
        max_bytes: int | None = None,
        patience: float = 3600.0,
        remedy: Callable[[dict[str, Any]], str] = lambda _: REPLACE,
    ) -> None:
        self.storage, self.plan, self.rank, self.ranks = storage, plan, rank, ranks
        self.provenance, self.patience, self.max_bytes = provenance, patience, max_bytes
        self._overwrite, self._remedy = overwrite, remedy
        self.shape = shape_of(provenance["states"])
        self.id: str = provenance["fingerprint"]
        heldout = sum(shard.bytes for shard in plan.of("heldout"))
        largest = max((shard.bytes for shard in plan.of("train")), default=0)
        if max_bytes is not None and heldout + largest > max_bytes:  # too small for any training
            needs = f"the held-out split and one shard, {heldout:,} and {largest:,} bytes"
            raise UserError(
                f"store.max_bytes={max_bytes:,} cannot hold {needs}: raise it, or lower extract.shard_tokens"
            )
        if rank == 0:
            self._prepare()
        else:
            self._await_first()
        # Only this process's files: in a continued store, which counts as prepared, others may be writing already.
        storage.clean([name for shard in self.mine() for name in (shard.name, shard.line)])
        self._sizes = storage.sizes("shards")
        self._consumed = set(read_consumed(storage, self.id).shards)
        self._gone: set[str] = set()  # those of _consumed that are certainly removed
        self.lines = self._committed(plan.shards if rank == 0 else self.mine())

    def mine(self) -> list[PlannedShard]:
        """The shards that this process extracts, in order; held-out ones first."""
        return self.plan.share(self.rank, self.ranks)

    def has(self, shard: PlannedShard) -> bool:
        """Return whether, at the last look, the shard was committed and had its line's size, or was used up."""
        line = self.lines.get(shard.name)
        return line is not None and (self._sizes.get(shard.name) == line.size or self._used_up(shard))

    def wait_for_quota(self, shard: PlannedShard, check: Callable[[], None] = lambda: None) -> bool:
        """Wait until a shard fits under the bound. Return False if the training that follows needs no more.

        `check` is called now and then meanwhile, and may raise.

        The plan is counted, not the files: a shard may be written once it fits together with all earlier shards that
        are not used up. So processes cannot exceed the bound together, and the shards that training needs first always
        fit.
        """
        if (most := self.max_bytes) is None:
            return True
        before = self.plan.shards[: shard.number + 1]
        ended = False

        def fits() -> bool:
            nonlocal ended
            check()
            consumed = read_consumed(self.storage, self.id)
            ended = consumed.finished and shard.split == "train"
            # The training records shards before it removes them. Remove any that it left, to free their bytes.
            if new := set(consumed.shards) - self._gone:
                for name in new & self.storage.sizes("shards").keys():
                    self.storage.remove(name)
                self._gone |= new
            return ended or sum(s.bytes for s in before if s.name not in self._gone) <= most

        what = f"extract: waiting: {self.storage.location} is at store.max_bytes until training uses up a shard"
        wait(fits, what, self.patience, lambda: len(self._gone))
        return not ended

    def write(
        self,
        shard: PlannedShard,
        documents: Sequence[Document],
        fidelity: Sequence[float] | None = None,
        agreement: Sequence[int] | None = None,
    ) -> None:
        """Commit one shard: its file, then its line. UserError if the disk is full. See `Line` for other arguments."""
        facts = {"fidelity": fidelity and list(fidelity), "agreement": agreement and list(agreement)}
        old = self.lines.get(shard.name)
        line = self._commit(shard.name, lambda path: write_shard(path, documents), old, **facts)
        if self._used_up(shard):  # only its line was lost and is still needed
            self.storage.remove(shard.name)
        self.lines[shard.name], self._sizes[shard.name] = line, line.size

    @property
    def has_trajectories(self) -> bool:
        """Whether an earlier start wrote trajectories, and they are intact."""
        try:
            return bool(read_tensors(self.storage, files.TRAJECTORIES, self.provenance))
        except DamagedError:
            return False

    def write_tensors(self, file: str, tensors: dict[str, Tensor]) -> None:
        """Write the file `TRAJECTORIES` or `TARGET`; `TARGET` last, since a training waits for it.

        UserError if a tensor is not finite, which training would find hours later, if at all."""
        if wrong := first_not_finite(tensors):
            raise UserError(
                f"{self.storage.location}/{file} would hold {wrong} with values that are not finite (NaN or infinite): "
                "check the target's weights and target.dtype"
            )
        try:
            old = files.read_line(self.storage, file, self.id)
        except DamagedError:
            old = None
        # The bytes are the same as an earlier start's, so that a training that begins meanwhile always finds them.
        self._commit(file, lambda path: save_file({name: one.cpu() for name, one in tensors.items()}, path), old)

    def _commit(self, name: str, save: Callable[[Path], str | None], old: Line | None, **facts: Any) -> Line:
        """Build a big file with `save`, commit it, then write its line. The scratch file is always removed.

        The line has these facts, and the checksums of the file's parts that `save` returns."""
        scratch = self.storage.scratch(name)
        try:
            with artifacts.explained(f"write {scratch}", "fix that, then run the same command again to resume"):
                facts["checksums"] = save(scratch)
                line = Line(name, self.id, scratch.stat().st_size, artifacts.checksum(scratch), **facts)
                if old not in (None, line):  # a kill must not leave the old file's line beside the new file
                    self.storage.remove(files.line_name(name))
                self.storage.put(scratch, name)
                self.storage.write(files.line_name(name), line.sealed())
                return line
        finally:
            scratch.unlink(missing_ok=True)

    def gather(self) -> list[Line] | None:
        """Wait until all shards are there, and return their lines in order; None if the training needs no more."""
        missing = [shard for shard in self.plan.shards if not self.has(shard)]
        total = len(missing)

        def complete() -> bool:
            nonlocal missing
            self._sizes = self.storage.sizes("shards")  # before the lines: a shard's new line is written after it
            awaited = [shard for shard in missing if shard.line not in self._sizes]
            if not awaited:  # a damaged or missing shard is remade by its own process: its line may be the old one
                for shard in missing:  # a line that is gone by now belongs to a shard that is being replaced
                    self.lines.pop(shard.name, None)
                self.lines |= read_lines(self.storage, self.plan, missing, self.id)[0]
                awaited = missing = [shard for shard in missing if not self.has(shard)]
            progress.update(total - len(awaited) - progress.n)
            return not awaited or read_consumed(self.storage, self.id).finished

        what = "extract: waiting for the other processes' shards"
        with Progress(total=total, desc="other processes' shards", unit="shard", disable=not missing) as progress:
            if missing:
                wait(complete, what, self.patience, lambda: len(self.storage.sizes("shards")))
        return None if missing else [self.lines[shard.name] for shard in self.plan.shards]

    def finish(self, lines: Sequence[Line], totals: dict[str, Any]) -> dict[str, Any]:
        """Complete the store (rank 0): write the lines of all shards, then the manifest, with `totals`."""
        self.storage.write(files.SHARDS, b"".join(line.sealed() for line in lines))
        at_once(self.storage.remove, [shard.line for shard in self.plan.shards])  # now in shards.jsonl
        self.storage.remove(files.STREAM)
        contents = {name: self.storage.read(name) for name in files.NEEDED}
        manifest = {
            "fingerprint": self.id,
            "inputs": self.provenance["inputs"],
            "samples": {split: len(lengths) for split, lengths in self.plan.lengths.items()},
            "tokens": self.plan.tokens,
            "bytes_per_token": sum(line.size for line in lines) / max(1, self.plan.tokens),
            **totals,
            "files": {name: {"bytes": len(data), "checksum": digest(data)} for name, data in contents.items()},
        }
        self.storage.write(artifacts.MANIFEST, seal(manifest, indent=2))
        return manifest

    def _prepare(self) -> None:
        """Begin the store, or check that what was begun is this one."""
        storage = self.storage
        begun = self._begun()
        # Refuse shards of unknown origin, unless their lines, too, say that they are this store's.
        if begun is None and storage.sizes("shards") and not self._committed(self.plan.shards):
            raise UserError(f"{storage.location} holds shards, but no intact {files.PROVENANCE}: remove the store")
        if begun is not None and begun != self.provenance:
            ours = {*files.FILES, files.STREAM, "shards"}
            others = [name for name in storage.listing("") if name not in ours and not name.startswith(".")]
            if others:
                raise UserError(
                    f"{storage.location} also holds {min(others)}, which is not part of a store and which "
                    "overwrite=true would remove: move it, or choose another folder for the store (store_dir=…)"
                )
            storage.discard()
        storage.remove(artifacts.MANIFEST)  # from now on a reader finds it unfinished
        storage.clean([files.TARGET, files.TRAJECTORIES])
        storage.write(files.PLAN, seal({**self.plan.to_json(), "store": self.id}))
        storage.write(files.STREAM, seal({"max_bytes": self.max_bytes, "processes": self.ranks, "store": self.id}))
        storage.write(files.PROVENANCE, seal(self.provenance, indent=2))
        if storage.size(files.SHARDS) is not None:  # the store was complete: split its lines into separate files again
            for line in self._committed(self.plan.shards).values():
                storage.write(files.line_name(line.name), line.sealed())
            storage.remove(files.SHARDS)

    def _begun(self) -> dict[str, Any] | None:
        """Return the provenance of the store that was begun, or None. UserError if it is another's and must stay."""
        try:
            begun = files.read_record(self.storage, files.PROVENANCE, dict)
        except DamagedError:
            return None
        if begun is not None and begun != self.provenance and not self._overwrite:
            change = artifacts.describe_change(begun, self.provenance)
            where = self.storage.location
            raise UserError(f"{where} holds an unfinished store of another run ({change}): {self._remedy(begun)}")
        return begun

    def _await_first(self) -> None:
        """Wait until rank 0 has prepared the store for `ranks` processes: else a shard would have no owner, or two."""
        what = "extract: waiting for the first process to prepare the store"
        if (others := self._processes()) not in (None, self.ranks):
            what += f" for {self.ranks} processes; {others} share it so far (extract.parts is the same for every part)"
        wait(self._prepared, what, self.patience)

    def _prepared(self) -> bool:
        if self._begun() != self.provenance:
            return False
        if self.storage.size(artifacts.MANIFEST) is not None:  # completed after this process asked (`finished`)
            return True
        return self.storage.size(files.SHARDS) is None and self._processes() == self.ranks

    def _processes(self) -> int | None:
        """Return how many processes share the store, or None if rank 0 has not said so."""
        try:
            bound = read_bound(self.storage, self.id)
        except UserError:  # damaged, or another store's: rank 0 is about to replace it
            return None
        return bound and bound.get("processes")

    def _used_up(self, shard: PlannedShard) -> bool:
        if shard.name not in self._consumed:
            self._consumed = set(read_consumed(self.storage, self.id).shards)
        return shard.name in self._consumed

    def _committed(self, shards: Sequence[PlannedShard]) -> dict[str, Line]:
        """Return the intact lines of these shards, and print what is wrong with others."""
        lines, problems = read_lines(self.storage, self.plan, shards, self.id)
        for problem in problems:
            note(f"extract: {problem.text}", error=True)
        return lines
