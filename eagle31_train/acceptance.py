"""What an evaluation measured: acceptance by depth and speed, for the manifest and for people."""

import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from eagle31_train.decoding import Decoded
from eagle31_train.prompts import Prompt
from eagle31_train.schema import EvaluateConfig, UserError
from eagle31_train.targets.cached import CachedTarget


@dataclass(frozen=True)
class Outcome:
    """One prompt, decoded both ways, with equal outputs."""

    prompt: Prompt
    plain: Decoded
    speculative: Decoded


def summarise(outcomes: list[Outcome], options: EvaluateConfig, target: CachedTarget) -> dict[str, Any]:
    """The manifest's report; UserError where nothing was drafted."""
    runs = [outcome.speculative for outcome in outcomes]
    drafts = sum(len(run.accepted) for run in runs)
    if not drafts:
        raise UserError("every answer ended with its first token, so nothing was drafted: choose other prompts")
    counts = (run.accepted_per_position(options.draft_tokens) for run in runs)
    per_position = [sum(column) for column in zip(*counts, strict=True)]
    tokens = sum(len(run.tokens) for run in runs)
    return {
        "prompts": len(outcomes),
        "draft_tokens": options.draft_tokens,
        "max_new_tokens": options.max_new_tokens,
        "drafts": drafts,
        "draft_tokens_proposed": sum(run.proposed for run in runs),
        "accepted": sum(per_position),
        "accepted_per_position": per_position,
        "acceptance_length": 1 + sum(per_position) / drafts,
        "acceptance_at_depth": [count / drafts for count in per_position],
        "conditional_acceptance": [
            count / before if before else None
            for before, count in zip([drafts, *per_position], per_position, strict=False)
        ],
        "tokens_per_second": {
            "speculative": tokens / sum(run.seconds for run in runs),
            "plain": tokens / sum(outcome.plain.seconds for outcome in outcomes),
        },
        "generated_tokens": tokens,
        "identical": True,  # refuse_difference has seen every output
        "dtype": options.dtype,
        "machine": machine(target),
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
        "  accepted           " + "".join(f"{share:>8.1%}" for share in report["acceptance_at_depth"]),
        "  if reached         "
        + "".join(f"{'-':>8}" if share is None else f"{share:>8.1%}" for share in report["conditional_acceptance"]),
        f"  tokens per second  {speed['speculative']:.1f} with the drafter, {speed['plain']:.1f} without "
        f"({speed['speculative'] / speed['plain']:.2f}x; {report['dtype']}, {report['machine']})",
    ]
    return "\n".join(lines)
