"""Answers from an OpenAI-compatible server, over plain HTTP.

A server may take an answer apart (vLLM with a reasoning parser and a tool parser): its parts go into the message,
and are put together again when it is made into tokens (turns.py). One that hands on plain text leaves special
tokens out by default. Where a target's own markup is made of such tokens, a thought would run into the answer and
nobody could tell, so they are asked for then (`skip_special_tokens: false`, which vLLM and SGLang know); for other
targets nothing is asked for that is not in OpenAI's API.

Whether a server renders prompts as the target's template does here can be told by the number of their tokens.
"""

import http.client
import json
import os
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from data_prep.formats import apart
from data_prep.messages import Message, Tool, UnusableError, check_text, tool_calls
from data_prep.template import ChatTemplate, RefusedError
from eagle31_train.schema import UserError

RETRIED = (408, 409, 425, 429, 500, 502, 503, 504)
REFUSED = (400, 413, 422)  # this request's fault: a prompt past the context, or a filter's objection


class NotAnsweredError(Exception):
    """The server is well, but gives this prompt no answer to learn from; the text says why."""


@dataclass(frozen=True)
class Reply:
    """One answer: the message (content, and perhaps reasoning_content and tool_calls), "stop", "tool_calls" or
    "length", and its tokens as the server counts them (0 if it does not)."""

    message: Message
    finish_reason: str
    tokens: int

    @property
    def text(self) -> str:
        """The words of the answer alone."""
        return str(self.message["content"])


class Server:
    """A chat-completions endpoint."""

    def __init__(
        self,
        url: str,
        model: str,
        timeout: float = 600.0,
        attempts: int = 5,
        wait: Callable[[float], None] = time.sleep,
        template: ChatTemplate | None = None,
    ) -> None:
        """`url` ends with /v1; a key, where one is needed, is taken from OPENAI_API_KEY.

        `template` is the target's, for its arguments and for what it does with thoughts; without it an answer
        whose thought was taken out is an error.
        """
        self.url = url.rstrip("/") + "/chat/completions"
        self.model = model
        self.timeout = timeout
        self.attempts = attempts
        self.wait = wait
        self.template = template
        self.options: dict[str, Any] = {}
        if template is not None and template.template_args:
            self.options["chat_template_kwargs"] = template.template_args
        if template is not None and template.hides_markup:
            self.options["skip_special_tokens"] = False
        self.other_prompts = 0  # answered, whose tokens are counted otherwise here
        self.lock = threading.Lock()
        self.given_up = False  # set from outside: no request is repeated any more
        self.keeps_thoughts = template is not None and template.reads_thoughts

    def answer(
        self,
        messages: list[Message],
        temperature: float,
        top_p: float,
        max_tokens: int,
        seed: int,
        tools: list[Tool] | None = None,
    ) -> Reply:
        """Ask for one answer, with retries and back-off where the server is busy or away.

        Raises:
            UserError: the server stays away, knows no such model, or answers something that is no
                chat completion: no prompt will fare better.
            NotAnsweredError: it refuses this one prompt, or the target's template does.
        """
        body = {
            "model": self.model,
            "messages": [_sent(apart(m) if self.keeps_thoughts else m) for m in messages],
            "temperature": temperature,
            "top_p": top_p if temperature > 0 else 1.0,
            "max_tokens": max_tokens,
            "seed": seed,
            **({"tools": tools} if tools else {}),
            **self.options,
        }
        ours, problem = self._prompt_tokens(messages, tools), ""
        for attempt in range(self.attempts):
            if attempt and self.given_up:
                break
            if attempt:
                self.wait(min(30.0, 2.0 ** (attempt - 1)))
            try:
                reply, prompt = self._reply(self._post(body))
                self._compare(prompt, ours)
                return reply
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

    def _prompt_tokens(self, messages: list[Message], tools: list[Tool] | None) -> int:
        """Tokens of the prompt as the target's template writes it here; 0 without one."""
        try:
            return len(self.template.prompt_ids(messages, tools)) if self.template else 0
        except RefusedError as error:
            raise NotAnsweredError(str(error)) from None

    def _compare(self, count: int, ours: int) -> None:
        """Say it once if prompts have other tokens at the server than here: the drafter would learn for others."""
        if not ours or not count:
            return
        with self.lock:
            self.other_prompts += ours != count
            first = ours != count and self.other_prompts == 1
        if first:
            tqdm.write(
                f"{self.url} makes {count} tokens of a prompt that has {ours} here: compare its chat template with "
                "target.chat_template and target.template_args",
                file=sys.stderr,
            )

    def _reply(self, content: bytes) -> tuple[Reply, int]:
        """The answer, and the tokens of its prompt (0 if the server does not say)."""
        try:
            value = json.loads(content)
            choice = value["choices"][0]
            said, reason = choice["message"], choice["finish_reason"]
            text, thought, calls = said.get("content"), _thought(said), said.get("tool_calls")
            usage = value.get("usage") or {}
            tokens, prompt = (int(usage.get(key) or 0) for key in ("completion_tokens", "prompt_tokens"))
        except (ValueError, KeyError, IndexError, TypeError, AttributeError):
            raise UserError(f"{self.url} answered no chat completion: is the server OpenAI-compatible?") from None
        if thought and not self.keeps_thoughts:
            # Half of what the target wrote, in a field that its prompt format does not keep in its place.
            raise UserError(f"{self.url} takes the thinking out of its answers: start it without a reasoning parser")
        if reason not in ("stop", "length", "tool_calls"):
            raise NotAnsweredError(f"the server ended the answer with {reason!r}, not with stop or length")
        if reason == "tool_calls" and not calls:
            raise NotAnsweredError("the server ended the answer with 'tool_calls', and gives none")
        if not isinstance(text, str) and not thought and not calls:
            raise NotAnsweredError("the server gave an answer without text")
        message: Message = {"role": "assistant", "content": text or ""}
        if thought:
            message["reasoning_content"] = thought
        try:
            if calls:
                message["tool_calls"] = tool_calls(calls)
            check_text(message)
        except UnusableError as error:
            raise NotAnsweredError(f"the target's answer cannot be used: {error}") from None
        if tokens:
            message["tokens"] = tokens
        return Reply(message, reason, tokens), prompt


def _thought(said: dict[str, Any]) -> str | None:
    return said.get("reasoning_content") or said.get("reasoning")


def _sent(message: Message) -> Message:
    """A message as the API takes it: arguments as JSON text, a thought under both names in use."""
    sent = {"role": message["role"], "content": message["content"]}
    for key in ("name", "tool_call_id"):
        if message.get(key):
            sent[key] = message[key]
    if message.get("reasoning_content"):
        sent["reasoning_content"] = sent["reasoning"] = message["reasoning_content"]
    if message.get("tool_calls"):
        sent["tool_calls"] = [{**call, "function": _as_text(call["function"])} for call in message["tool_calls"]]
    return sent


def _as_text(function: dict[str, Any]) -> dict[str, Any]:
    given = function["arguments"]
    return {**function, "arguments": given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)}
