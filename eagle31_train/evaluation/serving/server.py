"""vLLM's OpenAI server, started in its own environment and gone when we are."""

import http.client
import os
import shlex
import socket
import subprocess
import sys
import time
from contextlib import closing, suppress
from pathlib import Path
from types import TracebackType

from eagle31_train.errors import UserError

MODULE = "vllm.entrypoints.openai.api_server"
GRACE_SECONDS = 10.0  # between being asked to end and being made to
USELESS = ("initialization failed", "engine dead", "EngineDeadError")  # errors that another one led to
ENVIRONMENT = {"VLLM_NO_USAGE_STATS": "1", "PYTHONSAFEPATH": "1"}  # where nobody says otherwise


def pick_port() -> int:
    """A port of loopback that nobody listens on."""
    with closing(socket.socket()) as free:
        free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


class Server:
    """A server on loopback for as long as the `with` block lasts, or this process, whichever ends first: `command`
    starts it, `port` is where it will listen, `log` the file for all that it says."""

    def __init__(self, command: list[str], port: int, log: Path) -> None:
        self.command = command
        self.port = port
        self.log = log

    def __enter__(self) -> "Server":
        self.log.parent.mkdir(parents=True, exist_ok=True)
        # A key that the shell has would be asked of every request.
        environment = {**ENVIRONMENT, **{k: v for k, v in os.environ.items() if k != "VLLM_API_KEY"}}
        keeper = Path(__file__).with_name("keeper.py")
        with self.log.open("w", encoding="utf-8") as log:
            log.write(f"$ {shlex.join(self.command)}\n")
            log.flush()
            # Its standard input is a pipe whose other end nobody but this process has.
            self._keeper = subprocess.Popen(
                [sys.executable, "-I", "-S", str(keeper), str(GRACE_SECONDS), *self.command],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,  # Ctrl-C is for us, who then close the pipe
            )
        try:
            self._wait()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End the server and everything that it started."""
        assert self._keeper.stdin is not None
        self._keeper.stdin.close()
        try:
            self._keeper.wait(4 * GRACE_SECONDS)  # the keeper takes half of that at most
        except subprocess.TimeoutExpired:
            self._keeper.kill()
            self._keeper.wait()

    def _wait(self) -> None:
        """Until it answers, which a very large target does after most of an hour."""
        while True:
            self.check()
            with suppress(OSError):  # it does not listen yet
                if self.get("/health")[0] == http.client.OK:
                    return
            time.sleep(0.25)

    def check(self, dying: bool = False) -> None:
        """UserError if the server has ended; one that is dying is given the time for it."""
        with suppress(subprocess.TimeoutExpired):
            status = self._keeper.wait(2 + 2 * GRACE_SECONDS if dying else 0)
            raise UserError(f"vLLM's server ended with exit status {status} ({self.last_words()}): see {self.log}")

    def get(self, path: str) -> tuple[int, str]:
        """Status and text of a page."""
        with closing(self.connect(60.0)) as connection:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read().decode(errors="replace")

    def connect(self, timeout: float) -> http.client.HTTPConnection:
        """A new connection."""
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)

    def last_words(self) -> str:
        """The last error that the log tells, or else its last line."""
        with self.log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 1_000_000))
            lines = file.read().decode(errors="replace").splitlines()[1:]
        errors = [line.strip() for line in lines if "rror" in line and not any(word in line for word in USELESS)]
        return ([*lines[-1:], *errors] or ["it said nothing"])[-1][-300:]
