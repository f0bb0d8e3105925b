"""What drafters were trained on, as far as it is known: stage 1's training split, and caveats where it is not."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset


class TrainingSplit:
    """The prompts of a training split."""

    def __init__(self, dataset: Path) -> None:
        rows = Dataset.load_from_disk(str(dataset / "train")).select_columns(["input_ids", "loss_mask"])
        # Hashes, since lists of all tokens may not fit in memory. A prompt ends before the first answer.
        self._prompts = {_digest(row["input_ids"][: row["loss_mask"].argmax()]) for row in rows.with_format("numpy")}

    def __contains__(self, ids: Sequence[int]) -> bool:
        """Whether a sample has just these tokens before its first answer."""
        return _digest(ids) in self._prompts


def caveats(trainings: Mapping[str, Sequence[dict[str, Any] | None]], data: str) -> Iterator[str]:
    """Which drafters may have been trained on the prompts.

    Args:
        trainings: what each training of each drafter was made from; None of a published draft.
        data: the dataset_fingerprint of what the prompts are held out from, or are looked up in.
    """
    for name, inputs in trainings.items():
        if any(one is None or one.get("data") != data for one in inputs):
            yield f"{name} may have been trained on these prompts"
        elif any(one.get("train", {}).get("init_from") for one in inputs if one):
            yield f"the weights that {name} was initialised from may have been trained on these prompts"


def _digest(ids: Any) -> bytes:
    return hashlib.blake2b(np.asarray(ids, dtype="<i8").tobytes(), digest_size=16).digest()
