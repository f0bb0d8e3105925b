"""Files of JSON rows that only grow: one line per row, cut back to the checkpoint when a run goes on."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from eagle31_train import artifacts
from eagle31_train.console import note

Row = dict[str, Any]


class Rows:
    """One such file; made with the first row."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def cut(self, step: int, damaged: Callable[[str], None] = note) -> int:
        """Take away rows past `step` and a torn last line, which a kill after the checkpoint left.

        Rows lie in the order of their steps, so the file is only shortened: that needs no room, and a
        kill meanwhile does no harm.

        Args:
            damaged: is told of every whole line that is no row; it stays too.

        Returns:
            The step of the last row that stays; 0 without any.
        """
        size = last = 0
        bad: list[int] = []
        if not self.path.exists():
            return last
        with self.path.open("r+b") as file:
            for number, line in enumerate(file, 1):
                row = parse(line)
                if not line.endswith(b"\n") or (row is not None and row["step"] > step):
                    break
                size += len(line)
                if row is None:
                    bad.append(number)
                else:
                    last = row["step"]
            file.truncate(size)
        for number in bad:
            damaged(f"{self.path}:{number} is damaged, and its row is lost: remove the line")
        return last

    def append(self, row: Row) -> None:
        """Write one row; numbers that are not finite become null, which JSON has.

        Raises:
            UserError: the disk is full; half a row that it took is cut off when the run goes on.
        """
        remedy = "make room and run the same command, which goes on from the last checkpoint"
        with artifacts.explained(f"write {self.path}", remedy), self.path.open("a") as file:
            file.write(json.dumps(plain(row), allow_nan=False) + "\n")

    def close(self) -> None:
        """Force the file to the disk."""
        if self.path.exists():
            artifacts.fsync_path(self.path)


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
