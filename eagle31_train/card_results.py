"""What the model card tells of results: acceptance, drift, serving and comparisons, each with the command behind it."""

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from eagle31_train.findings import Finding
from eagle31_train.markdown import code, grid, image, plain, scrubbed
from eagle31_train.measure.intervals import Interval
from eagle31_train.measure.tables import DRIFT, bracket, sampling

MEANING = "What the numbers mean"
SERVED = ["drafter", "draft tokens", "users", "TTFT, ms", "TPOT, ms", "tokens/s/user", "speed-up", "total tokens/s",
          "acceptance length", "first n accepted", "different answers"]  # fmt: skip
Workload = dict[str, Any]  # as measure/acceptance.py has it


def sections(evaluation: Finding | None, serving: Finding | None, comparisons: Sequence[Finding]) -> Iterator[str]:
    """All of it; what was not measured is said, too."""
    yield "## Measured acceptance"
    if evaluation is None:
        yield "The acceptance of this checkpoint was not measured."
    else:
        yield from _acceptance(evaluation)
    yield "## Measured in vLLM"
    if serving is None:
        yield "How fast vLLM is with this checkpoint was not measured."
    else:
        yield from _serving(serving.told["serving"])
        yield from _pictures(serving)
    yield "## Compared with other drafters"
    if not comparisons:
        yield "This checkpoint was not compared with others."
    for finding in comparisons:
        yield from _comparison(finding)
    results = [finding.told.get("result", finding.told) for finding in [evaluation, *comparisons] if finding]
    if texts := list(dict.fromkeys(result["definitions"] for result in results if "definitions" in result)):
        yield f"## {MEANING}"
        yield "\n".join(f"- {plain(line)}" for text in texts for line in text.split("\n"))


# ---------------------------------------------------------------- acceptance


def _acceptance(finding: Finding) -> Iterator[str]:
    result, report = finding.told["result"], finding.told["report"]
    workloads, at = result["workloads"], str(result["draft_tokens"])
    first = workloads[0]
    length = _numbers(first)["by_depth"][at]["acceptance_length"]
    yield (
        f"**Acceptance length {bracket(length)} with {_count(int(at), 'draft token')}**, on "
        f"{_count(first['prompts'], 'prompt')} of {plain(first['name'])}, {sampling(first)}. {_meaning()}"
    )
    yield _how(result, report["identical"])
    yield from _conditions(result)
    if speeds := first.get("tokens_per_second"):
        name = next(iter(first["drafters"]))
        yield (
            f"Speed of that decoding, with {_count(int(at), 'draft token')}: {speeds[name]:.1f} tokens per second with "
            f"the drafter, {speeds['plain']:.1f} without ({speeds[name] / speeds['plain']:.2f} ×)."
        )
    if len(workloads) > 1:
        yield _overview(workloads, at)
    else:
        yield "Other prompts than these, and these under perturbation, were not measured."
    for number, workload in enumerate(workloads):
        told = list(_workload(workload, at))
        if number:
            length = _numbers(workload)["by_depth"][at]["acceptance_length"]
            yield from _folded(f"{workload['name']}: {bracket(length)} with {at} draft tokens", told[1:])
            continue
        yield from told
        if missing := report.get("not_measured"):
            yield f"Not measured, since none of its prompts was decoded: {plain(', '.join(missing))}."
        yield from _pictures(finding)


def _how(result: Mapping[str, Any], identical: bool) -> str:
    """What was decoded for real, and what was not."""
    real = (
        f"at {_count(result['draft_tokens'], 'draft token')} by real speculative decoding, with every output equal to "
        "plain decoding of the target; other numbers of draft tokens are told from the same outputs"
    )
    drawn = (
        "with drafts that were sampled, too, by real speculative decoding at every number of draft tokens, so that "
        "outputs are other draws from the target's own distribution"
    )
    if not identical:
        greedy = any(not workload["temperature"] for workload in result["workloads"])
        real = f"where tokens are chosen greedily, {real}; where they are sampled, {drawn}" if greedy else drawn
    return f"Draft and target were run by eagle31's own evaluator: {real}."


