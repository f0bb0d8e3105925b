"""The result of an evaluation or comparison as plain data: what tables, pictures, pages and cards are made from.

In JSON, an interval is [value, low, high], with null for what cannot be told; K is a number of draft tokens, as text; N
is a drafter's name:

    draft_tokens    K of the headline
    drafters        [N, …]; the others are compared with the first
    dtype, weights  of the computation; to which the drafters' weights were rounded before it
    workloads       [workload, …], each of which has
        name, suite, perturbation (or null), temperature, top_p, top_k (if set), prompts, notes
        drafts      "sampled", if the drafter's tokens were drawn, too
        verified    prompts that were decoded by real speculation with every drafter, without ties
        tokens_per_second  {"plain" or N: of real decoding, one prompt at a time}, if one drafter was measured alone
        timed       {prompts: how many, the first ones, by_depth: {K: their acceptance length}}, likewise
        drafters    {N: numbers}
        differences {N: {K: {difference: interval, ratio: interval}}}  of acceptance lengths, N - first and N / first;
                    for a perturbed workload, also kept_ratio: interval, which is kept of N / kept of the first
        verdict     {N: {better: {K: the better one's name, or null}}}
    and a drafter's numbers on a workload have
        prompts, generated_tokens
        by_depth    {K: {acceptance_length: interval, drafts, accepted_per_position: [counts]}}
        cumulative, conditional  [interval of position 1, 2, …], of drafts of the largest K
        drift       {sink, prompt, verified, own, rms, entropy: [interval of step 1, 2, …]}, or null
        by_source   {source: prompts … conditional, as above}
        by_repetition  {"repeating" or "new": {K: {acceptance_length: interval, drafts}}}, or {}
        by_training [{K: acceptance length}], where a drafter has several trainings
        kept        {K: interval}, for a perturbed workload: acceptance length on it / on these prompts' plain form

Several trainings of one drafter count as one: a prompt's counts are sums over them, and are resampled together.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eagle31_train.common.errors import UserError
from eagle31_train.evaluation.intervals import Estimate, Interval, ratios
from eagle31_train.evaluation.measurement import Counts, Drift, Measurement, rounds
from eagle31_train.evaluation.prompts import Prompt
from eagle31_train.evaluation.workloads import Workload

Drafters = Mapping[str, Sequence[Measurement]]  # by name: one measurement for each training
Trainings = Sequence[Sequence[Counts]]  # by training, then by prompt; all have the same prompts, in one order
# A text repeats itself where its newest TOKENS tokens occurred before in this order, in prompt or answer. What followed
# could then be looked up without a drafter. Small targets repeat themselves often.
TOKENS = 4
ELSEWHERE = "was measured on"  # in a note that belongs beside speeds


def summarise(
    measured: Sequence[tuple[Workload, Drafters]], depths: Sequence[int], draft_tokens: int
) -> dict[str, Any]:
    """Return the result of some workloads, which all have the same drafters and trainings.

    depths: numbers of draft tokens, ascending. draft_tokens: that of the headline."""
    plain = {workload.suite: drafters for workload, drafters in measured if workload.perturbation is None}
    return {
        "draft_tokens": draft_tokens,
        "drafters": list(dict.fromkeys(name for _, drafters in measured for name in drafters)),
        "workloads": [
            _workload(workload, drafters, plain.get(workload.suite) if workload.perturbation else None, depths)
            for workload, drafters in measured
        ],
    }


def per_prompt(workload: Workload, measurement: Measurement, draft_tokens: int) -> list[dict[str, Any]]:
    """Return a row per prompt for the manifest. `accepted` has an entry per draft in order, `reach` one per slot."""
    rows = []
    for prompt, output, counts in zip(workload.prompts, measurement.outputs, measurement.counts, strict=True):
        accepted = counts.verifications(draft_tokens)
        row = {"id": prompt.id, "source": prompt.source, "drafts": len(accepted), "accepted": accepted}
        rows.append(row | {"prompt_ids": prompt.ids, "output_ids": output, "reach": counts.accepted})
    return rows


def _workload(workload: Workload, drafters: Drafters, plain: Drafters | None, depths: Sequence[int]) -> dict[str, Any]:
    """Return a workload's result. `plain`: the same drafters on the plain form of a perturbed workload."""
    first, *others = drafters
    numbers = {name: _drafter(workload.prompts, measurements, depths) for name, measurements in drafters.items()}
    if not any(depth["drafts"] for each in numbers.values() for depth in each["by_depth"].values()):
        raise UserError(f"{workload.name}: every answer ended with its first token: choose other prompts")
    counts = {name: [one.counts for one in measurements] for name, measurements in drafters.items()}
    lengths = {name: acceptance_lengths(trainings, depths) for name, trainings in counts.items()}
    kept: dict[str, Estimate] = {}
    for name, measurements in plain.items() if plain else ():
        ids = {prompt.id for prompt in workload.prompts}  # those that have the perturbed form
        before = [[each for each in one.counts if each.id in ids] for one in measurements]
        kept[name] = lengths[name] / acceptance_lengths(before, depths)
        numbers[name]["kept"] = _by_depth(depths, kept[name].intervals())
    differences = {}
    for name in others:
        estimates = {"difference": lengths[name] - lengths[first], "ratio": lengths[name] / lengths[first]}
        if kept:
            estimates["kept_ratio"] = kept[name] / kept[first]
        columns = zip(*(estimate.intervals() for estimate in estimates.values()), strict=True)
        differences[name] = _by_depth(depths, [dict(zip(estimates, column, strict=True)) for column in columns])
    every = [one for trainings in counts.values() for one in trainings]
    elsewhere = [
        f"{name}, training {number}, {ELSEWHERE} {one.machine}"
        for name, trainings in drafters.items()
        for number, one in enumerate(trainings, 1)
        if one.machine
    ]
    return {
        "name": workload.name,
        "suite": workload.suite,
        "perturbation": workload.perturbation,
        "temperature": workload.temperature,
        "top_p": workload.top_p,
        **({"top_k": workload.top_k} if workload.top_k else {}),
        "prompts": len(workload.prompts),
        "verified": sum(all(each.seen for each in of_prompt) for of_prompt in zip(*every, strict=True)),
        "notes": [*workload.remarks, *elsewhere],
        **_speeds(drafters, depths),
        "drafters": numbers,
        "differences": differences,
        "verdict": {name: {"better": better(numbers, (first, name), differences[name])} for name in others},
    }


