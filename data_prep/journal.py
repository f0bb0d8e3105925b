"""A journal keeps the answers of a running regeneration on disk as soon as they exist."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from eagle31_train import provenance
from eagle31_train.common import artifacts, foreign
from eagle31_train.common.errors import Refused, UserError
from eagle31_train.common.locks import hold
from eagle31_train.provenance import Provenance
from eagle31_train.rows.messages import Message


@dataclass(frozen=True)
class Answer:
    message: Message  # role, content and token_ids, and perhaps reasoning_content and tool_calls
    finish_reason: str  # "stop" or "length"
    tokens: int  # of the answer; 0 for a user's turn


Outcomes = Iterator[tuple[str, Answer | Refused]]  # by the keys of requests
Request = TypeVar("Request")


class Journal:
    """The answers so far, one JSON line each, held by one run at a time. The journal X.jsonl.partial is beside X.jsonl,
    the file that is made from it; X.manifest.json is that file's record."""

    def __init__(self, output: Path) -> None:
        self.output, self.manifest = output, output.with_suffix(".manifest.json")
        self.path = output.with_name(f"{output.name}.partial")
        self.answers: dict[str, Answer] = {}
        self._tokens: dict[int, int] = {}

    def finished(self, made_from: Provenance, overwrite: bool) -> bool:
        """Return whether the output is there. Its manifest stays until a new one replaces it."""
        if self.manifest.is_file():
            done = provenance.up_to_date(self.output, made_from, overwrite, self.manifest, "eagle31 data")
            journal = artifacts.read_json(self.manifest, "eagle31 data").get("journal", {}) if done else {}
            if journal and not artifacts.first_damaged(self.output.parent, journal):
                self.path.unlink(missing_ok=True)  # its own, left by a full disk; other answers stay
            return done
        # An output beside a journal is ours: its run was killed before it wrote the manifest.
        if self.output.exists() and not self.path.exists() and not overwrite:
            raise UserError(
                f"{self.output} was not written by this command: move it, or replace it with overwrite=true"
            )
        return False

    def finish(self, rows: Iterable[str], made_from: Provenance, **facts: Any) -> dict[str, Any]:
        """Write the output, one JSON row per line, and its manifest, which is returned; remove the journal."""
        artifacts.write_parts(self.output, (row.encode() + b"\n" for row in rows))
        folder = self.output.parent
        files = {
            "files": artifacts.list_files(folder, [self.output]),
            "journal": artifacts.list_files(folder, [self.path]),
        }
        manifest = made_from.record(**files, **facts)
        artifacts.write_json(self.manifest, manifest)
        self.path.unlink(missing_ok=True)  # while the lock is still ours
        return manifest

    def __enter__(self) -> "Journal":
        artifacts.make_folder(self.path.parent)
        self.file = self.path.open("ab")
        try:
            # Lock before reading: a line that another run is writing would look like one cut short by a kill.
            hold(self.file, f"{self.path} is being written by another run")
            whole = self._read()
            with artifacts.located(self.path):
                self.file.truncate(whole)
        except BaseException:
            self.file.close()
            raise
        return self

    def _read(self) -> int:
        """Load the answers on disk; return how many bytes of whole lines there are."""
        whole = 0
        with self.path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    break  # the line being written when the run was killed
                try:
                    entry = foreign.parse_json(line)
                    self._keep(entry["key"], Answer(entry["message"], entry["finish_reason"], entry["tokens"]))
                except (ValueError, TypeError, KeyError, AttributeError):
                    raise UserError(f"{self.path}:{number} is damaged: remove this line and run again") from None
                whole += len(line)
        return whole

    def _keep(self, key: str, answer: Answer) -> None:
        if ids := answer.message.get("token_ids"):
            # One int object per token of the vocabulary, not per written token, takes a third of the memory.
            answer.message["token_ids"] = [self._tokens.setdefault(token, token) for token in ids]
        self.answers[key] = answer

    def check_wanted(self, wanted: Callable[[str], bool], overwrite: bool) -> None:
        """UserError if there are answers, none is wanted, and `overwrite` is not set: `finish` would remove them."""
        if self.answers and not overwrite and not any(map(wanted, self.answers)):
            raise UserError(
                f"{self.path} holds {len(self.answers):,} answers of an unfinished run with other prompts, options or "
                f"target: use the same inputs again, {provenance.REPLACE}"
            )

    def __exit__(self, *_: object) -> None:
        with artifacts.located(self.path):  # it tries again to write what failed
            self.file.close()

    def add(self, key: str, answer: Answer) -> None:
        self._keep(key, answer)
        with artifacts.located(self.path):
            self.file.write(json.dumps({"key": key, **asdict(answer)}, ensure_ascii=False).encode() + b"\n")
            self.file.flush()

    def outcomes(self, requests: Mapping[str, Request], ask: Callable[[dict[str, Request]], Outcomes]) -> Outcomes:
        """Yield the outcome of every request: first those answered before, then the others, asked and written now."""
        missing = {key: request for key, request in requests.items() if key not in self.answers}
        yield from [(key, self.answers[key]) for key in requests if key in self.answers]
        for key, outcome in ask(missing) if missing else ():  # asking may load the target
            if isinstance(outcome, Answer):
                self.add(key, outcome)
            yield key, self.answers.get(key, outcome)
