"""What drafters were trained on, as far as it is known: stage 1's training split, and caveats where it is not."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset
from numpy.typing import NDArray

from eagle31_train import artifacts
from eagle31_train.config import DrafterConfig, TrainConfig
from eagle31_train.provenance import recorded


class TrainingSplit:
    """A training split, read from Arrow's arrays, since lists of all of its tokens may not fit in memory."""

    def __init__(self, dataset: Path) -> None:
        self._rows = Dataset.load_from_disk(str((dataset / "train").absolute()))

    def __contains__(self, ids: Sequence[int]) -> bool:
        """Whether a sample has just these tokens before its first answer."""
        return _digest(np.asarray(ids)) in self._prompts

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each sample."""
        return np.concatenate([_lengths(ids) for (ids,) in self._columns("input_ids")])

    @cached_property
    def _prompts(self) -> frozenset[bytes]:
        """What stands before the first answer of each sample, by its hash."""
        digests: set[bytes] = set()
        for ids, mask in self._columns("input_ids", "loss_mask"):
            tokens, answers = ids.flatten().to_numpy(), np.flatnonzero(mask.flatten().to_numpy(zero_copy_only=False))
            starts = np.cumsum(_lengths(ids)) - _lengths(ids)
            firsts = answers[np.searchsorted(answers, starts)]  # stage 1 writes no sample without an answer
            digests.update(_digest(tokens[start:first]) for start, first in zip(starts, firsts, strict=True))
        return frozenset(digests)

    def _columns(self, *names: str) -> Iterator[list[Any]]:
        """Columns as Arrow's lists, some rows at a time."""
        for table in self._rows.select_columns(list(names)).with_format("arrow").iter(batch_size=1_000):
            yield [table[name].combine_chunks() for name in names]


def caveats(trainings: Mapping[str, Sequence[dict[str, Any] | None]], data: str) -> Iterator[str]:
    """Which drafters may have been trained on the prompts, and which trainings of one drafter differ in more than their
    seed.

    Args:
        trainings: what each training of each drafter was made from; None of a published draft.
        data: the dataset_fingerprint of what the prompts are held out from, or are looked up in.
    """
    for name, (first, *others) in trainings.items():
        if any(one is None or one.get("data") != data for one in (first, *others)):
            yield f"{name} may have been trained on these prompts"
        elif any(one.get("train", {}).get("init_from") for one in (first, *others) if one):
            yield f"the weights that {name} was initialised from may have been trained on these prompts"
        for number, other in enumerate(others, 2):
            if change := artifacts.describe_change(_recipe(first or {}), _recipe(other or {})):
                yield f"trainings 1 (there) and {number} (here) of {name} differ in more than their seed: {change}"


def _recipe(inputs: dict[str, Any]) -> dict[str, Any]:
    """All that training depended on but the seed; options that are newer than a training have their defaults."""
    defaults = {"drafter": asdict(DrafterConfig()), "train": asdict(TrainConfig())}
    known = {name: {**recorded(name, new), **inputs.get(name, {})} for name, new in defaults.items()}
    return {**inputs, **known, "seed": None}


def _lengths(lists: Any) -> NDArray[np.int64]:
    return np.asarray(lists.value_lengths().to_numpy(), dtype=np.int64)


def _digest(ids: NDArray[Any]) -> bytes:
    return hashlib.blake2b(ids.astype("<i8").tobytes(), digest_size=16).digest()
