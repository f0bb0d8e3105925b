"""Engines that answer: the target in this process, or on a server. Both continue a prompt's token ids. Every request
gets an `Answer`, or the reason why it has none. No journal keeps reasons: asking again costs little, and may help."""

import hashlib
import json
import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any

from data_prep import written
from data_prep.client import NoAnswer, Server
from data_prep.dialogue import PromptTurn
from data_prep.journal import Answer, Outcomes
from data_prep.own_server import OwnServer
from data_prep.sample import EMPTY
from eagle31_train.common import artifacts
from eagle31_train.common.console import note
from eagle31_train.common.errors import Refused, UserError
from eagle31_train.config import OWN_SERVER, Config, SelfPromptsConfig
from eagle31_train.rows.formats import Row
from eagle31_train.rows.messages import Message
from eagle31_train.targets.chat import ChatTemplate
from eagle31_train.targets.completions import Completion, Request, Sampling

NO_ROOM = "it leaves no room for an answer within data.max_length={}"
Requests = dict[str, Request]
Completions = Iterator[tuple[str, Completion | Refused]]  # by the keys of requests


@dataclass
class Job:
    """One conversation in progress: a prompt's turns, and the messages so far."""

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
        """The suffix that tells further samples of a prompt apart, the same that `formats.parse` appends to ids."""
        return f"#{self.sample}" if self.sample else ""

    def comes_to(self, turn: int) -> bool:
        """Return whether the conversation goes on to its prompt's turn of this number, from 0."""
        return turn < len(self.turns) and not self.refusal and not self.ended

    def seed(self, base: int) -> int:
        """Return the seed of the next answer, a different one for each prompt, sample and turn."""
        text = json.dumps([base, self.row.id, self.sample, len(self.messages)])
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")

    def add(self, answer: Answer) -> None:
        self.answers += 1
        self.tokens += answer.tokens
        self.messages.append({**answer.message, "finish_reason": answer.finish_reason})

    def stop(self, reason: str) -> None:
        """End the conversation here. The answers that it has are the target's own, and stay."""
        if not self.answers:
            self.refusal = reason
            return
        self.ended = reason
        last = max(i for i, message in enumerate(self.messages) if message["role"] == "assistant")
        del self.messages[last + 1 :]


def engine(config: Config, template: ChatTemplate, own: OwnServer | None = None) -> "Engine":
    """Return an engine for the servers that `data.generate.server` names, or our `own`; else for the target in this
    process, which is slow to load."""
    if config.data.generate.server:
        return Remote(config, template, own)
    from eagle31_train.targets.generate import Generator  # loads torch

    return Local(config, template, Generator(config.target))


def target_inputs(config: Config, template: ChatTemplate, served: str) -> dict[str, Any]:
    """Return what the target's words depend on. `served`: the key for a server's model, known only by its name."""
    if config.data.generate.server not in (None, OWN_SERVER):
        weights = {served: config.data.generate.model or config.target.path}
    else:
        weights = {"dtype": config.target.dtype, "weights": artifacts.weights_fingerprint(config.target.path)}
    return {"target": config.target.name, **weights, **template.fingerprints(), "seed": config.seed}


