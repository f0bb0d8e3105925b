"""vLLM's OpenAI server, and the users who ask it.

The server runs in its own environment, and ends when this process does. Of the concurrent users, each sends the next
prompt as soon as its last is answered."""

import http.client
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from eagle31_train.common import artifacts
from eagle31_train.common.errors import UserError

KEEPER = Path(__file__).with_name("keeper.py")
MODULE = "vllm.entrypoints.openai.api_server"
START_SECONDS = 3600.0  # a very large target loads and compiles for most of an hour
GRACE_SECONDS = 10.0  # between SIGTERM and SIGKILL
USELESS = ("initialization failed", "engine dead", "EngineDeadError")  # these follow from an earlier error
SILENCE_SECONDS = 600.0  # between two pieces of an answer
ENVIRONMENT = {"VLLM_NO_USAGE_STATS": "1", "PYTHONSAFEPATH": "1"}  # defaults


def pick_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    return port


def _end(*_: object) -> NoReturn:
    raise SystemExit(128 + signal.SIGTERM)


@dataclass(frozen=True)
class Server:
    """A server on loopback. port: where it listens. log: the file of its output. keeper: the process that keeps it."""

    port: int
    log: Path
    keeper: subprocess.Popen[bytes]

    def wait(self) -> None:
        """Wait until the server answers. UserError if it ends, or does not answer."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            self.check()
            with suppress(OSError):  # it does not listen yet
                if self.get("/health")[0] == http.client.OK:
                    return
            time.sleep(0.25)
        late = f"vLLM's server does not answer after {START_SECONDS:.0f} s"
        raise UserError(f"{late} ({last_words(self.log)}): see {self.log}")

    def check(self, dying: bool = False) -> None:
        """Raise UserError if the server has ended. If it is `dying`, first give it the time to end."""
        with suppress(subprocess.TimeoutExpired):
            status = self.keeper.wait(2 + 2 * GRACE_SECONDS if dying else 0)
            raise UserError(f"vLLM's server ended with exit status {status} ({last_words(self.log)}): see {self.log}")

    def ask(self, path: str) -> tuple[int, str]:
        """Like `get`, once the server has started. UserError if it has ended since, or is silent."""
        try:
            return self.get(path)
        except (OSError, http.client.HTTPException) as error:
            self.check(dying=True)
            raise UserError(f"vLLM's server does not answer at {path} ({error!r}): see {self.log}") from None

    def get(self, path: str) -> tuple[int, str]:
        with closing(self.connect(60.0)) as connection:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read().decode(errors="replace")

    def connect(self, timeout: float) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)


@contextmanager
def serving(command: list[str], port: int, log: Path, offline: bool = False) -> Iterator[Server]:
    """Context manager: a server that lasts as long as the block, or this process, whichever ends first. UserError if it
    does not start.

    command: starts it. port: where it will listen. log: the file for all its output. offline: the hub is out of reach,
    and what its cache has is used."""
    artifacts.make_folder(log.parent)
    # With a key from the shell, vLLM would require it in every request.
    environment = {**ENVIRONMENT, **{k: v for k, v in os.environ.items() if k != "VLLM_API_KEY"}}
    environment |= {"HF_HUB_OFFLINE": "1"} if offline else {}
    with log.open("w", encoding="utf-8") as output:
        output.write(f"$ {shlex.join(command)}\n")
        output.flush()
        keeper = subprocess.Popen(
            [sys.executable, "-I", "-S", str(KEEPER), str(GRACE_SECONDS), *command],
            stdin=subprocess.PIPE,  # only this process has its other end
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,  # Ctrl-C reaches only this process, which then closes the pipe
        )
    assert keeper.stdin is not None
    before: Any = None
    try:
        if threading.current_thread() is threading.main_thread():
            # End the server on SIGTERM: whoever starts this command again may need its memory.
            before = signal.signal(signal.SIGTERM, _end)
        server = Server(port, log, keeper)
        server.wait()
        yield server
    finally:
        if before is not None:  # a second SIGTERM, as when a group is sent one, must not end the wait
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        try:
            keeper.stdin.close()
            keeper.wait(4 * GRACE_SECONDS)  # the keeper takes half of that at most
        except subprocess.TimeoutExpired:
            keeper.kill()
            keeper.wait()
        finally:
            if before is not None:
                signal.signal(signal.SIGTERM, before)


def last_words(log: Path) -> str:
    """Return the last error in a server's log, or else its last line."""
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 1_000_000))
        lines = file.read().decode(errors="replace").splitlines()[1:]
    errors = [line.strip() for line in lines if "rror" in line and " WARNING " not in line]
    errors = [line for line in errors if not any(word in line for word in USELESS)] or errors
    errors = [line for line in errors if re.search(r"Error: \S", line)] or errors  # prefer those with a text
    return ([*lines[-1:], *errors] or ["it printed nothing"])[-1][-300:]


@dataclass(frozen=True)
class Question:
    """What is sent: the prompt's index among all, its id and tokens, and the rest of the request."""

    prompt: int
    id: str
    ids: list[int]
    options: dict[str, Any]


@dataclass(frozen=True)
class Answer:
    """What came back, and when, in seconds on the clock of `time.perf_counter`."""

    prompt: int
    tokens: list[int]
    sent: float
    first: float
    last: float

    @property
    def ttft(self) -> float:
        return self.first - self.sent

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first; None if there is only one."""
        return (self.last - self.first) / (len(self.tokens) - 1) if len(self.tokens) > 1 else None


def run_load(
    server: Server,
    questions: Sequence[Question],
    concurrency: int,
    finished: Callable[[], Any] = lambda: None,
) -> list[Answer]:
    """Have all questions answered, `concurrency` at a time. Return the answers in the questions' order.

    UserError if the server ended, refused, broke off or fell silent."""
    pool = ThreadPoolExecutor(concurrency)
    try:
        answers = [pool.submit(_answer, server, question) for question in questions]
        for answer in as_completed(answers):
            answer.result()
            finished()
        return [answer.result() for answer in answers]
    finally:  # after an error or Ctrl-C, requests under way end with the server, which the caller closes
        pool.shutdown(wait=False, cancel_futures=True)


def _answer(server: Server, question: Question) -> Answer:
    with closing(server.connect(SILENCE_SECONDS)) as connection:
        try:
            return _ask(connection, question)
        except (OSError, http.client.HTTPException) as error:
            # When the server dies, its connections end first, and its keeper last.
            silent = isinstance(error, TimeoutError)
            server.check(dying=not silent)
            what = f"was silent for {SILENCE_SECONDS:.0f} s" if silent else "broke the connection"
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
            raise UserError(f"vLLM failed on prompt {question.id} ({event['error']})")
        (choice,) = event["choices"]
        if new := choice.get("token_ids"):
            first, last = first or now, now
            tokens += new
        reason = choice.get("finish_reason") or reason
    if reason is None or not tokens:
        raise http.client.IncompleteRead(b"")
    if reason not in ("stop", "length"):
        raise UserError(f"vLLM ended its answer to prompt {question.id} with {reason!r}, not with stop or length")
    return Answer(question.prompt, tokens, sent, first, last)
