"""Who answers: the target in this process, or an OpenAI-compatible server.

`answers` gives every job its next answer, or the reason why it has none. No journal keeps the reason: asking again
costs little, and may fare better.
"""

import hashlib
import json
from collections.abc import Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from typing import Any

from data_prep.client import Server
from data_prep.dialogue import PromptTurn
from data_prep.formats import Message, Refused, Row
from data_prep.journal import Answer
from data_prep.masks import to_message
from data_prep.template import ChatTemplate
from eagle31_train.config import Config, SelfPromptsConfig
from eagle31_train.errors import UserError

NO_CHARACTER = "\ufffd"  # what bytes that are no character are decoded to
Texts = dict[str, tuple[list[int], int]]  # key → token ids to go on from, and a seed
BROKEN = "bytes inside the answer that are no text"


@dataclass
class Job:
    """One conversation on its way: a prompt's turns, and the messages so far.

    refusal: why it has no answer, once it is known. ended: why it ends before its prompt does.
    answers, tokens: how many it has, and of how many tokens.
    """

    row: Row
    sample: int
    temperature: float
    turns: list[PromptTurn]
    messages: list[Message] = field(default_factory=list)
    refusal: str | None = None
    ended: str | None = None
    answers: int = 0
    tokens: int = 0

    @property
    def suffix(self) -> str:
        """What further samples of a prompt carry behind its id, as `formats.parse` would give it them."""
        return f"#{self.sample}" if self.sample else ""

    def seed(self, base: int) -> int:
        """The seed of the next answer: apart for each prompt, sample and turn."""
        text = json.dumps([base, self.row.id, self.sample, len(self.messages)])
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")

    def add(self, answer: Answer) -> None:
        """Go on with an answer."""
        self.answers += 1
        self.tokens += answer.tokens
        self.messages.append({**answer.message, "finish_reason": answer.finish_reason})

    def stop(self, reason: str) -> None:
        """Give it no further answer: those that it has are the target's own, and are kept."""
        if not self.answers:
            self.refusal = reason
            return
        self.ended = reason
        last = max(i for i, message in enumerate(self.messages) if message["role"] == "assistant")
        del self.messages[last + 1 :]


class Local:
    """Answers from the target in this process; torch is loaded only here."""

    def __init__(self, config: Config, template: ChatTemplate) -> None:
        self.config = config
        self.template = template
        self.generator: Any = None
        self.at_once = config.data.generate.batch_size
        self.keeps_special = template.hides_markup  # as is asked of a server then

    def answers(self, jobs: dict[str, Job]) -> Iterator[tuple[str, Answer | Refused]]:
        """Refusals first, then batches of prompts of like length, the longest first: memory trouble shows at once."""
        if not jobs:
            return  # without loading the target
        from eagle31_train.targets.generate import Request

        generator, generate = self.load(), self.config.data.generate
        requests = {}
        for key, job in jobs.items():
            try:
                ids = self.template.prompt_ids(job.messages, job.row.tools)
                if problem := generator.refusal(len(ids), generate.max_new_tokens):
                    raise Refused(problem)
                requests[key] = Request(ids, job.temperature, job.seed(self.config.seed))
            except Refused as refused:
                yield key, refused
        for key, answer in self.draw(requests, generate.max_new_tokens, generate.top_p):
            try:
                yield key, self._answer(jobs[key], answer.ids, answer.finish_reason)
            except Refused as refused:
                yield key, refused

    def draw(self, requests: dict[Any, Any], *how: Any) -> Iterator[tuple[Any, Any]]:
        """The tokens of each request, in batches; `how` as in `Generator.answer`."""
        order = sorted(requests, key=lambda key: (-len(requests[key].ids), key))
        for start in range(0, len(order), self.at_once):
            keys = order[start : start + self.at_once]
            yield from zip(keys, self.load().answer([requests[key] for key in keys], *how), strict=True)

    def write(
        self, requests: Texts, how: SelfPromptsConfig, stops: list[int], stop_text: str | None
    ) -> Iterator[tuple[str, str, str]]:
        """Key, text and why it ended (stop, length), of texts that go on from token ids up to a stop."""
        from eagle31_train.targets.generate import Request

        drawn = {key: Request(ids, how.temperature, seed) for key, (ids, seed) in requests.items()}
        for key, answer in self.draw(drawn, how.max_new_tokens, how.top_p, stops):
            text, reason = self.template.decode(answer.ids), answer.finish_reason
            if stop_text and stop_text in text:  # the target writes on after it
                text, reason = text.partition(stop_text)[0], "stop"
            yield key, text, reason

    def load(self) -> Any:
        """The target's `Generator`, loaded once."""
        from eagle31_train.targets.generate import Generator

        if self.generator is None:
            self.generator = Generator(self.config.target, self.template.end_ids)
        return self.generator

    def _answer(self, job: Job, ids: list[int], finish_reason: str) -> Answer:
        """These tokens of the target as a message; Refused if as text they would become other tokens again."""
        if finish_reason == "length":  # perhaps cut inside a character: up to the last whole one
            while ids and self.template.decode(ids).endswith(NO_CHARACTER):
                ids = ids[:-1]
        text = self.template.decode(ids)
        if NO_CHARACTER in text and self.template.encode(text) != ids:
            raise Refused(BROKEN)
        if not self.keeps_special and text != self.template.decode(ids, skip_special_tokens=True):
            # Left out, they would be missing where the target wrote them.
            raise Refused("special tokens inside the answer")
        # With the end of turn, as servers count; stage 1 compares it with what the text becomes again.
        tokens = len(ids) + (finish_reason == "stop")
        message = to_message(self.template, job.messages, text, finish_reason, job.row.tools)
        return Answer({**message, "tokens": tokens}, finish_reason, len(ids))


