"""The result of an evaluation or comparison as plain data: what tables, pictures, pages and cards are made from.

As JSON. An interval is [value, low, high], with null for what cannot be told; K is a number of draft tokens, as text; N
is a drafter's name:

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

Several trainings of one drafter count as one: a prompt's counts are sums over them, and are resampled together.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eagle31_train.config import EvaluateConfig
from eagle31_train.errors import UserError
from eagle31_train.evaluation.intervals import FEW, LEVEL, RESAMPLES, Estimate, Interval, ratios
from eagle31_train.evaluation.measurement import Counts, Drift, Measurement
from eagle31_train.evaluation.workloads import HELDOUT, Workload

Key = tuple[str, str]  # of a prompt: its source and id
Drafters = Mapping[str, Sequence[Measurement]]  # by name: one measurement for each training
Lengths = Mapping[str, float | None]  # of one training: acceptance length by number of draft tokens


def summarise(
    measured: Sequence[tuple[Workload, Drafters]], depths: Sequence[int], draft_tokens: int
) -> dict[str, Any]:
    """The result of some workloads.

    Args:
        measured: every workload with the same drafters, each with as many trainings everywhere.
        depths: numbers of draft tokens, ascending.
        draft_tokens: that of the headline.

    Raises:
        UserError: nothing was drafted.
    """
    plain = {workload.suite: drafters for workload, drafters in measured if workload.perturbation is None}
    return {
        "definitions": definitions(max(depths)),
        "draft_tokens": draft_tokens,
        "drafters": list(dict.fromkeys(name for _, drafters in measured for name in drafters)),
        "workloads": [
            _workload(workload, drafters, plain.get(workload.suite), depths, draft_tokens)
            for workload, drafters in measured
        ],
    }


def definitions(deepest: int) -> str:
    """What the numbers mean, line by line; shares by position are of drafts of `deepest` tokens."""
    return (
        "Draft: one verification. The drafter proposes n tokens; the target reads them in one forward pass, accepts "
        "those before the first that it would not have written itself, and adds one token of its own, the bonus "
        "token.\n"
        "Acceptance length: tokens per draft, 1 + accepted tokens / drafts over all drafts of all prompts; from 1 to "
        "n + 1. Tokens that the target agrees with past the end of an answer count as accepted, as in vLLM.\n"
        f"Cumulative acceptance at position k: share of all drafts of {deepest} tokens whose first k tokens were "
        "accepted. Conditional: the same share among the drafts whose first k - 1 tokens were accepted.\n"
        "Several trainings under one name: acceptance is of all their drafts.\n"
        "Better: the interval of the difference leaves out 0, and each training of the one is ahead of each of the "
        "other.\n"
        "Kept, of the plain form: acceptance length on a perturbed form / that on the plain form of the same prompts.\n"
        "Drift: of drafts from every position of the target's answers, by draft step. Shares of the attention on the "
        "first 4 tokens of the sequence, the rest of the prompt, what the target has verified, and the drafter's own "
        "tokens, which sum to one; the root mean square (RMS) of the state that the step reads; the entropy of the "
        "draft distribution.\n"
        f"[low, high]: {LEVEL:.0%} interval by bootstrap over prompts ({RESAMPLES:,} resamples, widened for few "
        "prompts by Student's t; the same resamples for every drafter, so differences are paired). Each holds for its "
        "number alone: of 20 true zeros, one is expected to look like a difference. They speak of other prompts of the "
        "same kind, not of other training seeds."
    )


def headline(numbers: dict[str, Any], draft_tokens: int) -> dict[str, Any]:
    """Counts and shares at one number of draft tokens, as the manifest's report has them; None where nothing was."""
    depth = numbers["by_depth"][str(draft_tokens)]
    drafts, per_position = depth["drafts"], depth["accepted_per_position"]
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


