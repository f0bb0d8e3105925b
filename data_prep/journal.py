"""The answers of a regeneration under way, on disk as soon as they exist."""

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
from eagle31_train.rows.formats import Message


@dataclass(frozen=True)
class Answer:
    message: Message  # role, content and token_ids, and perhaps reasoning_content and tool_calls
    finish_reason: str  # "stop" or "length"
    tokens: int  # of the answer; 0 of what a user says


Outcomes = Iterator[tuple[str, Answer | Refused]]  # by the keys of requests
Request = TypeVar("Request")


class Journal:
    """Answers so far, one JSON line each; of one run at a time. Stands beside the file that is made of them, X.jsonl,
    as X.jsonl.partial; X.manifest.json is that file's record."""

    def __init__(self, output: Path) -> None:
        self.output, self.manifest = output, output.with_suffix(".manifest.json")
        self.path = output.with_name(f"{output.name}.partial")
        self.answers: dict[str, Answer] = {}
        self._tokens: dict[int, int] = {}

    def finished(self, made_from: Provenance, overwrite: bool) -> bool:
        """Whether the output is there. Its manifest stays until a new one replaces it."""
        if self.manifest.is_file():
            done = provenance.whole(self.output, self.manifest, made_from, overwrite, "eagle31 data")
            journal = artifacts.read_json(self.manifest, "eagle31 data").get("journal", {}) if done else {}
            if journal and not artifacts.first_damaged(self.output.parent, journal):
                self.path.unlink(missing_ok=True)  # its own, which a full disk left; another's answers are left alone
            return done
        # Beside a journal it is ours: killed after it, and before its manifest.
        if self.output.exists() and not self.path.exists() and not overwrite:
            raise UserError(f"{self.output} was not finished by this command: move it away, or overwrite=true")
        return False

    def finish(self, rows: Iterable[str], made_from: Provenance, **facts: Any) -> dict[str, Any]:
        """Write the output, of JSON a line, and its manifest, which is returned; the journal goes."""
        artifacts.write_parts(self.output, (row.encode() + b"\n" for row in rows))
        folder = self.output.parent
        files = {
            "files": artifacts.list_files(folder, [self.output]),
            "journal": artifacts.list_files(folder, [self.path]),
        }
        manifest = made_from.record(**files, **facts)
        artifacts.write_json(self.manifest, manifest)
        self.path.unlink(missing_ok=True)  # while it is still ours alone
        return manifest

    def __enter__(self) -> "Journal":
        artifacts.make_folder(self.path.parent)
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
            # One object for each token of the vocabulary, not one for each token written: a third of the memory.
            answer.message["token_ids"] = [self._tokens.setdefault(token, token) for token in ids]
        self.answers[key] = answer

    def check_wanted(self, wanted: Callable[[str], bool], overwrite: bool) -> None:
        """UserError for answers of which none is wanted, and which `finish` would remove, unless it may overwrite."""
        if self.answers and not overwrite and not any(map(wanted, self.answers)):
            raise UserError(
                f"{self.path} holds {len(self.answers):,} answers of other prompts, options, or another target, that "
                f"were not finished: give those again, {provenance.REPLACE}"
            )

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def add(self, key: str, answer: Answer) -> None:
        self._keep(key, answer)
        self.file.write(json.dumps({"key": key, **asdict(answer)}, ensure_ascii=False).encode() + b"\n")
        self.file.flush()

    def outcomes(self, requests: Mapping[str, Request], ask: Callable[[dict[str, Request]], Outcomes]) -> Outcomes:
        """What becomes of every request: those answered before come first, the others are asked and written."""
        missing = {key: request for key, request in requests.items() if key not in self.answers}
        yield from [(key, self.answers[key]) for key in requests if key in self.answers]
        for key, outcome in ask(missing) if missing else ():  # else a target would be loaded for nothing
            if isinstance(outcome, Answer):
                self.add(key, outcome)
            yield key, self.answers.get(key, outcome)
