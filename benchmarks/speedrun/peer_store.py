"""Our store as the peers read hidden states: each sample on demand, so that nothing is stored twice.

T tokens; A auxiliary layers; H hidden. The store keeps the target's last state at j where the assistant wrote token
j+1. Each peer has another mask; the positions in both are taught:

* speculators 0.9.0 counts a prediction of token j+1, taught by the state at j, where the assistant wrote token j: all
  but the last position of each turn, which predicts what comes after the answer.
* SpecForge 0.2.0 counts it where the assistant wrote token j-1: all but the last two positions of each turn.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from torch import Tensor

from eagle31_train.common.errors import UserError
from eagle31_train.model.vocab import DraftVocab
from eagle31_train.store import Store
from eagle31_train.store.document import Document

SPLITS = ("train", "heldout")  # what the peer trains on, then what it validates on


def taught_mask(loss_mask: Tensor) -> Tensor:
    """Return where speculators learns, [T] bool → [T] int64: 1 where this and the next token are the assistant's."""
    mask = torch.zeros(len(loss_mask), dtype=torch.long)
    mask[1:-1] = (loss_mask[1:-1] & loss_mask[2:]).long()
    return mask


def specforge_mask(loss_mask: Tensor) -> Tensor:
    """Return where SpecForge learns, [T] int64: 1 where this token and the one after the next are the assistant's."""
    mask = torch.zeros(len(loss_mask), dtype=torch.long)
    mask[:-2] = (loss_mask[:-2] & loss_mask[2:]).long()
    return mask


def specforge_sample(document: Document, norm: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """Return a document as in SpecForge's files, in bf16: auxiliary states concatenated, [1, T, A·H], and the last one
    after the target's final `norm`, [1, T, H]. They are zero where no prediction that counts reads them."""
    aux, last = document.aux.decode(), document.last.decode()
    wide = torch.zeros(len(document), aux.shape[1] * aux.shape[2], dtype=torch.bfloat16)
    target = torch.zeros(len(document), last.shape[1], dtype=torch.bfloat16)
    wide[: document.attended] = aux.flatten(1).bfloat16()
    target[document.supervised] = norm(last.float()).bfloat16()
    return {
        "input_ids": document.tokens.clone(),
        "loss_mask": specforge_mask(document.loss_mask),
        "hidden_state": target[None],
        "aux_hidden_state": wide[None],
    }


def sample(document: Document) -> dict[str, Tensor]:
    """Return a document as in speculators' files, in bf16: the states and the last one, [T, A+1, H]; zeros as above."""
    aux, last = document.aux.decode(), document.last.decode()
    states = torch.zeros(len(document), aux.shape[1] + 1, aux.shape[2], dtype=torch.bfloat16)
    states[: document.attended, :-1] = aux
    states[document.supervised, -1] = last.bfloat16()
    return {"token_ids": document.tokens.clone(), "hidden_states": states}


class Samples:
    """Transfer of speculators' backend: samples by their row in the data set, the training split first."""

    def __init__(self, store: Path) -> None:
        splits = [Store(store).split(name) for name in SPLITS]
        self.where = [(split, index) for split in splits for index in range(len(split))]

    def setup(self) -> None:
        """Do nothing: the store is complete."""

    def get_cached(self, file_idx: int) -> dict[str, Tensor]:
        split, index = self.where[file_idx]
        return sample(split.read(index))

    def get_generated(self, hs_transfer_params: dict[str, Any]) -> None:
        """Do nothing: every sample is in the store."""

    def delete(self, handle: str) -> None:
        """Do nothing: the store keeps its samples."""


def write(store: Store, kept: DraftVocab, folder: Path, validate: int) -> dict[str, int]:
    """Write speculators' data folder: a data set with its columns, and the draft vocabulary's maps. Return the number
    of samples of each split. validate: held-out samples, which the peer requires but does not train on; UserError if
    there are none."""
    columns: dict[str, list[Any]] = {"input_ids": [], "loss_mask": [], "seq_len": []}
    samples: dict[str, int] = {}
    for name in SPLITS:
        split = store.split(name)
        if not len(split):
            raise UserError(f"{store.location} has no {name} split: set data.heldout, and run the stages again")
        samples[name] = len(split) if name == "train" else min(validate, len(split))
        for index in range(samples[name]):
            document = split.read(index, states=False)
            columns["input_ids"].append(document.tokens.tolist())
            columns["loss_mask"].append(taught_mask(document.loss_mask).tolist())
            columns["seq_len"].append(len(document))
    rows = datasets.Dataset.from_dict(columns)
    rows.set_format("torch", columns=list(columns))
    rows.save_to_disk(str(folder))
    np.save(folder / f"d2t-{len(kept.d2t)}.npy", kept.d2t)
    np.save(folder / f"t2d-{len(kept.d2t)}.npy", kept.t2d)
    return samples


def ratio(samples: dict[str, int]) -> float:
    """Return speculators' --train-data-ratio that cuts the data set exactly between our splits."""
    return (samples["train"] + 0.5) / sum(samples.values())


def batches(lengths: Sequence[int], batch_tokens: int, seed: int, epoch: int) -> list[int]:
    """Return the tokens of every batch that speculators' own sampler makes of an epoch; needs the peer."""
    from speculators.train.distributed_batch_sampler import MultipackDistributedBatchSamplerV2

    sampler = MultipackDistributedBatchSamplerV2(batch_tokens, lengths, num_replicas=1, rank=0, seed=seed)
    sampler.set_epoch(epoch)
    return [int(sum(lengths[i] for i in batch)) for batch in sampler]
