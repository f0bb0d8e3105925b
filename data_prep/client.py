"""Get token ids from a completions server (vLLM, SGLang) over plain HTTP.

A request has the ids of a prompt, and the response has the ids with which the target continues. So no chat template,
parser or tokenizer of the server's stands between what the target wrote and what a drafter learns.
"""

import http.client
import json
import os
import time
import urllib.error
import urllib.request
from contextlib import suppress
from typing import Any

from data_prep.own_server import OwnServer
from eagle31_train.common import foreign
from eagle31_train.common.console import note
from eagle31_train.common.errors import Refused, UserError
from eagle31_train.targets.completions import WHOLE_DISTRIBUTION, Completion, Request, Sampling

SLOWEST = 2  # tokens per second, below which a server times out
TOKEN = 128  # bytes of JSON allowed for each token of an answer, as text and as a number: more than any token takes
TRIES = 8  # with waits of a minute and a half in all
LONGEST_WAIT = 300.0  # seconds, even if a server asks for a longer pause
BUSY = (408, 409, 424, 425, 429, 500, 502, 503, 504)  # worth asking again
HANGS = 2  # timeouts in a row, after which another server is asked
FAILED = "the server fails on the request: "  # the beginning of a reason
ABORTED = "it broke off the answer"
FULL = (429, 503)  # its turn is to come, as long as it answers others
FAILS = ("HTTP 500", "HTTP 424", ABORTED)  # problems of a server that fails on certain prompts every time
BROKEN_OFF = ("abort", "error", None)  # finish reasons of an answer that a stopping or failing server did not end
REFUSED = (400, 413, 422)  # this request's fault: a prompt past the context, or a filter's objection
FAILURES = 8  # requests in a row on which a server may fail, with all tries, before it counts as broken


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Follows no redirects: a request and its key are for the named server alone."""

    def redirect_request(self, *_: Any) -> None:
        """Return None: a redirect is an HTTP error."""


OPENER = urllib.request.build_opener(_NoRedirects)
DIRECT = urllib.request.build_opener(_NoRedirects, urllib.request.ProxyHandler({}))


class NoAnswer(UserError):  # noqa: N818 (of one server: others may answer)
    """A server gives no answer, even after retries."""


class _Unreadable(Exception):  # noqa: N818 (another try may fare better)
    """The response is not a completion, but, e.g., a proxy's page."""


