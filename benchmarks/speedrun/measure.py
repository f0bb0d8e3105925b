"""What the drafts of a speedrun accept, by real decoding, and when each training reached which acceptance length.

All drafts are measured on the same answers of the target, so their differences are paired. An acceptance length is
reached where the straight line between two drafts first gets there. Intervals are by bootstrap over prompts, with the
crossing computed anew in each resample: they are about other prompts, not about other trainings.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.speedrun.job import DRAFTS, JOB, MADE_BY, RESULT, Job
from eagle31_train import compose, provenance
from eagle31_train.checkpoint.drafter_checkpoint import DrafterCheckpoint
from eagle31_train.common import artifacts
from eagle31_train.common.errors import UserError
from eagle31_train.evaluation import in_process, intervals
from eagle31_train.evaluation.intervals import Estimate
from eagle31_train.evaluation.measurement import Measurement, rounds
from eagle31_train.evaluation.workloads import HELDOUT

OTHER, TRAINED = "other", "trained"  # kinds of prompts: never trained on (the headline), and trained on
KINDS = {OTHER: "prompts of kinds that were not trained on", TRAINED: "held-out prompts of the kinds trained on"}
COSTS = ("minutes", "cpu_minutes", "tokens", "flops")
Interval = list[float | None]


@dataclass(frozen=True)
class Training:
    """A finished training: its job, what training.json says, and the FLOPs of a token."""

    job: Job
    result: dict[str, Any]
    flops_per_token: float

    @property
    def name(self) -> str:
        return self.job.folder.name

    @property
    def points(self) -> list[dict[str, float]]:
        """Of each draft: its step, and what it cost until then."""
        rows = []
        for point in self.result["points"]:
            times = {"minutes": point["seconds"] / 60, "cpu_minutes": point["cpu_seconds"] / 60}
            tokens = point["tokens"]
            rows.append({"step": point["step"], **times, "tokens": tokens, "flops": tokens * self.flops_per_token})
        return rows

    @property
    def drafts(self) -> list[Path]:
        return [self.job.folder / DRAFTS / point["draft"] for point in self.result["points"]]


def read(out: Path) -> list[Training]:
    """Return all finished trainings of a speedrun; UserError if there are none, or they used different data."""
    trainings = []
    for file in sorted(out.glob(f"*/{RESULT}")):
        job = Job.read(file.parent / JOB)
        counted = artifacts.read_json(file.parent / "count" / RESULT, MADE_BY)
        flops = counted["flops"] / max(counted["tokens"], 1)
        trainings.append(Training(job, artifacts.read_json(file, MADE_BY), flops))
    if not trainings:
        raise UserError(f"{out} has no finished training: run `{MADE_BY} ours --out {out}` first")
    for field in ("data", "store", "recipe"):
        if len({str(getattr(one.job, field)) for one in trainings}) > 1:
            raise UserError(f"{out}: trainings differ in {field}, so they cannot be compared: remove some")
    return trainings


def accepted(trainings: Sequence[Training], options: Sequence[str], out: Path) -> tuple[dict[str, Estimate], int]:
    """Return the acceptance length of every draft of all trainings, in order, on each kind of prompts, and the number
    of draft tokens. options: key=value of evaluation, at least one of evaluate.suites. out: keeps what was decoded."""
    recipe = trainings[0].job.recipe
    config = compose.load_config([*recipe, f"run_dir={out}", "evaluate.drift=false", "evaluate.warmup=false", *options])
    data, draft_tokens = provenance.read_data(config, whole=True), config.evaluate.num_speculative_tokens
    checkpoints, verified = {}, {}
    for training in trainings:
        *_, last = training.drafts
        for folder in training.drafts:
            name = f"{training.name} {folder.name}"
            checkpoints[name] = [DrafterCheckpoint.open(folder)]
            verified[name] = config.compare.verified if folder == last else 0
    every, most = [one for (one,) in checkpoints.values()], config.evaluate.max_speculative_tokens
    workloads = in_process.choose_workloads(config, every, data, drafted=[most])
    measured = in_process.decode(config, checkpoints, workloads, data, out / "workloads", verified)
    found = {}
    for kind in KINDS:
        chosen = [m for one, m in zip(workloads, measured, strict=True) if (one.name == HELDOUT) == (kind == TRAINED)]
        if chosen:
            found[kind] = acceptance_lengths(chosen, draft_tokens)
    return found, draft_tokens


def acceptance_lengths(measured: Sequence[dict[str, list[Measurement]]], draft_tokens: int) -> Estimate:
    """Return an acceptance length for each draft, over all prompts of some workloads together."""
    accepted, drafts = [], []
    for workload in measured:
        for prompt in zip(*(of_draft.counts for (of_draft,) in workload.values()), strict=True):
            made = [rounds(counts.accepted, draft_tokens) for counts in prompt]
            accepted.append([sum(some) for some in made])
            drafts.append([len(some) for some in made])
    estimate = intervals.ratios(accepted, drafts)
    return Estimate(estimate.values + 1, estimate.draws + 1, estimate.prompts)


def reached(costs: Sequence[float], curves: NDArray[np.float64], level: float) -> NDArray[np.float64]:
    """Return where curves first reach a level: costs [M] and curves [R, M] → [R], inf where they never do."""
    at, above = np.asarray(costs, dtype=np.float64), curves >= level
    after = above.argmax(1)
    before, rows = np.maximum(after - 1, 0), np.arange(len(curves))
    low, high = curves[rows, before], curves[rows, after]
    share = np.divide(level - low, high - low, out=np.ones(len(curves)), where=high > low)
    crossing = at[before] + np.where(after > 0, share, 1.0) * (at[after] - at[before])
    return np.where(above.any(1), crossing, np.inf)


def bracketed(value: float, draws: NDArray[np.float64], prompts: int) -> Interval:
    """Return [value, low, high]; None for what is never reached."""
    ends = [value, value]
    if prompts > 1:
        tail = intervals.tail_of(prompts)
        ends = np.quantile(draws, [tail, 1 - tail], method="inverted_cdf").tolist()
    return [number if np.isfinite(number) else None for number in (value, *ends)]


def crossings(costs: Sequence[float], estimate: Estimate, columns: slice, level: float) -> NDArray[np.float64]:
    """Return [1 + R], where a training reaches a level, as measured and in each resample."""
    curves = np.vstack([estimate.values[columns], estimate.draws[:, columns]])
    return reached(costs, curves, level)


def summarise(
    trainings: Sequence[Training], found: dict[str, Estimate], levels: Sequence[float], draft_tokens: int
) -> dict[str, Any]:
    ends = np.cumsum([len(one.points) for one in trainings]).tolist()
    columns = [slice(end - len(one.points), end) for one, end in zip(trainings, ends, strict=True)]
    rows = []
    for training, part in zip(trainings, columns, strict=True):
        points = training.points
        acceptance, reach = {}, {}
        for kind, estimate in found.items():
            prompts = int(estimate.prompts.max())
            acceptance[kind] = estimate.intervals()[part]
            reach[kind] = {
                f"{level:g}": {
                    cost: bracketed(draws[0], draws[1:], prompts)
                    for cost in COSTS
                    for draws in [crossings([point[cost] for point in points], estimate, part, level)]
                }
                for level in levels
            }
        result = training.result
        rows.append(
            {
                "name": training.name,
                "contender": training.job.contender,
                "options": training.job.options,
                "seed": training.job.seed,
                "steps": result["steps"],
                "memory_bytes": result["memory_bytes"],
                "flops_per_token": training.flops_per_token,
                "machine": {key: value for key, value in result["machine"].items() if key != "command"},
                "points": points,
                "acceptance": acceptance,
                "reached": reach,
            }
        )
    best = {row["contender"]: row for row in sorted(rows, key=_end_on_trained)}  # the last row of a contender wins
    return {
        "draft_tokens": draft_tokens,
        "prompts": {kind: int(estimate.prompts.max()) for kind, estimate in found.items()},
        "levels": [f"{level:g}" for level in levels],
        "best": {contender: row["name"] for contender, row in best.items()},
        "times_ours": _times_ours(trainings, columns, found, levels, best["ours"]["name"]) if "ours" in best else {},
        "trainings": rows,
    }


def _end_on_trained(row: dict[str, Any]) -> float:
    """Return the length that chooses a sweep's best: on prompts of kinds trained on, so that the headline does not."""
    return float(row["acceptance"][TRAINED][-1][0])


