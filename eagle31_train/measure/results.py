"""What measuring hands on: the target's own words, and how far each draft from there would have got.

A drafter changes no word of the output, so one trajectory of the target serves every drafter and every depth: the
draft that a server makes while token i of the output is the newest does not depend on how it came there, and its
first K tokens are those of a server that drafts K.
"""

from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True)
class Trajectory:
    """What the target wrote after one prompt, and the states it had on the way.

    prompt, output: token ids; the output ends with an end token or at the limit.
    beyond: what the target would have written after that. vLLM counts drafted tokens that agree with it, too.
    aux: [>= len(prompt) + len(output) - 2, A, H] its auxiliary states, from position 0 on: drafts are made at
        positions len(prompt) - 1 + i, for i = 0 .. len(output) - 2.
    """

    prompt: list[int]
    output: list[int]
    beyond: list[int]
    aux: Tensor

    @property
    def slots(self) -> int:
        """How many places of the output a draft could be made at: before the token that ends it."""
        return len(self.output) - 1


@dataclass(frozen=True)
class Drift:
    """What changes inside the drafter from step to step; each list has one mean over the slots for each depth.

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
class Measured:
    """One drafter on one trajectory.

    accepted: for each slot in order, how many tokens of the draft made there the target agrees with, up to the depth.
    seen: real decodings' counts by draft tokens, where one was made: for each verification in order.
    """

    id: str
    source: str
    tokens: int  # of the output
    accepted: list[int]
    drift: Drift | None = None
    seen: dict[int, list[int]] = field(default_factory=dict)

    def rounds(self, draft_tokens: int) -> list[int]:
        """What a server that drafts so many tokens at a time would have accepted, verification by verification."""
        found, at = [], 0
        while at < len(self.accepted):
            found.append(min(self.accepted[at], draft_tokens))
            at += found[-1] + 1
        return found
