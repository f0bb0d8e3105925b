"""What an evaluation measured: acceptance by depth and speed, for the manifest and for people."""

import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from eagle31_train.measure.decoding import Decoded
from eagle31_train.measure.prompts import Prompt
from eagle31_train.schema import EvaluateConfig, UserError
from eagle31_train.targets.cached import CachedTarget

NAMED = 5  # sources that were not measured, in the table; the manifest names all


@dataclass(frozen=True)
class Outcome:
    """One prompt, decoded both ways, with equal outputs."""

    prompt: Prompt
    plain: Decoded
    speculative: Decoded


def summarise(outcomes: list[Outcome], options: EvaluateConfig, target: CachedTarget) -> dict[str, Any]:
    """The manifest's report; UserError where nothing was drafted."""
    found = measure(outcomes, options.draft_tokens)
    if not found["drafts"]:
        raise UserError("every answer ended with its first token, so nothing was drafted: choose other prompts")
    tokens = found["generated_tokens"]
    by_source: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        by_source.setdefault(outcome.prompt.source, []).append(outcome)
    return {
        **found,
        "draft_tokens": options.draft_tokens,
        "max_new_tokens": options.max_new_tokens,
        "draft_tokens_proposed": sum(outcome.speculative.proposed for outcome in outcomes),
        "tokens_per_second": {
            "speculative": tokens / sum(outcome.speculative.seconds for outcome in outcomes),
            "plain": tokens / sum(outcome.plain.seconds for outcome in outcomes),
        },
        "by_source": {source: measure(by_source[source], options.draft_tokens) for source in sorted(by_source)},
        "identical": True,  # refuse_difference has seen every output
        "dtype": options.dtype,
        "machine": machine(target),
    }


def measure(outcomes: list[Outcome], draft_tokens: int) -> dict[str, Any]:
    """Counts and shares of some prompts; the shares are None where nothing was drafted."""
    runs = [outcome.speculative for outcome in outcomes]
    drafts = sum(len(run.accepted) for run in runs)
    per_position = [sum(column) for column in zip(*(r.accepted_per_position(draft_tokens) for r in runs), strict=True)]
    before = [drafts, *per_position]
    return {
        "prompts": len(outcomes),
        "generated_tokens": sum(len(run.tokens) for run in runs),
        "drafts": drafts,
        "accepted": sum(per_position),
        "accepted_per_position": per_position,
        "acceptance_length": 1 + sum(per_position) / drafts if drafts else None,
        "acceptance_at_depth": [count / drafts if drafts else None for count in per_position],
        "conditional_acceptance": [
            count / reached if reached else None for reached, count in zip(before, per_position, strict=False)
        ],
    }


def describe(outcome: Outcome, draft_tokens: int) -> dict[str, Any]:
    """One prompt of the manifest; `accepted` has an entry for every draft, in order."""
    return {
        "id": outcome.prompt.id,
        "source": outcome.prompt.source,
        "drafts": len(outcome.speculative.accepted),
        "accepted_per_position": outcome.speculative.accepted_per_position(draft_tokens),
        "accepted": outcome.speculative.accepted,
        "prompt_ids": outcome.prompt.ids,
        "output_ids": outcome.speculative.tokens,
    }


def machine(target: CachedTarget) -> str:
    """What the speeds were measured on."""
    device = target.embedding.weight.device
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.is_file() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"


def table(report: dict[str, Any]) -> str:
    """What the user reads at the end."""
    speed = report["tokens_per_second"]
    lines = [
        f"evaluate: {report['prompts']} prompts, {report['generated_tokens']:,} tokens, equal to plain greedy decoding",
        f"  acceptance length  {report['acceptance_length']:.3f}  (1 + {report['accepted']:,} accepted / "
        f"{report['drafts']:,} drafts of {report['draft_tokens']} tokens)",
        "  depth              " + "".join(f"{k:>8}" for k in range(1, report["draft_tokens"] + 1)),
        "  accepted           " + shares(report["acceptance_at_depth"]),
        "  if reached         " + shares(report["conditional_acceptance"]),
        *by_source(report),
        f"  tokens per second  {speed['speculative']:.1f} with the drafter, {speed['plain']:.1f} without "
        f"({speed['speculative'] / speed['plain']:.2f}x; {report['dtype']}, {report['machine']})",
    ]
    return "\n".join(lines)


def by_source(report: dict[str, Any]) -> list[str]:
    """A line for each source, where there are several, and the sources of which nothing was decoded."""
    sources, lines = report["by_source"], []
    if len(sources) > 1:
        width = max(17, *(len(source) for source in sources))
        lines.append(f"  {'by source':<{width}}  prompts   length   if reached at each depth")
        for source, found in sources.items():
            length = "-" if found["acceptance_length"] is None else f"{found['acceptance_length']:.3f}"
            reached = shares(found["conditional_acceptance"])
            lines.append(f"  {source:<{width}}{found['prompts']:>9}{length:>9}   {reached}")
    if missing := report.get("not_measured"):
        more = f" and {len(missing) - NAMED} more" if len(missing) > NAMED else ""
        lines.append(f"  not measured       {', '.join(missing[:NAMED])}{more}: no prompt of it was decoded")
    return lines


def shares(values: list[float | None]) -> str:
    """Shares of a table's line."""
    return "".join(f"{'-':>8}" if share is None else f"{share:>8.1%}" for share in values)
