"""The answers of a regeneration under way, on disk as soon as they exist."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from data_prep.formats import Message
from eagle31_train.errors import UserError
from eagle31_train.locks import hold


@dataclass(frozen=True)
class Answer:
    """One answer of the target, as the journal keeps it.

    message: content, and perhaps reasoning_content, tool_calls and tokens.
    finish_reason: "stop", "tool_calls" or "length".
    tokens: of the answer, as who gave it counts them; 0 if unknown.
    """

    message: Message
    finish_reason: str
    tokens: int


class Journal:
    """Answers so far, one JSON line each, on disk as soon as they exist; of one run at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.answers: dict[str, Answer] = {}

    def __enter__(self) -> "Journal":
        self.file = self.path.open("ab")
        try:
            # Before it is read: another run's line half written would look like one that a kill left.
            hold(self.file, f"{self.path} is being written by another run")
            self.file.truncate(self._read())
        except BaseException:
            self.file.close()
            raise
        return self

    def _read(self) -> int:
        """Take up the answers that are there; how many bytes of whole lines they are."""
        whole = 0
        for number, line in enumerate(self.path.read_bytes().splitlines(keepends=True), start=1):
            if not line.endswith(b"\n"):
                break  # the line being written when the run was killed
            try:
                entry = json.loads(line)
                if entry["message"]["role"] not in ("assistant", "user"):
                    raise ValueError("a text is an answer, or a prompt that the target wrote")
                self.answers[entry["key"]] = Answer(entry["message"], entry["finish_reason"], entry["tokens"])
            except (ValueError, TypeError, KeyError):
                raise UserError(f"{self.path}:{number} is damaged: remove this line and run again") from None
            whole += len(line)
        return whole

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def add(self, key: str, answer: Answer) -> None:
        """Keep an answer."""
        self.answers[key] = answer
        self.file.write(json.dumps({"key": key, **asdict(answer)}, ensure_ascii=False).encode() + b"\n")
        self.file.flush()
