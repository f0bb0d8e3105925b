"""The answers of a regeneration under way, on disk as soon as they exist."""

import json
from dataclasses import dataclass
from pathlib import Path

from eagle31_train.schema import UserError


@dataclass(frozen=True)
class Answered:
    """One answer as the journal keeps it."""

    text: str
    finish_reason: str
    tokens: int


class Journal:
    """Answers so far, one JSON line each, on disk as soon as they exist."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.answers: dict[str, Answered] = {}

    def __enter__(self) -> "Journal":
        whole = 0
        if self.path.is_file():
            for number, line in enumerate(self.path.read_bytes().splitlines(keepends=True), start=1):
                if not line.endswith(b"\n"):
                    break  # the line being written when the run was killed
                try:
                    key, *answer = json.loads(line)
                    self.answers[key] = Answered(*answer)
                except (ValueError, TypeError):
                    raise UserError(f"{self.path}:{number} is damaged: remove this line and run again") from None
                whole += len(line)
        self.file = self.path.open("ab")
        self.file.truncate(whole)
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def add(self, key: str, answer: Answered) -> None:
        """Keep an answer."""
        self.answers[key] = answer
        entry = [key, answer.text, answer.finish_reason, answer.tokens]
        self.file.write(json.dumps(entry, ensure_ascii=False).encode() + b"\n")
        self.file.flush()
