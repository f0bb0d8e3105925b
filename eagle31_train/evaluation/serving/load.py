"""The users of a measured server: so many at once, each with the next prompt as soon as its last is answered."""

import http.client
import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from eagle31_train.errors import UserError
from eagle31_train.evaluation.serving.server import Server

SILENCE_SECONDS = 600.0  # between two pieces of an answer


@dataclass(frozen=True)
class Question:
    """What is sent: the prompt's place among all, its id and tokens, and the rest of the request."""

    prompt: int
    id: str
    ids: list[int]
    options: dict[str, Any]


@dataclass(frozen=True)
class Answer:
    """What came back, and when: on the clock of `time.perf_counter`, in seconds."""

    prompt: int
    tokens: list[int]
    sent: float
    first: float
    last: float

    @property
    def ttft(self) -> float:
        """Time to the first token."""
        return self.first - self.sent

    @property
    def tpot(self) -> float | None:
        """Time per token after the first; None where there is no other."""
        return (self.last - self.first) / (len(self.tokens) - 1) if len(self.tokens) > 1 else None


def run_load(
    server: Server,
    questions: Sequence[Question],
    concurrency: int,
    finished: Callable[[], Any] = lambda: None,
) -> list[Answer]:
    """Have all questions answered, `concurrency` under way at a time; the answers in the questions' order. UserError
    where the server ended, refused, broke off or fell silent."""
    pool = ThreadPoolExecutor(concurrency)
    try:
        answers = [pool.submit(_answer, server, question) for question in questions]
        for answer in as_completed(answers):
            answer.result()
            finished()
        return [answer.result() for answer in answers]
    finally:  # after an error or Ctrl-C, those that are under way end with the server, which the caller closes
        pool.shutdown(wait=False, cancel_futures=True)


def _answer(server: Server, question: Question) -> Answer:
    with closing(server.connect(SILENCE_SECONDS)) as connection:
        try:
            return _ask(connection, question)
        except (OSError, http.client.HTTPException) as error:
            # Where the server died, its connections end first, and its keeper last.
            silent = isinstance(error, TimeoutError)
            server.check(dying=not silent)
            what = f"was silent for {SILENCE_SECONDS:.0f} s" if silent else "broke off"
            raise UserError(f"vLLM's server {what} on prompt {question.id} ({error!r}): see {server.log}") from None


def _ask(connection: http.client.HTTPConnection, question: Question) -> Answer:
    body = json.dumps({**question.options, "prompt": question.ids, "stream": True, "return_token_ids": True})
    connection.connect()
    sent = time.perf_counter()
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != http.client.OK:
        said = " ".join(response.read().decode(errors="replace").split())
        raise UserError(f"vLLM refuses prompt {question.id} (HTTP {response.status}, {said[:300]})")
    tokens: list[int] = []
    first = last = 0.0
    reason = None
    for line in response:
        now = time.perf_counter()
        data = line.strip().removeprefix(b"data: ")
        if not data or data == b"[DONE]":
            continue
        event = json.loads(data)
        if "error" in event:
            raise UserError(f"vLLM gives up on prompt {question.id} ({event['error']})")
        (choice,) = event["choices"]
        if new := choice.get("token_ids"):
            first, last = first or now, now
            tokens += new
        reason = choice.get("finish_reason") or reason
    if reason is None or not tokens:
        raise http.client.IncompleteRead(b"")
    return Answer(question.prompt, tokens, sent, first, last)
