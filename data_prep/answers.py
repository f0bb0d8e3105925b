"""Who answers: the target in this process, or an OpenAI-compatible server. Both give every request an `Answer`, or the
reason why it has none, which no journal keeps: asking again costs little, and may fare better."""

import hashlib
import json
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any, TypeVar

from data_prep.client import Failed, NoAnswer, Server
from data_prep.dialogue import PromptTurn
from data_prep.journal import Answer, Outcomes
from data_prep.masks import to_message
from eagle31_train.common import artifacts
from eagle31_train.common.console import note
from eagle31_train.common.errors import Refused, UserError
from eagle31_train.config import Config, SelfPromptsConfig
from eagle31_train.rows.formats import Message, Row
from eagle31_train.targets.chat import ChatTemplate

NO_CHARACTER = "\ufffd"  # what bytes that are no character are decoded to
BROKEN = "bytes inside the answer that are no text"
Texts = dict[str, tuple[list[int], int]]  # key → token ids to go on from, and a seed
Drawn = Iterator[tuple[str, Refused | tuple[list[int], str]]]
Request = TypeVar("Request")


@dataclass
class Job:
    """One conversation on its way: a prompt's turns, and the messages so far."""

    row: Row
    sample: int
    temperature: float
    turns: list[PromptTurn]
    messages: list[Message] = field(default_factory=list)
    refusal: str | None = None  # why it has no answer
    ended: str | None = None  # why it ends before its prompt does
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
        self.answers += 1
        self.tokens += answer.tokens
        self.messages.append({**answer.message, "finish_reason": answer.finish_reason})

    def stop(self, reason: str) -> None:
        """Give it no further answer; those that it has are the target's own, and stay."""
        if not self.answers:
            self.refusal = reason
            return
        self.ended = reason
        last = max(i for i, message in enumerate(self.messages) if message["role"] == "assistant")
        del self.messages[last + 1 :]


def engine(config: Config, template: ChatTemplate) -> "Local | Remote":
    """The servers that `data.generate.server` names, else the target in this process, which takes its time to load."""
    if config.data.generate.server:
        return Remote(config, template)
    from eagle31_train.targets.generate import Generator  # loads torch

    return Local(config, template, Generator(config.target, template.end_ids))


def target_inputs(config: Config, template: ChatTemplate, served: str) -> dict[str, Any]:
    """What the target's words depend on. `served`: the key for a server's model, whose name is all that is known."""
    if config.data.generate.server:
        weights = {served: config.data.generate.model or config.target.path}
    else:
        weights = {"dtype": config.target.dtype, "weights": artifacts.weights_fingerprint(config.target.path)}
    return {"target": config.target.name, **weights, **template.fingerprints(), "seed": config.seed}


class Local:
    """Answers from the target in this process."""

    def __init__(self, config: Config, template: ChatTemplate, generator: Any) -> None:
        self.config, self.template, self.generator = config, template, generator
        self.at_once = config.data.generate.batch_size

    def answers(self, jobs: dict[str, Job]) -> Outcomes:
        """The next answer of each conversation, refusals first."""
        generate = self.config.data.generate
        requests = {}
        for key, job in jobs.items():
            try:
                ids = self.template.prompt_ids(job.messages, job.row.tools)
                requests[key] = ids, job.temperature, job.seed(self.config.seed)
            except Refused as refused:
                yield key, refused
        for key, drawn in self._draw(requests, generate.max_new_tokens, generate.top_p):
            try:
                yield key, drawn if isinstance(drawn, Refused) else self._answer(jobs[key], requests[key][0], *drawn)
            except Refused as refused:
                yield key, refused

    def write(self, how: SelfPromptsConfig, stops: list[int], stop_text: str | None, texts: Texts) -> Outcomes:
        """What a user says next: text that goes on from token ids up to one of `stops`, or to `stop_text`."""
        requests = {key: (ids, how.temperature, seed) for key, (ids, seed) in texts.items()}
        for key, drawn in self._draw(requests, how.max_new_tokens, how.top_p, stops):
            if isinstance(drawn, Refused):
                yield key, drawn
                continue
            text, reason = self.template.decode(drawn[0]), drawn[1]
            if stop_text and stop_text in text:  # the target writes on after it
                text, reason = text.partition(stop_text)[0], "stop"
            yield key, Answer({"role": "user", "content": text}, reason, 0)

    def _draw(self, requests: dict[str, tuple[list[int], float, int]], max_new_tokens: int, *how: Any) -> Drawn:
        """The tokens of each (ids, temperature, seed), the longest prompts first: memory trouble shows at once."""
        from eagle31_train.targets.generate import Request

        order = []
        for key in sorted(requests, key=lambda key: (-len(requests[key][0]), key)):
            if problem := self.generator.refusal(len(requests[key][0]), max_new_tokens):
                yield key, Refused(problem)
            else:
                order.append(key)
        asked = [Request(*requests[key]) for key in order]
        for index, ids, reason in self.generator.answer(asked, self.at_once, max_new_tokens, *how):
            yield order[index], (ids, reason)

    def _answer(self, job: Job, prompt: list[int], ids: list[int], finish_reason: str) -> Answer:
        """These tokens of the target, after those of its prompt, as a message; Refused if as text they would become
        other tokens again."""
        if finish_reason == "length":  # perhaps cut inside a character: up to the last whole one
            while ids and self.template.decode(ids).endswith(NO_CHARACTER):
                ids = ids[:-1]
        text = self._text(job, prompt, ids)
        if NO_CHARACTER in text and self.template.encode(text) != ids:
            raise Refused(BROKEN)
        shown = self.template.decode(ids) == self.template.decode(ids, skip_special_tokens=True)
        if not (shown or self.template.hides_markup):
            # Left out, they would be missing where the target wrote them; where markup is made of them, they are kept.
            raise Refused("special tokens inside the answer")
        # With the end of turn, as servers count; stage 1 compares it with what the text becomes again.
        tokens = len(ids) + (finish_reason == "stop")
        message = to_message(self.template, job.messages, text, finish_reason, job.row.tools)
        return Answer({**message, "tokens": tokens}, finish_reason, len(ids))

    def _text(self, job: Job, prompt: list[int], ids: list[int]) -> str:
        """The text of an answer, with the space before it unless the template writes one itself."""
        text, bare = self.template.decode_after(prompt, ids), self.template.decode(ids)
        if text != bare:
            with suppress(Refused):
                turn = [*self.template.history(job.messages), {"role": "assistant", "content": bare}]
                rendered = self.template.encode(self.template.render(turn, tools=job.row.tools))
                if rendered[: len(prompt) + len(ids)] == [*prompt, *ids]:
                    return bare
        return text


