"""Who answers: the target in this process, or in a server. Both go on from a prompt's token ids, and every request has
an `Answer`, or the reason why it has none, which no journal keeps: asking again costs little, and may fare better."""

import hashlib
import json
import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any

from data_prep import written
from data_prep.client import Failed, NoAnswer, Server
from data_prep.dialogue import PromptTurn
from data_prep.journal import Answer, Outcomes
from data_prep.masks import EMPTY
from data_prep.own_server import OwnServer
from eagle31_train.common import artifacts
from eagle31_train.common.console import note
from eagle31_train.common.errors import Refused, UserError
from eagle31_train.config import OWN_SERVER, Config, SelfPromptsConfig
from eagle31_train.rows.formats import Message, Row
from eagle31_train.targets.chat import ChatTemplate
from eagle31_train.targets.completions import Completion, Request, Sampling

NO_ROOM = "it leaves no room for an answer within data.max_length={}"
Requests = dict[str, Request]
Completions = Iterator[tuple[str, Completion | Refused]]  # by the keys of requests


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


def engine(config: Config, template: ChatTemplate, own: OwnServer | None = None) -> "Engine":
    """The servers that `data.generate.server` names, or our `own`; else the target in this process, which takes its
    time to load."""
    if config.data.generate.server:
        return Remote(config, template, own)
    from eagle31_train.targets.generate import Generator  # loads torch

    return Local(config, template, Generator(config.target))


def target_inputs(config: Config, template: ChatTemplate, served: str) -> dict[str, Any]:
    """What the target's words depend on. `served`: the key for a server's model, whose name is all that is known."""
    if config.data.generate.server not in (None, OWN_SERVER):
        weights = {served: config.data.generate.model or config.target.path}
    else:
        weights = {"dtype": config.target.dtype, "weights": artifacts.weights_fingerprint(config.target.path)}
    return {"target": config.target.name, **weights, **template.fingerprints(), "seed": config.seed}


class Engine(ABC):
    """The target, wherever it runs: it goes on from token ids, for answers and for what a user says alike."""

    def __init__(self, config: Config, template: ChatTemplate, at_once: int) -> None:
        self.config, self.template, self.at_once = config, template, at_once
        self.started = lambda: None  # called once what takes its time to start has done so

    @abstractmethod
    def complete(self, asked: Requests, sampling: Sampling) -> Completions:
        """What the target goes on with, as it ends."""

    def answers(self, jobs: dict[str, Job], most: float = math.inf) -> Outcomes:
        """The next answer of each conversation, refusals first: of prompts of `most` tokens or more, too."""
        generate, asked = self.config.data.generate, {}
        for key, job in jobs.items():
            try:
                ids = self.template.under(job.row.template_args).prompt_ids(job.messages, job.row.tools)
                if len(ids) >= most:
                    raise Refused(NO_ROOM.format(most))
                asked[key] = Request(ids, job.temperature, job.seed(self.config.seed))
            except Refused as refused:
                yield key, refused
        sampling = Sampling(generate.max_new_tokens, generate.top_p, self.template.end_ids, top_k=generate.top_k)
        for key, completion in self.complete(asked, sampling):
            try:
                if isinstance(completion, Refused):
                    raise completion
                outcome: Answer | Refused = self._answer(jobs[key], asked[key].ids, *completion)
            except Refused as refused:
                outcome = refused
            yield key, outcome

    def _answer(self, job: Job, prompt: list[int], ids: list[int], finish_reason: str) -> Answer:
        """These tokens after those of a prompt; UserError where they end otherwise than the target's answers do."""
        end_ids = self.template.end_ids
        if finish_reason == "stop" and not (ids and ids[-1] in end_ids):
            there = f"{self.template.decode(ids[-1:])!r} there" if ids else "no token there"
            raise UserError(
                f"an answer ends with {there}, which is none of the target's end tokens here ({end_ids}): is it the "
                "same target? They are eos_token_id of its generation_config.json"
            )
        template = self.template.under(job.row.template_args)
        message = written.message_of(template, prompt, template.with_rows(ids), job.row.tools)
        if not ids or ids[0] in end_ids:
            raise Refused(EMPTY)
        return Answer({**message, "token_ids": ids}, finish_reason, len(ids))

    def write(self, how: SelfPromptsConfig, end_ids: list[int], end_text: str | None, asked: Requests) -> Outcomes:
        """What a user says next: text that goes on from token ids up to one of `end_ids`, or to `end_text`."""
        for key, completion in self.complete(asked, Sampling(how.max_new_tokens, how.top_p, end_ids, end_text)):
            try:
                if isinstance(completion, Refused):
                    raise completion
                ids, reason = completion
                text = self.template.decode(ids[:-1] if ids and ids[-1] in end_ids else ids)
            except Refused as refused:
                yield key, refused
                continue
            if end_text and end_text in text:  # in this process the target writes on after it
                text, reason = text.partition(end_text)[0], "stop"
            yield key, Answer({"role": "user", "content": text}, reason, 0)


class Local(Engine):
    """The target in this process."""

    def __init__(self, config: Config, template: ChatTemplate, generator: Any) -> None:
        super().__init__(config, template, config.data.generate.batch_size)
        self.generator = generator

    def complete(self, asked: Requests, sampling: Sampling) -> Completions:
        """The longest prompts first: memory trouble shows at once."""
        order = []
        for key in sorted(asked, key=lambda key: (-len(asked[key].ids), key)):
            if problem := self.generator.refusal(len(asked[key].ids), sampling.max_new_tokens):
                yield key, Refused(problem)
            else:
                order.append(key)
        for index, completion in self.generator.complete([asked[key] for key in order], self.at_once, sampling):
            yield order[index], completion


class Remote(Engine):
    """The target of servers, many requests at once, in the order in which they finish them."""

    def __init__(self, config: Config, template: ChatTemplate, own: OwnServer | None = None) -> None:
        generate = config.data.generate
        super().__init__(config, template, generate.concurrency)
        assert generate.server is not None
        self.own, self.lock = own, Lock()
        self._reach([] if own else generate.server.split(","))

    def _reach(self, urls: list[str]) -> None:
        generate = self.config.data.generate
        longest = max(generate.max_new_tokens, self.config.data.self_prompts.max_new_tokens)
        model = generate.model or self.config.target.path
        self.servers = [Server(url, model, longest, self.own) for url in urls]
        self._tell_who_is_alone()

    def complete(self, asked: Requests, sampling: Sampling) -> Completions:
        """After an error that ends the run no more is asked, but what was under way comes first."""
        if not asked:
            return
        if self.own and not self.servers:
            self._reach([self.own.url()])
            self.started()
        failed: UserError | None = None
        waiting, done = deque(asked.items()), SimpleQueue[tuple[str, Any] | None]()

        def work() -> None:
            with suppress(IndexError):
                while True:
                    key, one = waiting.popleft()
                    try:
                        done.put((key, self._one(one, sampling)))
                    except BaseException as error:
                        done.put((key, error))
            done.put(None)

        workers = min(self.at_once, len(asked))
        for _ in range(workers):  # daemons: after Ctrl-C nobody waits for the requests under way
            Thread(target=work, daemon=True).start()
        try:
            while workers:
                if (outcome := done.get()) is None:
                    workers -= 1
                elif isinstance(outcome[1], tuple | Refused):
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

    def _one(self, asked: Request, sampling: Sampling) -> Completion:
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
                return server.complete(asked, sampling)
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
