"""Who answers: the target in this process, or an OpenAI-compatible server."""

import hashlib
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from typing import Any

from data_prep.dialogue import Turn
from data_prep.journal import Answered
from data_prep.messages import Message, Row
from data_prep.server import NotAnsweredError, Server
from data_prep.template import ChatTemplate, RefusedError
from data_prep.turns import answered
from eagle31_train.schema import Config

SLOWEST = 2  # tokens a second that a server is waited for


@dataclass
class Job:
    """One conversation on its way: a prompt's turns and the answers so far."""

    row: Row
    sample: int
    temperature: float
    turns: list[Turn]
    messages: list[Message] = field(default_factory=list)  # so far, answers included
    refusal: str | None = None  # why it has no answer, once it is known
    ended: str | None = None  # why it ends before its prompt does
    answers: int = 0
    tokens: int = 0  # of its answers

    @property
    def suffix(self) -> str:
        """What further samples of a prompt carry behind its id, as `messages.parse` would give it them."""
        return f"#{self.sample}" if self.sample else ""

    def seed(self, base: int) -> int:
        """The seed of the next answer: apart for each prompt, sample and turn."""
        text = json.dumps([base, self.row.id, self.sample, len(self.messages)])
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")


@dataclass(frozen=True)
class Refused:
    """Why a prompt has no answer. No journal keeps it: asking again costs little, and may fare better."""

    reason: str


class Local:
    """Answers from the target in this process; torch is loaded only here."""

    def __init__(self, config: Config, template: ChatTemplate) -> None:
        self.config = config
        self.template = template
        self.generator: Any = None
        self.at_once = config.data.generate.batch_size
        self.keeps_special = template.hides_markup  # as is asked of a server then

    def answers(self, jobs: dict[str, Job]) -> Iterator[tuple[str, Answered | Refused]]:
        """Refusals first, then batches of prompts of like length, the longest first: memory trouble shows at once."""
        if not jobs:
            return
        from eagle31_train.targets.generate import Generator, Request

        if self.generator is None:
            self.generator = Generator(self.config.target, self.template.end_ids)
        generate = self.config.data.generate
        requests = {}
        for key, job in jobs.items():
            try:
                ids = self.template.prompt_ids(job.messages, job.row.tools)
            except RefusedError as error:
                yield key, Refused(str(error))
                continue
            if problem := self.generator.refusal(len(ids), generate.max_new_tokens):
                yield key, Refused(problem)
                continue
            requests[key] = Request(ids, job.temperature, job.seed(self.config.seed))
        order = sorted(requests, key=lambda key: (-len(requests[key].ids), key))
        for start in range(0, len(order), generate.batch_size):
            keys = order[start : start + generate.batch_size]
            batch = [requests[key] for key in keys]
            answers = self.generator.answer(batch, generate.max_new_tokens, generate.top_p)
            for key, answer in zip(keys, answers, strict=True):
                text = self.template.decode(answer.ids)
                if not self.keeps_special and text != self.template.decode(answer.ids, skip_special_tokens=True):
                    # Left out, they would be missing where the target wrote them.
                    yield key, Refused("special tokens inside the answer")
                    continue
                # With the end of turn, as servers count; stage 1 compares it with what the text becomes again.
                written = len(answer.ids) + (answer.finish_reason == "stop")
                message = answered(self.template, jobs[key].messages, text, answer.finish_reason, jobs[key].row.tools)
                yield key, Answered({**message, "tokens": written}, answer.finish_reason, len(answer.ids))


class Remote:
    """Answers from an OpenAI-compatible server, many requests at once."""

    def __init__(self, config: Config, template: ChatTemplate) -> None:
        generate = config.data.generate
        assert generate.server is not None
        self.config = config
        self.template = template
        # A server says nothing until an answer is whole, and a long thought at a busy one may take hours.
        timeout = max(600.0, generate.max_new_tokens / SLOWEST)
        self.server = Server(generate.server, generate.model or config.target.path, timeout, template=template)
        self.at_once = generate.concurrency

    def answers(self, jobs: dict[str, Job]) -> Iterator[tuple[str, Answered | Refused]]:
        """In the order in which the server finishes them."""
        pool = ThreadPoolExecutor(self.at_once)
        try:
            futures = {pool.submit(self._ask, job): key for key, job in jobs.items()}
            for future in as_completed(futures):
                try:
                    yield futures[future], future.result()
                except NotAnsweredError as error:
                    yield futures[future], Refused(str(error))
        finally:
            # One failure, or Ctrl-C, must not wait for thousands of requests still queued.
            pool.shutdown(wait=False, cancel_futures=True)

    def _ask(self, job: Job) -> Answered:
        generate = self.config.data.generate
        reply = self.server.answer(
            job.messages,
            job.temperature,
            generate.top_p,
            generate.max_new_tokens,
            job.seed(self.config.seed),
            job.row.tools,
        )
        message = reply.message
        if job.row.tools and not message.get("tool_calls"):  # of a server without a tool parser, perhaps
            parts = answered(self.template, job.messages, reply.text, reply.finish_reason, job.row.tools)
            message = {**message, **parts}
        return Answered(message, reply.finish_reason, reply.tokens)
