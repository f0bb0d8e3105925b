"""Answers from an OpenAI-compatible server, over plain HTTP.

A server may take an answer apart (vLLM with a reasoning parser and a tool parser): its parts go into the message. Where
a target's own markup is made of special tokens, which plain text leaves out, they are asked for, by
`skip_special_tokens: false`. The number of a prompt's tokens tells whether a server renders it as the target's template
does here.
"""

import http.client
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from data_prep.journal import Answer
from eagle31_train.common import foreign
from eagle31_train.common.console import note
from eagle31_train.common.errors import Refused, UserError
from eagle31_train.common.foreign import Positions as Count
from eagle31_train.rows.formats import Message, Tool, check_text, tool_calls
from eagle31_train.targets.chat import ChatTemplate
from eagle31_train.targets.markup import CHANNEL

SLOWEST = 2  # tokens a second that a server is waited for
LETTER = 64  # bytes of an answer for each of its tokens, and more than any of them takes as JSON
TRIES = 8  # a minute and a half of waits
LONGEST_WAIT = 300.0  # seconds, however long a server asks to be left alone
BUSY = (408, 409, 424, 425, 429, 500, 502, 503, 504)  # asked again
HANGS = 2  # times in a row without any answer, after which another server is asked
ABORTED = "an answer that it broke off"
FAILS = ("HTTP 500", "HTTP 424", ABORTED)  # of a server that fails on some prompts, each time
BROKEN_OFF = ("abort", "error", None)  # of an answer that a server which stops, or fails, did not end
REFUSED = (400, 413, 422)  # this request's fault: a prompt past the context, or a filter's objection
FAILURES = 8  # requests in a row, all tries of which a server that has answered others ends so

Whole = TypeVar("Whole")


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """What is sent, the key too, is for the server that was named, and for no other that it names."""

    def redirect_request(self, *_: Any) -> None:
        """None: the answer is the error that it is."""


OPENER = urllib.request.build_opener(_NoRedirects)


class NoAnswer(UserError):  # noqa: N818 (of one server: others may answer)
    """A server gives no answer, though it was asked again."""


class Failed(Refused):
    """A server fails on one request, though it was asked again; another may not."""


class _Unreadable(Exception):  # noqa: N818 (another try may fare better)
    """What came is no answer, but a page of a proxy, say."""