def _speeds(drafters: Drafters, depths: Sequence[int]) -> dict[str, Any]:
    """Return speeds if there is a single training. For several, each timed on a few prompts, they would be noise."""
    (name, one), *more = [(name, one) for name, trainings in drafters.items() for one in trainings]
    if more or not one.tokens:
        return {}
    counts = one.counts[: one.timed]
    return {
        "tokens_per_second": {"plain": one.tokens / one.plain, name: one.tokens / one.speculative},
        **({"timed": {"prompts": len(counts), "by_depth": _values([counts], depths)}} if counts else {}),
    }


def _drafter(prompts: Sequence[Prompt], measurements: Sequence[Measurement], depths: Sequence[int]) -> dict[str, Any]:
    trainings = [one.counts for one in measurements]
    numbers = {**_numbers(trainings, depths), "drift": _drift(trainings)}
    if len(trainings) > 1:
        numbers["by_training"] = [_values([one], depths) for one in trainings]
    numbers["by_source"] = {
        source: _numbers([[each for each in one if each.source == source] for one in trainings], depths)
        for source in sorted({each.source for each in trainings[0]})
    }
    numbers["by_repetition"] = by_repetition(prompts, measurements, depths)
    return numbers


def _numbers(trainings: Trainings, depths: Sequence[int]) -> dict[str, Any]:
    reached = {depth: _reached(trainings, depth) for depth in depths}
    by_depth = {
        str(depth): {
            "acceptance_length": length,
            "drafts": int(reached[depth][:, 0].sum()),
            "accepted_per_position": reached[depth][:, 1:].sum(0).tolist(),
        }
        for depth, length in zip(depths, acceptance_lengths(trainings, depths).intervals(), strict=True)
    }
    deepest = reached[max(depths)]
    return {
        "prompts": len(trainings[0]),
        "generated_tokens": sum(each.tokens for one in trainings for each in one),
        "by_depth": by_depth,
        "cumulative": ratios(deepest[:, 1:], deepest[:, 0]).intervals(),
        "conditional": ratios(deepest[:, 1:], deepest[:, :-1]).intervals(),
    }


def acceptance_lengths(trainings: Trainings, depths: Sequence[int]) -> Estimate:
    reached = [_reached(trainings, depth) for depth in depths]
    return ratios(np.stack([r.sum(1) for r in reached], 1), np.stack([r[:, 0] for r in reached], 1))


def _values(trainings: Trainings, depths: Sequence[int]) -> dict[str, float | None]:
    """Return acceptance lengths by depth, without intervals."""
    return _by_depth(depths, [value for value, _, _ in acceptance_lengths(trainings, depths).intervals()])


