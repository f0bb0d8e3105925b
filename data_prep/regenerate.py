"""The target answers the prompts itself: a drafter must learn the target's own words.

Every answer goes to a journal as soon as it exists, under a key of all that it depends on. Conversations advance in
rounds, all of them by one turn at a time, which makes full batches. If a later answer cannot be given (see `dialogue`),
the conversation ends with the answers that it has.
"""

import json
import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from data_prep.answers import NO_ROOM, Engine, Job, engine, target_inputs
from data_prep.client import FAILED
from data_prep.dataset import check_shares, most_common, place, refusal
from data_prep.dialogue import following, turns_of
from data_prep.journal import Answer, Journal
from data_prep.own_server import OwnServer
from data_prep.sources import Corpus
from data_prep.written import check_goes_on
from eagle31_train.common import artifacts, foreign
from eagle31_train.common.console import Progress, note
from eagle31_train.common.errors import Refused, UserError
from eagle31_train.config import ANSWERED, Config, GenerateConfig
from eagle31_train.provenance import LAYOUTS, Provenance, recorded
from eagle31_train.rows.formats import TEMPLATE, TEMPLATE_ARGS
from eagle31_train.rows.messages import Message
from eagle31_train.targets.chat import ChatTemplate

SAMPLING = ("max_new_tokens", "temperature", "top_p", "top_k", "samples")  # of data.generate


def regenerate(config: Config, template: ChatTemplate, own: OwnServer | None = None) -> tuple[Path, dict[str, Any]]:
    """Answer `data.prompts`, or those of `data.sources`. Return `run_dir/conversations.jsonl` and its manifest."""
    output = Path(config.run_dir) / ANSWERED
    generate = config.data.generate
    if generate.samples > 1 and not generate.temperature:
        samples = f"data.generate.samples={generate.samples} at temperature 0 would repeat one answer"
        raise UserError(f"{samples}: set data.generate.temperature above 0")
    corpus = Corpus.open(config, "prompts")
    settings, made_from = _settings(config, template), of_answers(config, template, corpus)
    journal, record = Journal(output), dict[str, Any]()
    if journal.finished(made_from, config.overwrite):
        record = artifacts.read_json(journal.manifest, "eagle31 data")
        lacking = _lacking(record, config.data.max_length)
        if not lacking or not config.overwrite:
            note(f"answers: {output} {lacking or 'is up to date'}")
            return output, record
    jobs, refused = _jobs(corpus, generate)
    option = "data.sources" if corpus.mixed else f"data.prompts={config.data.prompts}"
    if not jobs:
        raise UserError(f"{option}: no prompt can be answered ({most_common(refused)})")
    # The answered conversations will be split in the same way: check it now, not after hours of answers.
    check_shares({place(job.turns[0].rest) for job in jobs}, config.data.heldout)
    if (count := sum(bool(job.row.tools) for job in jobs)) and not template.reads_tools:
        note(f"answers: {count} conversations have tools, which the chat template of {template.name} does not write")
    with journal:
        if journal.answers:
            journal.check_wanted(set(_first_keys(jobs, settings)).__contains__, config.overwrite)
        if record.get("layout") == LAYOUTS["answers"]:
            for key, answer in _given(output, settings):
                if key not in journal.answers:
                    journal.add(key, answer)
        answer_all(jobs, journal, settings, template, engine(config, template, own))
        refused += [refusal(job.row, job.refusal, job.suffix) for job in jobs if job.refusal]
        jobs = [job for job in jobs if not job.refusal]
        if not jobs:
            raise UserError(f"{option}: no prompt was answered ({most_common(refused)})")
        ended = [
            {**refusal(job.row, job.ended, job.suffix), "turns_left": len(job.turns) - job.answers}
            for job in jobs
            if job.ended
        ]
        counts = {"answers": sum(job.answers for job in jobs), "tokens": sum(job.tokens for job in jobs)}
        settled = {"layout": LAYOUTS["answers"], "max_length": config.data.max_length}
        facts = {**settled, **counts, "sources": corpus.counts, "refused": refused, "ended": ended}
        manifest = journal.finish((_line(job, template) for job in jobs), made_from, **facts)
    note(f"answers: {manifest['answers']} answers, {manifest['tokens']} tokens in {output}")
    if refused:
        note(f"answers: prompts refused: {len(refused)} ({most_common(refused)})")
    if ended:
        note(f"answers: {len(ended)} conversations end before their prompts do ({most_common(ended)})")
    return output, manifest


def _lacking(record: dict[str, Any], max_length: int) -> str:
    """Return what finished answers lack, and a larger `max_length` or another try may give; "" for nothing."""
    before = record.get("max_length", math.inf)
    reasons = [entry["reason"] for entry in [*record["refused"], *record.get("ended", [])]]
    short = reasons.count(NO_ROOM.format(before)) if max_length > before else 0
    failed = sum(reason.startswith(FAILED) for reason in reasons)
    lacked = [f"{short} prompts that left no room for an answer in data.max_length={before}"] * bool(short)
    lacked += [f"{failed} prompts that the server failed on"] * bool(failed)
    return f"lacks {' and '.join(lacked)}: set overwrite=true to ask these again" if lacked else ""


