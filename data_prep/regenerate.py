"""The target answers the prompts itself: a drafter must learn the target's own words.

Every answer goes to a journal as soon as it exists, under a key made of all that it depends on, so
the same command goes on where it was stopped. Conversations of several turns advance in rounds,
one turn of all of them at a time, which keeps the batches full. A prompt that cannot be answered
is refused by name, and the others go on.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from data_prep.journal import Answered, Journal
from data_prep.messages import Message, Row
from data_prep.server import NotAnsweredError, Server
from data_prep.sources import open_sources, read
from data_prep.template import ChatTemplate, RefusedError
from eagle31_train import artifacts
from eagle31_train.schema import Config, UserError

OUTPUT = "conversations.jsonl"
JOURNAL = "conversations.jsonl.partial"
MANIFEST = "conversations.manifest.json"


@dataclass
class Job:
    """One conversation on its way: a prompt's user turns and the answers so far."""

    row: Row
    sample: int
    temperature: float
    turns: list[Message]
    messages: list[Message] = field(default_factory=list)  # rendered so far, answers included
    refusal: str | None = None  # why it has no answer, once it is known

    tokens: int = 0  # of its answers

    def entry(self) -> dict[str, str]:
        """Its line among the refused; further samples carry the id that `messages.parse` would give them."""
        identity = self.row.id + (f"#{self.sample}" if self.sample else "")
        return {"id": identity, "where": self.row.where, "reason": self.refusal or ""}

    def seed(self, base: int) -> int:
        """The seed of the next answer: apart for each prompt, sample and turn."""
        text = json.dumps([base, self.row.id, self.sample, len(self.messages)])
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")


@dataclass(frozen=True)
class Refused:
    """Why a prompt has no answer. No journal keeps it: asking again costs little, and may fare better."""

    reason: str


def regenerate(config: Config, template: ChatTemplate) -> Path:
    """Answer `data.prompts` with the target; returns `run_dir/conversations.jsonl`.

    One answer per prompt is drawn at `data.generate.temperature`; of several, the first is greedy
    and the others are drawn at it.

    Raises:
        UserError: no prompts, none that can be answered, contradictory options, or an existing
            output of other inputs.
    """
    generate, folder = config.data.generate, Path(config.run_dir)
    if config.data.prompts is None:
        raise UserError("regenerate=true needs prompts to answer: set data.prompts")
    if generate.samples < 1 or (generate.samples > 1 and generate.temperature <= 0):
        raise UserError(
            f"data.generate.samples={generate.samples} at temperature {generate.temperature} would repeat one "
            "answer: set data.generate.temperature above 0, or samples=1"
        )
    sources = open_sources(config.data.prompts, config.data.split, "data.prompts")
    settings = _settings(config, template)
    inputs = {**settings, "prompts": {source.name: source.fingerprint for source in sources}}
    output = folder / OUTPUT
    if _done(folder, inputs, config.overwrite):
        print(f"answers: {output} is up to date")
        return output
    jobs, refused = _jobs(read(sources, config.data.format), config)
    if not jobs:
        raise UserError(f"data.prompts={config.data.prompts} holds no prompt that can be answered")
    folder.mkdir(parents=True, exist_ok=True)
    with Journal(folder / JOURNAL) as journal:
        answer_all(jobs, journal, settings, config, template)
    refused += [job.entry() for job in jobs if job.refusal]
    jobs = [job for job in jobs if not job.refusal]
    if not jobs:
        reasons = Counter(entry["reason"] for entry in refused).most_common(3)
        told = "; ".join(f"{count} × {reason}" for reason, count in reasons)
        raise UserError(f"data.prompts={config.data.prompts} holds no prompt that was answered ({told})")
    artifacts.write_text(output, "".join(_line(job) for job in jobs))
    manifest = {
        "fingerprint": artifacts.fingerprint(inputs),
        "inputs": inputs,
        "files": artifacts.list_files(folder, [output]),
        "answers": sum(len(job.turns) for job in jobs),
        "tokens": sum(job.tokens for job in jobs),
        "refused": refused,
    }
    artifacts.write_json(folder / MANIFEST, manifest)
    (folder / JOURNAL).unlink()
    print(f"answers: {manifest['answers']} answers, {manifest['tokens']} tokens in {output}")
    for entry in refused:
        print(f"answers: refused {entry['id']} ({entry['where']}): {entry['reason']}")
    return output


def refused_prompts(run_dir: Path) -> list[dict[str, str]]:
    """Prompts that `regenerate` got no answer to, as id, where, reason."""
    refused: list[dict[str, str]] = artifacts.read_json(run_dir / MANIFEST, "python -m data_prep")["refused"]
    return refused


def _settings(config: Config, template: ChatTemplate) -> dict[str, Any]:
    """All that an answer depends on, beside its prompt."""
    target, generate = config.target, config.data.generate
    local = Path(target.path)
    if generate.server:  # what weights it serves, only its name for them can tell
        where = {"model": generate.model or target.path}
    else:
        where = {"dtype": target.dtype, "weights": artifacts.weights_fingerprint(target.path)}
    return {
        # A folder by its name alone, and its weights: the same checkout elsewhere is the same target.
        "target": local.name if local.is_dir() else target.path,
        "revision": target.revision,
        **where,
        **template.fingerprints(),
        "seed": config.seed,
        "max_new_tokens": generate.max_new_tokens,
        "temperature": generate.temperature,
        "top_p": generate.top_p,
        "samples": generate.samples,
    }


