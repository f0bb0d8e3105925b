"""Sort the flat batches of an engine's steps into one file of hidden states per conversation. Does not import vLLM.

A step's batch concatenates pieces of conversations: chunks of long ones, many short ones, and padding.

Shapes: n tokens of a step; T of one conversation; L layers that are taken; H hidden.
"""

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

BEHIND = 2  # steps whose states may wait to be written, and are in memory besides those of the running step
LAYERS = "eagle31_layers"  # key in vLLM's additional_config that tells its workers the layers
CANNOT = "the states cannot be written"


@dataclass(frozen=True)
class Piece:
    """Rows of a step's batch: `count` tokens, from token `start` on, of a conversation of `length` tokens."""

    name: str
    start: int
    count: int
    length: int


@dataclass
class _Growing:
    states: Tensor  # [L, T, H]
    tokens: Tensor  # [T] int64
    done: int = 0


class StatesWriter:
    """Sorts the states of steps by conversation, and writes those of each complete conversation to NAME.safetensors in
    `folder`: `hidden_states` [L, T, H] and `token_ids` [T]. The file appears only once it is whole. A thread does this
    while the engine goes on; on a GPU it waits for copies into pinned memory, queued behind the step that made them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._growing: dict[str, _Growing] = {}
        self._thread = ThreadPoolExecutor(1)
        self._pending: deque[Future[None]] = deque()

    def add(self, layers: Sequence[Tensor], tokens: Tensor, pieces: Sequence[Piece]) -> None:
        """Take one step: L states [≥ n, H] and the tokens [≥ n] of its rows. The current stream may overwrite both
        afterwards. RuntimeError if earlier states cannot be written, or positions were left out."""
        count = sum(piece.count for piece in pieces)
        cuda = layers[0].is_cuda
        states = torch.empty((len(layers), count, layers[0].shape[1]), dtype=layers[0].dtype, pin_memory=cuda)
        for ours, theirs in zip(states, layers, strict=True):
            ours.copy_(theirs[:count], non_blocking=cuda)
        ids = torch.empty(count, dtype=torch.int64, pin_memory=cuda)
        ids.copy_(tokens[:count], non_blocking=cuda)
        copied = torch.cuda.Event() if cuda else None
        if copied is not None:
            copied.record()
        self._pending.append(self._thread.submit(self._sort, states, ids, pieces, copied))
        while len(self._pending) > BEHIND:
            self._pending.popleft().result()

    def flush(self) -> None:
        """Wait until all complete conversations are written; raises like `add`."""
        while self._pending:
            self._pending.popleft().result()

    def _sort(self, states: Tensor, tokens: Tensor, pieces: Sequence[Piece], copied: Any) -> None:
        if copied is not None:
            copied.synchronize()
        first = 0
        for piece in pieces:
            rows = slice(first, first + piece.count)
            first += piece.count
            # Generated tokens belong to no conversation.
            if piece.start < piece.length:
                self._grow(piece, states[:, rows], tokens[rows])

    def _grow(self, piece: Piece, states: Tensor, tokens: Tensor) -> None:
        if piece.name not in self._growing:
            shape = (states.shape[0], piece.length, states.shape[2])
            empty = torch.empty(shape, dtype=states.dtype)
            self._growing[piece.name] = _Growing(empty, torch.empty(piece.length, dtype=torch.int64))
        whole = self._growing[piece.name]
        # If memory runs short, vLLM computes a conversation again from its start, never from a later position.
        if piece.start > whole.done:
            raise RuntimeError(f"vLLM left out tokens {whole.done} to {piece.start} of a conversation: is a cache on?")
        whole.done = piece.start + piece.count
        whole.states[:, piece.start : whole.done] = states
        whole.tokens[piece.start : whole.done] = tokens
        if whole.done < piece.length:
            return
        del self._growing[piece.name]
        part = self._folder / f"{piece.name}.part"
        try:
            save_file({"hidden_states": whole.states, "token_ids": whole.tokens}, part)
            part.rename(part.with_suffix(".safetensors"))
        except (OSError, SafetensorError) as error:
            raise RuntimeError(f"{CANNOT}: {error}") from error


def number(request: str) -> str:
    """Return a conversation's name: vLLM numbers requests, and may append random letters."""
    return request.partition("-")[0]
