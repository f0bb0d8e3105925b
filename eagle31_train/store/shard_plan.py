"""What a store will hold, computed from the data alone: the samples of each shard, and its size in bytes.

So a killed extraction can go on, processes share the work without messages, and training knows every step in advance.
"""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from heapq import heapreplace
from operator import gt
from typing import Annotated, Any

import numpy as np
from numpy.typing import ArrayLike
from pydantic import ConfigDict, Field, with_config
from typing_extensions import TypedDict

from eagle31_train.common import foreign
from eagle31_train.store.codec import CODECS
from eagle31_train.store.document import attended_positions
from eagle31_train.store.format import line_name

SPLITS = ("heldout", "train")  # in the order of extraction: training evaluates from its first steps on
HEADER = 4096  # bytes, more than a shard file's header takes: names, shapes and offsets
TOKEN_BYTES = 4 + 1 + 4  # tokens, loss_mask, top1


@dataclass(frozen=True)
class Shape:
    """What determines the bytes of a state: H, A, and the codecs of auxiliary and last states."""

    hidden_size: int
    aux_layers: int
    aux_codec: str
    last_codec: str

    @property
    def row_bytes(self) -> tuple[int, int]:
        """Bytes of one position's auxiliary states, all layers together, and of its last hidden state."""
        aux, last = (CODECS[codec].row_bytes(self.hidden_size) for codec in (self.aux_codec, self.last_codec))
        return aux * self.aux_layers, last

    @property
    def document_bytes(self) -> int:
        """Bytes of a document besides its positions' states."""
        aux, last = (CODECS[codec].document_bytes(self.hidden_size) for codec in (self.aux_codec, self.last_codec))
        return aux * self.aux_layers + last


def shape_of(states: Mapping[str, Any]) -> Shape:
    return Shape(states["hidden_size"], len(states["aux_layers"]), states["aux_codec"], states["last_codec"])


@dataclass(frozen=True)
class PlannedShard:
    """Samples first to end - 1 of a split, in one file of at most `bytes`."""

    name: Annotated[str, Field(pattern=r"^shards/(heldout|train)-[0-9]{5,9}\.safetensors$")]
    split: str
    number: int  # in the order of extraction, over all splits
    first: int
    end: int
    tokens: int
    bytes: int

    def samples(self) -> str:
        return f"samples {self.first} to {self.end - 1} of {self.split}"

    @property
    def line(self) -> str:
        return line_name(self.name)


@with_config(ConfigDict(extra="forbid"))
class _Lengths(TypedDict):
    heldout: list[foreign.Positions]
    train: list[foreign.Positions]


@dataclass(frozen=True)
class Plan:
    """A store's samples and shards.

    lengths: tokens of every sample, per split.
    shards: in the order of extraction.
    supervised: supervised positions of every sample, per split; empty in plans of earlier versions.
    """

    lengths: dict[str, list[int]]
    shards: list[PlannedShard]
    supervised: dict[str, "array[int]"] = field(default_factory=dict)  # arrays: there may be 10^7 samples

    @property
    def tokens(self) -> int:
        return sum(shard.tokens for shard in self.shards)

    def of(self, split: str) -> list[PlannedShard]:
        return [shard for shard in self.shards if shard.split == split]

    def share(self, rank: int, ranks: int) -> list[PlannedShard]:
        """Return one process's shards. In order, each shard goes to the process with the fewest tokens so far."""
        loads, mine = [(0, process) for process in range(ranks)], []  # a heap
        for shard in self.shards:
            tokens, lightest = loads[0]
            heapreplace(loads, (tokens + shard.tokens, lightest))
            if lightest == rank:
                mine.append(shard)
        return mine

    def to_json(self) -> dict[str, Any]:
        supervised = {split: counted.tolist() for split, counted in self.supervised.items()}
        shards = [asdict(shard) for shard in self.shards]
        return {"lengths": self.lengths, "supervised": supervised, "shards": shards}

    @staticmethod
    def from_json(value: dict[str, Any]) -> "Plan":
        """Read a plan from its JSON. ValueError if it is not one."""
        lengths = foreign.typed(_Lengths, value.get("lengths"))
        counts = foreign.typed(_Lengths, value["supervised"]) if "supervised" in value else {}
        supervised = {split: array("q", counts.pop(split)) for split in list(counts)}
        shards = foreign.typed(list[dict[str, Any]], value.get("shards"))
        plan = Plan(lengths, [foreign.typed(PlannedShard, shard) for shard in shards], supervised)
        for number, shard in enumerate(plan.shards):
            if shard.number != number or shard.split not in plan.lengths or shard.bytes < 0:
                raise ValueError(f"{shard.name} is not in its place")
        for split, lengths in plan.lengths.items():
            shards = plan.of(split)
            edges = [0, *(shard.end for shard in shards)]
            if [s.first for s in shards] != edges[:-1] or edges[-1] != len(lengths) or edges != sorted(edges):
                raise ValueError(f"the shards of {split} do not hold its {len(lengths):,} samples, each once")
            if wrong := [s.name for s in shards if s.tokens != sum(lengths[s.first : s.end])]:
                raise ValueError(f"{wrong[0]} has another number of tokens than its samples")
        for split, counted in plan.supervised.items():
            if len(counted) != len(plan.lengths[split]) or any(map(gt, counted, plan.lengths[split])):
                raise ValueError(f"supervised: not one count for each sample of {split}, of at most its tokens")
        if len({shard.name for shard in plan.shards}) < len(plan.shards):
            raise ValueError("two shards have one name")
        return plan


def make_plan(loss_masks: Mapping[str, Iterable[ArrayLike]], shard_tokens: int, shape: Shape) -> Plan:
    """Plan a store for samples given by their loss masks [T], per split. Each mask is read once."""
    shards: list[PlannedShard] = []
    lengths: dict[str, list[int]] = {}
    supervised: dict[str, array[int]] = {}
    for split in SPLITS:
        lengths[split], supervised[split], sizes = [], array("q"), array("q", [0])
        for mask in loss_masks[split]:
            count, size = sample_size(mask, shape)
            lengths[split].append(np.size(mask))
            supervised[split].append(count)
            sizes.append(sizes[-1] + size)
        for count, (first, end) in enumerate(plan_shards(lengths[split], shard_tokens)):
            name = f"shards/{split}-{count:05d}.safetensors"
            tokens = sum(lengths[split][first:end])
            size = HEADER + sizes[end] - sizes[first]
            shards.append(PlannedShard(name, split, len(shards), first, end, tokens, size))
    return Plan(lengths, shards, supervised)


def plan_shards(lengths: Sequence[int], shard_tokens: int) -> list[tuple[int, int]]:
    """Cut samples, in order, into shards (first, end) of at most `shard_tokens`; a longer sample has its own."""
    shards, first, held = [], 0, 0
    for index, length in enumerate(lengths):
        if held and held + length > shard_tokens:
            shards.append((first, index))
            first, held = index, 0
        held += length
    return [*shards, (first, len(lengths))] if lengths else []


def sample_size(loss_mask: ArrayLike, shape: Shape) -> tuple[int, int]:
    """Return a sample's number of supervised positions, and its bytes in a shard; see `Document`."""
    supervised = np.flatnonzero(np.asarray(loss_mask, dtype=bool)[2:]) + 1  # `supervised_positions`, 10 times as fast
    aux, last = shape.row_bytes
    states = attended_positions(supervised) * aux + len(supervised) * last + shape.document_bytes
    return len(supervised), np.size(loss_mask) * TOKEN_BYTES + states