def report(
    result: dict[str, Any], measurement: Measurement, data: dict[str, Any], options: EvaluateConfig
) -> dict[str, Any]:
    """The manifest's report of one drafter on the first workload; `identical` speaks of all workloads.

    Args:
        result: of this drafter alone. measurement: of the first workload. data: stage 1's manifest.
    """
    workload = result["workloads"][0]
    (numbers,) = workload["drafters"].values()
    whole = headline(numbers, options.num_speculative_tokens)
    sampled_drafts = options.draft_sampling != "greedy" and any(each["temperature"] for each in result["workloads"])
    trained_on = data["splits"]["train"].get("by_source", {}) if workload["suite"] == HELDOUT else {}
    return {
        **whole,
        "draft_tokens": options.num_speculative_tokens,
        "by_source": {
            name: headline(source, options.num_speculative_tokens) for name, source in numbers["by_source"].items()
        },
        **{key: numbers[key] for key in ("by_depth", "cumulative", "conditional", "drift")},
        "max_new_tokens": options.max_new_tokens,
        "draft_tokens_proposed": options.num_speculative_tokens * whole["drafts"],
        "tokens_per_second": {
            "speculative": measurement.tokens / measurement.speculative,
            "plain": measurement.tokens / measurement.plain,
        },
        "identical": not sampled_drafts,  # or measuring would have refused
        "workload": workload["name"],
        "dtype": options.dtype,
        "machine": result["machine"],
        "not_measured": sorted(trained_on.keys() - numbers["by_source"].keys()),  # sources
    }


def per_prompt(workload: Workload, measurement: Measurement, draft_tokens: int) -> list[dict[str, Any]]:
    """Every prompt of the manifest; `accepted` has an entry for every draft in order, `reach` one for every slot."""
    rows = []
    for prompt, output, counts in zip(workload.prompts, measurement.outputs, measurement.counts, strict=True):
        accepted = counts.verifications(draft_tokens)
        rows.append(
            {
                "id": prompt.id,
                "source": prompt.source,
                "drafts": len(accepted),
                "accepted_per_position": [
                    sum(count > position for count in accepted) for position in range(draft_tokens)
                ],
                "accepted": accepted,
                "prompt_ids": prompt.ids,
                "output_ids": output,
                "reach": counts.accepted,
            }
        )
    return rows


# ---------------------------------------------------------------- one workload


def _workload(
    workload: Workload, drafters: Drafters, plain: Drafters | None, depths: Sequence[int], draft_tokens: int
) -> dict[str, Any]:
    rows = {name: _rows(trainings) for name, trainings in drafters.items()}
    first, *others = drafters
    keys = _keys(rows[first])
    numbers = {name: _drafter(trainings, depths) for name, trainings in drafters.items()}
    if not any(depth["drafts"] for each in numbers.values() for depth in each["by_depth"].values()):
        raise UserError(
            f"{workload.name}: every answer ended with its first token, so nothing was drafted: choose other prompts"
            + (f", or leave out {workload.perturbation}" if workload.perturbation else "")
        )
    kept: dict[str, Estimate] = {}
    if plain is not None and workload.perturbation is not None:
        plain_rows = {name: _rows(plain[name]) for name in drafters}
        in_both = set(_keys(plain_rows[first]))
        both = [key for key in keys if key in in_both]  # in one order: the resamples are paired
        if both:
            kept = {
                name: acceptance_lengths(rows[name], depths, both) / acceptance_lengths(plain_rows[name], depths, both)
                for name in drafters
            }
        for name, share in kept.items():
            numbers[name]["kept"] = _by_depth(depths, share.intervals())

    lengths = {name: acceptance_lengths(rows[name], depths, keys) for name in drafters}
    differences = {}
    for name in others:
        estimates = {"difference": lengths[name] - lengths[first], "ratio": lengths[name] / lengths[first]}
        if kept:
            estimates["kept_ratio"] = kept[name] / kept[first]
        columns = zip(*(estimate.intervals() for estimate in estimates.values()), strict=True)
        differences[name] = _by_depth(depths, [dict(zip(estimates, column, strict=True)) for column in columns])
    unseen = {(each.source, each.id) for each in _rows_of_all(rows) if not each.seen}
    return {
        "name": workload.name,
        "suite": workload.suite,
        "perturbation": workload.perturbation,
        "temperature": workload.temperature,
        "top_p": workload.top_p,
        "prompts": len(keys),
        "verified": len(keys) - len(unseen),
        "notes": [*workload.remarks, *_other_machines(drafters)],
        **_speeds(drafters),
        "drafters": numbers,
        "differences": differences,
        "verdict": {
            name: verdict(
                (first, _trainings(numbers[first])),
                (name, _trainings(numbers[name])),
                differences[name],
                len(keys),
                draft_tokens,
            )
            for name in others
        },
    }


