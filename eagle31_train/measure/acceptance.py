"""All numbers of an evaluation or comparison, as plain data: what tables, pictures, pages and cards are made from.

The result, as JSON. An interval is [value, low, high], with null for what cannot be told; K is a number of draft
tokens, as text; N is a drafter's name:

    definitions     what the numbers mean
    draft_tokens    K of the headline
    drafters        [N, …]; the others are compared with the first
    workloads       [workload, …], of which each has
        name, suite, perturbation (or null), temperature, top_p, prompts, notes
        verified    prompts that were decoded by real speculation with every drafter
        tokens_per_second  {"plain" or N: of real decoding}, of a drafter that was measured alone
        drafters    {N: numbers}
        differences {N: {K: {difference: interval, ratio: interval}}}  of acceptance lengths, N - first and N / first;
                    of a perturbed workload kept_ratio: interval, too, which is kept of N / kept of the first
        verdict     {N: {text, better: {K: the better one's name, or null}}}
    and of a drafter on a workload, numbers has
        prompts, generated_tokens
        by_depth    {K: {acceptance_length: interval, drafts, accepted_per_position: [counts]}}
        cumulative, conditional  [interval of position 1, 2, …], of drafts of the largest K
        drift       {sink, prompt, verified, own, rms, entropy: [interval of step 1, 2, …]}, or null
        by_source   {source: prompts … conditional, as above}
        by_training [{K: acceptance length}], where a drafter has several trainings
        kept        {K: interval}, of a perturbed workload: acceptance length there / on the plain form of these prompts

Several rows of a prompt are those of as many trainings of one drafter: they count as one prompt, and are drawn again
together.
"""

import os
import platform
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from eagle31_train.measure.drift import MEASURES, drift_sums
from eagle31_train.measure.intervals import LEVEL, RESAMPLES, Estimate, Interval, ratios
from eagle31_train.measure.results import Measured
from eagle31_train.measure.verdicts import verdict
from eagle31_train.schema import UserError

if TYPE_CHECKING:
    from eagle31_train.measure.prompts import Prompt

Key = tuple[str, str]
Counts = NDArray[np.int64]


