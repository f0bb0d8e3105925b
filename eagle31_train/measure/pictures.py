"""Pictures of a result, which `acceptance.py` describes: acceptance and drift by depth, and all workloads at once."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any

import numpy as np

from eagle31_train.measure.intervals import Interval
from eagle31_train.measure.tables import bracket
from eagle31_train.report.canvas import THEMES, Canvas, Theme, percent
from eagle31_train.report.rows import Rows
from eagle31_train.report.thin import Floats

Result = dict[str, Any]
Show = Callable[[float], str]
KINDS = {"sink": "first tokens", "prompt": "prompt", "verified": "verified", "own": "own drafts"}
TOKENS, STEP = "draft tokens", "draft step"
ALL, SERVING = "All workloads", "Serving"  # sections of pictures that are not of one workload
BAND = "95 % intervals shaded"
LEAST = 10.0  # per cent; smaller differences are drawn pale


@dataclass(frozen=True)
class Picture:
    """name: of its file. section: the workload's name, or ALL. title, caption: what is said there. draw: on a theme."""

    name: str
    section: str
    title: str
    caption: str
    draw: Callable[[Theme], Canvas]

    def png(self, theme: str) -> bytes:
        """The picture on "light" or "dark" paper."""
        return self.draw(THEMES[theme]).png()


def pictures(result: Result) -> Iterator[Picture]:
    """Every picture that there are numbers for: first those of all workloads, then those of each."""
    names: set[str] = set()
    for picture in _pictures(result):
        # Names that differ in case or in signs alone would write the same file.
        same = (name for n in count(1) if (name := f"{picture.name}-{n}" if n > 1 else picture.name) not in names)
        names.add(name := next(same))
        yield replace(picture, name=name)


def _pictures(result: Result) -> Iterator[Picture]:
    names, workloads = result.get("drafters", []), result.get("workloads", [])
    if len(workloads) > 1:
        yield from _overview(result)
    for index, workload in enumerate(workloads):
        yield from _of_workload(workload, names, index == 0)
    if result.get("serving"):
        yield from _serving(result["serving"])


def slug(name: str) -> str:
    """A name as part of a file's name."""
    return re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-")


# ---------------------------------------------------------------- one workload


def _of_workload(workload: dict[str, Any], names: list[str], first: bool) -> Iterator[Picture]:
    """Drift is drawn of the first workload alone; the table has it of all."""
    section, found = workload["name"], workload["drafters"]
    depths = [int(depth) for depth in next(iter(found.values()))["by_depth"]]
    lengths = {
        name: [numbers["by_depth"][str(depth)]["acceptance_length"] for depth in depths]
        for name, numbers in found.items()
    }

    def curves(
        name: str, title: str, caption: str, across: str, shown: dict[str, list[Interval]], show: Show
    ) -> Picture:
        def draw(theme: Theme) -> Canvas:
            return _curves(Canvas(theme, title, [section, BAND], across), shown, names, show)

        return Picture(f"{slug(section)}-{name}", section, title, caption, draw)

    yield curves(
        "acceptance",
        "Acceptance length",
        "Tokens per verification, the target's own included, by the number of tokens that are drafted.",
        TOKENS,
        lengths,
        "{:.2f}".format,
    )
    if workload["differences"]:
        yield _gain(workload, names, depths)
    if workload["perturbation"] is None:
        yield curves(
            "conditional",
            "Accepted, if reached",
            f"Share of drafts whose token at this position is accepted, of those whose tokens before it are; "
            f"{depths[-1]} tokens are drafted.",
            "position",
            {name: numbers["conditional"] for name, numbers in found.items()},
            percent,
        )
    drift = {name: numbers["drift"] for name, numbers in found.items() if numbers["drift"]}
    if not first or not drift:
        return
    for name, of in drift.items():
        yield Picture(
            f"{slug(section)}-attention-{slug(name)}",
            section,
            f"Where {name} looks",
            "Share of the attention on the first tokens of the sequence, the rest of the prompt, what the target has "
            "verified, and what the drafter itself has drafted.",
            partial(_attention, section, name, of),
        )
    for measure, title, caption in (
        ("own", "Attention on its own drafts", "Share of the attention on tokens that are not verified."),
        (
            "rms",
            "RMS of the state that a step reads",
            "Step 1 reads the target's states, later steps the one fed back.",
        ),
        ("entropy", "Entropy of the draft distribution, nats", "How undecided the drafter is, step by step."),
    ):
        show: Show = percent if measure == "own" else "{:.2f}".format
        yield curves(measure, title, caption, STEP, {name: of[measure] for name, of in drift.items()}, show)


