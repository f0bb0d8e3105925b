"""A store's states kept by other codecs, and what that costs: bytes, the target's logits, the states themselves."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from eagle31_train import artifacts
from eagle31_train.codec import CODECS, as_encoded, check_codec, encode
from eagle31_train.document import Document
from eagle31_train.fidelity import compare
from eagle31_train.place import Place
from eagle31_train.schema import UserError
from eagle31_train.store import PlannedShard, Store, StoreWriter, finished, make_plan, shape_of
from eagle31_train.store.plan import SPLITS, TOKEN_BYTES
from eagle31_train.targets.engine import Reference
from eagle31_train.targets.readout import Readout

ROWS = 256  # of logits alive at once


@dataclass(frozen=True)
class Pair:
    """The codecs of auxiliary and of last states."""

    aux: str
    last: str

    @staticmethod
    def parse(text: str) -> "Pair":
        """From AUX:LAST.

        Raises:
            UserError: it is not of that form, or there is no such codec.
        """
        aux, colon, last = text.partition(":")
        if not colon:
            raise UserError(f"{text!r} is no pair of codecs: write AUX:LAST, like fp8:fp8")
        for name in (aux, last):
            check_codec(name, text)
        return Pair(aux, last)

    def __str__(self) -> str:
        return f"{self.aux}:{self.last}"

    @property
    def folder(self) -> str:
        """In names of folders."""
        return f"{self.aux}-{self.last}"

    @property
    def exact(self) -> bool:
        """Whether nothing is lost."""
        return self.aux == self.last == "bf16"


EXACT = Pair("bf16", "bf16")


def transcode(source: Store, place: Place, pair: Pair) -> None:
    """Write the store that extraction with these codecs would have written, from one in bf16.

    Where the target runs in bf16, as it does by default, its states lose nothing in `source`: the shards
    and the provenance have the same bytes as those of an extraction, which then has nothing to do.

    Raises:
        UserError: `source` is not in bf16, or the place holds another store.
    """
    began = time.perf_counter()
    if (source.shape.aux_codec, source.shape.last_codec) != ("bf16", "bf16"):
        raise UserError(f"{source.location} is not in bf16: other codecs can only be made from what is exact")
    inputs = {**source.inputs, "codecs": {"aux": pair.aux, "last": pair.last}}
    states = {**source.states, "aux_codec": pair.aux, "last_codec": pair.last}
    fingerprint = artifacts.fingerprint(inputs)
    if finished(place, fingerprint, inputs, overwrite=False):
        return
    plan = make_plan(masks_of(source), inputs["shard_tokens"], shape_of(states))
    writer = StoreWriter(place, {"fingerprint": fingerprint, "inputs": inputs, "states": states}, plan)
    tied = source.states["tied_lm_head"]
    writer.write_target({name: w for name, w in source.target.items() if name != "lm_head" or not tied})
    for shard in writer.mine():
        if not writer.has(shard):
            writer.write(shard, recoded(source, shard, pair))
    writer.finish({"fidelity": None, "seconds": time.perf_counter() - began})


def recoded(source: Store, shard: PlannedShard, pair: Pair) -> list[Document]:
    """The samples of a shard, their states kept by other codecs."""
    split = source.split(shard.split)
    documents = split.read_all(range(shard.first, shard.end))
    return [
        replace(
            document,
            aux=encode(as_encoded(document.aux).decode(), pair.aux),
            last=encode(as_encoded(document.last).decode(), pair.last),
        )
        for document in documents
    ]


def masks_of(store: Store) -> dict[str, Sequence[Sequence[bool]]]:
    """The loss mask of every sample, per split."""
    splits = {name: store.split(name) for name in SPLITS}
    return {
        name: [split.read(i, states=False).loss_mask.tolist() for i in range(len(split))]
        for name, split in splits.items()
    }


def shares(store: Store) -> tuple[float, float]:
    """Of all tokens, the share with auxiliary states kept and that with last states kept."""
    documents = [store.split(name).read(i, states=False) for name in SPLITS for i in range(len(store.split(name)))]
    tokens = sum(len(document) for document in documents)
    return sum(d.attended for d in documents) / tokens, sum(len(d.taught) for d in documents) / tokens


def bytes_per_token(pair: Pair, hidden: int, layers: int, aux_share: float = 1.0, last_share: float = 1.0) -> float:
    """What a token takes at hidden size H with A auxiliary layers, where so many tokens need their states."""
    aux, last = (CODECS[name].row_bytes(hidden) for name in (pair.aux, pair.last))
    return TOKEN_BYTES + aux_share * layers * aux + last_share * last


def readout_from(store: Store) -> Readout:
    """The target's readout, from what the store keeps of it."""
    weights, norm = store.target, store.states["norm"]
    embedding, head = weights["embed_tokens"], weights["lm_head"]
    return Readout(embedding, weights["norm"].float(), norm["kind"], norm["eps"], head, depth=0)


@torch.no_grad()
def fidelity(exact: Store, coded: Store, samples: int | None = None) -> dict[str, float]:
    """What the held-out split lost in `coded`, over every position that teaches.

    Returns:
        top1: share of arg-maxes that stay; gate: the same as the fidelity gate counts it (within one rounding step
        of bf16); kl: mean KL(exact || coded) of the next-token distributions, in nats; aux_error, last_error:
        RMS over states of the error's norm over the state's.
    """
    readout = readout_from(exact)
    before, after = exact.split("heldout"), coded.split("heldout")
    sums, aux_errors, last_errors = torch.zeros(4, dtype=torch.float64), [], []
    for index in range(min(len(before), samples or len(before))):
        one, other = before.read(index), after.read(index)
        last, found = as_encoded(one.taught_states).decode(), as_encoded(other.taught_states).decode()
        aux_errors.append(_errors(as_encoded(one.aux).decode(), as_encoded(other.aux).decode()))
        last_errors.append(_errors(last, found))
        for rows, others in zip(last.split(ROWS), found.split(ROWS), strict=True):
            if not len(rows):
                continue
            own, rebuilt = readout.logits(rows), readout.logits(others)
            agreement, kl = compare(Reference(own), rebuilt)
            same = (own.argmax(-1) == rebuilt.argmax(-1)).sum().item()
            sums += torch.tensor([len(rows), same, agreement * len(rows), kl * len(rows)], dtype=torch.float64)
    count, same, gate, kl = sums.tolist()
    return {
        "positions": count,
        "top1": same / count,
        "gate": gate / count,
        "kl": kl / count,
        "aux_error": _rms(aux_errors),
        "last_error": _rms(last_errors),
    }


def _errors(exact: Tensor, found: Tensor) -> Tensor:
    """[...] squared relative error of each state [..., H]."""
    exact, found = exact.float(), found.float()
    return ((found - exact).square().sum(-1) / exact.square().sum(-1).clamp_min(1e-30)).flatten()


def _rms(squares: Sequence[Tensor]) -> float:
    return torch.cat(list(squares)).mean().sqrt().item()