@dataclass(frozen=True)
class Sheet:
    """What was measured on one workload: of every drafter by name, the same prompts each.

    speeds: tokens and seconds of real decodings, "plain" and by name of the drafter. notes: what a reader should know.
    """

    name: str
    suite: str
    perturbation: str | None
    temperature: float
    top_p: float
    measured: dict[str, list[Measured]]
    speeds: dict[str, tuple[int, float]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def tell(sheets: Sequence[Sheet], depths: Sequence[int], draft_tokens: int) -> dict[str, Any]:
    """The result of some workloads.

    Args:
        depths: numbers of draft tokens, ascending.
        draft_tokens: that of the headline.

    Raises:
        UserError: drafters of one workload were measured on different prompts, or nothing was drafted.
    """
    plain = {sheet.suite: sheet for sheet in sheets if sheet.perturbation is None}
    return {
        "definitions": definitions(max(depths)),
        "draft_tokens": draft_tokens,
        "drafters": list(dict.fromkeys(name for sheet in sheets for name in sheet.measured)),
        "workloads": [_workload(sheet, plain.get(sheet.suite), depths, draft_tokens) for sheet in sheets],
    }


def definitions(deepest: int) -> str:
    """What the numbers mean, line by line; shares by position are of drafts of `deepest` tokens."""
    return (
        "Draft: one verification. The drafter proposes n draft tokens, the target reads them in one forward pass, "
        "accepts those before the first that it would not have written itself, and adds one token of its own, the "
        "bonus token.\n"
        "Acceptance length: tokens per draft, the bonus token included, which is 1 + accepted tokens / drafts, over "
        "all drafts of all prompts; from 1 to n + 1. Drafted tokens that the target agrees with past the end of an "
        "answer count as accepted, as vLLM counts them.\n"
        f"Cumulative acceptance at position k, of drafts of {deepest}: share of all drafts of {deepest} tokens whose "
        "first k tokens were accepted.\n"
        f"Conditional acceptance at position k, if reached, of drafts of {deepest}: the same share among the drafts "
        "whose first k - 1 tokens were accepted.\n"
        "Several trainings under one name: generated tokens and drafts are sums over them, and acceptance is of all "
        "their drafts, so that a training weighs by how many drafts it made.\n"
        "Wins: where the interval of the difference leaves out 0, and each training of the one is ahead of each of the "
        "other.\n"
        "Kept, of the plain form: acceptance length on a perturbed form / that on the plain form of the same prompts. "
        "Who keeps 3 % more has a share 1.03 times that of the other.\n"
        "Drift: of drafts from every place of the target's answers, by draft step. Shares of the attention on the "
        "first 4 tokens of the sequence, the rest of the prompt, what the target has verified, and the drafter's own "
        "tokens, which sum to one; the root mean square (RMS) of the state that the step reads; the entropy of the "
        "draft distribution.\n"
        f"[low, high]: {LEVEL:.0%} interval by bootstrap over prompts ({RESAMPLES:,} resamples, widened for few "
        "prompts by Student's t; the same resamples for every drafter, so differences are paired). Each holds for its "
        "number alone: of 20 differences that are none, one is expected to look like one. They speak of other prompts "
        "of the same kind, not of other training seeds."
    )


def headline(numbers: dict[str, Any], draft_tokens: int) -> dict[str, Any]:
    """Counts and shares at one number of draft tokens, as the manifest's report has them; None where nothing was."""
    found = numbers["by_depth"][str(draft_tokens)]
    drafts, per_position = found["drafts"], found["accepted_per_position"]
    before = [drafts, *per_position]
    return {
        "prompts": numbers["prompts"],
        "generated_tokens": numbers["generated_tokens"],
        "drafts": drafts,
        "accepted": sum(per_position),
        "accepted_per_position": per_position,
        "acceptance_length": 1 + sum(per_position) / drafts if drafts else None,
        "acceptance_at_depth": [count / drafts if drafts else None for count in per_position],
        "conditional_acceptance": [
            count / reached if reached else None for reached, count in zip(before, per_position, strict=False)
        ],
    }


def report(numbers: dict[str, Any], draft_tokens: int) -> dict[str, Any]:
    """The manifest's report of one drafter on one workload: the headline, its sources, and every depth's interval."""
    return {
        **headline(numbers, draft_tokens),
        "draft_tokens": draft_tokens,
        "by_source": {name: headline(found, draft_tokens) for name, found in numbers["by_source"].items()},
        "by_depth": numbers["by_depth"],
        "cumulative": numbers["cumulative"],
        "conditional": numbers["conditional"],
        "drift": numbers["drift"],
    }


def describe(prompt: "Prompt", output: list[int], measured: Measured, draft_tokens: int) -> dict[str, Any]:
    """One prompt of the manifest; `accepted` has an entry for every draft, in order."""
    accepted = rounds(measured, draft_tokens)
    return {
        "id": prompt.id,
        "source": prompt.source,
        "drafts": len(accepted),
        "accepted_per_position": [sum(count > position for count in accepted) for position in range(draft_tokens)],
        "accepted": accepted,
        "prompt_ids": prompt.ids,
        "output_ids": output,
    }


def machine(device: torch.device, threads: bool = True) -> str:
    """What was measured on; `threads`: with how many this process computes on a CPU, else with how many it has."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.is_file() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    count, of = (torch.get_num_threads(), "thread") if threads else (os.cpu_count() or 1, "core")
    name = names[0] if names else platform.processor() or platform.machine()
    return f"{name}, {count} {of}{'s' if count > 1 else ''}"


def rounds(measured: Measured, draft_tokens: int) -> list[int]:
    """Accepted tokens of every verification: as it follows from all places, or, where these were not run, as seen."""
    return measured.rounds(draft_tokens) if measured.accepted else measured.seen.get(draft_tokens, [])


# ---------------------------------------------------------------- one workload


def _workload(sheet: Sheet, plain: Sheet | None, depths: Sequence[int], draft_tokens: int) -> dict[str, Any]:
    keys = {name: _keys(measured) for name, measured in sheet.measured.items()}
    first, *others = sheet.measured
    for name in others:
        if set(keys[name]) != set(keys[first]):
            raise UserError(
                f"{name} and {first} were measured on different prompts of {sheet.name}: measure them together"
            )
    drafters = {name: _drafter(measured, depths) for name, measured in sheet.measured.items()}
    if not any(entry["drafts"] for numbers in drafters.values() for entry in numbers["by_depth"].values()):
        ways = f"other prompts, or leave out {sheet.perturbation}" if sheet.perturbation else "other prompts"
        raise UserError(f"{sheet.name}: every answer ended with its first token, so nothing was drafted: choose {ways}")
    kept = _kept(sheet, plain, depths)
    for name, share in kept.items():
        drafters[name]["kept"] = _by_depth(depths, share.intervals())
    more = {name: kept[name] / kept[first] for name in kept if first in kept}
    lengths = {name: acceptance_lengths(sheet.measured[name], depths, keys[first]) for name in sheet.measured}
    differences = {name: _difference(lengths[first], lengths[name], more.get(name), depths) for name in others}
    trainings = {name: numbers.get("by_training") or [_values(numbers)] for name, numbers in drafters.items()}
    count = len(keys[first])
    unseen = {(each.source, each.id) for rows in sheet.measured.values() for each in rows if not each.seen}
    return {
        "name": sheet.name,
        "suite": sheet.suite,
        "perturbation": sheet.perturbation,
        "temperature": sheet.temperature,
        "top_p": sheet.top_p,
        "prompts": count,
        "verified": count - len(unseen),
        "notes": sheet.notes,
        **({"tokens_per_second": {n: tokens / s for n, (tokens, s) in sheet.speeds.items()}} if sheet.speeds else {}),
        "drafters": drafters,
        "differences": differences,
        "verdict": {
            name: verdict(first, name, found, count, trainings, draft_tokens) for name, found in differences.items()
        },
    }


def _drafter(measured: list[Measured], depths: Sequence[int]) -> dict[str, Any]:
    sources: dict[str, list[Measured]] = {}
    for each in measured:
        sources.setdefault(each.source, []).append(each)
    return {
        **_numbers(measured, depths),
        "drift": _drift(measured),
        **({"by_training": _trainings(measured, depths)} if len(measured) > len(_keys(measured)) else {}),
        "by_source": {source: _numbers(sources[source], depths) for source in sorted(sources)},
    }


def _numbers(measured: list[Measured], depths: Sequence[int]) -> dict[str, Any]:
    keys = _keys(measured)
    lengths = acceptance_lengths(measured, depths, keys).intervals()
    reached = {depth: _reached(measured, depth, keys) for depth in depths}
    deepest = reached[max(depths)]
    return {
        "prompts": len(keys),
        "generated_tokens": sum(each.tokens for each in measured),
        "by_depth": {
            str(depth): {
                "acceptance_length": length,
                "drafts": int(reached[depth][:, 0].sum()),
                "accepted_per_position": reached[depth][:, 1:].sum(0).tolist(),
            }
            for depth, length in zip(depths, lengths, strict=True)
        },
        "cumulative": _shares(ratios(deepest[:, 1:], deepest[:, 0])),
        "conditional": _shares(ratios(deepest[:, 1:], deepest[:, :-1])),
    }


def _shares(found: Estimate) -> list[Interval]:
    """Of none or all, no resample is different: how far from there the truth may be, they cannot tell."""
    return [[value, None, None] if value in (0, 1) else [value, low, high] for value, low, high in found.intervals()]


def acceptance_lengths(measured: list[Measured], depths: Sequence[int], keys: Sequence[Key]) -> Estimate:
    """Acceptance length at each depth, over the prompts of `keys` in this order."""
    reached = [_reached(measured, depth, keys) for depth in depths]
    return ratios(np.stack([r.sum(1) for r in reached], 1), np.stack([r[:, 0] for r in reached], 1))


def _reached(measured: Iterable[Measured], draft_tokens: int, keys: Sequence[Key]) -> Counts:
    """[P, draft_tokens + 1]: drafts of each prompt whose first 0 (so all of them), 1, 2, … tokens were accepted."""
    row = {key: index for index, key in enumerate(keys)}
    found = np.zeros((len(keys), draft_tokens + 1), dtype=np.int64)
    for each in measured:
        if (index := row.get((each.source, each.id))) is not None:
            exactly = np.bincount(rounds(each, draft_tokens), minlength=draft_tokens + 1)
            found[index] += exactly[::-1].cumsum()[::-1]
    return found


def _drift(measured: list[Measured]) -> dict[str, list[Interval]] | None:
    told = [each for each in measured if each.drift is not None]
    if not told:
        return None
    sums, slots = drift_sums(told)
    keys = _keys(told)
    prompt = np.array([[key == (each.source, each.id) for each in told] for key in keys], dtype=np.float64)  # [P, rows]
    return {name: ratios(prompt @ sums[name], prompt @ slots).intervals() for name in MEASURES}


def _trainings(measured: list[Measured], depths: Sequence[int]) -> list[dict[str, float | None]]:
    """Acceptance lengths of each training: the first rows of all prompts are of the first, the second of the second."""
    rows: dict[Key, list[Measured]] = {}
    for each in measured:
        rows.setdefault((each.source, each.id), []).append(each)
    trainings = zip(*rows.values(), strict=True)
    keys = list(rows)
    lengths = [acceptance_lengths(list(training), depths, keys).intervals() for training in trainings]
    return [_by_depth(depths, [value for value, _, _ in of]) for of in lengths]


def _values(numbers: dict[str, Any]) -> dict[str, float | None]:
    return {depth: found["acceptance_length"][0] for depth, found in numbers["by_depth"].items()}


def _kept(sheet: Sheet, plain: Sheet | None, depths: Sequence[int]) -> dict[str, Estimate]:
    """What a perturbation leaves of each drafter's acceptance length, over the prompts that have both forms."""
    if plain is None or sheet.perturbation is None:
        return {}
    both = set(_keys(next(iter(plain.measured.values()))))
    keys = [key for key in _keys(next(iter(sheet.measured.values()))) if key in both]  # one order: the draws are paired
    return {
        name: acceptance_lengths(measured, depths, keys) / acceptance_lengths(plain.measured[name], depths, keys)
        for name, measured in sheet.measured.items()
        if keys and name in plain.measured
    }


def _keys(measured: Iterable[Measured]) -> list[Key]:
    return list(dict.fromkeys((each.source, each.id) for each in measured))


def _by_depth(depths: Sequence[int], values: Sequence[Any]) -> dict[str, Any]:
    return dict(zip(map(str, depths), values, strict=True))


def _difference(first: Estimate, other: Estimate, kept: Estimate | None, depths: Sequence[int]) -> dict[str, Any]:
    told = {"difference": other - first, "ratio": other / first, **({"kept_ratio": kept} if kept else {})}
    rows = zip(*(estimate.intervals() for estimate in told.values()), strict=True)
    return _by_depth(depths, [dict(zip(told, row, strict=True)) for row in rows])
