"""What the card tells of results: every number as it was measured, and what was not measured said so."""

import copy
import re
from dataclasses import replace

import numpy as np
import pytest

from eagle31_train.card_results import sections
from eagle31_train.findings import Finding
from eagle31_train.measure.acceptance import Sheet, headline, tell
from eagle31_train.measure.results import Drift, Measured
from eagle31_train.measure.tables import bracket

DEPTHS = range(1, 5)
UNKNOWN = "nobody knows whether me/other was trained on these prompts"
HOW = {"machine": "a | machine", "dtype": "float32", "max_new_tokens": 24}


def answers(rate, prompts=12):
    generator = np.random.default_rng(round(1000 * rate))
    own = [0.0, 0.1, 0.2, 0.25]
    rest = [(1 - share) / 3 for share in own]
    drift = Drift(rest, rest, rest, own, [1.0, 2.0, 3.0, 4.5], [2.0] * 4)
    reach = [np.minimum(generator.geometric(1 - rate, size=30) - 1, 4).tolist() for _ in range(prompts)]
    return [Measured(f"p{i}", ["chat", "a|b<c>"][i % 2], 31, found, drift) for i, found in enumerate(reach)]


def sheet(name, rates, **more):
    suite, _, perturbation = name.partition(" · ")
    return Sheet(name, suite, perturbation or None, 0.0, 1.0, {n: answers(rate) for n, rate in rates.items()}, **more)


@pytest.fixture(scope="module")
def alone():
    """The manifest of an evaluation: held-out prompts, and those under a perturbation."""
    speeds = {"plain": (90, 9.0), "ours": (90, 6.0)}
    sheets = [
        sheet("heldout", {"ours": 0.6}, speeds=speeds, notes=["see /home/me/notes.txt", "left out p98, p99: too long"]),
        sheet("heldout · no_template", {"ours": 0.4}, notes=["no template"]),
    ]
    result = {**tell(sheets, DEPTHS, 3), **HOW, "title": "ours", "command": "python -m stage x=/home/me/p.jsonl"}
    numbers = result["workloads"][0]["drafters"]["ours"]
    report = {**headline(numbers, 3), "identical": True, "not_measured": ["agent"]}
    return {"report": report, "result": result}


@pytest.fixture(scope="module")
def compared():
    """result.json of a comparison: the second drafter, of two trainings, is the better one."""
    sheets = [
        sheet("heldout", {"theirs": 0.3, "ours": 0.7}, notes=[UNKNOWN, "left out p98, p99: too long"]),
        replace(sheet("mt_bench", {"theirs": 0.5, "ours": 0.5}), temperature=0.7, top_p=0.9),
    ]
    for rows in sheets[0].measured.values():
        for each in rows[:7]:
            each.seen[3] = each.rounds(3)
    identities = {"theirs": ["1"], "ours": ["2", "3"]}
    return {**tell(sheets, DEPTHS, 3), **HOW, "title": "theirs against ours", "command": "x", "identities": identities}


def row(tokens, users, value, **more):
    accepted = {"acceptance_length": 1.357, "acceptance_at_depth": [0.3, 0.05, None]}
    return {
        "drafter": "ours" if tokens else None,
        "draft_tokens": tokens,
        "concurrency": users,
        "requests": 8,
        "ttft": {"mean": 0.0521},
        "tpot": {"mean": None},
        "per_user": [value, value - 1, value + 1],
        "speedup": [value / 20, None, None] if tokens else None,
        "total": 99.54,
        "acceptance": accepted if tokens else None,
        "different": 1 if tokens else 0,
        **more,
    }


SERVING = {
    "definitions": "TTFT: seconds to the first token.",
    "vllm": "0.32.0",
    "dtype": "bfloat16",
    "prompts": 4,
    "max_new_tokens": 48,
    "temperature": 0.0,
    "top_p": 1.0,
    "rows": [row(0, 1, 20.0), row(3, 1, 30.0)],
    "verdict": ["ours: at concurrency 1 num_speculative_tokens=3 is best, with 1.50 × the tokens/s/user."],
    "notes": ["1 of 8 answers are different"],
    "command": "python -m stage evaluate.backend=vllm",
    "machine": "a machine",
    "workload": "mt_bench",
}