class Remote:
    """Answers from an OpenAI-compatible server, many requests at once."""

    def __init__(self, config: Config, template: ChatTemplate) -> None:
        generate = config.data.generate
        assert generate.server is not None
        self.seed = config.seed
        self.template = template
        model = generate.model or config.target.path
        self.server = Server(generate.server, model, template, generate.max_new_tokens, generate.top_p)
        self.at_once = generate.concurrency

    def answers(self, jobs: dict[str, Job]) -> Iterator[tuple[str, Answer | Refused]]:
        """In the order in which the server finishes them.

        Raises UserError where no prompt will fare better. None more is asked then, and what was under way comes
        first: the process would have to wait for it in any case.
        """
        failed: UserError | None = None
        pool = ThreadPoolExecutor(self.at_once)
        try:
            futures = {pool.submit(self._ask, job): key for key, job in jobs.items()}
            for future in as_completed(futures):
                try:
                    yield futures[future], future.result()
                except Refused as refused:
                    yield futures[future], refused
                except CancelledError:
                    continue
                except UserError as error:
                    failed = failed or error
                    self.server.given_up = True
                    for other in futures:
                        other.cancel()  # not by the pool's shutdown: as_completed would wait for them
        finally:
            # Ctrl-C must not wait for thousands of requests still queued.
            pool.shutdown(wait=False, cancel_futures=True)
        if failed:
            raise failed

    def write(
        self, requests: Texts, how: SelfPromptsConfig, stops: list[int], stop_text: str | None
    ) -> Iterator[tuple[str, str, str]]:
        """See `Local.write`."""
        drawing = {"max_tokens": how.max_new_tokens, "temperature": how.temperature, "top_p": how.top_p}

        def ask(key: str) -> tuple[str, str, str]:
            prompt, seed = requests[key]
            return key, *self.server.complete(prompt=prompt, seed=seed, stop_token_ids=stops, stop=stop_text, **drawing)

        with ThreadPoolExecutor(self.at_once) as pool:
            yield from pool.map(ask, requests)

    def _ask(self, job: Job) -> Answer:
        tools = job.row.tools
        answer = self.server.answer(job.messages, job.temperature, job.seed(self.seed), tools)
        message = _whole_message(answer.message, answer.finish_reason)
        if tools and not message.get("tool_calls"):  # of a server without a tool parser, perhaps
            parts = to_message(self.template, job.messages, message["content"], answer.finish_reason, tools)
            message = {**message, **parts}
        return Answer(message, answer.finish_reason, answer.tokens)


def _whole_message(message: Message, finish_reason: str) -> Message:
    """A server's answer up to its last whole character, where it was cut inside one.

    Refused for bytes elsewhere that are no text: what tokens they were, the text cannot tell.
    """
    last = "content" if message["content"] else "reasoning_content"
    if finish_reason == "length" and message.get(last):
        message = {**message, last: message[last].rstrip(NO_CHARACTER)}
    if NO_CHARACTER in json.dumps(message, ensure_ascii=False):
        raise Refused(BROKEN)
    return message
