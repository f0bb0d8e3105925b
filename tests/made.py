"""A small store of made-up documents, written as extraction writes one, but without a target."""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import make_document, make_shape
from fsspec.implementations.memory import MemoryFileSystem
from whole import encoded

from eagle31_train.common.errors import UserError
from eagle31_train.store import Store, StoreWriter, make_plan, shape_of
from eagle31_train.store.__main__ import check
from eagle31_train.store.backends import LocalStorage
from eagle31_train.store.format import TARGET

LENGTHS = {"train": [9, 4, 1, 12, 6, 8], "heldout": [5, 7, 3]}
VOCAB = 50


def states_of(aux_layers, hidden, vocab, aux_codec="bf16", last_codec="bf16"):
    """What a store says of a target's states."""
    sizes = {"aux_layers": aux_layers, "hidden_size": hidden, "vocab_size": vocab}
    return {**sizes, "aux_codec": aux_codec, "last_codec": last_codec, "norm": {"kind": "w", "eps": 1e-5}}


def plan_of(documents, shard_tokens, states):
    """The plan of a store of these documents, by split."""
    masks = {split: [document.loss_mask.tolist() for document in some] for split, some in documents.items()}
    return make_plan(masks, shard_tokens, shape_of(states))


@dataclass
class Made:
    """What is to be stored; `write` stores it."""

    lengths: dict = field(default_factory=lambda: LENGTHS)
    hidden: int = 16
    aux_codec: str = "bf16"
    last_codec: str = "bf16"
    shard_tokens: int = 14
    fingerprint: str = "f" * 16

    def __post_init__(self):
        generator = torch.Generator().manual_seed(3)
        shape = make_shape(aux_layers=[1, 3], target_hidden_size=self.hidden, vocab_size=VOCAB)
        self.documents = {
            split: [make_document(shape, length, generator) for length in lengths]
            for split, lengths in self.lengths.items()
        }
        self.states = states_of([1, 3], self.hidden, VOCAB, self.aux_codec, self.last_codec)
        self.provenance = {
            "fingerprint": self.fingerprint,
            "inputs": {"data": "d" * 16, "target": {"name": "somewhere"}},
            "states": self.states,
        }
        self.plan = plan_of(self.documents, self.shard_tokens, self.states)
        self.weights = {
            "embed_tokens": torch.randn(VOCAB, self.hidden, generator=generator).bfloat16(),
            "norm": torch.randn(self.hidden, generator=generator),
            "lm_head": torch.randn(VOCAB, self.hidden, generator=generator).bfloat16(),
        }

    def of(self, shard):
        """The documents of a shard, as extraction hands them to the writer."""
        some = self.documents[shard.split][shard.first : shard.end]
        return [encoded(document, self.aux_codec, self.last_codec) for document in some]

    def writer(self, storage, **options):
        storage = LocalStorage(str(storage), storage) if isinstance(storage, Path) else storage
        return StoreWriter(storage, self.provenance, self.plan, **options)

    def write(self, storage, stop_after=None, **options):
        """Write the store, or stop after so many new shards as a killed run does: without a word."""
        writer = self.writer(storage, **options)
        writer.write_tensors(TARGET, self.weights)
        written = 0
        for shard in writer.mine():
            if writer.has(shard):
                continue
            if written == stop_after:
                return writer
            writer.wait_for_quota(shard)
            writer.write(shard, self.of(shard), [1.0, 0.0, 5] if shard.number == 0 else None)
            written += 1
        if written != stop_after:
            writer.finish(writer.gather(), {"seconds": 1.0})
        return writer


def read_whole(storage, shards=None, **options):
    """Read a store as training does: the samples of its first so many shards, or of all.

    Returns:
        (documents by split, as far as they were read; the message of the UserError that refused the others, or None)
    """
    found = {"heldout": [], "train": []}
    try:
        store = Store(storage, **options)
        assert store.target
        assert store.max_bytes is None
        for shard in store.plan.shards[:shards]:
            for index in range(shard.first, shard.end):
                found[shard.split].append(store.split(shard.split).read(index))
    except UserError as error:
        return found, str(error)
    return found, None


def problems(folder):
    """What `store verify` finds in a store's folder."""
    return [problem.text for problem in check(LocalStorage("the store", folder), Counter())]


def right_so_far(found, whole):
    """Whether everything that was read has the bits that a whole store gives."""

    def bits(document):
        states = [(one.values, one.scale, one.channels) for one in (document.aux, document.last)]
        plain = (document.tokens, document.loss_mask, document.top1)
        return [tensor.contiguous().flatten().view(torch.uint8) for tensor in (*plain, *states[0], *states[1])]

    return all(
        all(map(torch.equal, bits(ours), bits(theirs)))
        for split, documents in found.items()
        for ours, theirs in zip(documents, whole[split], strict=False)
    )


def message_of(call, *arguments, **options):
    with pytest.raises(UserError) as error:
        call(*arguments, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


def status_of(command, *arguments):
    """With which a command ends."""
    with pytest.raises(SystemExit) as ended:
        command(*arguments)
    return ended.value.code


def memory(kind=MemoryFileSystem):
    """A file system in memory whose files are its own; older versions of fsspec have no option for that."""
    fs = kind(skip_instance_cache=True)
    fs.store, fs.pseudo_dirs = {}, [""]
    return fs


class Documents:
    """A split in memory."""

    def __init__(self, documents):
        self.documents, self.lengths = documents, [len(document) for document in documents]

    def wait_for(self, indices):
        pass

    def passed(self, step):
        pass

    def sizes(self, indices):
        return [self.lengths[i] for i in indices], [len(self.documents[i].supervised) for i in indices]

    def read(self, index, states=True):
        return self.documents[index]

    def read_all(self, indices):
        return [self.read(index) for index in indices]


class Split(Documents):
    """A split as trainings know it, in a store of one shard."""

    store = SimpleNamespace(wait_for=lambda *_: None)

    def __len__(self):
        return len(self.documents)

    def shard_of(self, index):
        return None
