"""How hidden states can be kept: our store, and one file per sample as others do, behind one interface.

SpecForge 0.2.0 and ModelOpt keep a `.pt` per sample (torch.save; read by torch.load with mmap), speculators 0.9.0 a
`.safetensors` per sample; both write what they write without fsync, and leave no checksum. Here they get fsync as
well, as a contender of its own.

Shapes: T tokens of a sample; A auxiliary layers; H hidden.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eagle31_train import artifacts
from eagle31_train.store import Store, StoreSplit, StoreWriter, make_plan, shape_of
from eagle31_train.store.backends import open_storage
from eagle31_train.store.codec import Encoded, as_encoded, concatenate
from eagle31_train.store.document import Document

VOCAB = 64  # of the random token ids
State = Tensor | Encoded


class Format(Protocol):
    """A way to keep samples on a disk."""

    name: str

    def write(self, documents: Sequence[Document], folder: Path) -> None:
        """Keep samples with whole states aux [T, A, H] and last [T, H] in an empty folder."""
        ...

    def open(self, folder: Path) -> None:
        """Make ready to read."""
        ...

    def read(self, indices: Sequence[int]) -> list[State]:
        """Auxiliary and last states of a batch: one contiguous tensor each, in memory of its own."""
        ...


class Ours:
    """The store, in shards of about `shard_tokens`."""

    def __init__(self, aux_codec: str, last_codec: str, shard_tokens: int) -> None:
        codecs = aux_codec if aux_codec == last_codec else f"{aux_codec}+{last_codec}"
        self.name = f"ours, {codecs}"
        self.codecs, self.shard_tokens = {"aux_codec": aux_codec, "last_codec": last_codec}, shard_tokens
        self.split: StoreSplit | None = None

    def write(self, documents: Sequence[Document], folder: Path) -> None:
        """See `Format.write`. States are encoded, shards checksummed and committed as in an extraction."""
        writer = begin(folder, documents, self.codecs, self.shard_tokens)
        for shard in writer.mine():
            writer.write(shard, documents[shard.first : shard.end])
        writer.finish({})

    def open(self, folder: Path) -> None:
        """Map every shard, which verifies its checksum."""
        store = Store(folder)
        self.split = store.split("train")
        for shard in self.split.shards:
            store.open(shard)

    def read(self, indices: Sequence[int]) -> list[State]:
        """As training does: the states still encoded, and only those that slots attend to or that teach."""
        assert self.split is not None
        documents = self.split.read_all(indices)
        aux = concatenate([as_encoded(document.aux) for document in documents])
        return [aux, concatenate([as_encoded(document.supervised_states) for document in documents])]


def begin(folder: Path, documents: Sequence[Document], codecs: dict[str, str], shard_tokens: int) -> StoreWriter:
    """A store of random samples, begun."""
    assert isinstance(documents[0].aux, Tensor)
    states = {
        "hidden_size": documents[0].aux.shape[2],
        "aux_layers": list(range(documents[0].aux.shape[1])),
        "vocab_size": VOCAB,
        **codecs,
    }
    inputs = {"random": True, **codecs}
    provenance = {"fingerprint": artifacts.fingerprint(inputs), "inputs": inputs, "states": states}
    masks: dict[str, Sequence[Sequence[bool]]] = {
        "heldout": [],
        "train": [document.loss_mask.tolist() for document in documents],
    }
    writer = StoreWriter(
        open_storage(str(folder), folder, 0), provenance, make_plan(masks, shard_tokens, shape_of(states))
    )
    writer.write_target({"embed_tokens": torch.zeros(1), "norm": torch.zeros(1)})
    return writer


class PerSample:
    """A file per sample; `fsync` forces each to the disk."""

    suffix: str

    def __init__(self, name: str, fsync: bool) -> None:
        self.name = f"{name}, fsync" if fsync else name
        self.fsync = fsync
        self.folder = Path()

    def write(self, documents: Sequence[Document], folder: Path) -> None:
        """See `Format.write`."""
        folder.mkdir(parents=True)
        for index, document in enumerate(documents):
            path = folder / f"{index}{self.suffix}"
            self.save(document, path)
            if self.fsync:
                artifacts.fsync_path(path)
        if self.fsync:
            artifacts.fsync_path(folder)

    def open(self, folder: Path) -> None:
        """Nothing is checked."""
        self.folder = folder

    def read(self, indices: Sequence[int]) -> list[State]:
        """All states of the samples."""
        parts = [self.load(self.folder / f"{index}{self.suffix}") for index in indices]
        return [torch.cat(column) for column in zip(*parts, strict=True)]

    def save(self, document: Document, path: Path) -> None:
        """Write one sample."""
        raise NotImplementedError

    def load(self, path: Path) -> tuple[Tensor, Tensor]:
        """Auxiliary states [T, A*H] and last ones [T, H] of one sample, mapped or read."""
        raise NotImplementedError


class TorchSave(PerSample):
    """As SpecForge and ModelOpt do."""

    suffix = ".pt"

    def __init__(self, fsync: bool = False) -> None:
        super().__init__("torch.save per sample", fsync)

    def save(self, document: Document, path: Path) -> None:
        """input_ids, loss_mask, hidden_state [T, H], aux_hidden_state [T, A*H]."""
        assert isinstance(document.aux, Tensor)
        sample = {
            "input_ids": document.tokens,
            "loss_mask": document.loss_mask.long(),
            "hidden_state": document.last,
            "aux_hidden_state": document.aux.flatten(1),
        }
        torch.save(sample, path)

    def load(self, path: Path) -> tuple[Tensor, Tensor]:
        """Mapped, as SpecForge does; these files are our own, so that a pickle may be read."""
        sample = torch.load(path, weights_only=False, mmap=True)
        return sample["aux_hidden_state"], sample["hidden_state"]


class Safetensors(PerSample):
    """As speculators does: token_ids, hidden_states [T, A+1, H]; the loss mask lies elsewhere."""

    suffix = ".safetensors"

    def __init__(self, fsync: bool = False) -> None:
        super().__init__("safetensors per sample", fsync)

    def save(self, document: Document, path: Path) -> None:
        """Layer by layer into one tensor, as the engine there does."""
        assert isinstance(document.aux, Tensor)
        assert isinstance(document.last, Tensor)
        states = torch.cat([document.aux, document.last[:, None]], 1)
        save_file({"token_ids": document.tokens, "hidden_states": states}, path)

    def load(self, path: Path) -> tuple[Tensor, Tensor]:
        """Cut as speculators cuts them."""
        states = load_file(path)["hidden_states"]
        return states[:, :-1].flatten(1), states[:, -1]


def usage(folder: Path) -> tuple[int, int]:
    """Files under a folder, and their bytes."""
    sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
    return len(sizes), sum(sizes)