def _overview(workloads: Sequence[Workload], at: str) -> str:
    rows = []
    for workload in workloads:
        numbers = _numbers(workload)
        kept, drift = numbers.get("kept", {}).get(at), numbers["drift"]
        rows.append(
            [
                plain(workload["name"]),
                f"{workload['prompts']:,}",
                sampling(workload),
                bracket(numbers["by_depth"][at]["acceptance_length"]),
                bracket(kept, "{:.1%}") if kept else "–",
                bracket(drift["own"][-1], "{:.1%}") if drift else "–",
            ]
        )
    header = ["prompts", "number", "decoding", f"acceptance length with {at} draft tokens", "kept of the plain form's"]
    return grid([*header, "attention on its own drafts at the last step"], rows)


def _workload(workload: Workload, at: str) -> Iterator[str]:
    """Everything of one workload: by depth, drift, by source."""
    numbers = _numbers(workload)
    yield f"### {plain(workload['name'])}"
    yield plain("; ".join([_count(workload["prompts"], "prompt"), sampling(workload), *workload["notes"]])) + "."
    kept, deepest = numbers.get("kept"), len(numbers["by_depth"])
    header = ["n", "acceptance length with n draft tokens", *(["kept of the plain form's"] if kept else [])]
    rows = [
        [
            depth,
            bracket(found["acceptance_length"]),
            *([bracket(kept[depth], "{:.1%}")] if kept else []),
            bracket(numbers["cumulative"][int(depth) - 1], "{:.1%}"),
            bracket(numbers["conditional"][int(depth) - 1], "{:.1%}"),
        ]
        for depth, found in numbers["by_depth"].items()
    ]
    yield grid([*header, f"first n of {deepest} accepted (cumulative)", "nth, if reached (conditional)"], rows)
    yield _drift(numbers["drift"]) if numbers["drift"] else "Drift was not measured."
    yield from _sources(numbers["by_source"], at)


def _drift(drift: Mapping[str, list[Interval]]) -> str:
    """In short: without intervals."""
    steps = range(len(drift["own"]))
    shown = {measure: (label, form) for measure, (label, form) in DRIFT.items() if measure in drift}
    rows = [
        [str(step + 1), *(bracket([drift[measure][step][0], None, None], form) for measure, (_, form) in shown.items())]
        for step in steps
    ]
    return grid(["draft step", *(label for label, _ in shown.values())], rows)


def _sources(sources: Mapping[str, Any], at: str) -> Iterator[str]:
    if len(sources) > 1:
        rows = []
        for name, found in sources.items():
            counts = found["by_depth"][at]
            rows.append([plain(name), f"{found['prompts']:,}", f"{counts['drafts']:,}"])
            rows[-1].append(bracket(counts["acceptance_length"]))
        yield grid(["source", "prompts", "drafts", f"acceptance length with {at} draft tokens"], rows)


def _numbers(workload: Workload) -> dict[str, Any]:
    """Of the only drafter."""
    (numbers,) = workload["drafters"].values()
    return dict(numbers)


# ---------------------------------------------------------------- serving


def _serving(serving: Mapping[str, Any]) -> Iterator[str]:
    yield from (f"**{plain(sentence)}**" for sentence in serving["verdict"])
    how = f"greedy, at most {serving['max_new_tokens']:,} tokens per answer"
    if serving["temperature"]:
        how = how.replace("greedy", f"sampled at temperature {serving['temperature']:g}, top_p {serving['top_p']:g}")
    on = f" on {plain(serving['machine'])}" if "machine" in serving else ""
    of = f" of {plain(serving['workload'])}" if "workload" in serving else ""
    asked = f"{_count(serving['prompts'], 'prompt')}{of}"
    yield f"vLLM {plain(serving['vllm'])}{on}, {plain(serving['dtype'])}; {asked}, {how}."
    if "command" in serving:
        yield code(scrubbed(serving["command"]))
    yield grid(SERVED, [_served(row) for row in serving["rows"]])
    if serving["notes"]:
        yield "\n".join(f"- {plain(note)}" for note in serving["notes"])
    yield plain(serving["definitions"])


