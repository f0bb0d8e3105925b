"""The store of hidden states: sharded safetensors under a manifest, written once, read by mapping.

    store/provenance.json     what the states are of: target, layers, data; written first
    store/target.safetensors  the target's embedding rows, final norm and lm_head
    store/shards/train-00000.safetensors …   many samples each, concatenated without padding
    store/shards.jsonl        one line per committed shard, with its checksum and sample lengths
    store/manifest.json       written last: the store is complete

Which samples a shard holds is a pure function of the data set, so a killed extraction goes on at
the first shard that has no line, and ends with the bytes that an uninterrupted one writes.

A shard holds, for S samples of N tokens together: tokens [N] int32, loss_mask [N] bool, top1 [N]
int32, aux [N, A, H] bf16, last [N, H] bf16, offsets [S+1] int64.
"""

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from eagle31_train import artifacts
from eagle31_train.schema import Document, UserError

REMAKE = "remove the store and run `python -m eagle31_train.extract` again"
PROVENANCE = "provenance.json"
SHARDS = "shards.jsonl"
TARGET = "target.safetensors"


@dataclass(frozen=True)
class Shard:
    """One line of shards.jsonl. `first` is the index of its first sample within the split.

    `fidelity` holds what the gate found where it compared this shard: top-1 agreement, KL, positions.
    """

    file: str
    split: str
    first: int
    lengths: list[int]
    bytes: int
    sha256: str
    fidelity: Sequence[float] | None = None


def plan_shards(lengths: Sequence[int], shard_tokens: int) -> list[tuple[int, int]]:
    """Cut samples, in order, into shards of at most `shard_tokens` (a longer sample has its own): (first, end)."""
    shards, first, held = [], 0, 0
    for index, length in enumerate(lengths):
        if held and held + length > shard_tokens:
            shards.append((first, index))
            first, held = index, 0
        held += length
    return [*shards, (first, len(lengths))] if lengths else []


class StoreWriter:
    """Writes a store shard by shard; every shard is committed whole.

    Args:
        folder: the store's folder; one that an earlier run of the same provenance began is continued.
        provenance: what the states are of, as JSON.

    Raises:
        UserError: the folder holds a begun store of another provenance.
    """

    def __init__(self, folder: Path, provenance: dict[str, Any], overwrite: bool = False) -> None:
        self.folder = folder
        self.provenance = provenance
        if (folder / PROVENANCE).exists():
            begun = artifacts.read_json(folder / PROVENANCE, "python -m eagle31_train.extract")
            if begun != provenance and not overwrite:
                raise UserError(
                    f"{folder} holds a begun store of another run ({artifacts.describe_change(begun, provenance)}): "
                    "choose another run_dir=… or replace it with overwrite=true"
                )
            if begun != provenance:
                artifacts.discard(folder)
        elif (folder / SHARDS).exists():  # shards of unknown origin pass for nobody's
            raise UserError(f"{folder} holds shards but no {PROVENANCE}: remove it, or choose another run_dir=…")
        (folder / "shards").mkdir(parents=True, exist_ok=True)
        for leftover in [*folder.glob(".*.tmp"), *(folder / "shards").glob(".*.tmp")]:
            leftover.unlink()
        artifacts.write_json(folder / PROVENANCE, provenance)
        self.shards: list[Shard] = read_shards(folder, tolerate_torn_tail=True)
        # A torn last line is cut off here, before anything is appended after it.
        self._write_lines()

    def has(self, name: str) -> bool:
        """Whether the shard is committed and of its listed size."""
        return any(
            shard.file == name and (self.folder / name).is_file() and (self.folder / name).stat().st_size == shard.bytes
            for shard in self.shards
        )

    def write_target(self, weights: dict[str, Tensor]) -> None:
        """Write the target's weights that training needs: embed_tokens, norm and, unless tied, lm_head."""
        _save(self.folder / TARGET, weights)

    def write_shard(
        self,
        name: str,
        split: str,
        first: int,
        documents: Sequence[Document],
        fidelity: Sequence[float] | None = None,
    ) -> None:
        """Commit one shard: file, then its line."""
        lengths = [len(document) for document in documents]
        path = self.folder / name
        _save(
            path,
            {
                "tokens": torch.cat([d.tokens for d in documents]).int(),
                "loss_mask": torch.cat([d.loss_mask for d in documents]),
                "top1": torch.cat([d.top1 for d in documents]).int(),
                "aux": torch.cat([d.aux for d in documents]).bfloat16(),
                "last": torch.cat([d.last for d in documents]).bfloat16(),
                "offsets": torch.tensor([0, *lengths]).cumsum(0),
            },
        )
        shard = Shard(name, split, first, lengths, path.stat().st_size, artifacts.file_sha256(path), fidelity)
        self.shards = [*(s for s in self.shards if s.file != name), shard]
        with (self.folder / SHARDS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(shard)) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def finish(self, manifest: dict[str, Any]) -> None:
        """Write the manifest, which makes the store complete."""
        # In one order, however often the extraction was stopped on its way.
        self.shards.sort(key=_order)
        self._write_lines()
        files = {shard.file: {"bytes": shard.bytes, "sha256": shard.sha256} for shard in self.shards}
        files |= artifacts.list_files(self.folder, [self.folder / name for name in (PROVENANCE, SHARDS, TARGET)])
        artifacts.write_json(self.folder / artifacts.MANIFEST, {**manifest, "files": files})

    def _write_lines(self) -> None:
        lines = "".join(json.dumps(asdict(shard)) + "\n" for shard in self.shards)
        artifacts.write_text(self.folder / SHARDS, lines)


