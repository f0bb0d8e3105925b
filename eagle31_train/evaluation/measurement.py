"""What was measured: how many drafted tokens of one drafter the target accepts on the prompts of one workload.

The target's output does not depend on the drafter, so one output serves every drafter and number of draft tokens: the
first K tokens of the draft that a server makes while token i is the newest are those of a server that drafts K."""

import os
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field, TypeAdapter

from eagle31_train.common import artifacts
from eagle31_train.common.errors import UserError
from eagle31_train.common.machine import processor


@dataclass(frozen=True)
class Drift:
    """What changes inside the drafter from draft step to draft step: one mean over the slots for each step.

    sink, prompt, verified, own: shares of the attention, which sum to one: the first tokens of the sequence, the rest
        of the prompt, what the target has written, and what the drafter itself has drafted (its newest token's key
        is made of a verified state at step 0, of its own at later steps).
    rms: of the state that the step reads. entropy: of the draft distribution, in nats.
    """

    sink: list[float]
    prompt: list[float]
    verified: list[float]
    own: list[float]
    rms: list[float]
    entropy: list[float]


@dataclass(frozen=True)
class Counts:
    """One drafter on one prompt.

    tokens: of the output.
    accepted: for each slot (each position of the output that a draft can start at), how many tokens of the draft made
        there the target agrees with; empty if drafts are sampled.
    seen: by number of draft tokens, the accepted tokens of each verification of a real decoding, if one was made and
        gave this output; at a tie it may give another."""

    id: str
    source: str
    tokens: int
    accepted: list[int]
    drift: Drift | None = None
    seen: dict[int, list[int]] = field(default_factory=dict)

    def verifications(self, draft_tokens: int) -> list[int]:
        """Return `rounds`, or, if drafts are sampled, what the real decoding accepted."""
        return rounds(self.accepted, draft_tokens) if self.accepted else self.seen.get(draft_tokens, [])


def rounds(accepted: list[int], draft_tokens: int) -> list[int]:
    """Return what a server that drafts so many tokens accepts in each verification. accepted: as in `Counts`."""
    made, at = [], 0
    while at < len(accepted):
        made.append(min(accepted[at], draft_tokens))
        at += made[-1] + 1
    return made


@dataclass(frozen=True)
class Measurement:
    """One drafter on one workload.

    outputs: the target's token ids of every prompt. counts: of every prompt, in the same order.
    tokens: in the outputs of the prompts that were timed, decoded one at a time. plain, speculative: seconds for that
        many tokens without the drafter, and with it at evaluate.num_speculative_tokens (outputs differ in length if
        drafts are sampled, and after a tie).
    machine: what was measured on; empty for the present machine.
    """

    outputs: list[list[int]]
    counts: Annotated[list[Counts], Field(alias="measured")]
    tokens: int = 0
    plain: float = 0.0
    speculative: float = 0.0
    machine: str = ""

    @property
    def timed(self) -> int:
        """How many prompts were timed: the first ones, whose outputs have `tokens` tokens in all."""
        ends = accumulate(map(len, self.outputs))
        return next((n for n, end in enumerate(ends, 1) if end >= self.tokens), 0) if self.tokens else 0


_JSON = TypeAdapter(Measurement)


def acceptance(drafts: int, per_position: list[int]) -> dict[str, Any]:
    """Return the number of drafts, and of those whose first 1, 2, … tokens were accepted, with shares (None if 0)."""
    return {
        "drafts": drafts,
        "accepted_per_position": per_position,
        "acceptance_length": 1 + sum(per_position) / drafts if drafts else None,
        "acceptance_at_depth": [count / drafts if drafts else None for count in per_position],
    }


def write_measurement(file: Path, measurement: Measurement, **more: Any) -> None:
    write_checked(file, "outcome", _JSON.dump_python(measurement, mode="json", by_alias=True), **more)


def read_measurement(file: Path) -> Measurement | None:
    """Return what `write_measurement` wrote, or None if there is no file. UserError if it is damaged."""
    value = read_checked(file, "outcome")
    return None if value is None else _JSON.validate_python(value)


def write_checked(file: Path, name: str, value: dict[str, Any], **more: Any) -> None:
    artifacts.write_json(file, {**more, "sum": artifacts.fingerprint(value), name: value})


def read_checked(file: Path, name: str) -> dict[str, Any] | None:
    """Return what `write_checked` wrote, or None if there is no file. UserError if it is damaged."""
    if not file.is_file():
        return None
    record = artifacts.read_json(file, "this command")
    value: dict[str, Any] | None = record.get(name)
    if artifacts.fingerprint(value) != record.get("sum"):
        raise UserError(f"{file} is damaged: remove it, and run the same command to measure it again")
    return value


def machine(device: torch.device) -> str:
    """Return the name of a device; for a CPU, with its number of cores."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    count = os.cpu_count() or 1
    return f"{processor()}, {count} core{'s' if count > 1 else ''}"
