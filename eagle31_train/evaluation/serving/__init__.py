"""A drafter as it is served: vLLM with and without it, under load, by the clock and by vLLM's own counters."""

import json
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle31_train import provenance
from eagle31_train.common import artifacts
from eagle31_train.common.console import Progress, note
from eagle31_train.common.errors import UserError
from eagle31_train.config import Config
from eagle31_train.evaluation.measurement import read_checked, write_checked
from eagle31_train.evaluation.serving import report
from eagle31_train.evaluation.serving.engine import Installation, flags, server_arguments
from eagle31_train.evaluation.serving.server import MODULE, Answer, Question, Server, pick_port, run_load, serving
from eagle31_train.targets.completions import WHOLE_DISTRIBUTION

if TYPE_CHECKING:  # the model card imports this package, and does not need datasets
    from eagle31_train.evaluation.prompts import Prompt

Load = tuple[list[Answer], Counter[str]]  # what was answered at one concurrency, and what vLLM counted meanwhile
WARM_TOKENS = 16  # of an answer that is thrown away
SETTLED_SECONDS = 60.0  # at most, until the counters include the last answer


def measure_serving(
    config: Config,
    drafts: Mapping[str, Path],
    prompts: Sequence["Prompt"],
    end_ids: Collection[int],
    engine: Installation,
    folder: Path | None = None,
) -> dict[str, Any]:
    """Serve the target alone, then every drafter with each of evaluate.serve_speculative_tokens.

    `report.py` describes the result. UserError if a server does not start or breaks off. Every server is started once,
    and what it did is recorded in `folder`. One that has a record is not started again: a very large target takes an
    hour to start.

    Args:
        drafts: exported checkpoints by the names under which they are reported.
        prompts: sent several times over if they are too few to keep all users busy.
        end_ids: tokens that end an answer. engine: from `check`.
        folder: of the records and of each server's log; default: run_dir/servers.
    """
    options = config.evaluate
    sent = {users: questions(config, prompts, end_ids, users) for users in options.concurrency}
    servers = _Servers(config, drafts, sent, engine, Path(config.run_dir) / "servers" if folder is None else folder)
    note(
        f"serve: {1 + len(drafts) * len(options.serve_speculative_tokens)} servers in turn; "
        f"{sum(map(len, sent.values()))} requests to each. For fewer: evaluate.serve_speculative_tokens, "
        "evaluate.concurrency, evaluate.num_prompts"
    )
    plain = servers.loads(None, 0)
    # Sampled answers differ anyway: with a drafter, other random numbers choose.
    reference = None if options.temperature else plain[options.concurrency[0]][0]

    rows = [report.row(None, 0, users, *load, None, reference) for users, load in plain.items()]
    timed = {one["concurrency"]: plain[one["concurrency"]][0] for one in rows if "bunched" not in one}
    for name in drafts:
        for depth in options.serve_speculative_tokens:
            rows += [
                report.row(name, depth, users, *load, timed.get(users), reference)
                for users, load in servers.loads(name, depth).items()
            ]
    best = report.best(rows)
    return {
        "vllm": engine.version,
        "machine": engine.device,
        "dtype": options.vllm_args.get("dtype", config.target.dtype),
        "arguments": dict(options.vllm_args),
        "prompts": len(prompts),
        **{name: getattr(options, name) for name in ("max_new_tokens", "temperature", "top_p")},
        **({"top_k": options.top_k} if options.top_k else {}),
        **({"drafts": "sampled"} if options.temperature and options.draft_sampling != "greedy" else {}),
        "rows": rows,
        "best": best,
        "verdict": report.verdict(best),
        "notes": report.notes(rows),
    }


@dataclass(frozen=True)
class _Servers:
    """Servers of one target that are all sent the same questions, by concurrency; see `measure_serving`."""

    config: Config
    drafts: Mapping[str, Path]
    sent: Mapping[int, Sequence[Question]]
    engine: Installation
    folder: Path

    def loads(self, name: str | None, depth: int) -> dict[int, Load]:
        """Return what a server with drafts of `depth` tokens did, by concurrency. Start it if there is no record."""
        draft = self.drafts[name] if name is not None else None
        what = f"serve {name}, {depth} draft tokens" if name is not None else "serve without a drafter"
        # The key has the contents of the weights, not where they are, nor the drafter's name among others.
        arguments = server_arguments(self.config, draft, depth, 0)
        if draft is not None:
            arguments["speculative_config"]["model"] = artifacts.weights_fingerprint(str(draft))
        requests = {str(users): [asdict(question) for question in asked] for users, asked in self.sent.items()}
        made_from = provenance.of_server(self.config, arguments, requests, asdict(self.engine))
        file = self.folder / f"server-{depth}-{artifacts.fingerprint(made_from)}.json"
        if (record := read_checked(file, "served")) is not None:
            note(f"{what}: measured before ({file})")
        else:
            record = self._serve(draft, depth, what, self.folder / f"{name or 'none'}-{depth}.log")
            write_checked(file, "served", record, drafter=name)
        return {
            users: ([Answer(**one) for one in record["answers"][str(users)]], Counter(record["counted"][str(users)]))
            for users in self.sent
        }

    def _serve(self, draft: Path | None, depth: int, what: str, log: Path) -> dict[str, Any]:
        """Start a server, let it answer everything, and end it. Return answers and counts by concurrency, as JSON."""
        from eagle31_train.targets.pretrained import out_of_reach  # imports transformers

        options, port = self.config.evaluate, pick_port()
        command = [options.vllm_python, "-m", MODULE, *flags(server_arguments(self.config, draft, depth, port))]
        served: dict[str, Any] = {"answers": {}, "counted": {}}
        note(f"{what}: vLLM starts ({log})")
        with (
            serving(command, port, log, offline=out_of_reach(self.config.target) is not None) as server,
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
                    report.speculation(counted, depth)  # raises, before more is asked, if there are no counts
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
    """Return every prompt, as often as is needed to keep all users busy for at least two turns."""
    options = config.evaluate
    common: dict[str, Any] = {
        "max_tokens": options.max_new_tokens,
        "stop_token_ids": sorted(end_ids),
        "temperature": options.temperature,
        "top_p": options.top_p,
        **WHOLE_DISTRIBUTION,
        "top_k": options.top_k or 0,  # 0 as in the records of earlier measurements; to vLLM it is -1
    }
    seeds = [{"seed": config.seed + i} if options.temperature else {} for i in range(len(prompts))]
    once = [Question(i, prompt.id, prompt.ids, common | seeds[i]) for i, prompt in enumerate(prompts)]
    return once * ceil(2 * concurrency / len(prompts))


def settled(server: Server, answered: int) -> Counter[str]:
    """Return the counters once they include all answers and no longer change: vLLM counts after it has answered."""
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
    raise UserError(f"vLLM's /metrics (HTTP {status}) report {finished}: see {server.log}")