def _reached(trainings: Trainings, draft_tokens: int) -> NDArray[np.int64]:
    """Count each prompt's drafts whose first 0 (that is, all), 1, 2, … tokens were accepted: [P, draft_tokens + 1]."""
    exactly = [
        [np.bincount(each.verifications(draft_tokens), minlength=draft_tokens + 1) for each in one] for one in trainings
    ]
    return np.sum(exactly, 0)[:, ::-1].cumsum(1)[:, ::-1]


def _drift(trainings: Trainings) -> dict[str, list[Interval]] | None:
    """Return means over the slots of all prompts: a prompt counts by the number of its slots."""
    drifts = [(at, each, each.drift) for one in trainings for at, each in enumerate(one) if each.drift is not None]
    if not drifts:
        return None
    slots = np.array([len(each.accepted) for _, each, _ in drifts], dtype=np.float64)
    prompts = np.array([[at == other for at, _, _ in drifts] for other in dict.fromkeys(at for at, _, _ in drifts)])
    intervals = {}
    for name in (field.name for field in fields(Drift)):
        means = np.array([getattr(drift, name) for _, _, drift in drifts])  # [rows, steps]
        intervals[name] = ratios(prompts @ (means * slots[:, None]), prompts @ slots).intervals()
    return intervals


def _by_depth(depths: Sequence[int], values: Sequence[Any]) -> dict[str, Any]:
    return dict(zip(map(str, depths), values, strict=True))


def better(numbers: Mapping[str, Any], names: tuple[str, str], differences: Mapping[str, Any]) -> dict[str, str | None]:
    """Return the better of two drafters (`names`), or None, by number of draft tokens.

    It is the one that the interval of their difference, second - first, favours, provided that each of its trainings is
    ahead of each of the other's. numbers: of the drafters."""
    better: dict[str, str | None] = {}
    for depth, each in differences.items():
        _, low, high = each["difference"]
        better[depth] = None
        if low is not None and not low <= 0 <= high:
            winner, loser = names[::-1] if low > 0 else names
            ours, theirs = (_trainings(numbers[name], depth) for name in (winner, loser))
            if None not in ours + theirs and min(ours) > max(theirs):
                better[depth] = winner
    return better


def _trainings(numbers: dict[str, Any], depth: str) -> list[Any]:
    """Return the acceptance length of each training, None for one that drafted nothing."""
    if "by_training" in numbers:
        return [lengths[depth] for lengths in numbers["by_training"]]
    return [numbers["by_depth"][depth]["acceptance_length"][0]]


def repeats(prompt: Sequence[int], output: Sequence[int]) -> NDArray[np.bool_]:
    """Return whether the text, up to each of the N tokens of the output, ends by repeating itself: [N] bool."""
    ids, seen, found = [*prompt, *output], set[tuple[int, ...]](), []
    for end in range(1, len(ids) + 1):
        newest = tuple(ids[max(0, end - TOKENS) : end])
        found.append(newest in seen)
        seen.add(newest)
    return np.array(found[len(prompt) :], dtype=bool)


def by_repetition(
    prompts: Sequence[Prompt], trainings: Sequence[Measurement], depths: Sequence[int]
) -> Mapping[str, Mapping[str, Any]]:
    """Return {"repeating" or "new": {K: {acceptance_length: interval, drafts}}}; {} if drafts were sampled.

    Sampled drafts were not made at every slot. trainings: of one drafter, on these prompts."""
    if any(each.tokens > 1 and not each.accepted for one in trainings for each in one.counts):
        return {}
    again = [repeats(prompt.ids, output) for prompt, output in zip(prompts, trainings[0].outputs, strict=True)]
    result: dict[str, dict[str, Any]] = {"repeating": {}, "new": {}}
    for depth in depths:
        drafts, tokens = np.zeros((2, len(prompts), 2), dtype=np.int64)  # [prompts, new or repeating]
        for one in trainings:
            for at, counts in enumerate(one.counts):
                made = np.array(rounds(counts.accepted, depth), dtype=np.int64) + 1  # tokens, the target's own included
                begun = again[at][made.cumsum() - made].astype(int)
                np.add.at(drafts[at], begun, 1)
                np.add.at(tokens[at], begun, made)
        for kind, column in (("new", 0), ("repeating", 1)):
            (length,) = ratios(tokens[:, [column]], drafts[:, [column]]).intervals()
            result[kind][str(depth)] = {"acceptance_length": length, "drafts": int(drafts[:, column].sum())}
    return result
