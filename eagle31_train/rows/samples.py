"""The samples that stage 1 left, RUN/data/dataset: of each id, source, input_ids [T] int32 and loss_mask [T] bool."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

if TYPE_CHECKING:
    from datasets import Dataset


def load(dataset: Path, split: str) -> "Dataset":
    """A split, train or heldout, mapped from the disk."""
    from datasets import Dataset  # a second, which a stage that is up to date need not wait for

    return Dataset.load_from_disk(str((dataset / split).absolute()))


def masked(dataset: Path, split: str) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
    """Token ids and loss mask, [T] each, of every sample of a split."""
    columns = ["input_ids", "loss_mask"]
    for batch in load(dataset, split).select_columns(columns).with_format("numpy").iter(1_000):
        yield from zip(*(batch[column] for column in columns), strict=True)
