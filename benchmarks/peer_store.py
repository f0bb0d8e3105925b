"""Our store as speculators 0.9.0 reads hidden states: a data set of its columns, and each sample's states on demand.

Its trainer takes `{"token_ids" [T], "hidden_states" [T, A+1, H]}` per sample from a backend that anyone may register:
ours hands out what the store holds, so that nothing is kept twice. T tokens; A auxiliary layers; H hidden.

Its mask counts a prediction of token j+1, taught by the target's state at j, where the assistant wrote token j. The
store keeps that state where the assistant wrote token j+1, so that what lies in both is taught: all of the peer's own
but the last position of each turn, which foretells what comes after the answer.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from torch import Tensor

from eagle31_train.errors import UserError
from eagle31_train.model.vocab import DraftVocab
from eagle31_train.store import Store
from eagle31_train.store.codec import as_encoded
from eagle31_train.store.document import Document

SPLITS = ("train", "heldout")  # in this order: what the peer trains on, and what it validates on


def taught_mask(loss_mask: Tensor) -> Tensor:
    """Where the peer learns: [T] bool → [T] int64, one where this token and the next one are the assistant's."""
    mask = torch.zeros(len(loss_mask), dtype=torch.long)
    mask[1:-1] = (loss_mask[1:-1] & loss_mask[2:]).long()
    return mask


def sample(document: Document) -> dict[str, Tensor]:
    """A document as the peer's files hold it, in bf16; zero where no prediction that counts looks."""
    aux, last = as_encoded(document.attended_states).decode(), as_encoded(document.supervised_states).decode()
    states = torch.zeros(len(document), aux.shape[1] + 1, aux.shape[2], dtype=torch.bfloat16)
    states[: document.attended, :-1] = aux
    states[document.supervised, -1] = last.bfloat16()
    return {"token_ids": document.tokens.clone(), "hidden_states": states}


class Samples:
    """The transfer of the peer's backend: samples by their row in the data set, the training split first."""

    def __init__(self, store: Path) -> None:
        splits = [Store(store).split(name) for name in SPLITS]
        self.where = [(split, index) for split in splits for index in range(len(split))]

    def setup(self) -> None:
        """Nothing is left to do."""

    def get_cached(self, file_idx: int) -> dict[str, Tensor]:
        """One sample; see `sample`."""
        split, index = self.where[file_idx]
        return sample(split.read(index))

    def get_generated(self, hs_transfer_params: dict[str, Any]) -> None:
        """Every sample is there: nothing is ever generated."""

    def delete(self, handle: str) -> None:
        """Nothing is deleted."""


def write(store: Store, kept: DraftVocab, folder: Path, validate: int) -> dict[str, Any]:
    """The peer's data folder: a data set with its columns, and the draft vocabulary's maps.

    Args:
        store: complete, of unencoded or encoded states.
        kept: the draft vocabulary.
        folder: is made.
        validate: held-out samples, which the peer must have and only looks at.

    Returns:
        samples of each split; tokens of training; the peer's own mask there (`mask`), and how much of it is `taught`.

    Raises:
        UserError: the store has no split of its own to validate on.
    """
    columns: dict[str, list[Any]] = {"input_ids": [], "loss_mask": [], "seq_len": []}
    found: dict[str, Any] = {"samples": {}, "tokens": 0, "mask": 0, "taught": 0}
    for name in SPLITS:
        split = store.split(name)
        if not len(split):
            raise UserError(f"{store.location} has no {name} split: set data.heldout, and run the stages again")
        found["samples"][name] = len(split) if name == "train" else min(validate, len(split))
        for index in range(found["samples"][name]):
            document = split.read(index, states=False)
            mask = taught_mask(document.loss_mask)
            columns["input_ids"].append(document.tokens.tolist())
            columns["loss_mask"].append(mask.tolist())
            columns["seq_len"].append(len(document))
            if name == "train":
                found["tokens"] += len(document)
                found["mask"] += int(document.loss_mask[1:].sum())
                found["taught"] += int(mask.sum())
    rows = datasets.Dataset.from_dict(columns)
    rows.set_format("torch", columns=list(columns))
    rows.save_to_disk(str(folder))
    np.save(folder / f"d2t-{len(kept.d2t)}.npy", kept.d2t)
    np.save(folder / f"t2d-{len(kept.d2t)}.npy", kept.t2d)
    return found


def ratio(samples: dict[str, int]) -> float:
    """The peer's --train-data-ratio, which cuts the data set exactly between our splits."""
    return (samples["train"] + 0.5) / sum(samples.values())


def batches(lengths: Sequence[int], batch_tokens: int, seed: int, epoch: int) -> list[int]:
    """Tokens of every batch that the peer's own sampler makes of an epoch; needs the peer."""
    from speculators.train.distributed_batch_sampler import MultipackDistributedBatchSamplerV2

    sampler = MultipackDistributedBatchSamplerV2(batch_tokens, lengths, num_replicas=1, rank=0, seed=seed)
    sampler.set_epoch(epoch)
    return [int(sum(lengths[i] for i in batch)) for batch in sampler]