def told(evaluation=None, serving=None, comparisons=()):
    wrapped = {"evaluation": evaluation, "serving": serving and {"serving": serving}}
    found = {name: value and Finding(value) for name, value in wrapped.items()}
    return "\n\n".join(sections(found["evaluation"], found["serving"], comparisons))


def cells(text, first):
    """The cells of the row that begins with this one."""
    (line,) = re.findall(rf"^\| {re.escape(first)} \|.*$", text, re.MULTILINE)
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def test_every_depth_has_its_interval_its_shares_and_what_a_perturbation_keeps(alone):
    text = told(alone)
    plain, perturbed = (w["drafters"]["ours"] for w in alone["result"]["workloads"])
    whole, folded = text.split("<details>")
    for depth in map(str, DEPTHS):
        at = int(depth) - 1
        length = bracket(plain["by_depth"][depth]["acceptance_length"])
        shares = [bracket(plain[kind][at], "{:.1%}") for kind in ("cumulative", "conditional")]
        assert re.search(rf"^\| {depth} \| {re.escape(' | '.join([length, *shares]))} \|$", whole, re.MULTILINE)
        length = bracket(perturbed["by_depth"][depth]["acceptance_length"])
        kept = bracket(perturbed["kept"][depth], "{:.1%}")
        assert f"| {depth} | {length} | {kept} | " in folded
        assert re.search(r"\d\.\d{3} \[\d\.\d{3}, \d\.\d{3}\]", length)
    overview = cells(text, "heldout · no\\_template")
    assert overview == [
        "heldout · no\\_template",
        "12",
        "greedy",
        bracket(perturbed["by_depth"]["3"]["acceptance_length"]),
        bracket(perturbed["kept"]["3"], "{:.1%}"),
        "25.0% [25.0%, 25.0%]",
    ]
    assert f"**Acceptance length {bracket(plain['by_depth']['3']['acceptance_length'])} with 3 draft tokens**" in text


def test_drift_is_told_in_short(alone):
    text = told(alone)
    assert "| draft step | attention: first tokens | attention: prompt |" in text
    assert "| 4 | 25.0% | 25.0% | 25.0% | 25.0% | 4.50 | 2.00 |" in text
    without = copy.deepcopy(alone)
    for workload in without["result"]["workloads"]:
        workload["drafters"]["ours"]["drift"] = None
    assert "| draft step |" not in told(without)
    assert "Drift was not measured." in told(without)
    assert "Drift was not measured." not in text


def test_sources_conditions_and_what_is_missing_are_told(alone):
    text = told(alone)
    for name in ("chat", "a\\|b\\<c\\>"):
        found = alone["result"]["workloads"][0]["drafters"]["ours"]["by_source"][name.replace("\\", "")]
        line = f"| {name} | 6 | {found['by_depth']['3']['drafts']} | "
        assert line + bracket(found["by_depth"]["3"]["acceptance_length"]) in text
    assert "Not measured, since none of its prompts was decoded: agent." in text
    assert "On a \\| machine, in float32, with answers of at most 24 tokens, by\n\n```sh\npython -m stage" in text
    assert "15.0 tokens per second with the drafter, 10.0 without (1.50 ×)" in text
    assert text.count("left out p98, p99: too long") == 1
    assert "12 prompts, greedy, no template." in text.replace(";", ",")


def test_what_was_decoded_for_real_is_told(alone):
    by = "Draft and target were run by eagle31's own evaluator: "
    real = "at 3 draft tokens by real speculative decoding, with every output equal to plain decoding of the target"
    same = "other numbers of draft tokens are told from the same outputs"
    assert f"{by}{real}; {same}." in told(alone)
    drawn = copy.deepcopy(alone)
    drawn["report"]["identical"] = False
    drawn["result"]["workloads"][1]["temperature"] = 0.7
    law = "by real speculative decoding at every number of draft tokens, so that outputs are other draws from"
    both = told(drawn)
    assert f"{by}where tokens are chosen greedily, {real}; {same}; where they are sampled, with drafts that" in both
    assert law in both
    drawn["result"]["workloads"][0]["temperature"] = 0.7
    assert "equal to plain decoding" not in told(drawn)
    assert law in told(drawn)


