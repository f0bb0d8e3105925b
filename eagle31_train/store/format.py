"""What the files of a store are called, and the lines by which shards are committed.

    provenance.json     what the states are of: {"fingerprint", "inputs", "states"}; written first
    plan.json           every sample's length and every shard's samples (`shard_plan.Plan`)
    stream.json         how many bytes the extraction may keep, and how many processes share it, while it runs
    target.safetensors  the target's embedding rows, final norm and lm_head; target.json is its line
    trajectories.safetensors  the target's own answers to some held-out prompts, where training is to measure acceptance
                        (`evaluation/trajectories.py`); trajectories.json is its line
    shards/train-00000.safetensors …   many samples each, concatenated without padding (see `shard`)
    shards/train-00000.json …          one `Line` for each committed shard, with its checksum
    shards.jsonl        those lines together, in the order of the plan, in their place, once all are there
    consumed.json       which shards a training has used up and removed (`stream.Consumed`)
    manifest.json       written last: the store is complete; lists the small files with their checksums

Every JSON file carries a checksum of itself (`sealed`). A shard is committed once its line is there. While a store is
written each line is a file of its own, so that any number of processes can commit shards without a word to each other,
on a disk or in a bucket.
"""

from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

from pydantic import Field
from typing_extensions import NotRequired, TypedDict

from eagle31_train import artifacts, foreign
from eagle31_train.foreign import Count, Number, Positions, Width
from eagle31_train.store.sealed import DamagedError, seal, unseal

PROVENANCE = "provenance.json"
PLAN = "plan.json"
STREAM = "stream.json"
TARGET = "target.safetensors"
TARGET_LINE = "target.json"
TRAJECTORIES = "trajectories.safetensors"
TRAJECTORIES_LINE = "trajectories.json"
SHARDS = "shards.jsonl"
CONSUMED = "consumed.json"
FILES = {artifacts.MANIFEST, PROVENANCE, PLAN, SHARDS, STREAM, CONSUMED}  # beside shards/
FILES |= {TARGET, TARGET_LINE, TRAJECTORIES, TRAJECTORIES_LINE}

EXTRACT = "eagle31 extract"
REMAKE = f"run `{EXTRACT}` again, which makes what is damaged or missing anew"

Codec = Literal["bf16", "fp8", "int8", "int4"]


class Entry(TypedDict):
    """What a manifest lists of a file."""

    bytes: int
    checksum: str


class Manifest(TypedDict):
    """Of a complete store; what else it says concerns people."""

    fingerprint: str
    inputs: dict[str, Any]
    files: dict[str, Entry]


class Norm(TypedDict):
    kind: str
    eps: Number


class States(TypedDict):
    """What the states mean; see `targets.extraction.describe`."""

    aux_layers: Annotated[list[Count], Field(min_length=1, max_length=1024)]
    hidden_size: Annotated[Width, Field(ge=1)]
    vocab_size: Annotated[Width, Field(ge=1)]
    aux_codec: Codec
    last_codec: Codec
    norm: NotRequired[Norm]


class Origin(TypedDict):
    """Of provenance.json."""

    fingerprint: str
    inputs: dict[str, Any]
    states: States


class Bound(TypedDict):
    """Of stream.json. `store`: the fingerprint of the store that it belongs to; earlier versions did not say."""

    max_bytes: Positions | None
    processes: NotRequired[Count]
    store: NotRequired[str]


def line_name(name: str) -> str:
    """The file that commits a shard's file of this name."""
    return name.replace(".safetensors", ".json")


@dataclass(frozen=True)
class Line:
    """What commits a shard, or another big file. `fidelity` is the gate's result where it compared the shard."""

    name: str
    store: str  # fingerprint of the store that it belongs to
    size: int  # in bytes
    checksum: str
    fidelity: list[float] | None = None

    def sealed(self) -> bytes:
        """One line of JSON with a checksum of itself."""
        return seal(asdict(self))

    @property
    def entry(self) -> dict[str, Any]:
        """As a manifest lists it."""
        return {"bytes": self.size, "checksum": self.checksum}


def parse_line(data: bytes, store: str, name: str | None = None) -> Line:
    """One line, of the store with this fingerprint, and of the file of this name.

    Raises:
        DamagedError: it is torn or altered, or of another store or file.
    """
    try:
        line: Line = foreign.typed(Line, unseal(data))
    except DamagedError:
        raise
    except ValueError as error:
        raise DamagedError(str(error)) from None
    if line.store != store:
        raise DamagedError(f"it belongs to another store, {line.store}")
    if name not in (None, line.name):
        raise DamagedError(f"it belongs to {line.name}")
    return line