def _curves(canvas: Canvas, shown: dict[str, list[Interval]], names: list[str], show: Show) -> Canvas:
    """A curve for each drafter, over 1, 2, 3, …"""
    count = 0
    for name, intervals in shown.items():
        values, low, high = columns(intervals)
        count = len(values)
        known = values[np.isfinite(values)]
        label = f"{name}  {show(known[-1])}" if len(known) else name
        canvas.banded(np.arange(1.0, count + 1), values, low, high, label, names.index(name))
    canvas.heights(share=show is percent)
    canvas.counts(list(range(1, count + 1)))
    return canvas


def _gain(workload: dict[str, Any], names: list[str], depths: list[int]) -> Picture:
    """Every other drafter against the first."""
    found, first = workload["differences"], next(iter(workload["drafters"]))
    title = f"{' and '.join(found) if len(found) < 3 else 'Others'} against {first}"

    def draw(theme: Theme) -> Canvas:
        canvas = Canvas(theme, f"{title}: acceptance length", [workload["name"], BAND], TOKENS)
        canvas.level(0.0, first)
        for name, by_depth in found.items():
            values, low, high = (part - 1 for part in columns([by_depth[str(depth)]["ratio"] for depth in depths]))
            canvas.banded(np.array(depths, float), values, low, high, f"{name}  {values[-1]:+.1%}", names.index(name))
        canvas.heights(share=True)
        canvas.counts(depths)
        return canvas

    return Picture(
        f"{slug(workload['name'])}-gain",
        workload["name"],
        title,
        "Change of the acceptance length on the same prompts. Bands speak of other prompts, not of other trainings.",
        draw,
    )


def _attention(section: str, name: str, drift: dict[str, list[Interval]], theme: Theme) -> Canvas:
    canvas = Canvas(theme, f"Where {name} looks", [section, "share of the attention, by draft step"], STEP)
    parts = [columns(drift[kind])[0] for kind in KINDS]
    steps = np.arange(1, len(parts[0]) + 1, dtype=float)
    labels = [f"{label}  {percent(part[-1])}" for label, part in zip(KINDS.values(), parts, strict=True)]
    canvas.stacked(steps, parts, labels)
    canvas.heights(0.0, share=True)
    canvas.axis.set_ylim(0, 1)
    canvas.counts([int(step) for step in steps])
    return canvas


# ---------------------------------------------------------------- all workloads


def _overview(result: Result) -> Iterator[Picture]:
    workloads, names, headline = result["workloads"], result["drafters"], result["draft_tokens"]
    depth = str(headline)
    yield Picture(
        "workloads-acceptance",
        ALL,
        f"Acceptance length at {headline}",
        f"At {headline} draft tokens, with 95 % intervals.",
        _forest(
            f"Acceptance length at {headline} draft tokens",
            {
                w["name"]: {n: f["by_depth"][depth]["acceptance_length"] for n, f in w["drafters"].items()}
                for w in workloads
            },
            names,
            "tokens per verification",
            None,
            "{:.2f}",
        ),
    )
    kept = {
        w["name"]: {name: found["kept"][depth] for name, found in w["drafters"].items() if found.get("kept")}
        for w in workloads
        if w["perturbation"] is not None
    }
    if kept := {name: found for name, found in kept.items() if found}:
        yield Picture(
            "workloads-kept",
            ALL,
            "What a perturbation leaves",
            f"Acceptance length at {headline} draft tokens, as a share of that on the plain form of the same prompts.",
            _forest("Acceptance length kept under perturbation", kept, names, "of the plain form's", 1.0, "{:.0%}"),
        )
    if all(found["drift"] for w in workloads for found in w["drafters"].values()):
        own = {w["name"]: {name: found["drift"]["own"][-1] for name, found in w["drafters"].items()} for w in workloads}
        yield Picture(
            "workloads-own",
            ALL,
            "Attention on its own drafts",
            "Share of the attention that the last draft step spends on tokens that are not verified.",
            _forest("Attention on its own drafts, at the last step", own, names, "of the attention", None, "{:.0%}"),
        )
    for name in names[1:]:
        rows = [w for w in workloads if name in w["differences"]]
        if rows:
            yield Picture(
                f"workloads-gain-{slug(name)}",
                ALL,
                f"{name} against {names[0]}",
                "Change of the acceptance length, in per cent; bold where one of them wins. "
                f"Positive: {name} is better.",
                partial(_cells, name, names[0], rows),
            )


