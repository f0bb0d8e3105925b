"""What vLLM counts of itself, read from its /metrics before and after: sums over all engines of a server."""

import re
from collections import Counter
from typing import Any

from eagle31_train.errors import UserError
from eagle31_train.evaluation.measurement import acceptance

# Prometheus' text: a name, labels, a value.
_LINE = re.compile(r"^(vllm:[\w:]+?)(?:\{(.*)\})? ([^ ]+)$", re.MULTILINE)
_POSITION = re.compile(r'position="(\d+)"')
DRAFTS = "vllm:spec_decode_num_drafts_total"
PROPOSED = "vllm:spec_decode_num_draft_tokens_total"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
FINISHED = "vllm:request_success_total"
TOKENS = "vllm:generation_tokens_total"
PREEMPTIONS = "vllm:num_preemptions_total"
TTFT = "vllm:time_to_first_token_seconds"
TPOT = "vllm:request_time_per_output_token_seconds"


def parse(text: str) -> Counter[str]:
    """The counters of /metrics by name, those of a position by NAME[i]; histograms only by their _sum and _count."""
    found: Counter[str] = Counter()
    for name, labels, value in _LINE.findall(text):
        if name.endswith("_bucket"):
            continue
        at = _POSITION.search(labels)
        found[f"{name}[{at[1]}]" if at else name] += float(value)  # type: ignore[assignment]
    return found


def since(before: Counter[str], after: Counter[str]) -> Counter[str]:
    """What was counted between two readings."""
    return Counter({name: after[name] - before[name] for name in after})


def speculation(counted: Counter[str], draft_tokens: int) -> dict[str, Any]:
    """Acceptance as vLLM counts it; UserError where this vLLM has no such counters."""
    if missing := [name for name in (DRAFTS, PROPOSED, ACCEPTED, f"{PER_POSITION}[0]") if name not in counted]:
        raise UserError(f"this vLLM counts no {missing[0]}: eagle31 reads those of vLLM 0.32")
    positions = [round(counted[f"{PER_POSITION}[{i}]"]) for i in range(draft_tokens)]
    return {"draft_tokens_proposed": round(counted[PROPOSED]), **acceptance(round(counted[DRAFTS]), positions)}


def mean(counted: Counter[str], histogram: str) -> float | None:
    """The mean of what a histogram counted; None where that is nothing."""
    count = counted[f"{histogram}_count"]
    return counted[f"{histogram}_sum"] / count if count else None
