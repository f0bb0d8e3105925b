"""The files of a store, and how its small ones are read.

    provenance.json     what the states are of: {"fingerprint", "inputs", "states"}; written first
    plan.json           every sample's tokens and supervised positions, every shard's samples (`shard_plan.Plan`)
    stream.json         how many bytes the extraction may keep, and how many processes share it, while it runs
    target.safetensors  the target's embedding rows, final norm and lm_head; target.json is its line
    trajectories.safetensors  the target's answers to some held-out prompts, by which training measures acceptance
                        (`evaluation/trajectories.py`); trajectories.json is its line
    shards/train-00000.safetensors …   many samples each, concatenated without padding (see `shard`)
    shards/train-00000.json …          one `Line` for each committed shard, with its checksum
    shards.jsonl        those lines together, in the order of the plan; replaces them once all are there
    consumed.json       which shards a training has used up and removed (`stream.Consumed`)
    manifest.json       written last: the store is complete; lists the small files, for people: each knows its checksum

Every JSON file carries a checksum of itself (`sealed`). A shard is committed once its line is there. While a store is
written each line is a file of its own, so that processes commit shards independently, on a disk or in a bucket.
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
REMAKE = f"run `{EXTRACT}` again, which makes what is damaged or missing anew"


class Manifest(TypedDict):
    """Of a complete store; what else it says concerns people."""

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
    """What commits a shard, or another big file. fidelity: the gate's result, where it compared the shard. agreement:
    how far answers are the target's own (`targets.extraction.Agreement`), then the checksum of the draft vocabulary.
    checksums: of a shard's parts, for readers of some, 16 characters each: tokens, loss mask and arg-max together; then
    the states of each sample. Earlier versions had none of these, or some."""

    name: str
    store: str  # fingerprint of the store that it belongs to
    size: Bytes
    checksum: str
    fidelity: list[float] | None = None
    agreement: list[int] | None = None
    checksums: str | None = None  # one text: a list would take each process 90 bytes a sample

    def sealed(self) -> bytes:
        """One line of JSON with a checksum of itself."""
        return seal(asdict(self))


def line_name(name: str) -> str:
    """The file that commits a shard's file of this name."""
    return name.replace(".safetensors", ".json")


def read_record(storage: Storage, name: str, parse: Callable[[Any], T], store: str | None = None) -> T | None:
    """A small file of a store, as `parse_record` reads it, once more where it is damaged; None if it is missing."""
    where = f"{storage.location}/{name}"
    with suppress(FileNotFoundError):
        return read_twice(storage, name, lambda: parse_record(storage.read(name), where, parse, store))
    return None


def read_twice(storage: Storage, name: str, read: Callable[[], T]) -> T:
    """`read()` of a file; where that says that it is damaged, once more, from where the file lies."""
    with suppress(DamagedError):
        return read()
    storage.forget(name)  # no sooner: an error that is being handled keeps the file mapped, whose pages then stay
    return read()


def parse_record(data: bytes, where: str, parse: Callable[[Any], T], store: str | None = None) -> T:
    """A sealed JSON object, made a T by `parse`; DamagedError, naming `where`, if it is torn, altered, of another type,
    or of another store than `store`, a fingerprint that earlier versions did not record in every file."""
    try:
        value = unseal(data)
        record = parse(value)
    except ValueError as error:
        raise DamagedError(f"{where} is damaged ({error})") from None
    if store is not None and (other := value.get("store", store)) != store:
        raise DamagedError(f"{where} belongs to another store, {other} (this is {store})")
    return record


def read_line(storage: Storage, name: str, store: str) -> Line | None:
    """The line that commits a big file; None if it is missing; DamagedError as `parse_record`."""
    line = read_record(storage, line_name(name), partial(foreign.typed, Line), store)
    if line is not None and line.name != name:
        raise DamagedError(f"{storage.location}/{line_name(name)} is damaged (it belongs to {line.name})")
    return line


def open_checked(
    storage: Storage, line: Line, opener: Callable[[Path], T], what: str = "", verified: bool = False
) -> T:
    """`opener` of a big file that is as its line says; the checksum of one that is `verified` already is not compared.
    DamagedError, which names the file and then `what`, if it is another; FileNotFoundError if it is missing."""

    def checked(path: Path) -> T:
        if (size := path.stat().st_size) != line.size:
            raise DamagedError(f"has {size} bytes, not {line.size}: truncated or replaced")
        if not verified and artifacts.checksum(path) != line.checksum:
            raise DamagedError("is not as it was written (its checksum differs)")
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