def _drafter(trainings: Sequence[Measurement], depths: Sequence[int]) -> dict[str, Any]:
    rows = _rows(trainings)
    sources: dict[str, list[Counts]] = {}
    for each in rows:
        sources.setdefault(each.source, []).append(each)
    by_training = []
    for training in trainings if len(trainings) > 1 else ():
        intervals = acceptance_lengths(training.counts, depths, _keys(training.counts)).intervals()
        by_training.append(_by_depth(depths, [value for value, _, _ in intervals]))
    return {
        **_numbers(rows, depths),
        "drift": _drift(rows),
        **({"by_training": by_training} if by_training else {}),
        "by_source": {source: _numbers(sources[source], depths) for source in sorted(sources)},
    }


def _numbers(rows: list[Counts], depths: Sequence[int]) -> dict[str, Any]:
    keys = _keys(rows)
    lengths = acceptance_lengths(rows, depths, keys).intervals()
    reached = {depth: _reached(rows, depth, keys) for depth in depths}
    deepest = reached[max(depths)]
    return {
        "prompts": len(keys),
        "generated_tokens": sum(each.tokens for each in rows),
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


def _shares(estimate: Estimate) -> list[Interval]:
    """Intervals; none for a share of 0 or 1, where every resample is the same and tells nothing of the uncertainty."""
    return [[value, None, None] if value in (0, 1) else [value, low, high] for value, low, high in estimate.intervals()]


def acceptance_lengths(rows: Iterable[Counts], depths: Sequence[int], keys: Sequence[Key]) -> Estimate:
    """Acceptance length at each depth, over the prompts of `keys` in this order."""
    reached = [_reached(rows, depth, keys) for depth in depths]
    return ratios(np.stack([r.sum(1) for r in reached], 1), np.stack([r[:, 0] for r in reached], 1))


def _reached(rows: Iterable[Counts], draft_tokens: int, keys: Sequence[Key]) -> NDArray[np.int64]:
    """[P, draft_tokens + 1]: drafts of each prompt whose first 0 (so all of them), 1, 2, … tokens were accepted."""
    row = {key: index for index, key in enumerate(keys)}
    reached = np.zeros((len(keys), draft_tokens + 1), dtype=np.int64)
    for each in rows:
        if (index := row.get((each.source, each.id))) is not None:
            exactly = np.bincount(each.verifications(draft_tokens), minlength=draft_tokens + 1)
            reached[index] += exactly[::-1].cumsum()[::-1]
    return reached


def _drift(rows: Sequence[Counts]) -> dict[str, list[Interval]] | None:
    """Means over the slots of all prompts: a prompt weighs as many slots as its output has."""
    drifts = [(each, each.drift) for each in rows if each.drift is not None]
    if not drifts:
        return None
    slots = np.array([len(each.accepted) for each, _ in drifts], dtype=np.float64)
    keys = [(each.source, each.id) for each, _ in drifts]
    prompts = np.array([[key == other for other in keys] for key in dict.fromkeys(keys)], dtype=np.float64)  # [P, rows]
    found = {}
    for name in (field.name for field in fields(Drift)):
        means = np.array([getattr(drift, name) for _, drift in drifts])  # [rows, steps]
        found[name] = ratios(prompts @ (means * slots[:, None]), prompts @ slots).intervals()
    return found


def _speeds(drafters: Drafters) -> dict[str, Any]:
    """Tokens per second of a drafter that was measured alone, with every prompt.

    Of several, which were measured at other times and with a few prompts each, they would be noise: serving tells which
    is faster.
    """
    alone = [(name, one) for name, trainings in drafters.items() for one in trainings]
    if len(alone) > 1 or not alone[0][1].tokens:
        return {}
    ((name, one),) = alone
    return {"tokens_per_second": {"plain": one.tokens / one.plain, name: one.tokens / one.speculative}}


def _other_machines(drafters: Drafters) -> list[str]:
    return [
        f"{name}{f', training {number}' if len(trainings) > 1 else ''} was measured on {one.machine}"
        for name, trainings in drafters.items()
        for number, one in enumerate(trainings, 1)
        if one.machine
    ]


def _rows(trainings: Sequence[Measurement]) -> list[Counts]:
    return [each for training in trainings for each in training.counts]


def _rows_of_all(rows: Mapping[str, list[Counts]]) -> list[Counts]:
    return [each for of_drafter in rows.values() for each in of_drafter]


def _keys(rows: Iterable[Counts]) -> list[Key]:
    return list(dict.fromkeys((each.source, each.id) for each in rows))


def _by_depth(depths: Sequence[int], values: Sequence[Any]) -> dict[str, Any]:
    return dict(zip(map(str, depths), values, strict=True))


# ---------------------------------------------------------------- which of two is better


def verdict(
    first: tuple[str, Sequence[Lengths]],
    other: tuple[str, Sequence[Lengths]],
    differences: Mapping[str, Any],
    prompts: int,
    draft_tokens: int,
) -> dict[str, Any]:
    """Which of two drafters is better at which number of draft tokens, and a line that says so.

    Args:
        first, other: name, and the acceptance lengths of each training.
        differences: other - first and other / first, by number of draft tokens.
        prompts: how many there are.
        draft_tokens: that of the headline.
    """
    better = {depth: _better(first, other, found["difference"], depth) for depth, found in differences.items()}
    parts = []
    for name in (other[0], first[0]):
        if won := [depth for depth, winner in better.items() if winner == name]:
            at = str(draft_tokens) if str(draft_tokens) in won else won[0]
            gain = _gain(differences[at]["ratio"], inverse=name == first[0])
            shown = f" at {at}" if len(won) > 1 else ""
            parts.append(f"{name} better at {_spans(won)} draft token{'s' * (won != ['1'])}: {gain}{shown}")
    if not parts:
        parts = [f"no difference shown: {_gain(differences[str(draft_tokens)]['ratio'])} at {draft_tokens}"]
    if prompts < FEW:
        parts.append(f"only {prompts} prompt{'s' * (prompts != 1)}")
    return {"text": "; ".join(parts), "better": better}


def _better(
    first: tuple[str, Sequence[Lengths]], other: tuple[str, Sequence[Lengths]], difference: Interval, depth: str
) -> str | None:
    """The one that the interval of the difference favours, if each of its trainings is ahead of each of the other's."""
    _, low, high = difference
    if low is None or high is None or low <= 0 <= high:
        return None
    winner, loser = (other, first) if low > 0 else (first, other)
    pairs = [(one[depth], another[depth]) for one in winner[1] for another in loser[1]]
    return winner[0] if all(a is not None and b is not None and a > b for a, b in pairs) else None


def _trainings(numbers: dict[str, Any]) -> list[Lengths]:
    alone = {depth: each["acceptance_length"][0] for depth, each in numbers["by_depth"].items()}
    return numbers.get("by_training") or [alone]


def _spans(depths: Sequence[str]) -> str:
    """Numbers in short: 1-3, 5."""
    spans: list[list[int]] = []
    for depth in map(int, depths):
        if spans and depth == spans[-1][-1] + 1:
            spans[-1].append(depth)
        else:
            spans.append([depth])
    return ", ".join(f"{span[0]}-{span[-1]}" if len(span) > 1 else str(span[0]) for span in spans)


def _gain(ratio: Interval, inverse: bool = False) -> str:
    """A ratio's interval in per cent; of the first over the other if `inverse`."""
    value, low, high = ratio
    if value is None:
        return "nothing was drafted"
    if low is None or high is None:
        return f"{100 * (value - 1):+.1f} %"
    if inverse:
        value, low, high = 1 / value, 1 / high, 1 / low
    return f"{100 * (value - 1):+.1f} % [{100 * (low - 1):.1f}, {100 * (high - 1):.1f}]"
