"""A drafter as it is served: vLLM with and without it, under load, by the clock and by vLLM's own report."""

import json
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle31_train import provenance
from eagle31_train.checkpoint.published import drafts_in_parallel
from eagle31_train.common import artifacts
from eagle31_train.common.console import Progress, note
from eagle31_train.common.errors import UserError
from eagle31_train.config import Config
from eagle31_train.evaluation.measurement import read_checked, write_checked
from eagle31_train.evaluation.serving import report
from eagle31_train.evaluation.serving.engine import DRAFTED, RANGES, Installation, flags, server_arguments
from eagle31_train.evaluation.serving.server import MODULE, Answer, Question, Server, pick_port, run_load

if TYPE_CHECKING:  # the card, which imports this package, has no need of datasets
    from eagle31_train.evaluation.prompts import Prompt

Load = tuple[list[Answer], Counter[str]]  # what was answered at one concurrency, and what vLLM counted meanwhile
WARM_TOKENS = 16  # of an answer that is thrown away
SETTLED_SECONDS = 60.0  # until the counters know of the last answer


def measure_serving(
    config: Config,
    drafts: Mapping[str, Path],
    prompts: Sequence["Prompt"],
    end_ids: Collection[int],
    engine: Installation,
    folder: Path | None = None,
) -> dict[str, Any]:
    """Serve the target alone, then every draft with each of evaluate.serve_speculative_tokens, then by the schedule
    that these give, if it is not one of them; `report.py` has the form. UserError: a server that does not start or
    breaks off.

    Every server is started once. What it did is recorded in `folder`, and none is started again whose record is there:
    a very large target takes an hour to start.

    Args:
        drafts: exported checkpoints by the names under which they are reported.
        prompts: sent several times over where they are too few to keep all users busy.
        end_ids: tokens that end an answer. engine: as `check` gives it.
        folder: of the records and of each server's log; default: run_dir/servers.
    """
    options = config.evaluate
    sent = {users: questions(config, prompts, end_ids, users) for users in options.concurrency}
    servers = _Servers(config, drafts, sent, engine, Path(config.run_dir) / "servers" if folder is None else folder)
    note(
        f"serve: {1 + len(drafts) * len(options.serve_speculative_tokens)} servers in turn, and up to two for a "
        f"schedule by load for each drafter; {sum(map(len, sent.values()))} requests to each. For fewer: "
        "evaluate.serve_speculative_tokens, evaluate.concurrency, evaluate.num_prompts"
    )
    plain = servers.loads(None, {})
    # Sampled answers differ: with a drafter, other random numbers choose.
    reference = None if options.temperature else plain[options.concurrency[0]][0]

    def row(name: str | None, depth: int, users: int, load: Load) -> report.Row:
        return report.row(name, depth, users, *load, plain[users][0] if name else None, reference)

    loads = {
        (name, depth): servers.loads(name, {DRAFTED: depth})
        for name in drafts
        for depth in options.serve_speculative_tokens
    }
    rows = [row(None, 0, users, load) for users, load in plain.items()]
    rows += [row(*which, users, load) for which, by_users in loads.items() for users, load in by_users.items()]
    best = report.best(rows)
    schedules: dict[str, dict[str, Any]] = {}
    scheduled: list[report.Row] = []
    for name, draft in drafts.items():
        if not _follows_schedules(config, draft):
            continue
        length = report.schedule(rows, name)
        if length and any(depth == 0 for *_, depth in length[RANGES]):
            # A drafter that drafts nothing still reads all tokens, so it is not as fast as none.
            never = {DRAFTED: length[DRAFTED], RANGES: [[1, max(options.concurrency), 0]]}  # DRAFTED must be above 0
            resting = servers.loads(name, never)
            rows += [row(name, 0, users, load) for users, load in resting.items()]
            loads[name, 0] = resting
            length = report.schedule(rows, name)
        if not length:
            continue
        schedules[name], ranges = length, length[RANGES]
        if len(ranges) == 1:
            continue  # one number at every load, and measured so
        for users, load in servers.loads(name, length).items():
            (depth,) = [depth for first, last, depth in ranges if first <= users <= last]
            beside = report.speed(load[0]) / report.speed(loads[name, depth][users][0])
            scheduled.append({**row(name, depth, users, load), "beside_fixed": beside.intervals()[0]})
    return {
        "vllm": engine.version,
        "machine": engine.device,
        "dtype": options.vllm_args.get("dtype", config.target.dtype),
        "arguments": dict(options.vllm_args),
        "prompts": len(prompts),
        **{name: getattr(options, name) for name in ("max_new_tokens", "temperature", "top_p")},
        "rows": rows,
        "best": best,
        "schedules": schedules,
        "by_load": scheduled,
        "verdict": report.verdict(best, schedules, scheduled),
        "notes": report.notes([*rows, *scheduled]),
    }


def _follows_schedules(config: Config, draft: Path) -> bool:
    """Whether vLLM 0.32 does. With a parallel drafter, or in several replicas, it always drafts one number."""
    replicas: int = server_arguments(config, None, {}, 0).get("data_parallel_size", 1)
    return replicas == 1 and not drafts_in_parallel(draft)


