"""The files of a store, and functions that read the small ones.

    provenance.json     what the states were made from: {"fingerprint", "inputs", "states"}; written first
    plan.json           every sample's tokens and supervised positions, every shard's samples (`shard_plan.Plan`)
    stream.json         while extraction runs: how many bytes it may keep, and how many processes share it
    target.safetensors  the target's embedding rows, final norm and lm_head; target.json is its line
    trajectories.safetensors  the target's answers to some held-out prompts, by which training measures acceptance
                        (`evaluation/trajectories.py`); trajectories.json is its line
    shards/train-00000.safetensors …   many samples each, concatenated without padding (see `shard`)
    shards/train-00000.json …          one `Line` for each committed shard, with its checksum
    shards.jsonl        all of those lines, in the order of the plan; replaces them once they are complete
    consumed.json       which shards a training has used up and removed (`stream.Consumed`)
    manifest.json       written last: the store is complete; its list of files is for people: each has its own checksum

Every JSON file carries a checksum of itself (`sealed`). A shard is committed once its line exists. While a store is
being written, each line is a separate file, so that processes commit shards independently, on a disk or in a bucket.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field
from typing_extensions import NotRequired, TypedDict

from eagle31_train.common import artifacts, foreign
from eagle31_train.common.foreign import Bytes, Count, Number, Width
from eagle31_train.store.backends import Storage
from eagle31_train.store.sealed import DamagedError, seal, unseal

T = TypeVar("T")
PROVENANCE = "provenance.json"
PLAN = "plan.json"
STREAM = "stream.json"
TARGET = "target.safetensors"
TARGET_LINE = "target.json"
TRAJECTORIES = "trajectories.safetensors"
TRAJECTORIES_LINE = "trajectories.json"
SHARDS = "shards.jsonl"
CONSUMED = "consumed.json"
NEEDED = (PROVENANCE, PLAN, SHARDS, TARGET_LINE)  # small files that every complete store has
FILES = {*NEEDED, artifacts.MANIFEST, CONSUMED, TARGET, TRAJECTORIES, TRAJECTORIES_LINE}  # beside shards/ and STREAM

EXTRACT = "eagle31 extract"
REMAKE = f"run `{EXTRACT}` again to make what is damaged or missing"


class Manifest(TypedDict):
    """The manifest of a complete store. Its other entries are for people."""

    fingerprint: str
    inputs: dict[str, Any]


class Norm(TypedDict):
    kind: str
    eps: Number


class States(TypedDict):
    """What the states mean; see `targets.extraction.describe`."""

    aux_layers: Annotated[list[Count], Field(min_length=1, max_length=1024)]
    hidden_size: Annotated[Width, Field(ge=1)]
    vocab_size: Annotated[Width, Field(ge=1)]
    soft_cap: NotRequired[Annotated[Number, Field(gt=0)]]
    aux_codec: Literal["bf16", "int8_channel", "fp8", "int8", "int4"]
    last_codec: Literal["bf16", "int8_channel", "fp8", "int8", "int4"]
    norm: NotRequired[Norm]


class Origin(TypedDict):
    fingerprint: str
    inputs: dict[str, Any]
    states: States


class Bound(TypedDict):
    max_bytes: Bytes | None
    processes: NotRequired[Count]


@dataclass(frozen=True)
class Line:
    """The record that commits a shard or another big file. Lines of earlier versions lack some or all of these fields:

    fidelity: the gate's result, if it compared the shard.
    agreement: how far answers are the target's own (`targets.extraction.Agreement`), then the checksum of the draft
        vocabulary.
    checksums: 16 characters for each part of a shard, so that parts can be read alone: tokens, loss mask and arg-max
        together, then the states of each sample.
    """

    name: str
    store: str  # fingerprint of the store that it belongs to
    size: Bytes
    checksum: str
    fidelity: list[float] | None = None
    agreement: list[int] | None = None
    checksums: str | None = None  # one string: a list would take 90 bytes per sample in each process

    def sealed(self) -> bytes:
        """One line of JSON with a checksum of itself."""
        return seal(asdict(self))


def line_name(name: str) -> str:
    """Return the name of the file whose line commits the big file `name`."""
    return name.replace(".safetensors", ".json")


def read_record(storage: Storage, name: str, parse: Callable[[Any], T], store: str | None = None) -> T | None:
    """Read a small file with `parse_record`, twice if it seems damaged. Return None if it is missing."""
    where = f"{storage.location}/{name}"
    with suppress(FileNotFoundError):
        return read_twice(storage, name, lambda: parse_record(storage.read(name), where, parse, store))
    return None


def read_twice(storage: Storage, name: str, read: Callable[[], T]) -> T:
    """Return `read()`. On DamagedError, drop cached copies of the file and read once more."""
    with suppress(DamagedError):
        return read()
    storage.forget(name)  # after the `with`: an error being handled keeps the file mapped, and mapped pages stay
    return read()


def parse_record(data: bytes, where: str, parse: Callable[[Any], T], store: str | None = None) -> T:
    """Unseal a JSON object and return what `parse` makes of it.

    DamagedError, naming `where`, if it is torn, altered, of another type, or of a store with another fingerprint than
    `store`. Earlier versions did not record that in every file."""
    try:
        value = unseal(data)
        record = parse(value)
    except ValueError as error:
        raise DamagedError(f"{where} is damaged ({error})") from None
    if store is not None and (other := value.get("store", store)) != store:
        raise DamagedError(f"{where} belongs to another store, {other} (this is {store})")
    return record


def read_line(storage: Storage, name: str, store: str) -> Line | None:
    """Return the line that commits a big file, or None if it is missing. DamagedError as in `parse_record`."""
    line = read_record(storage, line_name(name), partial(foreign.typed, Line), store)
    if line is not None and line.name != name:
        raise DamagedError(f"{storage.location}/{line_name(name)} is damaged (it belongs to {line.name})")
    return line


def open_checked(
    storage: Storage, line: Line, opener: Callable[[Path], T], what: str = "", verified: bool = False
) -> T:
    """Compare a big file with its line (with `verified`, only its size), then return `opener` of it.

    DamagedError, naming the file and then `what`, if they differ; FileNotFoundError if the file is missing."""

    def checked(path: Path) -> T:
        if (size := path.stat().st_size) != line.size:
            raise DamagedError(f"has {size} bytes, not {line.size}: truncated or replaced")
        if not verified and artifacts.checksum(path) != line.checksum:
            raise DamagedError("has changed since it was written (its checksum differs)")
        try:
            return opener(path)
        except DamagedError:
            raise
        except foreign.NO_TENSORS as error:
            raise DamagedError(f"cannot be read ({error})") from None

    try:
        return read_twice(storage, line.name, lambda: storage.opened(line.name, checked))
    except DamagedError as error:
        raise DamagedError(f"{storage.location}/{line.name}{what} {error}") from None