def test_definitions_stand_once(alone, compared):
    text = told(alone, None, [Finding(compared, ours=["ours"])])
    assert text.count("Acceptance length: tokens per draft") == 1
    assert text.count("## What the numbers mean") == 1
    assert "Acceptance length: tokens per draft" in told(None, None, [Finding(compared, ours=["ours"])])
    assert "What the numbers mean" not in told()


def test_no_folder_of_the_machine_is_told(alone):
    text = told(alone)
    assert "/home/me" not in text
    assert "see /path/to/notes.txt" in text
    assert "x=/path/to/p.jsonl" in text


def test_one_workload_says_that_others_were_not_measured(alone):
    one = copy.deepcopy(alone)
    del one["result"]["workloads"][1]
    assert "Other prompts than these, and these under perturbation, were not measured." in told(one)
    assert "were not measured" not in told(alone)


# ---------------------------------------------------------------- serving


def test_serving_is_told_with_its_verdict_and_conditions():
    text = told(serving=SERVING)
    assert f"**{SERVING['verdict'][0].replace('_', chr(92) + '_')}**" in text
    assert "vLLM 0.32.0 on a machine, bfloat16; 4 prompts of mt\\_bench, greedy, at most 48 tokens per answer." in text
    assert "```sh\npython -m stage evaluate.backend=vllm\n```" in text
    assert "| none | 0 | 1 | 52.1 | – | 20.0 [19.0, 21.0] | – | 99.5 | – | – | 0 of 8 |" in text
    ours = "| ours | 3 | 1 | 52.1 | – | 30.0 [29.0, 31.0] | 1.50 | 99.5 | 1.36 | 30.0%, 5.0%, – | 1 of 8 |"
    assert ours in text
    assert "- 1 of 8 answers are different" in text
    assert "TTFT: seconds to the first token." in text
    sampled = told(serving={**SERVING, "temperature": 0.7, "top_p": 0.9})
    assert "sampled at temperature 0.7, top_p 0.9" in sampled


def test_what_was_not_measured_is_said():
    text = told()
    assert "The acceptance of this checkpoint was not measured." in text
    assert "How fast vLLM is with this checkpoint was not measured." in text
    assert "This checkpoint was not compared with others." in text


# ---------------------------------------------------------------- comparisons


def test_a_comparison_is_told_by_verdict_and_difference(compared):
    text = told(comparisons=[Finding(compared, ours=["ours"])])
    assert "This checkpoint is ours, one of 2 trainings that stand under this name." in text
    assert "| prompts | number | of these by real speculation | decoding | ours against theirs |" in text
    won, even = compared["workloads"]
    assert won["verdict"]["ours"]["text"].startswith("ours wins at every number of draft tokens")
    assert f"| heldout | 12 | 7 | greedy | {won['verdict']['ours']['text'].replace('[', chr(92) + '[')[:40]}" in text
    assert "| mt\\_bench | 12 | 0 | sampled at temperature 0.7, top_p 0.9 | " in text
    changes = [bracket(won["differences"]["ours"][str(depth)]["difference"], "{:+.2f}") for depth in DEPTHS]
    assert f"| heldout | {' | '.join(f'**{change}**' for change in changes)} |" in text
    same = [bracket(even["differences"]["ours"][str(depth)]["difference"], "{:+.2f}") for depth in DEPTHS]
    assert f"| mt\\_bench | {' | '.join(same)} |" in text, "what is no difference is not bold"
    lengths = [bracket(won["drafters"][n]["by_depth"]["3"]["acceptance_length"]) for n in ("theirs", "ours")]
    assert f"| heldout | {' | '.join(lengths)} |" in text


def test_a_comparison_tells_what_its_readers_should_know(compared):
    lines = told(comparisons=[Finding(compared, ours=["ours"])]).splitlines()
    assert f"- heldout: {UNKNOWN}; left out p98, p99: too long" in lines
    assert not any(line.startswith("- mt") for line in lines), "of which there is nothing to say"


def test_a_comparison_that_was_served_tells_it(compared):
    serving = {key: value for key, value in SERVING.items() if key not in ("command", "machine")}
    text = told(comparisons=[Finding({**compared, "serving": serving}, ours=["ours"])])
    assert "vLLM 0.32.0, bfloat16; 4 prompts" in text