def _done(folder: Path, inputs: dict[str, Any], overwrite: bool) -> bool:
    """Whether the answers are there. The manifest stays until a new one replaces it, so that a kill
    at any time leaves answers that the next run knows for ours."""
    if not (folder / MANIFEST).is_file():
        # Beside a journal the answers are ours: killed after them, and before their manifest.
        if (folder / OUTPUT).exists() and not (folder / JOURNAL).exists() and not overwrite:
            raise UserError(
                f"{folder / OUTPUT} is there but was not finished by this command: move it away, or overwrite=true"
            )
        return False
    manifest = artifacts.read_json(folder / MANIFEST, "python -m data_prep")
    if manifest.get("fingerprint") == artifacts.fingerprint(inputs):
        damage = artifacts.first_damaged(folder, manifest.get("files", {}))
        if damage is None:
            return True
        print(f"{damage}; answering again")
    elif not overwrite:
        change = artifacts.describe_change(manifest.get("inputs", {}), inputs)
        raise UserError(
            f"{folder / OUTPUT} was made from other inputs ({change}): choose another name=… or run_dir=…, "
            "or replace it with overwrite=true"
        )
    return False


def _jobs(rows: Iterator[Row], config: Config) -> tuple[list[Job], list[dict[str, str]]]:
    """One job per prompt and sample; prompts that cannot be asked, with the reason."""
    generate = config.data.generate
    jobs: list[Job] = []
    refused: list[dict[str, str]] = []
    for row in rows:
        turns = [message for message in row.messages if message["role"] == "user"]
        problem = row.problem or (None if turns else "no user turn")
        if any(message["role"] == "tool" for message in row.messages):
            problem = "tool turns cannot be answered anew"
        if problem:
            refused.append({"id": row.id, "where": row.where, "reason": problem})
            continue
        system = [message for message in row.messages if message["role"] == "system"]
        for sample in range(generate.samples):
            greedy = sample == 0 and generate.samples > 1
            temperature = 0.0 if greedy else generate.temperature
            jobs.append(Job(row, sample, temperature, turns, list(system)))
    return jobs, refused


def answer_all(
    jobs: list[Job], journal: Journal, settings: dict[str, Any], config: Config, template: ChatTemplate
) -> None:
    """Bring every job to its end, or to its refusal, turn by turn, taking from the journal what it has."""
    engine = _Remote(config) if config.data.generate.server else _Local(config, template)
    total = sum(len(job.turns) for job in jobs)
    fresh = 0
    with tqdm(total=total, desc="answers", unit="answer", dynamic_ncols=True) as bar:
        for turn in range(max(len(job.turns) for job in jobs)):
            waiting: dict[str, Job] = {}
            for job in jobs:
                if turn < len(job.turns) and not job.refusal:
                    job.messages.append(job.turns[turn])
                    key = artifacts.fingerprint([settings, job.row.id, job.sample, job.messages])
                    waiting[key] = job
            missing = {key: job for key, job in waiting.items() if key not in journal.answers}
            found = len(waiting) - len(missing)
            bar.initial += found  # the rate counts answers of this run alone
            bar.update(found)
            for key, answer in engine.answers(missing):
                if isinstance(answer, Refused):
                    waiting.pop(key).refusal = answer.reason
                    bar.total -= len(missing[key].turns) - turn
                    bar.refresh()
                    continue
                journal.add(key, answer)
                fresh += answer.tokens
                bar.update()
                elapsed = bar.format_dict["elapsed"]
                bar.set_postfix_str(f"{fresh / max(elapsed, 1e-9):.0f} tokens/s", refresh=False)
            for key, job in waiting.items():
                known = journal.answers[key]
                job.tokens += known.tokens
                job.messages.append({"role": "assistant", "content": known.text, "finish_reason": known.finish_reason})


class _Local:
    """Answers from the target in this process; torch is loaded only here."""

    def __init__(self, config: Config, template: ChatTemplate) -> None:
        self.config = config
        self.template = template
        self.generator: Any = None

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
                ids = self.template.prompt_ids(job.messages)
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
                text = self.template.decode(answer.ids, skip_special_tokens=True)
                yield key, Answered(text, answer.finish_reason, len(answer.ids))


class _Remote:
    """Answers from an OpenAI-compatible server, many requests at once."""

    def __init__(self, config: Config) -> None:
        generate = config.data.generate
        assert generate.server is not None
        self.config = config
        self.server = Server(generate.server, generate.model or config.target.path)

    def answers(self, jobs: dict[str, Job]) -> Iterator[tuple[str, Answered | Refused]]:
        """In the order in which the server finishes them."""
        generate = self.config.data.generate
        pool = ThreadPoolExecutor(generate.concurrency)
        try:
            futures = {
                pool.submit(
                    self.server.answer,
                    job.messages,
                    job.temperature,
                    generate.top_p,
                    generate.max_new_tokens,
                    job.seed(self.config.seed),
                ): key
                for key, job in jobs.items()
            }
            for future in as_completed(futures):
                try:
                    reply = future.result()
                except NotAnsweredError as error:
                    yield futures[future], Refused(str(error))
                    continue
                yield futures[future], Answered(reply.text, reply.finish_reason, reply.tokens)
        finally:
            # One failure, or Ctrl-C, must not wait for thousands of requests still queued.
            pool.shutdown(wait=False, cancel_futures=True)


def _line(job: Job) -> str:
    last = job.messages[-1]
    value = {
        "id": job.row.id,
        "source": job.row.source,
        "sample": job.sample,
        "temperature": job.temperature,
        "finish_reason": last["finish_reason"],
        "messages": job.messages,
    }
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")) + "\n"
