"""The draft vocabulary: which of the target's tokens the drafter can propose. vLLM reads `d2t`, an **offset**: target
id = k + d2t[k]. `t2d` says of each target id whether the draft vocabulary holds it. Draft ids are in the order of the
target's, so each map follows from the other. NumPy only: the data stage imports this module without torch."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save

from eagle31_train.common import foreign
from eagle31_train.common.artifacts import write_bytes
from eagle31_train.common.errors import UserError


@dataclass(frozen=True)
class DraftVocab:
    """The kept target ids, ascending: `target_ids` [Vd] int64, out of `target_size` = V."""

    target_ids: NDArray[np.int64]
    target_size: int

    def __post_init__(self) -> None:
        ids, V = self.target_ids, self.target_size
        if not len(ids) or ids[0] < 0 or ids[-1] >= V or (np.diff(ids) <= 0).any():
            what = f"d2t must be the offset target id - draft id, with ascending ids below {V}"
            raise UserError(f"d2t or t2d is damaged: {what}")

    def __len__(self) -> int:
        return len(self.target_ids)

    @property
    def pruned(self) -> bool:
        return len(self) < self.target_size

    @property
    def d2t(self) -> NDArray[np.int64]:
        """[Vd] int64 offsets: target id = k + d2t[k]."""
        return self.target_ids - np.arange(len(self), dtype=np.int64)

    @property
    def t2d(self) -> NDArray[np.bool_]:
        """[V] bool: whether the draft vocabulary holds the target id."""
        mask = np.zeros(self.target_size, dtype=np.bool_)
        mask[self.target_ids] = True
        return mask


def count(samples: Iterable[tuple[NDArray[Any], NDArray[Any]]], size: int) -> NDArray[np.int64]:
    """Return how often the assistant wrote each token, [size] int64. samples: token ids and loss mask, [T] each."""
    counts = np.zeros(size, dtype=np.int64)
    for ids, mask in samples:
        # Not bincount with minlength=size, which would add up `size` numbers for every sample.
        np.add.at(counts, ids[mask], 1)
    return counts


def choose(counts: NDArray[np.int64], always: list[int], size: int | None = None) -> DraftVocab:
    """Keep the most frequent tokens. Raise UserError if `always` alone are more than `size`.

    Args:
        counts: [V] how often the assistant wrote each token.
        always: ids to keep whatever their count (`ChatTemplate.kept_ids`).
        size: how many tokens to keep; None, or V and more, keeps all V.
    """
    V = len(counts)
    forced = np.unique(np.asarray(always, dtype=np.int64))
    if size is None or size >= V:
        return DraftVocab(np.arange(V, dtype=np.int64), V)
    if size < len(forced):
        what = f"the {len(forced)} special tokens that end turns or that the template names"
        raise UserError(f"data.draft_vocab_size={size} has no room for {what}: raise it")
    # Frequent first, ties by id; forced tokens before all others.
    rank = counts.astype(np.float64)
    rank[forced] = np.inf
    return DraftVocab(np.sort(np.argsort(-rank, kind="stable")[:size]), V)


def from_maps(d2t: NDArray[np.int64], t2d: NDArray[np.bool_]) -> DraftVocab:
    """Return the vocabulary of a checkpoint's maps. Raise UserError if they contradict each other."""
    vocab = DraftVocab(d2t + np.arange(len(d2t), dtype=np.int64), len(t2d))
    if not np.array_equal(vocab.t2d, t2d):
        raise UserError("d2t and t2d contradict each other: d2t must be the offset target id - draft id")
    return vocab


def write(path: Path, vocab: DraftVocab) -> None:
    """Write `d2t` and `t2d` as safetensors, whole or not at all."""
    write_bytes(path, save({"d2t": vocab.d2t, "t2d": vocab.t2d}))


def read(path: Path) -> DraftVocab:
    try:
        maps = load_file(path)
        return from_maps(maps["d2t"], maps["t2d"])
    except UserError as error:
        raise UserError(f"{path} cannot be used ({error}): run `eagle31 data` again") from None
    except (OSError, *foreign.NO_TENSORS) as error:
        raise UserError(f"{path} is missing or damaged ({error}): run `eagle31 data` again") from None
