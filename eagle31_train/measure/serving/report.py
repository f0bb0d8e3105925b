"""What the answers say: latencies, speeds, and how many tokens to draft at each concurrency, if any.

The report, as JSON has it (`measure_serving` gives it):

    {"definitions": DEFINITIONS, "vllm": version, "machine": what it ran on, "dtype", "arguments": evaluate.vllm_args,
     "prompts", "max_new_tokens", "temperature", "top_p",
     "rows": [{"drafter": NAME or null, "draft_tokens": 0 without one, "concurrency", "requests", "output_tokens",
               "seconds", "in_flight", "ttft": {"mean", "p50", "p95"}, "tpot": likewise, "per_user": [value, low, high],
               "total": tokens/s, "speedup": [value, low, high] or null without a drafter, "total_speedup": or null,
               "different": how many, or null when sampling, "acceptance": `counters.speculation` or null,
               "counted": {"requests", "output_tokens", "ttft", "tpot", "preemptions"} of vLLM itself}],
     "best": [{"drafter", "concurrency", "draft_tokens": 0 if speculation does not pay, "speedup": [value, low, high]
               of the best number of draft tokens, "tried": that number}],
     "verdict": [a sentence for each drafter], "notes": [what else must be known, often nothing]}

Times are in seconds. A null in an interval: too few prompts for one.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from eagle31_train.measure.intervals import FEW, Estimate, ratios
from eagle31_train.measure.serving import counters
from eagle31_train.measure.serving.load import Answer

DEFINITIONS = (
    "TTFT: seconds from sending a request to its first token. TPOT: seconds per token after the first, of one request. "
    "tokens/s/user: tokens after the first over the seconds that their users waited for them, sums over requests. "
    "total: all tokens over the seconds from the first request to the last token. speed-up: tokens/s/user over that "
    "without a drafter, the same prompts at the same concurrency; [95 % interval, by bootstrap over prompts: what the "
    "machine did between two servers is not in it]. accepted: tokens of each verification, the target's own included; "
    "by position: share of the drafts whose tokens up to there were accepted; both as vLLM counts. different: answers "
    "that are not, token for token, those without a drafter at the first concurrency; where the arithmetic is rounded, "
    "other requests in a batch can change an answer."
)
Row = dict[str, Any]


def speed(answers: Sequence[Answer], over: Sequence[Answer] | None = None) -> Estimate:
    """Tokens/s/user; with `over`, answers to the same questions, the paired ratio of the two.

    Prompts are what the interval is over: one that was sent several times counts as one.
    """
    sums = np.zeros((2, 1 + max(answer.prompt for answer in answers), 1))
    for answer in answers:
        sums[:, answer.prompt, 0] += len(answer.tokens) - 1, answer.last - answer.first
    ours = ratios(*sums)
    return ours if over is None else ours / speed(over)


def row(
    drafter: str | None,
    draft_tokens: int,
    concurrency: int,
    answers: Sequence[Answer],
    counted: Counter[str],
    plain: Sequence[Answer] | None,
    reference: Sequence[Answer] | None,
) -> Row:
    """One line of the report.

    Args:
        counted: what vLLM counted meanwhile.
        plain: the same questions without a drafter at this concurrency; None for that itself.
        reference: the answers that these are compared with, by prompt; None where they need not be equal.
    """
    tokens = sum(len(answer.tokens) for answer in answers)
    seconds = tokens / total(answers)
    expected = {answer.prompt: answer.tokens for answer in reference or ()}
    return {
        "drafter": drafter,
        "draft_tokens": draft_tokens,
        "concurrency": concurrency,
        "requests": len(answers),
        "output_tokens": tokens,
        "seconds": seconds,
        "in_flight": sum(answer.last - answer.sent for answer in answers) / seconds,
        "ttft": _spread([answer.ttft for answer in answers]),
        "tpot": _spread([answer.tpot for answer in answers if answer.tpot is not None]),
        "per_user": speed(answers).intervals()[0],
        "total": total(answers),
        "speedup": None if plain is None else speed(answers, plain).intervals()[0],
        "total_speedup": None if plain is None else total(answers) / total(plain),
        "different": None if reference is None else sum(a.tokens != expected[a.prompt] for a in answers),
        "acceptance": counters.speculation(counted, draft_tokens) if draft_tokens else None,
        "counted": {
            "requests": round(counted[counters.FINISHED]),
            "output_tokens": round(counted[counters.TOKENS]),
            "ttft": counters.mean(counted, counters.TTFT),
            "tpot": counters.mean(counted, counters.TPOT),
            "preemptions": round(counted[counters.PREEMPTIONS]),
        },
    }


def total(answers: Sequence[Answer]) -> float:
    """Tokens per second of all users together."""
    seconds = max(answer.last for answer in answers) - min(answer.sent for answer in answers)
    return sum(len(answer.tokens) for answer in answers) / seconds


def _spread(values: list[float]) -> dict[str, float | None]:
    if not values:
        return {"mean": None, "p50": None, "p95": None}
    p50, p95 = np.quantile(values, [0.5, 0.95])
    return {"mean": float(np.mean(values)), "p50": float(p50), "p95": float(p95)}


def best(rows: Sequence[Row]) -> list[Row]:
    """The number of draft tokens with the greatest speed-up, for each drafter and concurrency; 0 where none pays.

    It pays where all of its interval is above one; without an interval (a single prompt) nothing is shown. One that
    pays is better than a greater speed-up that may be none. The best of several is somewhat flattered by the choice.
    """
    found: list[Row] = []
    tried = [one for one in rows if one["speedup"] is not None and one["speedup"][0] is not None]
    for drafter, concurrency in dict.fromkeys((one["drafter"], one["concurrency"]) for one in tried):
        of = [one for one in tried if (one["drafter"], one["concurrency"]) == (drafter, concurrency)]
        first = max(of, key=lambda one: (_pays(one), one["speedup"][0]))
        found.append(
            {
                "drafter": drafter,
                "concurrency": concurrency,
                "draft_tokens": first["draft_tokens"] if _pays(first) else 0,
                "speedup": first["speedup"],
                "tried": first["draft_tokens"],
            }
        )
    return found


def _pays(one: Row) -> bool:
    low = one["speedup"][1]
    return low is not None and low > 1


def verdict(chosen: Sequence[Row], prompts: int) -> list[str]:
    """What to serve with, a sentence for each drafter."""
    sentences = []
    for drafter in dict.fromkeys(one["drafter"] for one in chosen):
        of = [one for one in chosen if one["drafter"] == drafter]
        parts = [f"at concurrency {one['concurrency']} {_advice(one)}" for one in of]
        if not any(one["draft_tokens"] for one in of):
            parts.append("so serve without --speculative-config")
        if prompts < FEW:
            parts.append(f"{prompts} prompts are too few to rely on this")
        sentences.append(f"{drafter}: {'; '.join(parts)}.")
    return sentences


def _advice(one: Row) -> str:
    value, low, high = one["speedup"]
    much = f"{value:.2f} × the tokens/s/user" + (f" [{low:.2f}, {high:.2f}]" if low is not None else "")
    if one["draft_tokens"]:
        return f"num_speculative_tokens={one['draft_tokens']} is best, with {much}"
    if low is None or low <= 1 <= high:
        return f"no gain can be told: num_speculative_tokens={one['tried']}, the best, has {much}"
    return f"speculation does not pay: num_speculative_tokens={one['tried']}, the best, has {much}"


def notes(rows: Sequence[Row]) -> list[str]:
    """What went otherwise than a measurement should, row by row."""
    told = []
    for one in rows:
        where = f"{one['drafter'] or 'no drafter'}, {one['draft_tokens']} draft tokens, {one['concurrency']} users: "
        counted = one["counted"]
        if one["different"]:
            told.append(f"{where}{one['different']} of {one['requests']} answers are different")
        if (counted["requests"], counted["output_tokens"]) != (one["requests"], one["output_tokens"]):
            told.append(
                f"{where}vLLM counts {counted['requests']} requests and {counted['output_tokens']} tokens, but "
                f"{one['requests']} and {one['output_tokens']} came"
            )
        if counted["preemptions"]:
            told.append(
                f"{where}vLLM put off {counted['preemptions']} requests for want of memory, which others waited for: "
                "give its cache more"
            )
    return told


HEADS = ["drafter", "draft tokens", "users", "TTFT ms", "p50", "p95", "TPOT ms", "p50", "p95", "tokens/s/user", "total",
         "speed-up", "accepted", "by position", "different"]  # fmt: skip


def table(report: Row) -> str:
    """The report for a terminal."""
    lines = [HEADS]
    for one in report["rows"]:
        times = [_milliseconds(one[kind][key]) for kind in ("ttft", "tpot") for key in ("mean", "p50", "p95")]
        told = one["acceptance"] or {"acceptance_length": None, "acceptance_at_depth": []}
        length = told["acceptance_length"]
        speeds = [_interval(one["per_user"], ".1f"), f"{one['total']:.1f}", _interval(one["speedup"], ".2f")]
        accepted = ["–" if length is None else f"{length:.2f}", _shares(told["acceptance_at_depth"])]
        different = "–" if one["different"] is None else f"{one['different']} of {one['requests']}"
        counts = [one["drafter"] or "none", str(one["draft_tokens"]), str(one["concurrency"])]
        lines.append([*counts, *times, *speeds, *accepted, different])
    widths = [max(len(line[i]) for line in lines) for i in range(len(HEADS))]
    text = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
    return "\n".join([*text, "", *report["verdict"], *report["notes"], "", report["definitions"]])


def _milliseconds(value: float | None) -> str:
    return "–" if value is None else f"{1000 * value:.1f}"


def _shares(values: list[float | None]) -> str:
    return " ".join("–" if value is None else f"{value:.2f}" for value in values) or "–"


def _interval(values: list[float | None] | None, form: str) -> str:
    if values is None or values[0] is None:
        return "–"
    if values[1] is None:
        return f"{values[0]:{form}}"
    return f"{values[0]:{form}} [{values[1]:{form}}, {values[2]:{form}}]"