def _served(row: Mapping[str, Any]) -> list[str]:
    accepted = row["acceptance"] or {"acceptance_length": None, "acceptance_at_depth": []}
    return [
        plain(row["drafter"] or "none"),
        str(row["draft_tokens"]),
        str(row["concurrency"]),
        *("–" if row[time]["mean"] is None else f"{1000 * row[time]['mean']:.1f}" for time in ("ttft", "tpot")),
        bracket(row["per_user"], "{:.1f}"),
        bracket(row["speedup"], "{:.2f}") if row["speedup"] else "–",
        f"{row['total']:.1f}",
        bracket([accepted["acceptance_length"], None, None], "{:.2f}"),
        ", ".join("–" if share is None else f"{share:.1%}" for share in accepted["acceptance_at_depth"]) or "–",
        "–" if row["different"] is None else f"{row['different']} of {row['requests']}",
    ]


# ---------------------------------------------------------------- comparisons


def _comparison(finding: Finding) -> Iterator[str]:
    told = finding.told
    first, *others = told["drafters"]
    at = str(told["draft_tokens"])
    yield f"### {plain(told['title'])}"
    yield f"This checkpoint is {_whose(finding)}. {_meaning()}"
    yield from _conditions(told)
    for other in others:
        compared = [workload for workload in told["workloads"] if other in workload["differences"]]
        yield grid(
            ["prompts", "number", "of these by real speculation", "decoding", f"{plain(other)} against {plain(first)}"],
            [
                [
                    plain(w["name"]),
                    f"{w['prompts']:,}",
                    f"{w['verified']:,}",
                    sampling(w),
                    plain(w["verdict"][other]["text"]),
                ]
                for w in compared
            ],
        )
        depths = list(compared[0]["differences"][other]) if compared else []
        yield (
            f"Difference of the acceptance lengths, {plain(other)} - {plain(first)}, by number of draft tokens; bold "
            "where one of them wins:"
        )
        rows = [[plain(workload["name"]), *_changes(workload, other, depths)] for workload in compared]
        yield grid(["prompts", *depths], rows)
    rows = [
        [
            plain(workload["name"]),
            *(bracket(workload["drafters"][name]["by_depth"][at]["acceptance_length"]) for name in told["drafters"]),
        ]
        for workload in told["workloads"]
    ]
    yield grid([f"acceptance length with {at} draft tokens", *map(plain, told["drafters"])], rows)
    if noted := [workload for workload in told["workloads"] if workload["notes"]]:
        yield "\n".join(f"- {plain(workload['name'])}: {plain('; '.join(workload['notes']))}" for workload in noted)
    if serving := told.get("serving"):
        yield from _serving(serving)
    yield from _pictures(finding)


def _changes(workload: Workload, other: str, depths: Sequence[str]) -> Iterator[str]:
    better = workload["verdict"][other]["better"]
    for depth in depths:
        cell = bracket(workload["differences"][other][depth]["difference"], "{:+.2f}")
        yield f"**{cell}**" if better[depth] else cell


def _whose(finding: Finding) -> str:
    parts = []
    for name in finding.ours:
        count = len(finding.told["identities"][name])
        parts.append(plain(name) + (f", one of {count} trainings that stand under this name" if count > 1 else ""))
    return " and ".join(parts)


# ---------------------------------------------------------------- parts


def _conditions(result: Mapping[str, Any]) -> Iterator[str]:
    yield (
        f"On {plain(result['machine'])}, in {plain(result['dtype'])}, with answers of at most "
        f"{result['max_new_tokens']:,} tokens, by"
    )
    yield code(scrubbed(result["command"]))


def _pictures(finding: Finding) -> Iterator[str]:
    for shown in finding.pictures:
        title = f"{shown.picture.title} ({shown.picture.section})"
        yield image(shown.name, title, shown.picture.caption)


def _folded(summary: str, parts: Sequence[str]) -> Iterator[str]:
    """Parts that show on a click."""
    yield f"<details>\n<summary>{escape(scrubbed(summary))}</summary>"
    yield from parts
    yield "</details>"


def _meaning() -> str:
    anchor = MEANING.lower().replace(" ", "-")
    return f"In brackets: 95 % intervals ([{MEANING.lower()}](#{anchor}))."


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"