def _times_ours(
    trainings: Sequence[Training],
    columns: Sequence[slice],
    found: dict[str, Estimate],
    levels: Sequence[float],
    ours: str,
) -> dict[str, Any]:
    """Return the minutes of every other training over those of ours, by kind and level, paired; None where one never
    gets there, or a resample says so."""
    at = [one.name for one in trainings].index(ours)
    times: dict[str, Any] = {}
    for kind, estimate in found.items():
        for level in levels:
            minutes = [
                crossings([point["minutes"] for point in one.points], estimate, part, level)
                for one, part in zip(trainings, columns, strict=True)
            ]
            if not np.isfinite(minutes[at][0]):
                continue
            for one, some in zip(trainings, minutes, strict=True):
                if one.name != ours:
                    with np.errstate(invalid="ignore", divide="ignore"):
                        ratio = np.nan_to_num(some / minutes[at], nan=np.inf, posinf=np.inf)
                    bracket = bracketed(ratio[0], ratio[1:], int(estimate.prompts.max()))
                    times.setdefault(one.name, {}).setdefault(kind, {})[f"{level:g}"] = bracket
    return times


def tables(result: dict[str, Any]) -> str:
    """Return the result in markdown: for each kind of prompts, what each level cost, and where each training ends."""
    parts = []
    for kind in result["prompts"]:
        head = ["training", "steps", *(f"to {level}: minutes, tokens, PFLOP" for level in result["levels"]), "ends at"]
        lines = [head, ["---"] * len(head)]
        for row in result["trainings"]:
            best = " (best)" if result["best"][row["contender"]] == row["name"] else ""
            costs = [_shown(row["reached"][kind][level]) for level in result["levels"]]
            end, last = intervals.bracket(row["acceptance"][kind][-1]), row["points"][-1]
            ends = f"{end} after {last['minutes']:.1f} min, {_amounts(last['tokens'], last['flops'])}"
            lines.append([row["name"] + best, f"{row['steps']}", *costs, ends])
        title = f"{KINDS[kind]} ({result['prompts'][kind]}), {result['draft_tokens']} draft tokens"
        parts.append("\n".join([title, "", *(f"| {' | '.join(line)} |" for line in lines)]))
    for name, kinds in result["times_ours"].items():
        for kind, levels in kinds.items():
            times = [f"{level}: {'never' if ratio[0] is None else _ends(ratio)}" for level, ratio in levels.items()]
            parts.append(f"{name}, times the minutes of {result['best']['ours']}, {kind}: {', '.join(times)}")
    return "\n\n".join(parts)


def _shown(costs: dict[str, Interval]) -> str:
    if costs["minutes"][0] is None:
        return "not reached"
    return f"{_ends(costs['minutes'])}, {_amounts(costs['tokens'][0], costs['flops'][0])}"


def _amounts(tokens: float | None, flops: float | None) -> str:
    return f"{(tokens or 0) / 1e6:.2f}M, {(flops or 0) / 1e15:.2g}"


def _ends(interval: Interval) -> str:
    """Format an interval, such as 3.0 [2.5, never]."""
    value, low, high = ("never" if number is None else f"{number:.1f}" for number in interval)
    return f"{value} [{low}, {high}]"
