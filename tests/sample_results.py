"""Results of made-up drafters, for tests of what is shown of them."""

import numpy as np

from eagle31_train.evaluation.measurement import Counts, Drift, Measurement
from eagle31_train.evaluation.prompts import Prompt
from eagle31_train.evaluation.results import summarise
from eagle31_train.evaluation.workloads import Workload

DEPTHS = range(1, 5)
CONDITIONS = {"machine": "a | processor", "dtype": "float32", "max_new_tokens": 128, "command": "python -m this a>b"}


def measured(name, counts, temperature=0.0, top_p=1.0, notes=()):
    """The workload "SUITE" or "SUITE · PERTURBATION" and its measurements. counts: of each drafter by name, a list of
    Counts, or several of them, one for each training."""
    suite, _, perturbation = name.partition(" · ")
    several = {name: some if some and isinstance(some[0], list) else [some] for name, some in counts.items()}
    rows, *_ = next(iter(several.values()))
    prompts = [Prompt(row.id, row.source, [1, 2, 3]) for row in rows]
    outputs = [[place * place % 11 for place in range(row.tokens)] for row in rows]
    workload = Workload(name, suite, perturbation or None, prompts, temperature, top_p, notes=list(notes))
    trainings = {drafter: [Measurement(outputs, rows) for rows in some] for drafter, some in several.items()}
    return workload, trainings


def answers(rate, prompts=12, drift=True):
    """What was measured of a drafter that gets each token right at this rate."""
    generator = np.random.default_rng(round(1000 * rate))
    rows = []
    for number in range(prompts):
        reach = np.minimum(generator.geometric(1 - rate, size=30) - 1, 4).tolist()
        own = [0.0, 0.1, 0.2, rate / 2]
        rest = [(1 - share) / 4 for share in own]
        states = Drift(rest, [2 * r for r in rest], rest, own, [1, 2, 3, 4 + number], [2.0] * 4) if drift else None
        rows.append(Counts(f"p{number}", ["chat", "a|b<c>"][number % 2], 31, reach, states))
    return rows


def sheet(name, rates, prompts=12, drift=True, **more):
    return measured(name, {drafter: answers(rate, prompts, drift) for drafter, rate in rates.items()}, **more)


def serving():
    accepted = {"drafts": 1234, "acceptance_length": 1.95, "acceptance_at_depth": [0.6, 0.25, None]}
    times = {"ttft": {"mean": 0.05, "p50": 0.041, "p95": 0.0912}, "tpot": dict.fromkeys(("mean", "p50", "p95"))}
    rows = []
    for drafted, users, speed in ((0, 1, 20.0), (0, 16, 9.0), (3, 1, 30.0), (3, 16, 8.0)):
        row = {"drafter": None, "draft_tokens": drafted, "concurrency": users, "requests": 24, "total": 99.5, **times}
        row |= {"per_user": [speed, speed - 1, speed + 1], "speedup": None, "different": 0, "acceptance": None}
        if drafted:
            speedup = [speed / 20, None, None]
            row |= {"drafter": "B", "speedup": speedup, "different": 2, "acceptance": accepted}
        rows.append(row)
    return {
        "vllm": "0.32",
        "dtype": "bfloat16",
        "workload": "heldout",
        "prompts": 12,
        "max_new_tokens": 64,
        "temperature": 0.7,
        "top_p": 1.0,
        "rows": rows,
        "schedules": {"B": {"num_speculative_tokens": 3}},  # of an earlier version, as is by_load
        "by_load": [rows[-1] | {"beside_fixed": [0.98, None, None]}],
        "verdict": ["B: at concurrency 1 num_speculative_tokens=3 is best."],
        "notes": ["B, 3 draft tokens, 1 users: 2 of 24 answers are <different>"],
    }


def result(*sheets, **more):
    return {**summarise(sheets, DEPTHS, 3), "title": "B against <A>", **more}


def comparison():
    """Two drafters, the second the better one, on three workloads, and served."""
    rates = {"A": 0.5, "B": 0.7}
    sheets = [
        sheet("heldout", rates, notes=["first turns & no more"]),
        sheet("heldout · system_long", {"A": 0.3, "B": 0.6}),
        sheet("mt_bench", rates, prompts=6),
    ]
    compared = result(*sheets, serving=serving(), **CONDITIONS)
    compared["workloads"][0]["tokens_per_second"] = {"plain": 10.0, "B": 15.0}
    return compared


def alone():
    """One drafter on held-out prompts, and on those under a perturbation."""
    sheets = [sheet("heldout", {"B": 0.6}, notes=["see /home/me/notes"]), sheet("heldout · x", {"B": 0.4})]
    return result(*sheets, **CONDITIONS | {"command": "python -m stage x=/home/me/p.jsonl"})