class Remote:
    """Answers from OpenAI-compatible servers, many requests at once, in the order in which they finish them."""

    def __init__(self, config: Config, template: ChatTemplate) -> None:
        generate = config.data.generate
        assert generate.server is not None
        self.seed = config.seed
        self.template = template
        model, urls = generate.model or config.target.path, generate.server.split(",")
        self.servers = [Server(url, model, template, generate.max_new_tokens, generate.top_p) for url in urls]
        self._tell_who_is_alone()
        self.at_once = generate.concurrency
        self.lock = Lock()

    def answers(self, jobs: dict[str, Job]) -> Outcomes:
        """The next answer of each conversation; UserError where no prompt will fare better."""
        return self._all(jobs, self._answer)

    def write(self, how: SelfPromptsConfig, stops: list[int], stop_text: str | None, texts: Texts) -> Outcomes:
        options = {"max_tokens": how.max_new_tokens, "temperature": how.temperature, "top_p": how.top_p}
        options["skip_special_tokens"] = False  # a text with some is refused, and `stop` is looked for in what is left

        def ask(server: Server, text: tuple[list[int], int]) -> Answer:
            ids, seed = text
            written = server.complete(prompt=ids, seed=seed, stop_token_ids=stops, stop=stop_text, **options)
            return Answer({"role": "user", "content": written[0]}, written[1], 0)

        return self._all(texts, ask)

    def _all(self, requests: dict[str, Request], ask: Callable[[Server, Request], Answer]) -> Outcomes:
        """After an error that ends the run no more is asked, but what was under way comes first."""
        failed: UserError | None = None
        waiting, done = deque(requests.items()), SimpleQueue[tuple[str, Any] | None]()

        def work() -> None:
            with suppress(IndexError):
                while True:
                    key, request = waiting.popleft()
                    try:
                        done.put((key, self._one(ask, request)))
                    except BaseException as error:
                        done.put((key, error))
            done.put(None)

        workers = min(self.at_once, len(requests))
        for _ in range(workers):  # daemons: after Ctrl-C nobody waits for the requests under way
            Thread(target=work, daemon=True).start()
        try:
            while workers:
                if (outcome := done.get()) is None:
                    workers -= 1
                elif isinstance(outcome[1], Answer | Refused):
                    yield outcome
                elif isinstance(outcome[1], UserError):
                    failed = failed or outcome[1]
                    waiting.clear()
                    self._give_up()
                else:
                    raise outcome[1]
        finally:
            if workers:
                waiting.clear()
                self._give_up()
        if failed:
            raise failed

    def _give_up(self) -> None:
        for server in list(self.servers):
            server.given_up = True

    def _tell_who_is_alone(self) -> None:
        for server in self.servers:
            server.alone = len(self.servers) == 1

    def _one(self, ask: Callable[[Server, Request], Answer], request: Request) -> Answer:
        """Ask the server with the fewest requests under way; leave out one that gives no answer, but not the last. What
        one fails on the others are asked, too."""
        failed: dict[Server, Failed] = {}
        while True:
            with self.lock:
                left = [server for server in self.servers if server not in failed]
                if not left:
                    raise next(iter(failed.values()))
                server = min(left, key=lambda one: one.under_way)
                server.under_way += 1
            try:
                return ask(server, request)
            except Failed as error:
                failed[server] = error
            except NoAnswer as error:
                with self.lock:
                    if self.servers == [server]:
                        raise
                    if server in self.servers:
                        self.servers.remove(server)
                        self._tell_who_is_alone()
                        server.given_up = True
                        note(f"{error}; the other servers answer in its place", error=True)
            finally:
                with self.lock:
                    server.under_way -= 1

    def _answer(self, server: Server, job: Job) -> Answer:
        tools = job.row.tools
        answer = server.answer(job.messages, job.temperature, job.seed(self.seed), tools)
        message = answer.message
        last = "content" if message["content"] else "reasoning_content"
        if answer.finish_reason == "length" and message.get(last):  # perhaps cut inside a character
            message = {**message, last: message[last].rstrip(NO_CHARACTER)}
        if NO_CHARACTER in json.dumps(message, ensure_ascii=False):
            raise Refused(BROKEN)
        if tools and not message.get("tool_calls"):  # of a server without a tool parser, perhaps
            parts = to_message(self.template, job.messages, message["content"], answer.finish_reason, tools)
            message = {**message, **parts}
        return Answer(message, answer.finish_reason, answer.tokens)