@dataclass(frozen=True)
class _Servers:
    """Servers of one target that are all sent the same questions, by concurrency; see `measure_serving`."""

    config: Config
    drafts: Mapping[str, Path]
    sent: Mapping[int, Sequence[Question]]
    engine: Installation
    folder: Path

    def loads(self, name: str | None, length: Mapping[str, Any]) -> dict[int, Load]:
        """What the server with a draft of that length did, by concurrency: now, or as it is recorded."""
        draft = self.drafts[name] if name is not None else None
        depth = length.get(DRAFTED, 0)
        ranges = length.get(RANGES, [])
        by_load = ", idle" if [drafted for *_, drafted in ranges] == [0] else ", by load" if ranges else ""
        what = f"serve {name}, {depth} draft tokens{by_load}" if name is not None else "serve without a drafter"
        # By what the weights hold, and not by where they lie, nor by what the drafter is called beside others.
        arguments = server_arguments(self.config, draft, length, 0)
        if draft is not None:
            arguments["speculative_config"]["model"] = artifacts.weights_fingerprint(str(draft))
        requests = {str(users): [asdict(question) for question in asked] for users, asked in self.sent.items()}
        made_from = provenance.of_server(self.config, arguments, requests, asdict(self.engine))
        file = self.folder / f"server-{depth}-{artifacts.fingerprint(made_from)}.json"
        if (record := read_checked(file, "served")) is not None:
            note(f"{what}: measured before ({file})")
        else:
            log = self.folder / f"{name or 'none'}-{depth}{by_load.replace(', ', '-').replace(' ', '-')}.log"
            record = self._serve(draft, length, what, log)
            write_checked(file, "served", record, drafter=name)
        return {
            users: ([Answer(**one) for one in record["answers"][str(users)]], Counter(record["counted"][str(users)]))
            for users in self.sent
        }

    def _serve(self, draft: Path | None, length: Mapping[str, Any], what: str, log: Path) -> dict[str, Any]:
        """Start a server, let it answer everything, and end it: answers, and vLLM's counts, by concurrency, as JSON."""
        from eagle31_train.targets.pretrained import out_of_reach  # imports transformers

        options, port = self.config.evaluate, pick_port()
        command = [options.vllm_python, "-m", MODULE, *flags(server_arguments(self.config, draft, length, port))]
        served: dict[str, Any] = {"answers": {}, "counted": {}}
        note(f"{what}: vLLM starts ({log})")
        with (
            Server(command, port, log, offline=out_of_reach(self.config.target) is not None) as server,
            Progress(total=sum(map(len, self.sent.values())), desc=what, unit="request") as bar,
        ):
            model = json.loads(server.ask("/v1/models")[1])["data"][0]["id"]
            done = 0  # requests that this server has answered
            for users, some in self.sent.items():
                asked = [replace(question, options={"model": model, **question.options}) for question in some]
                if options.warmup:
                    short = {"max_tokens": min(WARM_TOKENS, options.max_new_tokens)}
                    warming = [replace(question, options=question.options | short) for question in asked[:users]]
                    done += len(run_load(server, warming, users))
                before = settled(server, done)
                answers = run_load(server, asked, users, bar.update)
                done += len(answers)
                counted = settled(server, done)
                counted.subtract(before)
                if draft is not None:
                    report.speculation(counted, length[DRAFTED])  # or it raises, before more is asked
                (speed, _, _) = report.speed(answers).intervals()[0]
                if speed is None:
                    raise UserError(f"{what}: every answer ended with its first token: choose other prompts")
                bar.set_postfix_str(f"{speed:.1f} tokens/s/user of {users}")
                served["answers"][str(users)] = [asdict(answer) for answer in answers]
                served["counted"][str(users)] = dict(counted)
        return served


def questions(
    config: Config, prompts: Sequence["Prompt"], end_ids: Collection[int], concurrency: int
) -> list[Question]:
    """Every prompt, as often as keeps all users busy for two turns at least."""
    options = config.evaluate
    # All that a server would else take from the target's generation_config.json.
    common: dict[str, Any] = {
        "max_tokens": options.max_new_tokens,
        "stop_token_ids": sorted(end_ids),
        "temperature": options.temperature,
        "top_p": options.top_p,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
    }
    seeds = [{"seed": config.seed + i} if options.temperature else {} for i in range(len(prompts))]
    once = [Question(i, prompt.id, prompt.ids, common | seeds[i]) for i, prompt in enumerate(prompts)]
    return once * ceil(2 * concurrency / len(prompts))


def settled(server: Server, answered: int) -> Counter[str]:
    """The counters, once they know of all answers and no longer move: vLLM counts after it has answered."""
    deadline = time.monotonic() + SETTLED_SECONDS
    before: Counter[str] | None = None
    while time.monotonic() < deadline:
        status, text = server.ask("/metrics")
        now = report.parse(text)
        if now == before and now[report.FINISHED] >= answered:
            return now
        before = now
        time.sleep(0.1)
    finished = f"{now[report.FINISHED]:.0f} finished requests, not {answered}"
    raise UserError(f"vLLM's /metrics (HTTP {status}) know of {finished}: see {server.log}")
