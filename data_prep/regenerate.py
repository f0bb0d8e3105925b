"""The target answers the prompts itself: a drafter must learn the target's own words.

Every answer goes to a journal as soon as it exists, under a key made of all that it depends on, so
the same command goes on where it was stopped. Conversations of several turns advance in rounds,
one turn of all of them at a time, which keeps the batches full. A prompt that cannot be answered
is refused by name, and the others go on; a conversation that has answers already ends there with them, as it does
where an answer calls a tool whose result its prompt does not have (see `dialogue`).
"""

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

from tqdm import tqdm

from data_prep.answers import Job, Local, Refused, Remote
from data_prep.collect import refusal
from data_prep.dialogue import EndedError, following, turns_of
from data_prep.journal import Journal
from data_prep.messages import UnusableError
from data_prep.mixture import Corpus
from data_prep.template import ChatTemplate
from eagle31_train import artifacts
from eagle31_train.schema import Config, GenerateConfig, UserError

OUTPUT = "conversations.jsonl"
JOURNAL = "conversations.jsonl.partial"
MANIFEST = "conversations.manifest.json"


def regenerate(config: Config, template: ChatTemplate) -> Path:
    """Answer `data.prompts`, or the prompts of `data.sources`, with the target; returns `run_dir/conversations.jsonl`.

    One answer per prompt is drawn at `data.generate.temperature`; of several, the first is greedy
    and the others are drawn at it.

    Raises:
        UserError: no prompts, none that can be answered, contradictory options, or an existing
            output of other inputs.
    """
    generate, folder = config.data.generate, Path(config.run_dir)
    _check(generate)
    corpus = Corpus.open(config, "prompts")
    settings = _settings(config, template)
    inputs = {**settings, **_prompts(corpus)}
    output = folder / OUTPUT
    if _done(folder, inputs, config.overwrite):
        print(f"answers: {output} is up to date")
        return output
    jobs, refused = _jobs(corpus, config)
    option = "data.sources" if corpus.mixed else f"data.prompts={config.data.prompts}"
    if not jobs:
        raise UserError(f"{option}: there is no prompt that can be answered")
    if (count := sum(bool(job.row.tools) for job in jobs)) and not template.reads_tools:
        print(f"answers: {count} are asked for with tools, which the target's chat template does not write")
    folder.mkdir(parents=True, exist_ok=True)
    with Journal(folder / JOURNAL) as journal:
        answer_all(jobs, journal, settings, config, template)
        refused += [refusal(job.row, job.refusal, job.suffix) for job in jobs if job.refusal]
        jobs = [job for job in jobs if not job.refusal]
        if not jobs:
            reasons = Counter(entry["reason"] for entry in refused).most_common(3)
            told = "; ".join(f"{count} × {reason}" for reason, count in reasons)
            raise UserError(f"{option}: no prompt was answered ({told})")
        artifacts.write_text(output, "".join(_line(job) for job in jobs))
        manifest = {
            "fingerprint": artifacts.fingerprint(inputs),
            "inputs": inputs,
            "files": artifacts.list_files(folder, [output]),
            "answers": sum(job.answers for job in jobs),
            "tokens": sum(job.tokens for job in jobs),
            "sources": corpus.counts,
            "refused": refused,
            "ended": [
                {**refusal(job.row, job.ended, job.suffix), "turns_left": len(job.turns) - job.answers}
                for job in jobs
                if job.ended
            ],
        }
        artifacts.write_json(folder / MANIFEST, manifest)
        journal.path.unlink()  # while it is still ours alone
    _tell(manifest, output)
    return output


def _check(generate: GenerateConfig) -> None:
    """Refuse at once what would fail, or mean nothing, once the target is asked."""
    if generate.samples < 1 or (generate.samples > 1 and generate.temperature <= 0):
        raise UserError(
            f"data.generate.samples={generate.samples} at temperature {generate.temperature} would repeat one "
            "answer: set data.generate.temperature above 0, or samples=1"
        )
    for name in ("concurrency", "batch_size", "max_new_tokens"):
        if (value := getattr(generate, name)) < 1:
            raise UserError(f"data.generate.{name}={value} asks nothing: set at least 1")
    if not 0 <= generate.temperature < math.inf:
        raise UserError(f"data.generate.temperature={generate.temperature} is none: set 0, which is greedy, or above")
    if not 0 < generate.top_p <= 1:
        raise UserError(f"data.generate.top_p={generate.top_p} is not in (0, 1]")
    if generate.server and not generate.server.startswith(("http://", "https://")):
        raise UserError(
            f"data.generate.server={generate.server} is no address: write it as in http://localhost:8000/v1"
        )


