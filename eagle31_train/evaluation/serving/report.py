"""The report of a serving measurement: latencies, speeds, and how many tokens to draft at each concurrency.

As JSON (`measure_serving` makes it):

    {"vllm": version, "machine": what it ran on, "dtype", "arguments": evaluate.vllm_args,
     "prompts", "max_new_tokens", "temperature", "top_p", "top_k" if set,
     "rows": [{"drafter": NAME or null, "draft_tokens": 0 without one, "concurrency",
               "requests", "output_tokens", "seconds", "ttft": {"mean", "p50", "p95"}, "tpot": likewise,
               "per_user": [value, low, high],
               "total": tokens/s, "speedup": [value, low, high] or null without a drafter or if either bunched,
               "different": how many, or null when sampling, "acceptance": `speculation` or null,
               "counted": {"requests", "output_tokens", "preemptions"} of vLLM itself,
               "bunched": of vLLM's time from first to last tokens, the share that passed here, if it is too small}],
     "best": [{"drafter", "concurrency", "draft_tokens": 0 if speculation does not pay, "speedup": [value, low, high]
               of the best number of draft tokens, "tried": that number}],
     "verdict": [a line for each of these], "notes": [what else must be known, often nothing]}

Times are in seconds. A null in an interval: too few prompts for one. Earlier versions also measured schedules of draft
tokens ("schedules", "by_load") and rows of a drafter that drafts nothing, of 0 draft tokens.
"""

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from eagle31_train.common.errors import UserError
from eagle31_train.evaluation.intervals import Estimate, Interval, bracket, ratios
from eagle31_train.evaluation.measurement import acceptance
from eagle31_train.evaluation.serving.server import Answer

Row = dict[str, Any]
# Prometheus' text: a name, labels, a value.
_LINE = re.compile(r"^(vllm:[\w:]+?)(?:\{(.*)\})? ([^ ]+)$", re.MULTILINE)
_POSITION = re.compile(r'position="(\d+)"')
DRAFTS = "vllm:spec_decode_num_drafts_total"
PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
FINISHED = "vllm:request_success_total"
TOKENS = "vllm:generation_tokens_total"
PREEMPTIONS = "vllm:num_preemptions_total"
DECODING = "vllm:request_decode_time_seconds_sum"
HELD_UP = 0.8  # share of vLLM's own time from first to last tokens below which they came in bunches


def speed(answers: Sequence[Answer]) -> Estimate:
    """Return tokens/s/user, over prompts: one that was sent several times counts as one."""
    sums = np.zeros((2, 1 + max(answer.prompt for answer in answers), 1))
    for answer in answers:
        sums[:, answer.prompt, 0] += len(answer.tokens) - 1, answer.last - answer.first
    return ratios(*sums)


def row(
    drafter: str | None,
    draft_tokens: int,
    concurrency: int,
    answers: Sequence[Answer],
    counted: Counter[str],
    plain: Sequence[Answer] | None,
    reference: Sequence[Answer] | None,
) -> Row:
    """Return one row of the report.

    counted: what vLLM counted meanwhile. plain: answers to the same questions without a drafter; None if `answers` are
    those, or if those came in bunches. reference: answers that `answers` are compared with; None if they need not be
    equal."""
    tokens = sum(len(answer.tokens) for answer in answers)
    seconds = max(answer.last for answer in answers) - min(answer.sent for answer in answers)
    expected = {answer.prompt: answer.tokens for answer in reference or ()}
    decoding = counted[DECODING] or None  # in seconds; older versions of vLLM may not count it
    share = sum(answer.last - answer.first for answer in answers) / decoding if decoding else 1.0
    bunched = share < HELD_UP
    return {
        "drafter": drafter,
        "draft_tokens": draft_tokens,
        "concurrency": concurrency,
        "requests": len(answers),
        "output_tokens": tokens,
        "seconds": seconds,
        "ttft": _spread([answer.ttft for answer in answers]),
        "tpot": _spread([answer.tpot for answer in answers if answer.tpot is not None]),
        "per_user": speed(answers).intervals()[0],
        "total": tokens / seconds,  # of all users together
        "speedup": None if plain is None or bunched else (speed(answers) / speed(plain)).intervals()[0],
        "different": None if reference is None else sum(a.tokens != expected[a.prompt] for a in answers),
        "acceptance": speculation(counted, draft_tokens) if draft_tokens else None,
        "counted": {
            "requests": round(counted[FINISHED]),
            "output_tokens": round(counted[TOKENS]),
            "preemptions": round(counted[PREEMPTIONS]),
        },
        **({"bunched": share} if bunched else {}),
    }