class Server:
    """A chat-completions endpoint. url: ends with /v1; a key is taken from OPENAI_API_KEY."""

    def __init__(self, url: str, model: str, template: ChatTemplate, max_tokens: int, top_p: float = 1.0) -> None:
        if not url.startswith(("http://", "https://")):
            raise UserError(f"data.generate.server={url} is no address: http://HOST:PORT/v1")
        self.base = url.rstrip("/")
        self.url = f"{self.base}/chat/completions"
        self.model, self.template, self.max_tokens, self.top_p = model, template, max_tokens, top_p
        self.under_way = 0  # requests
        self.given_up = False  # nothing is repeated any more
        self.alone = True  # no other server may answer in its place
        self.failures = FAILURES  # in a row; as many at first, so that a server must have answered before it may fail
        self.doubts: set[str] = set()  # what was said, once each, of answers that may be another target's
        # A server says nothing until an answer is whole, and a long thought at a busy one may take hours.
        self.timeout = max(600.0, self.max_tokens / SLOWEST)
        self.options: dict[str, Any] = {}
        if self.template.template_args:
            self.options["chat_template_kwargs"] = self.template.template_args
        effort = self.template.template_args.get("reasoning_effort")
        if effort and CHANNEL in self.template.template:  # of gpt-oss vLLM reads it here, and not there
            self.options["reasoning_effort"] = effort
        if self.template.hides_markup:
            self.options["skip_special_tokens"] = False

    def answer(self, messages: list[Message], temperature: float, seed: int, tools: list[Tool] | None = None) -> Answer:
        """Ask for one answer. UserError where no prompt will fare better (NoAnswer where another server may give one),
        Refused where this one is refused."""
        body = {
            "model": self.model,
            "messages": list(map(_sent, self.template.history(messages))),
            "temperature": temperature,
            "top_p": self.top_p if temperature > 0 else 1.0,
            "max_tokens": self.max_tokens,
            "seed": seed,
            **({"tools": tools} if tools else {}),
            **self.options,
        }
        prompt_tokens = len(self.template.prompt_ids(messages, tools))
        answer, prompt_tokens_there, model = self._ask(self.url, body, self._read)
        if prompt_tokens_there not in (0, prompt_tokens):  # the drafter would learn for others
            self._doubt(
                f"{self.url} makes {prompt_tokens_there} tokens of a prompt that has {prompt_tokens} here: compare its "
                "chat template with target.chat_template and .template_args",
                kind="tokens",
            )
        if model not in ("", self.model):
            self._doubt(f"{self.url} answers as {model[:200]}, and {self.model} was asked for", kind="model")
        return answer

    def _doubt(self, text: str, kind: str) -> None:
        if kind not in self.doubts:
            self.doubts.add(kind)
            note(text, error=True)

    def complete(self, **request: Any) -> tuple[str, str]:
        """Go on from token ids: the text, and why it ended. `request`: as vLLM and SGLang take it."""
        return self._ask(f"{self.base}/completions", {"model": self.model, **request}, self._read_text)

    def _read_text(self, content: bytes) -> tuple[str, str]:
        try:
            choice = foreign.parse_json(content)["choices"][0]
            text, reason = choice["text"], choice["finish_reason"]
        except (ValueError, KeyError, IndexError, TypeError):
            raise _Unreadable(f"no completion, which data.prompts=self needs: {_beginning(content)}") from None
        _check_whole(reason, ("stop", "length"))
        if not isinstance(text, str):
            raise Refused("the server gave no text")
        return text, reason

    def _ask(self, url: str, body: dict[str, Any], read: Callable[[bytes], Whole]) -> Whole:
        """Ask, and read what is answered; again, with back-off, where the server is busy or away, or broke off."""
        problem, wait, hung = "", 0.0, 0
        for attempt in range(TRIES):
            if attempt:
                if self.given_up:
                    break
                self._doubt(f"{url} gives no answer ({problem}): asking again, {TRIES} times in all", kind="again")
                time.sleep(max(wait, min(30.0, 2.0 ** (attempt - 1))))
                wait = 0.0
            try:
                answer = read(self._post(url, body))
                self.failures = 0
                return answer
            except _Unreadable as error:
                problem, hung = str(error), 0
                if self.failures == FAILURES:  # it has not answered yet: perhaps it is no such server
                    break
            except urllib.error.HTTPError as error:
                problem, hung = f"HTTP {error.code}", 0
                asked = error.headers.get("Retry-After") or ""  # seconds, or a date
                wait = min(float(asked), LONGEST_WAIT) if asked.isdecimal() else 0.0
                with suppress(OSError, http.client.HTTPException):
                    problem += f" {' '.join(error.read(1000).decode(errors='replace').split())[:200]}"
                if error.code in REFUSED:
                    raise Refused(f"the server refuses it: {problem}") from None
                if error.code not in BUSY:
                    break
            except (OSError, http.client.HTTPException) as error:
                problem = str(getattr(error, "reason", error))
                hung += isinstance(getattr(error, "reason", error), TimeoutError)
                if hung == HANGS and not self.alone:
                    break
            except UserError:
                raise
            except ValueError:  # whose text would show the key
                problem = "HTTP cannot carry its address, or the key in OPENAI_API_KEY"
                break
        if problem.startswith(FAILS) and self.failures < FAILURES:  # some servers fail on some prompts, each time
            self.failures += 1
            raise Failed(f"the server fails on it: {problem}")
        raise NoAnswer(f"{url} gives no answer ({problem}): check data.generate.server and .model")

    def _post(self, url: str, body: dict[str, Any]) -> bytes:
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get("OPENAI_API_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        request = urllib.request.Request(url, json.dumps(body).encode(), headers)
        most, content = (1 << 24) + LETTER * self.max_tokens, bytearray()
        until = time.monotonic() + self.timeout
        with OPENER.open(request, timeout=self.timeout) as response:
            while part := response.read1(1 << 16):
                content += part
                if len(content) > most:
                    raise UserError(f"{url} answers without end (more than {most:,} bytes): see to the server")
                if time.monotonic() > until:  # a byte now and then, and no timeout of the socket's
                    raise TimeoutError("timed out")
            if response.length:  # read1 takes the end of the connection for that of the answer
                raise http.client.IncompleteRead(bytes(content), response.length)
        return bytes(content)

    def _read(self, content: bytes) -> tuple[Answer, int, str]:
        """The answer, the tokens of its prompt, and whose it is ("" and 0 if the server does not say)."""
        try:
            value = foreign.parse_json(content)
            choice = value["choices"][0]
            said, reason = choice["message"], choice["finish_reason"]
            text, calls = said.get("content"), said.get("tool_calls")
            thought = said.get("reasoning_content") or said.get("reasoning")
            usage = value.get("usage") or {}
            counts = [usage.get(key) or 0 for key in ("completion_tokens", "prompt_tokens")]
            tokens, prompt_tokens = foreign.typed(list[Count], counts)
            foreign.typed(str | None, thought)
            foreign.typed(str | None, text)
            model = foreign.typed(str, value.get("model") or "")
        except (ValueError, KeyError, IndexError, TypeError, AttributeError):
            raise _Unreadable(f"no chat completion: {_beginning(content)}") from None
        if thought and not self.template.reads_thoughts:  # half of what the target wrote would be lost
            raise UserError(f"{self.url} takes the thinking out of its answers: start it without a reasoning parser")
        _check_whole(reason, ("stop", "length", "tool_calls"))
        if (reason == "tool_calls" and not calls) or not (isinstance(text, str) or thought or calls):
            raise Refused("the server gave an answer without text, or without the tool calls that it ended with")
        message: Message = {"role": "assistant", "content": text or ""}
        if thought:
            message["reasoning_content"] = thought
        if calls:
            message["tool_calls"] = tool_calls(calls)
        check_text(message)
        message["tokens"] = tokens  # 0 where the server does not count them
        return Answer(message, reason, tokens), prompt_tokens, model


def _check_whole(reason: Any, known: tuple[str, ...]) -> None:
    if reason in BROKEN_OFF:
        raise http.client.HTTPException(f"{ABORTED}, with the reason {reason!r}")
    if reason not in known:
        raise Refused(f"the server ended the answer with {reason!r}, not with stop or length")


def _beginning(content: bytes) -> str:
    return " ".join(content[:1000].decode(errors="replace").split())[:200]


def _sent(message: Message) -> Message:
    """A message as the API takes it: arguments as JSON text, a thought under both names in use."""
    sent = {"role": message["role"], "content": message["content"]}
    sent |= {key: message[key] for key in ("name", "tool_call_id") if message.get(key)}
    if message.get("reasoning_content"):
        sent["reasoning_content"] = sent["reasoning"] = message["reasoning_content"]
    if message.get("tool_calls"):
        sent["tool_calls"] = []
        for call in message["tool_calls"]:
            given = call["function"]["arguments"]
            text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
            sent["tool_calls"].append({**call, "function": {**call["function"], "arguments": text}})
    return sent