def _order(shard: Shard) -> tuple[str, int]:
    return shard.split, shard.first


def _save(path: Path, tensors: dict[str, Tensor]) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    save_file({name: tensor.contiguous().cpu() for name, tensor in tensors.items()}, temporary)
    artifacts.commit(temporary, path)


def read_shards(folder: Path, tolerate_torn_tail: bool = False) -> list[Shard]:
    """The committed shards, newest line of each file, in the order of splits and samples.

    Raises:
        UserError: a damaged line; a torn *last* line is what a kill leaves, and allowed while writing.
    """
    path = folder / SHARDS
    lines = path.read_bytes().splitlines() if path.is_file() else []
    shards: dict[str, Shard] = {}
    for number, line in enumerate(lines, 1):
        try:
            shard = Shard(**json.loads(line))
        except (json.JSONDecodeError, UnicodeDecodeError, TypeError) as error:
            if tolerate_torn_tail and number == len(lines):
                break
            raise UserError(f"{path}:{number} is damaged ({error}): {REMAKE}") from None
        shards[shard.file] = shard
    return sorted(shards.values(), key=_order)


class Store:
    """A complete store, opened for reading.

    Raises:
        UserError: the store is missing, incomplete or damaged, or (while reading) a shard is.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest = artifacts.read_json(folder / artifacts.MANIFEST, "python -m eagle31_train.extract")
        # A changed length or layer id would be read as wrong states, and silently.
        self._verify(PROVENANCE)
        self._verify(SHARDS)
        self.provenance = artifacts.read_json(folder / PROVENANCE, "python -m eagle31_train.extract")
        self.shards = read_shards(folder)

    @cached_property
    def target(self) -> dict[str, Tensor]:
        """The target's weights: embed_tokens [V, H], norm [H] (effective), lm_head [V, H]."""
        self._verify(TARGET)
        with safe_open(self.folder / TARGET, framework="pt") as file:
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        weights.setdefault("lm_head", weights["embed_tokens"])
        return weights

    def split(self, name: str) -> "StoreSplit":
        """The samples of one split, in the order of the data set."""
        return StoreSplit(self, [shard for shard in self.shards if shard.split == name])

    def _verify(self, name: str) -> None:
        files = self.manifest.get("files", {})
        if name not in files:
            raise UserError(f"{self.folder / artifacts.MANIFEST} does not list {name}: {REMAKE}")
        if damage := artifacts.first_damaged(self.folder, {name: files[name]}):
            raise UserError(f"{damage}; {REMAKE}")


class StoreSplit:
    """The samples of one split. Each shard is checked against its checksum when it is first read."""

    def __init__(self, store: Store, shards: list[Shard]) -> None:
        self.store = store
        self.lengths = [length for shard in shards for length in shard.lengths]
        self._where = [(shard, i) for shard in shards for i in range(len(shard.lengths))]
        self._verified: set[str] = set()

    def __len__(self) -> int:
        return len(self.lengths)

    def read(self, index: int, states: bool = True) -> Document:
        """One sample; its states are bf16, mapped from the file until they are used, or empty without `states`."""
        shard, i = self._where[index]
        if shard.file not in self._verified:
            self.store._verify(shard.file)
            self._check_ids(shard)
            self._verified.add(shard.file)
        begin = sum(shard.lengths[:i])
        names = ("tokens", "loss_mask", "top1") + (("aux", "last") if states else ())
        cut = self._cut(shard, names, begin, begin + shard.lengths[i])
        none = torch.empty(0)
        return Document(
            cut["tokens"].long(), cut["loss_mask"], cut["top1"].long(), cut.get("aux", none), cut.get("last", none)
        )

    def _cut(self, shard: Shard, names: Sequence[str], begin: int, end: int) -> dict[str, Tensor]:
        try:
            with safe_open(self.store.folder / shard.file, framework="pt") as file:
                return {name: file.get_slice(name)[begin:end] for name in names}
        except (SafetensorError, OSError) as error:
            raise UserError(f"{self.store.folder / shard.file} cannot be read ({error}): {REMAKE}") from None

    def _check_ids(self, shard: Shard) -> None:
        """Refuse ids that the target's vocabulary lacks: as indices they fail far from here, or silently wrap."""
        V = self.store.provenance["vocab_size"]
        ids = self._cut(shard, ("tokens", "loss_mask", "top1"), 0, sum(shard.lengths))
        for name, least in (("tokens", 0), ("top1", -1)):
            if ((ids[name] < least) | (ids[name] >= V)).any():
                found = [int(ids[name].min()), int(ids[name].max())]
                raise UserError(
                    f"{self.store.folder / shard.file} holds {name} from {found[0]} to {found[1]}, "
                    f"outside the {V} tokens of its target's vocabulary: {REMAKE}"
                )
        taught = ids["loss_mask"].roll(-1)
        taught[torch.tensor(shard.lengths).cumsum(0) - 1] = False  # what follows is another sample
        if (ids["top1"][taught] < 0).any():
            raise UserError(
                f"{self.store.folder / shard.file} lacks the target's arg-max (top1) before some of the "
                f"assistant's tokens: {REMAKE}"
            )

    def read_all(self, indices: Iterable[int]) -> list[Document]:
        """Several samples, in the order asked for."""
        return [self.read(index) for index in indices]