class Server:
    """A completions endpoint. url: ends with /v1. longest: most tokens of an answer. own: set if we started the server
    on this machine. Others are sent the key in OPENAI_API_KEY, through a proxy if there is one."""

    def __init__(self, url: str, model: str, longest: int, own: OwnServer | None = None) -> None:
        if not url.startswith(("http://", "https://")):
            raise UserError(f"data.generate.server={url} is not an address: write http://HOST:PORT/v1")
        self.url = f"{url.rstrip('/')}/completions"
        self.model, self.longest, self.own = model, longest, own
        self.under_way = 0  # requests
        self.answered = 0  # requests
        self.given_up = False  # no more retries
        self.alone = True  # no other server may answer in its place
        self.failures_left = 0  # requests that it may still fail on; none before its first answer
        self.said: set[str] = set()  # kinds of messages that were already printed
        # A server sends nothing until an answer is whole, and a long thought on a busy one may take hours.
        self.timeout = max(600.0, longest / SLOWEST)

    def complete(self, asked: Request, sampling: Sampling) -> Completion:
        """Return what the target writes after a prompt's token ids. UserError if no prompt would succeed (NoAnswer if
        another server may answer), Refused if the server refuses this prompt, or fails on it even after retries."""
        body = {
            "model": self.model,
            "prompt": asked.ids,
            "return_token_ids": True,
            "seed": asked.seed,
            "temperature": asked.temperature,
            "top_p": sampling.top_p if asked.temperature else 1.0,
            "max_tokens": sampling.max_new_tokens,
            "stop_token_ids": sampling.end_ids,
            **({"stop": sampling.end_text, "skip_special_tokens": False} if sampling.end_text else {}),
            **WHOLE_DISTRIBUTION,
            **({"top_k": sampling.top_k} if sampling.top_k and asked.temperature else {}),
        }
        completion, model = self._ask(body)
        if model not in ("", self.model):
            self._say_once(f"{self.url} answers as {model[:200]}, but {self.model} was requested", kind="model")
        return completion

    def _say_once(self, text: str, kind: str) -> None:
        if kind not in self.said:
            self.said.add(kind)
            note(text, error=True)

    def _ask(self, body: dict[str, Any]) -> tuple[Completion, str]:
        """Ask and read the response. Retry, with back-off, if the server is busy or unreachable, or breaks off. A try
        that finds it full does not count if it has answered others since the one before."""
        problem, wait, hung = "", 0.0, 0
        tries, answered = 0, self.answered
        while tries < TRIES:
            if tries:
                if self.given_up:
                    break
                self._say_once(
                    f"no answer from {self.url} ({problem}): retrying, {TRIES} attempts in all", kind="again"
                )
                time.sleep(max(wait, min(30.0, 2.0 ** (tries - 1))))
                wait = 0.0
            tries += 1
            try:
                answer = self._read(self._post(body))
                self.answered += 1
                self.failures_left = FAILURES
                return answer
            except _Unreadable as error:
                problem, hung = str(error), 0
                if not self.failures_left:  # no answer yet: it may not be a completions server
                    break
            except urllib.error.HTTPError as error:
                problem, hung = f"HTTP {error.code}", 0
                asked = error.headers.get("Retry-After") or ""  # seconds, or a date
                wait = min(float(asked), LONGEST_WAIT) if asked.isdecimal() else 0.0
                with suppress(OSError, http.client.HTTPException):
                    problem += f" {' '.join(error.read(1000).decode(errors='replace').split())[:200]}"
                if error.code in REFUSED:
                    raise Refused(f"the server refuses the request: {problem}") from None
                if error.code not in BUSY:
                    break
                if error.code in FULL and self.answered != answered:
                    tries, answered = max(1, tries - 1), self.answered
            except (OSError, http.client.HTTPException) as error:
                reason = getattr(error, "reason", error)
                if self.own:  # which may die before an answer, or amid one
                    self.own.check(dying=isinstance(reason, ConnectionError | http.client.IncompleteRead))
                problem = str(reason)
                hung += isinstance(reason, TimeoutError)
                if hung == HANGS and not self.alone:
                    break
            except UserError:
                raise
            except ValueError:  # its text would show the key
                problem = "its address, or the key in OPENAI_API_KEY, has characters that HTTP does not allow"
                break
        if problem.startswith(FAILS) and self.failures_left:  # some servers fail on some prompts, each time
            self.failures_left -= 1
            raise Refused(FAILED + problem)
        remedy = "see vLLM's log" if self.own else "check data.generate.server and data.generate.model"
        raise NoAnswer(f"no answer from {self.url} ({problem}): {remedy}")

    def _post(self, body: dict[str, Any]) -> bytes:
        headers = {"Content-Type": "application/json"}
        if (key := os.environ.get("OPENAI_API_KEY")) and not self.own:
            headers["Authorization"] = f"Bearer {key}"
        request = urllib.request.Request(self.url, json.dumps(body).encode(), headers)
        most, content = (1 << 24) + TOKEN * self.longest, bytearray()
        until = time.monotonic() + self.timeout
        with (DIRECT if self.own else OPENER).open(request, timeout=self.timeout) as response:
            while part := response.read1(1 << 16):
                content += part
                if len(content) > most:
                    raise UserError(f"{self.url} sends an endless answer (more than {most:,} bytes): check the server")
                if time.monotonic() > until:  # a trickle of bytes evades the socket's timeout
                    raise TimeoutError("timed out")
            if response.length:  # read1 takes a closed connection for the end of the answer
                raise http.client.IncompleteRead(bytes(content), response.length)
        return bytes(content)

    def _read(self, content: bytes) -> tuple[Completion, str]:
        """Return the ids, why they end, and the model's name ("" if the server does not give it)."""
        try:
            value = foreign.parse_json(content)
            choice = value["choices"][0]
            reason, ids = choice["finish_reason"], choice.get("token_ids")
            model = foreign.typed(str, value.get("model") or "")
            foreign.typed(list[foreign.Width] | None, ids)
        except (ValueError, KeyError, IndexError, TypeError, AttributeError):
            beginning = " ".join(content[:1000].decode(errors="replace").split())[:200]
            raise _Unreadable(f"not a completion: {beginning}") from None
        if reason in BROKEN_OFF:
            raise http.client.HTTPException(f"{ABORTED}, with finish_reason {reason!r}")
        if reason not in ("stop", "length"):
            raise Refused(f"the server ended the answer with {reason!r}, not with stop or length")
        if ids is None:
            raise UserError(
                f"{self.url} returns no token ids, though return_token_ids asks for them: use vLLM 0.10.2 or later, or "
                "SGLang of July 2026 or later"
            )
        return (ids, reason), model
