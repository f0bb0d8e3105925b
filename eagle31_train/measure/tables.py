"""The result of an evaluation or comparison as text, for a terminal."""

import textwrap
from collections.abc import Iterator
from typing import Any

from eagle31_train.measure.intervals import Interval

WIDTH = 118
DRIFT = {  # label and form of each measure
    "sink": ("attention: first tokens", "{:.1%}"),
    "prompt": ("attention: prompt", "{:.1%}"),
    "verified": ("attention: verified", "{:.1%}"),
    "own": ("attention: own drafts", "{:.1%}"),
    "rms": ("RMS of the state read", "{:.2f}"),
    "entropy": ("entropy, nats", "{:.2f}"),
}


def table(result: dict[str, Any]) -> str:
    """All workloads, one below the other, and at the end what the numbers mean."""
    told = [line for workload in result["workloads"] for line in [*_workload(workload, result["draft_tokens"]), ""]]
    return "\n".join(
        [
            *told,
            *(
                line
                for text in result["definitions"].split("\n")
                for line in textwrap.wrap(text, WIDTH, subsequent_indent="  ")
            ),
        ]
    )


def _workload(workload: dict[str, Any], draft_tokens: int) -> Iterator[str]:
    drafters = workload["drafters"]
    first = next(iter(drafters))
    depths = list(drafters[first]["by_depth"])
    yield f"{workload['name']}: {_count(workload['prompts'], 'prompt')}, {sampling(workload)}, {decoded(workload)}"
    yield from (f"  {note}" for note in workload["notes"])
    yield _row("  draft tokens", depths)
    for name, numbers in drafters.items():
        lengths = [numbers["by_depth"][depth]["acceptance_length"] for depth in depths]
        yield from _three(f"  {name}: acceptance length", lengths, "{:.3f}")
        for training, values in enumerate(numbers.get("by_training", [])):
            yield _row(f"    training {training + 1}", [_shown(values[depth], "{:.3f}") for depth in depths])
        if numbers.get("kept"):
            yield _row("    kept, of the plain form", [_shown(x, "{:.1%}") for x, *_ in numbers["kept"].values()])
        yield _row(f"    position, of drafts of {depths[-1]}", [f"{k + 1}" for k in range(len(numbers["cumulative"]))])
        yield _row("      accepted", [_shown(x, "{:.1%}") for x, *_ in numbers["cumulative"]])
        yield _row("      if reached", [_shown(x, "{:.1%}") for x, *_ in numbers["conditional"]])
        yield from _drift(numbers["drift"])
    for name, found in workload["differences"].items():
        yield from _three(f"  {name} - {first}", [found[depth]["difference"] for depth in depths], "{:+.3f}")
        if "kept_ratio" in found[depths[0]]:
            more = [found[depth]["kept_ratio"] for depth in depths]
            yield from _three(f"  {name} / {first}: kept", more, "{:.3f}")
        verdict = workload["verdict"][name]["text"]
        yield from textwrap.wrap(verdict, WIDTH, initial_indent="  ", subsequent_indent="    ")
    yield from _sources(workload, draft_tokens)
    if speeds := workload.get("tokens_per_second"):
        plain = speeds.get("plain")
        told = [f"{speed:.1f} with {name} ({speed / plain:.2f}x)" for name, speed in speeds.items() if name != "plain"]
        yield f"  tokens per second, at {draft_tokens}: {plain:.1f} without a drafter, {', '.join(told)}"


def _three(label: str, values: list[Interval], form: str) -> Iterator[str]:
    """Values, and below them where their intervals begin and end."""
    yield _row(label, [_shown(value, form) for value, _, _ in values])
    if any(low is not None for _, low, _ in values):
        yield _row("    from", [_shown(low, form) for _, low, _ in values])
        yield _row("    to", [_shown(high, form) for _, _, high in values])


def _drift(drift: dict[str, list[Interval]] | None) -> Iterator[str]:
    for name, intervals in (drift or {}).items():
        label, form = DRIFT[name]
        yield _row(f"    {label}", [_shown(value, form) for value, _, _ in intervals])


def _sources(workload: dict[str, Any], draft_tokens: int) -> Iterator[str]:
    """A line for each source, where there are several: acceptance length at the headline's draft tokens."""
    drafters = workload["drafters"]
    sources: dict[str, Any] = next(iter(drafters.values()))["by_source"]
    if len(sources) < 2:
        return
    yield f"  by source, acceptance length at {draft_tokens}:"
    width = max(map(len, sources))
    for source in sources:
        found = {name: numbers["by_source"][source] for name, numbers in drafters.items()}
        told = "   ".join(
            f"{name} {bracket(numbers['by_depth'][str(draft_tokens)]['acceptance_length'])}"
            for name, numbers in found.items()
        )
        yield f"    {source:<{width}}  {_count(sources[source]['prompts'], 'prompt'):>11}   {told}"


def sampling(workload: dict[str, Any]) -> str:
    """How its tokens were chosen."""
    if not workload["temperature"]:
        return "greedy"
    nucleus = f", top_p {workload['top_p']:g}" if workload["top_p"] < 1 else ""
    return f"sampled at temperature {workload['temperature']:g}{nucleus}"


def decoded(workload: dict[str, Any]) -> str:
    """Of how many prompts real speculation has shown that it changes nothing."""
    count = workload["verified"]
    told = "all" if count == workload["prompts"] else f"{count:,} of them" if count else "none"
    return f"{told} decoded by real speculation"


def bracket(interval: Interval, form: str = "{:.3f}") -> str:
    """An interval on one line: 2.013 [1.902, 2.124]."""
    value, low, high = interval
    if value is None:
        return "–"
    return form.format(value) + (f" [{form.format(low)}, {form.format(high)}]" if low is not None else "")


def _row(label: str, cells: list[str]) -> str:
    return f"{label:<32}" + "".join(f"{cell:>9}" for cell in cells)


def _shown(value: float | None, form: str) -> str:
    return "–" if value is None else form.format(value)


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"
