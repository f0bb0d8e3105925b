"""Who answers: the target in this process, or an OpenAI-compatible server."""

import hashlib
import json
import sys
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from typing import Any

from tqdm import tqdm

from data_prep.dialogue import Turn
from data_prep.journal import Answered
from data_prep.messages import Message, Row
from data_prep.server import NotAnsweredError, Server
from data_prep.template import ChatTemplate, RefusedError
from data_prep.turns import answered
from eagle31_train.schema import Config, UserError

SLOWEST = 2  # tokens a second that a server is waited for
NO_CHARACTER = "\ufffd"  # what bytes that are no character are decoded to
BROKEN = "bytes inside the answer that are no text"


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
                ids = self._whole(answer.ids) if answer.finish_reason == "length" else answer.ids
                text = self.template.decode(ids)
                if NO_CHARACTER in text and self.template.encode(text) != ids:
                    # What the text becomes again would be learnt, and is not what the target wrote.
                    yield key, Refused(BROKEN)
                    continue
                if not self.keeps_special and text != self.template.decode(ids, skip_special_tokens=True):
                    # Left out, they would be missing where the target wrote them.
                    yield key, Refused("special tokens inside the answer")
                    continue
                # With the end of turn, as servers count; stage 1 compares it with what the text becomes again.
                written = len(ids) + (answer.finish_reason == "stop")
                message = answered(self.template, jobs[key].messages, text, answer.finish_reason, jobs[key].row.tools)
                yield key, Answered({**message, "tokens": written}, answer.finish_reason, len(ids))

    def _whole(self, ids: list[int]) -> list[int]:
        """A cut answer up to its last whole character: it may have been cut inside the next."""
        while ids and self.template.decode(ids).endswith(NO_CHARACTER):
            ids = ids[:-1]
        return ids


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
        """In the order in which the server finishes them.

        Raises:
            UserError: no prompt will fare better. None more is asked then, and what was under way comes first: the
                process would have to wait for it in any case.
        """
        failed: UserError | None = None
        pool = ThreadPoolExecutor(self.at_once)
        try:
            futures = {pool.submit(self._ask, job): key for key, job in jobs.items()}
            for future in as_completed(futures):
                try:
                    yield futures[future], future.result()
                except NotAnsweredError as error:
                    yield futures[future], Refused(str(error))
                except CancelledError:
                    continue
                except UserError as error:
                    failed = failed or self._give_up(error, futures)
        finally:
            # Ctrl-C must not wait for thousands of requests still queued.
            pool.shutdown(wait=False, cancel_futures=True)
        if failed:
            raise failed

    def _give_up(self, error: UserError, futures: dict[Future[Answered], str]) -> UserError:
        """Ask nothing more, and say what is waited for."""
        self.server.given_up = True
        for future in futures:
            future.cancel()  # and not by the pool's shutdown, which would leave as_completed waiting for them
        if waiting := sum(not future.done() for future in futures):
            tqdm.write(f"{error}; waiting for the answers under way ({waiting}), to keep them", file=sys.stderr)
        return error

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
        message = _whole_message(reply.message, reply.finish_reason)
        if job.row.tools and not message.get("tool_calls"):  # of a server without a tool parser, perhaps
            parts = answered(self.template, job.messages, message["content"], reply.finish_reason, job.row.tools)
            message = {**message, **parts}
        return Answered(message, reply.finish_reason, reply.tokens)


def _whole_message(message: Message, finish_reason: str) -> Message:
    """A server's answer up to its last whole character, where it was cut inside one.

    Raises:
        NotAnsweredError: bytes elsewhere that are no text. What tokens they were, the text cannot tell.
    """
    last = "content" if message["content"] else "reasoning_content"
    if finish_reason == "length" and message.get(last):
        message = {**message, last: message[last].rstrip(NO_CHARACTER)}
    if NO_CHARACTER in json.dumps(message, ensure_ascii=False):
        raise NotAnsweredError(BROKEN)
    return message