class Engine(ABC):
    """The target, wherever it runs: it continues token ids, both for answers and for what a user says."""

    def __init__(self, config: Config, template: ChatTemplate, at_once: int) -> None:
        self.config, self.template, self.at_once = config, template, at_once
        self.started = lambda: None  # called when a slow start is over

    @abstractmethod
    def complete(self, asked: Requests, sampling: Sampling) -> Completions:
        """Yield the target's completions as they end."""

    def answers(self, jobs: dict[str, Job], most: float = math.inf) -> Outcomes:
        """Yield the next answer of each conversation, refusals first. Prompts of `most` tokens or more are refused."""
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

        def answer(key: str, ids: list[int], finish_reason: str) -> Answer:
            return self._answer(jobs[key], asked[key].ids, ids, finish_reason)

        yield from self._outcomes(asked, sampling, answer)

    def write(self, how: SelfPromptsConfig, end_ids: list[int], end_text: str | None, asked: Requests) -> Outcomes:
        """Yield what a user says next: text that continues token ids up to one of `end_ids`, or up to `end_text`."""

        def said(_: str, ids: list[int], finish_reason: str) -> Answer:
            text = self.template.decode(ids[:-1] if ids and ids[-1] in end_ids else ids)
            if end_text and end_text in text:  # in this process, generation does not stop there
                text, finish_reason = text.partition(end_text)[0], "stop"
            return Answer({"role": "user", "content": text}, finish_reason, 0)

        yield from self._outcomes(asked, Sampling(how.max_new_tokens, how.top_p, end_ids, end_text), said)

    def _outcomes(self, asked: Requests, sampling: Sampling, read: Callable[[str, list[int], str], Answer]) -> Outcomes:
        """Yield what is read from every completion, its key, token ids and finish_reason; or why it is of no use."""
        for key, completion in self.complete(asked, sampling):
            outcome: Answer | Refused
            try:
                outcome = completion if isinstance(completion, Refused) else read(key, *completion)
            except Refused as refused:
                outcome = refused
            yield key, outcome

    def _answer(self, job: Job, prompt: list[int], ids: list[int], finish_reason: str) -> Answer:
        """Return the answer that `ids` make after a prompt; UserError if they do not end as the target's answers do."""
        end_ids = self.template.end_ids
        if not ids:
            raise Refused(EMPTY)
        if finish_reason == "stop" and ids[-1] not in end_ids:
            raise UserError(
                f"an answer ends with {self.template.decode(ids[-1:])!r}, not with one of the target's end tokens "
                f"({end_ids}, eos_token_id of its generation_config.json): does the server run the same target?"
            )
        message = written.message_of(self.template, prompt, self.template.with_rows(ids), job.row.tools)
        if ids[0] in end_ids:
            raise Refused(EMPTY)
        return Answer({**message, "token_ids": ids}, finish_reason, len(ids))


class Local(Engine):
    """The target in this process."""

    def __init__(self, config: Config, template: ChatTemplate, generator: Any) -> None:
        super().__init__(config, template, config.data.generate.batch_size)
        self.generator = generator

    def complete(self, asked: Requests, sampling: Sampling) -> Completions:
        """Run the longest prompts first, so that a lack of memory shows at once."""
        order = []
        for key in sorted(asked, key=lambda key: (-len(asked[key].ids), key)):
            if problem := self.generator.refusal(len(asked[key].ids), sampling.max_new_tokens):
                yield key, Refused(problem)
            else:
                order.append(key)
        for index, completion in self.generator.complete([asked[key] for key in order], self.at_once, sampling):
            yield order[index], completion


class Remote(Engine):
    """The target on servers: many requests at once, in the order in which they finish."""

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
        """Ask no more after an error that ends the run, but first yield the requests under way."""
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
        """Ask the server with the fewest requests under way. Drop a server that gives no answer, unless it is the last.
        If one server refuses a request or fails on it, ask the others, too."""
        refused: dict[Server, Refused] = {}
        while True:
            with self.lock:
                left = [server for server in self.servers if server not in refused]
                if not left:
                    raise next(iter(refused.values()))
                server = min(left, key=lambda one: one.under_way)
                server.under_way += 1
            try:
                return server.complete(asked, sampling)
            except Refused as error:  # another may take longer prompts
                refused[server] = error
            except NoAnswer as error:
                with self.lock:
                    if self.servers == [server]:
                        raise
                    if server in self.servers:
                        self.servers.remove(server)
                        self._tell_who_is_alone()
                        server.given_up = True
                        note(f"{error}; the other servers take over", error=True)
            finally:
                with self.lock:
                    server.under_way -= 1