def _spread(values: list[float]) -> dict[str, float | None]:
    if not values:
        return {"mean": None, "p50": None, "p95": None}
    p50, p95 = np.quantile(values, [0.5, 0.95])
    return {"mean": float(np.mean(values)), "p50": float(p50), "p95": float(p95)}


def best(rows: Sequence[Row]) -> list[Row]:
    """Return the number of draft tokens with the greatest speed-up, for each drafter and concurrency; 0 if none pays.

    A number pays if its whole interval is above one. It goes before one with a greater speed-up that does not pay."""
    tried: dict[tuple[str, int], list[Row]] = {}
    for one in rows:
        if one["speedup"] is not None and one["speedup"][0] is not None:
            tried.setdefault((one["drafter"], one["concurrency"]), []).append(one)
    chosen: list[Row] = []
    for (drafter, concurrency), some in tried.items():
        first = max(some, key=lambda one: (_pays(one["speedup"]), one["speedup"][0]))
        speedup, depth = first["speedup"], first["draft_tokens"]
        row = {"drafter": drafter, "concurrency": concurrency, "draft_tokens": depth if _pays(speedup) else 0}
        chosen.append({**row, "speedup": speedup, "tried": depth})
    return chosen


def _pays(speedup: Interval) -> bool:
    return (speedup[1] or 0) > 1


def verdict(chosen: Sequence[Row]) -> list[str]:
    """Say how many tokens to draft, on a line for each drafter and concurrency."""
    return [
        f"{one['drafter']} at concurrency {one['concurrency']}: "
        f"{'' if one['draft_tokens'] else 'no gain shown, '}best with num_speculative_tokens={one['tried']}, "
        f"{bracket(one['speedup'], '{:.2f}')} × the tokens/s/user"
        for one in chosen
    ]


def notes(rows: Sequence[Row]) -> list[str]:
    """Say what did not go as in a good measurement, row by row."""
    lines = []
    for one in rows:
        where = f"{one['drafter'] or 'no drafter'}, {one['draft_tokens']} draft tokens, {one['concurrency']} users: "
        counted, came = one["counted"], (one["requests"], one["output_tokens"])
        if one["different"]:
            different = f"{one['different']} of {one['requests']} answers are different"
            lines.append(f"{where}{different} (rounding depends on what else is in a batch)")
        if (counted["requests"], counted["output_tokens"]) != came:
            lines.append(f"{where}requests and tokens are {came}, but vLLM counts {counted}")
        if "bunched" in one:
            lines.append(
                f"{where}tokens came in bunches (in {one['bunched']:.0%} of the time that vLLM took for them), so the "
                "tokens/s/user are too high: remove the servers' records, and measure again on an idle machine with "
                "overwrite=true"
            )
        if counted["preemptions"]:
            lines.append(f"{where}{counted['preemptions']} preemptions: give vLLM's cache more memory")
    return lines


def parse(text: str) -> Counter[str]:
    """Parse the counters of /metrics by name, those of a position by NAME[i]. Histograms have only _sum and _count."""
    counters: Counter[str] = Counter()
    for name, labels, value in _LINE.findall(text):
        if name.endswith("_bucket"):
            continue
        at = _POSITION.search(labels)
        counters[f"{name}[{at[1]}]" if at else name] += float(value)  # type: ignore[assignment]
    return counters


def speculation(counted: Counter[str], draft_tokens: int) -> dict[str, Any]:
    """Return acceptance as vLLM counts it. UserError if this vLLM has no such counters."""
    if missing := [name for name in (DRAFTS, f"{PER_POSITION}[0]") if name not in counted]:
        raise UserError(f"this vLLM does not report {missing[0]}: use vLLM 0.32, whose metrics eagle31 reads")
    positions = [round(counted[f"{PER_POSITION}[{i}]"]) for i in range(draft_tokens)]
    return acceptance(round(counted[DRAFTS]), positions)