def _tell(manifest: dict[str, Any], output: Path) -> None:
    print(f"answers: {manifest['answers']} answers, {manifest['tokens']} tokens in {output}")
    for entry in manifest["refused"]:
        print(f"answers: refused {entry['id']} ({entry['where']}): {entry['reason']}")
    for reason, count in Counter(entry["reason"] for entry in manifest["ended"]).most_common():
        print(f"answers: {count} conversations end before their prompts do, since {reason}")


def answered(run_dir: Path) -> dict[str, Any]:
    """What `regenerate` tells of its answers; `refused` are prompts without one, as id, source, where, reason."""
    return artifacts.read_json(run_dir / MANIFEST, "python -m data_prep")


def _prompts(corpus: Corpus) -> dict[str, Any]:
    inputs = corpus.inputs()
    if corpus.mixed:
        return {"prompts": inputs}
    files = dict(inputs["sources"])
    # By name, so that a change is told by the file that has it; as a list where two folders have a file of one name.
    prompts = files if len(files) == len(inputs["sources"]) else {"files": inputs["sources"]}
    # "auto" goes without saying, as it did when formats were not recorded.
    return {"prompts": prompts, **({} if inputs["format"] == "auto" else {"format": inputs["format"]})}


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


def _jobs(corpus: Corpus, config: Config) -> tuple[list[Job], list[dict[str, str]]]:
    """One job per prompt and sample; prompts that cannot be asked, with the reason."""
    generate = config.data.generate
    jobs: list[Job] = []
    refused: list[dict[str, str]] = []
    for row in corpus.read():
        try:
            if row.problem:
                raise UnusableError(row.problem)
            turns = turns_of(row.messages)
        except UnusableError as error:
            refused.append(refusal(row, str(error)))
            continue
        for sample in range(generate.samples):
            greedy = sample == 0 and generate.samples > 1
            jobs.append(Job(row, sample, 0.0 if greedy else generate.temperature, turns))
    return jobs, refused


def answer_all(
    jobs: list[Job], journal: Journal, settings: dict[str, Any], config: Config, template: ChatTemplate
) -> None:
    """Bring every job to its end, or to its refusal, turn by turn, taking from the journal what it has."""
    engine = Remote(config, template) if config.data.generate.server else Local(config, template)
    total = sum(len(job.turns) for job in jobs)
    fresh = 0
    with tqdm(total=total, desc="answers", unit="answer", dynamic_ncols=True) as bar:
        for turn in range(max(len(job.turns) for job in jobs)):
            waiting: dict[str, Job] = {}
            for job in [job for job in jobs if turn < len(job.turns) and not job.refusal and not job.ended]:
                try:
                    job.messages += following(job.turns[turn], job.messages[-1] if turn else None, job.row.tools)
                except EndedError as error:
                    job.ended = str(error)
                    bar.total -= len(job.turns) - turn
                    continue
                waiting[_key(job, settings)] = job
            missing = {key: job for key, job in waiting.items() if key not in journal.answers}
            found = len(waiting) - len(missing)
            bar.initial += found  # the rate counts answers of this run alone
            bar.update(found)
            bar.refresh()
            left = len(missing)
            for key, answer in engine.answers(missing):
                left -= 1
                if isinstance(answer, Refused):
                    _end(waiting.pop(key), answer.reason)
                    bar.total -= len(missing[key].turns) - turn
                    bar.refresh()
                    continue
                journal.add(key, answer)
                fresh += answer.tokens
                bar.update()
                rate = fresh / max(bar.format_dict["elapsed"], 1e-9)
                bar.set_postfix_str(f"{rate:.0f} tokens/s, {min(left, engine.at_once)} at once", refresh=False)
            for key, job in waiting.items():
                known = journal.answers[key]
                job.answers += 1
                job.tokens += known.tokens
                job.messages.append({**known.message, "finish_reason": known.finish_reason})


def _end(job: Job, reason: str) -> None:
    """One that gets no further answer: those that it has are the target's own, and are kept."""
    if not job.answers:
        job.refusal = reason
        return
    job.ended = reason
    last = max(i for i, message in enumerate(job.messages) if message["role"] == "assistant")
    del job.messages[last + 1 :]


def _key(job: Job, settings: dict[str, Any]) -> str:
    """The journal's key of the next answer."""
    asked = [settings, job.row.id, job.sample, job.messages]
    return artifacts.fingerprint([*asked, job.row.tools] if job.row.tools else asked)


def _line(job: Job) -> str:
    value = {
        "id": job.row.id,
        "source": job.row.source,
        "sample": job.sample,
        "temperature": job.temperature,
        "finish_reason": job.messages[-1]["finish_reason"],
        "messages": job.messages,
    }
    if job.row.tools:
        value["tools"] = job.row.tools
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")) + "\n"