def _forest(
    title: str, found: dict[str, dict[str, Interval]], names: list[str], across: str, against: float | None, form: str
) -> Callable[[Theme], Canvas]:
    shown = [name for name in names if any(name in row for row in found.values())]

    def draw(theme: Theme) -> Canvas:
        canvas = Rows(theme, title, list(found), across, ["95 % intervals"], len(shown))
        for name in shown:
            values, low, high = columns([row.get(name, [None] * 3) for row in found.values()])
            canvas.whiskers(values, low, high, names.index(name), len(names), name if len(names) > 1 else "")
        if against is not None:
            canvas.line(against)
        if len(shown) == 1:
            texts = [bracket(row.get(shown[0], [None] * 3), form) for row in found.values()]
            canvas.beside(texts, [theme.ink] * len(texts))
        canvas.axis.xaxis.set_major_formatter(lambda value, _: form.format(value))
        return canvas

    return draw


def _cells(name: str, first: str, workloads: Sequence[dict[str, Any]], theme: Theme) -> Canvas:
    depths = list(workloads[0]["differences"][name])
    remarks = ["per cent", "bold: one of them wins"]
    canvas = Rows(theme, f"{name} against {first}: acceptance length", [w["name"] for w in workloads], TOKENS, remarks)
    ratios = [[w["differences"][name][depth]["ratio"] for depth in depths] for w in workloads]
    gains = np.array([[np.nan if ratio[0] is None else 100 * (ratio[0] - 1) for ratio in row] for row in ratios])
    firm = [[w["verdict"][name]["better"][depth] is not None for depth in depths] for w in workloads]
    texts = [["" if np.isnan(gain) else f"{gain:+.1f}" for gain in row] for row in gains]
    canvas.cells(gains, texts, firm, depths, least=LEAST)
    return canvas


# ---------------------------------------------------------------- serving


def _serving(serving: dict[str, Any]) -> Iterator[Picture]:
    rows = serving["rows"]
    for name in dict.fromkeys(row["drafter"] for row in rows if row["drafter"]):
        of = [row for row in rows if row["drafter"] in (None, name)]
        yield Picture(
            f"serving-{slug(name)}",
            SERVING,
            f"{name} in vLLM",
            "Output tokens per second and user, by requests under way at once; none: without a drafter.",
            partial(_speeds, name, of),
        )


def _speeds(name: str, rows: list[dict[str, Any]], theme: Theme) -> Canvas:
    users = sorted({row["concurrency"] for row in rows})
    canvas = Canvas(theme, f"{name} in vLLM: tokens/s/user", ["by number of draft tokens", BAND], "concurrency")
    for index, tokens in enumerate(sorted({row["draft_tokens"] for row in rows})):
        found = {row["concurrency"]: row["per_user"] for row in rows if row["draft_tokens"] == tokens}
        values, low, high = columns([found.get(count, [None] * 3) for count in users])
        label = f"{tokens or 'none'}  {values[-1]:.1f}"
        canvas.banded(np.arange(len(users), dtype=float), values, low, high, label, index)
    canvas.heights(0.0)
    canvas.counts(list(range(len(users))))
    canvas.axis.xaxis.set_major_formatter(lambda value, _: str(users[round(value)]))
    return canvas


# ---------------------------------------------------------------- numbers


def columns(intervals: Sequence[Interval]) -> tuple[Floats, Floats, Floats]:
    """Values, lows and highs, NaN for what cannot be told."""
    table = np.array([[np.nan if part is None else part for part in interval] for interval in intervals], dtype=float)
    return table[:, 0], table[:, 1], table[:, 2]
