"""Answers from an OpenAI-compatible server, over plain HTTP."""

import http.client
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from data_prep.messages import Message
from eagle31_train.schema import UserError

RETRIED = (408, 409, 425, 429, 500, 502, 503, 504)
REFUSED = (400, 413, 422)  # this request's fault: a prompt past the context, or a filter's objection


class NotAnsweredError(Exception):
    """The server is well, but gives this prompt no answer to learn from; the text says why."""


@dataclass(frozen=True)
class Reply:
    """One answer: text, "stop" or "length", and its tokens as the server counts them (0 if it does not)."""

    text: str
    finish_reason: str
    tokens: int


class Server:
    """A chat-completions endpoint."""

    def __init__(
        self,
        url: str,
        model: str,
        timeout: float = 600.0,
        attempts: int = 5,
        wait: Callable[[float], None] = time.sleep,
    ) -> None:
        """`url` ends with /v1; a key, where one is needed, is taken from OPENAI_API_KEY."""
        self.url = url.rstrip("/") + "/chat/completions"
        self.model = model
        self.timeout = timeout
        self.attempts = attempts
        self.wait = wait

    def answer(self, messages: list[Message], temperature: float, top_p: float, max_tokens: int, seed: int) -> Reply:
        """Ask for one answer, with retries and back-off where the server is busy or away.

        Raises:
            UserError: the server stays away, knows no such model, or answers something that is no
                chat completion: no prompt will fare better.
            NotAnsweredError: it refuses this one prompt.
        """
        body = {
            "model": self.model,
            "messages": [{"role": m["role"], "content": m["content"]} for m in messages],
            "temperature": temperature,
            "top_p": top_p if temperature > 0 else 1.0,
            "max_tokens": max_tokens,
            "seed": seed,
        }
        problem = ""
        for attempt in range(self.attempts):
            if attempt:
                self.wait(min(30.0, 2.0 ** (attempt - 1)))
            try:
                return _reply(self._post(body), self.url)
            except urllib.error.HTTPError as error:
                detail = " ".join(error.read().decode(errors="replace").split())[:200]
                problem = f"HTTP {error.code} {detail}"
                if error.code in REFUSED:
                    raise NotAnsweredError(f"the server refuses it: {problem}") from None
                if error.code not in RETRIED:
                    break
            except (OSError, http.client.HTTPException) as error:
                problem = str(getattr(error, "reason", error))
        raise UserError(f"{self.url} gives no answer ({problem}): check data.generate.server and .model")

    def _post(self, body: dict[str, Any]) -> bytes:
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get("OPENAI_API_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        request = urllib.request.Request(self.url, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=self.timeout) as response:
            content: bytes = response.read()
        return content


def _reply(content: bytes, url: str) -> Reply:
    try:
        value = json.loads(content)
        choice = value["choices"][0]
        message, reason = choice["message"], choice["finish_reason"]
        text, thought = message["content"], message.get("reasoning_content") or message.get("reasoning")
        tokens = int((value.get("usage") or {}).get("completion_tokens") or 0)
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        raise UserError(f"{url} answered no chat completion: is the server OpenAI-compatible?") from None
    if thought:
        # Half of what the target wrote, in a field that no prompt format keeps in its place.
        raise UserError(f"{url} takes the thinking out of its answers: start it without a reasoning parser")
    if reason not in ("stop", "length"):
        raise NotAnsweredError(f"the server ended the answer with {reason!r}, not with stop or length")
    if not isinstance(text, str):
        raise NotAnsweredError("the server gave an answer without text")
    return Reply(text, reason, tokens)
