"""The users of a measured server: so many at once, each with the next prompt as soon as its last is answered."""

import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Any

from eagle31_train.measure.serving.server import Server
from eagle31_train.schema import UserError

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
    """Have all questions answered, `concurrency` under way at a time; the answers in the questions' order.

    Raises:
        UserError: the server ended, refused, broke off or fell silent.
    """
    users = _Users(server)
    waiting = iter(enumerate(questions))
    answers: dict[int, Answer] = {}
    lock = threading.Lock()

    def user() -> None:
        while not users.leaving:
            with lock:
                number, question = next(waiting, (-1, None))
            if question is None:
                return
            answers[number] = users.ask(question)
            finished()

    with ThreadPoolExecutor(concurrency) as pool:
        try:
            under_way = [pool.submit(user) for _ in range(concurrency)]
            done, _ = wait(under_way, return_when=FIRST_EXCEPTION)
            for one in done:
                one.result()
        except BaseException:  # Ctrl-C too: the others would be waited for
            users.leave()
            raise
    return [answers[number] for number in range(len(questions))]


class _Users:
    def __init__(self, server: Server) -> None:
        self.server = server
        self.leaving = False
        self._open: set[http.client.HTTPConnection] = set()

    def ask(self, question: Question) -> Answer:
        """Send one question and read its answer as it comes."""
        try:
            with closing(self.server.connect(SILENCE_SECONDS)) as connection:
                self._open.add(connection)
                try:
                    return _ask(connection, question)
                finally:
                    self._open.discard(connection)
        except TimeoutError:
            self.server.check()
            raise UserError(
                f"vLLM's server was silent for {SILENCE_SECONDS:.0f} s on prompt {question.id} "
                f"({self.server.last_words()}): see {self.server.log}"
            ) from None
        except (OSError, http.client.HTTPException) as error:
            # Where it died, its connections end first, and its keeper last.
            self.server.check(dying=not self.leaving)
            raise UserError(
                f"vLLM's server broke off on prompt {question.id} ({error or type(error).__name__}): "
                f"see {self.server.log}"
            ) from None

    def leave(self) -> None:
        """Have nobody wait any longer."""
        self.leaving = True
        for connection in list(self._open):
            with suppress(OSError, AttributeError):
                connection.sock.shutdown(socket.SHUT_RDWR)


def _ask(connection: http.client.HTTPConnection, question: Question) -> Answer:
    body = json.dumps({**question.options, "prompt": question.ids, "stream": True, "return_token_ids": True})
    connection.connect()
    sent = time.perf_counter()
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != http.client.OK:
        detail = _message(response.read().decode(errors="replace"))
        raise UserError(f"vLLM refuses prompt {question.id} (HTTP {response.status}, {detail})")
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
            raise UserError(f"vLLM gives up on prompt {question.id} ({_message(event)})")
        (choice,) = event["choices"]
        if new := choice.get("token_ids"):
            first, last = first or now, now
            tokens += new
        reason = choice.get("finish_reason") or reason
    if reason is None or not tokens:
        raise http.client.IncompleteRead(b"")
    return Answer(question.prompt, tokens, sent, first, last)


def _message(answer: Any) -> str:
    """What is said in {"error": {"message": …}}, or whatever else came, in one line."""
    with suppress(ValueError, KeyError, TypeError):
        answer = (json.loads(answer) if isinstance(answer, str) else answer)["error"]["message"]
    return " ".join(str(answer).split())[:300]
