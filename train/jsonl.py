"""Files of JSON rows that only grow: one line per row, cut back to the checkpoint when a run goes on."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from eagle31_train import artifacts
from eagle31_train.errors import UserError

Row = dict[str, Any]


class Rows:
    """One such file.

    A disk that is full does not stop the run: rows that could not be written are kept, which is said
    once, and go with a later one.

    Args:
        path: the file; made with the first row.
        say: takes one line for the user.
    """

    def __init__(self, path: Path, say: Callable[[str], None]) -> None:
        self.path, self.say = path, say
        self.pending: list[bytes] = []

    def cut(self, step: int, seen: Callable[[Row], None] | None = None) -> int:
        """Take away rows past `step` and a torn last line, which a kill after the checkpoint left.

        Rows lie in the order of their steps, so the file is only shortened: that needs no room, and a
        kill meanwhile does no harm.

        Args:
            seen: is given every row that stays.

        Returns:
            The step of the last row that stays; 0 without any.
        """
        size = last = 0
        if not self.path.exists():
            return last
        with self.path.open("r+b") as file:
            for line in file:
                row = parse(line)
                if not line.endswith(b"\n") or (row is not None and row["step"] > step):
                    break
                size += len(line)
                if row is not None:
                    last = row["step"]
                    if seen is not None:
                        seen(row)
            file.truncate(size)
        return last

    def append(self, row: Row) -> None:
        """Write one row; numbers that are not finite become null, which JSON has."""
        self.pending.append(json.dumps(plain(row), allow_nan=False).encode() + b"\n")
        try:
            self._write()
        except OSError as error:
            if len(self.pending) == 1:
                self.say(f"{self.path} cannot be written ({error.strerror or error}): rows wait for room")

    def close(self) -> None:
        """Write what is left and force the file to the disk.

        Raises:
            UserError: there is still no room.
        """
        try:
            if self.pending:
                self._write()
            if self.path.exists():
                artifacts.fsync_path(self.path)
        except OSError as error:
            reason = error.strerror or error
            raise UserError(f"{self.path} cannot be written ({reason}), its last rows are lost: make room") from None

    def _write(self) -> None:
        with self.path.open("ab", buffering=0) as file:
            before = file.tell()
            data = b"".join(self.pending)
            try:
                while data:  # a disk that fills up takes part of it
                    data = data[file.write(data) :]
            except OSError:
                file.truncate(before)
                raise
        self.pending.clear()


def parse(line: bytes) -> Row | None:
    """A row that says its step; None for anything else."""
    try:
        row = json.loads(line)
    except ValueError:  # of JSON or of UTF-8
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None


def plain(value: Any) -> Any:
    """The same without numbers that JSON does not know."""
    if isinstance(value, dict):
        return {name: plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