def _given(output: Path, settings: dict[str, Any]) -> Iterator[tuple[str, Answer]]:
    """Yield the answers of finished conversations, with their keys."""
    with output.open("rb") as file:
        for row in map(foreign.parse_json, file):
            for i, message in enumerate(row["messages"]):
                if message["role"] == "assistant":
                    words = {name: value for name, value in message.items() if name != "finish_reason"}
                    about = row.get("tools"), row.get(TEMPLATE_ARGS)
                    key = _key_of(settings, row["id"], row["sample"], row["messages"][:i], *about)
                    yield key, Answer(words, message["finish_reason"], len(words["token_ids"]))


def of_answers(config: Config, template: ChatTemplate, corpus: Corpus) -> Provenance:
    """Return what answers depend on. corpus: the prompts."""
    inputs = corpus.inputs()
    prompts = {"prompts": inputs}
    if not corpus.mixed:
        files = dict(inputs["sources"])
        # By name, so that an error names the file that changed; as a list where two folders have a file of one name.
        prompts["prompts"] = files if len(files) == len(inputs["sources"]) else {"files": inputs["sources"]}
        if inputs["format"] != "auto":  # the default is left out, as it was before formats were recorded
            prompts["format"] = inputs["format"]
    options = {"revision": "target.revision", **{name: f"data.generate.{name}" for name in SAMPLING}}
    return Provenance({**_settings(config, template), **prompts}, options=options)


def _settings(config: Config, template: ChatTemplate) -> dict[str, Any]:
    return {
        **target_inputs(config, template, "model"),
        "revision": config.target.revision,
        **recorded("data.generate", {name: getattr(config.data.generate, name) for name in SAMPLING}),
    }


def _jobs(corpus: Corpus, generate: GenerateConfig) -> tuple[list[Job], list[dict[str, str]]]:
    """Return one job per prompt and sample, and the prompts that cannot be asked, with reasons."""
    jobs: list[Job] = []
    refused: list[dict[str, str]] = []
    for row in corpus.read():
        try:
            if row.problem:
                raise Refused(row.problem)
            if row.tokens:
                raise Refused("input_ids cannot be answered: set data.format to that of the text beside them")
            turns = turns_of(row.messages)
        except Refused as error:
            refused.append(refusal(row, str(error)))
            continue
        for sample in range(generate.samples):
            greedy = sample == 0 and generate.samples > 1
            jobs.append(Job(row, sample, 0.0 if greedy else generate.temperature, turns))
    return jobs, refused


def answer_all(
    jobs: list[Job], journal: Journal, settings: dict[str, Any], template: ChatTemplate, target: Engine
) -> None:
    """Answer every job turn by turn until it ends or is refused, taking the answers that the journal has from there."""
    new_tokens = 0
    total = sum(len(job.turns) for job in jobs)
    with Progress(total=total, desc="answers", unit="answer", smoothing=0) as bar:  # the journal's come all at once
        target.started = bar.unpause
        for turn in range(max(len(job.turns) for job in jobs)):
            waiting: dict[str, Job] = {}
            for job in [job for job in jobs if job.comes_to(turn)]:
                try:
                    if turn:
                        check_goes_on(template, job.messages[-1], job.row.tools)
                    job.messages += following(job.turns[turn], job.messages[-1] if turn else None, job.row.tools)
                    waiting[_key(job, settings)] = job
                except Refused as refused:
                    job.ended = str(refused)
                    bar.total -= len(job.turns) - turn
            new = waiting.keys() - journal.answers.keys()
            bar.initial += len(waiting) - len(new)  # the rate is that of this run alone
            # Nothing would be learnt after a longer first prompt. Later turns are cut instead: earlier ones are of use.
            most = math.inf if turn else target.config.data.max_length
            for key, outcome in journal.outcomes(waiting, partial(target.answers, most=most)):
                if isinstance(outcome, Refused):
                    waiting[key].stop(str(outcome))
                    bar.total -= len(waiting[key].turns) - turn
                    continue
                waiting[key].add(outcome)
                new_tokens += outcome.tokens * (key in new)
                rate = new_tokens / max(bar.format_dict["elapsed"], 1e-9)
                bar.set_postfix_str(f"{rate:,.0f} tokens/s", refresh=False)
                bar.update()


def _key(job: Job, settings: dict[str, Any]) -> str:
    return _key_of(settings, job.row.id, job.sample, job.messages, job.row.tools, job.row.template_args)


def _key_of(settings: dict[str, Any], row: str, sample: int, messages: list[Message], *more: Any) -> str:
    return artifacts.fingerprint([settings, row, sample, messages, *filter(None, more)])


def _first_keys(jobs: list[Job], settings: dict[str, Any]) -> Iterator[str]:
    """Yield the key of every job's first answer."""
    for job in jobs:
        with suppress(Refused):
            asked = following(job.turns[0], None, job.row.tools)
            yield _key(replace(job, messages=[*job.messages, *asked]), settings)


def _line(job: Job, template: ChatTemplate) -> str:
    value = {
        "id": job.row.id,
        "source": job.row.source,
        "sample": job.sample,
        "temperature": job.temperature,
        "finish_reason": job.messages[-1]["finish_reason"],
        TEMPLATE: template.under(job.row.template_args).identity,
        "messages": job.messages,
        **({"tools": job.row.tools} if job.row.tools else {}),
        **({TEMPLATE_ARGS: job.row.template_args} if job.row.template_args else {}),
    }
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
