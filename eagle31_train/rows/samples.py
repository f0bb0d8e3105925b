"""Read stage 1's samples, RUN/data/dataset: each has id, source, input_ids [T] int32 and loss_mask [T] bool."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from datasets import Dataset


def load(dataset: Path, split: str) -> "Dataset":
    """Return a split, train or heldout, memory-mapped from disk."""
    from datasets import Dataset  # takes a second to import; an up-to-date stage does without

    return Dataset.load_from_disk(str((dataset / split).absolute()))


def masked(dataset: Path, split: str) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
    """Yield token ids and loss mask, [T] each, of every sample of a split."""
    rows = load(dataset, split)
    yield from zip(column(rows, "input_ids"), column(rows, "loss_mask"), strict=True)


def column(rows: "Dataset", name: str) -> Iterator[NDArray[Any]]:
    """Yield a column, input_ids or loss_mask, as [T] of every row. It reads Arrow directly: Python lists take twenty
    times as long, the "numpy" format of `datasets` nine times."""
    for batch in rows.select_columns([name]).with_format("arrow").iter(1000):
        lists = batch[name].combine_chunks()
        ends = lists.offsets.to_numpy()
        yield from np.split(lists.flatten().to_numpy(zero_copy_only=False), ends[1:-1] - ends[0])
