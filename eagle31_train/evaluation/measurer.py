"""Decode workloads: by the target alone, and by real speculation with every drafter.

Every drafter is also run from every position of the target's output (`unrolled.py`), which gives its acceptance at all
numbers of draft tokens at once. Two gates check this: speculation must change no token, and what real decoding
accepted, verification by verification, must equal the run from every position.
"""

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eagle31_train.common.console import Progress, note
from eagle31_train.common.errors import UserError
from eagle31_train.config import EvaluateConfig
from eagle31_train.evaluation.decoding import Decoded, Limits, decode_plain, decode_speculative
from eagle31_train.evaluation.measurement import Counts, Measurement, machine, rounds
from eagle31_train.evaluation.prompts import Prompt
from eagle31_train.evaluation.sampling import TARGET, agreeing, stream
from eagle31_train.evaluation.unrolled import Trajectory, narrowest, unroll
from eagle31_train.evaluation.workloads import Workload
from eagle31_train.model.drafter import Drafter
from eagle31_train.targets.cached import CachedTarget, why_alone

Way = tuple[str, int]  # drafter's name and number of draft tokens; PLAIN for no drafter
PLAIN: Way = ("", 0)
Timed = tuple[int, float]  # tokens of an output that was decoded alone, and its seconds
TRIED_TOKENS = 8  # tokens of an answer that is decoded only to warm up and to be timed
TIE = 1e-4  # difference of scores that float32 may round either way


@dataclass(frozen=True)
class Candidate:
    """A drafter in memory, beside its target.

    identity: its checkpoint's. target_ids: [Vd] int64, on the drafter's device.
    verified: how many prompts of a workload, from the first on, it decodes for real; None is all. If drafts are
        sampled, it decodes all, since nothing else then tells what is accepted."""

    name: str
    identity: str
    drafter: Drafter
    target_ids: Tensor
    verified: int | None = None


@dataclass
class Measurer:
    """What all workloads share.

    model: from `load_model`. seed: each prompt's own seed is made from it. threads: how many torch uses to decode one
    prompt alone; `warm_up` chooses them."""

    model: Any
    limits: Limits
    options: EvaluateConfig
    seed: int
    threads: int = field(default_factory=torch.get_num_threads)

    @property
    def machine(self) -> str:
        here = machine(self.model.device)
        return f"{here}, torch {torch.__version__}, transformers {version('transformers')}"

    def one_output(self, workload: Workload) -> bool:
        """Return whether one output of the target serves every drafter and every number of draft tokens."""
        return not workload.sampling(self.options.draft_sampling).drawn_drafts

    def measure(self, workload: Workload, candidates: list[Candidate]) -> dict[str, Measurement]:
        """Decode a workload with drafters of different names. Return the measurement of each, by name.

        UserError if speculation changed an output, or many by ties, or if the two ways of counting differ."""
        prompts, options, headline = workload.prompts, self.options, self.options.num_speculative_tokens
        depths = [headline] if self.one_output(workload) else range(1, options.max_speculative_tokens + 1)
        ways = [PLAIN, *((one.name, depth) for one in candidates for depth in depths)]
        verified = {one.name: self._verified(workload, one) for one in candidates}
        most, layers = max(verified.values()), _layers(candidates)
        together = 1 if why_alone(self.model) else options.batch_size
        outputs: list[list[int]] = [[] for _ in prompts]
        counts: dict[str, list[Any]] = {one.name: [None] * len(prompts) for one in candidates}
        timed: dict[Way, list[Timed]] = {way: [] for way in ways}
        with Progress(total=len(prompts), desc=f"evaluate {workload.name}", unit="prompt") as bar:
            for number, batch in enumerate(batches(prompts, options.timed_prompts, together, most)):
                turns = [way for way in ways if way == PLAIN or max(batch) < verified[way[0]]]
                if number % 2:  # so that a busy machine slows all ways alike
                    turns.reverse()
                with threads(self.threads) if len(batch) == 1 else nullcontext():
                    decoded = {way: self._decode(way, workload, batch, candidates) for way in turns}
                for row, at in enumerate(batch):
                    of_prompt = {way: answers[row] for way, answers in decoded.items()}
                    outputs[at] = of_prompt[PLAIN].tokens
                    for one in candidates:
                        counts[one.name][at] = self._count(workload, prompts[at], of_prompt, one, layers)
                if max(batch) < min(most, options.timed_prompts):
                    for way, answers in decoded.items():
                        timed[way] += [(len(one.tokens), one.seconds) for one in answers]
                bar.update(len(batch))
        measurements = {}
        for name, of_prompts in counts.items():
            self._refuse_many_ties(f"{workload.name}, {name}", of_prompts[: verified[name]])
            measurements[name] = Measurement(outputs, of_prompts, *timing(timed[PLAIN], timed[name, headline]))
        return measurements

    def _verified(self, workload: Workload, candidate: Candidate) -> int:
        """Return how many prompts, from the first on, are decoded with a drafter for real."""
        if candidate.verified is None or not self.one_output(workload):
            return len(workload.prompts)
        return min(candidate.verified, len(workload.prompts))

    def warm_up(self, workload: Workload, candidates: list[Candidate]) -> None:
        """Decode a few tokens in every way, as the first also pay for libraries' setup. Then choose the threads."""
        ways = [PLAIN, *((candidate.name, self.options.num_speculative_tokens) for candidate in candidates)]
        limits = replace(self.limits, max_new_tokens=min(TRIED_TOKENS, self.limits.max_new_tokens))
        briefly = replace(self, limits=limits)

        def decode() -> None:
            for way in ways:
                briefly._decode(way, workload, [0], candidates)

        decode()
        if self.model.device.type == "cpu":
            self.threads = quickest_threads(decode)

    def _decode(self, way: Way, workload: Workload, batch: list[int], candidates: list[Candidate]) -> list[Decoded]:
        """Answer the prompts at these indices. PLAIN keeps auxiliary states if one output serves every drafter."""
        rows = [workload.prompts[at] for at in batch]
        ids, seeds = [prompt.ids for prompt in rows], [seed_of(self.seed, prompt) for prompt in rows]
        sampling = workload.sampling(self.options.draft_sampling)
        if way == PLAIN:
            target, states = CachedTarget(self.model, _layers(candidates)), self.one_output(workload)
            beyond = self.options.max_speculative_tokens - 1 if states else 0
            return decode_plain(target, ids, self.limits, sampling, seeds, beyond=beyond, states=states)
        (candidate,) = [one for one in candidates if one.name == way[0]]
        target = CachedTarget(self.model, candidate.drafter.shape.aux_layers)
        drafter = candidate.drafter
        return decode_speculative(target, drafter, candidate.target_ids, ids, way[1], self.limits, sampling, seeds)

    def _count(
        self,
        workload: Workload,
        prompt: Prompt,
        decoded: Mapping[Way, Decoded],
        candidate: Candidate,
        layers: list[int],
    ) -> Counts:
        """Return a drafter's counts on a prompt. `layers`: those of plain decoding's auxiliary states."""
        plain = decoded[PLAIN]
        real = {depth: answer for (name, depth), answer in decoded.items() if name == candidate.name}
        seen = {depth: answer.accepted for depth, answer in real.items()}
        if not self.one_output(workload):
            return Counts(prompt.id, prompt.source, len(plain.tokens), [], None, seen)
        for answer in real.values():  # of one number of draft tokens
            if answer.tokens != plain.tokens:
                self._check_difference(workload, prompt, plain.tokens, answer.tokens)
                seen = {}  # a tie: what follows is another answer
        assert plain.aux is not None
        states = plain.aux[:, [layers.index(layer) for layer in candidate.drafter.shape.aux_layers]]
        trajectory = Trajectory(prompt.ids, plain.tokens, plain.beyond, states)
        depths, drift = self.options.max_speculative_tokens, self.options.drift
        accepted = unroll(candidate.drafter, candidate.target_ids, trajectory, depths, drift)
        counts = Counts(prompt.id, prompt.source, len(plain.tokens), *accepted, seen)
        self._refuse_other_counts(prompt, candidate, trajectory, counts)
        return counts

    def _refuse_many_ties(self, where: str, verified: list[Counts]) -> None:
        """Raise UserError if more outputs than rounding explains differ from plain decoding."""
        ties = sum(not one.seen for one in verified)
        if ties > max(1, len(verified) // 10):
            raise UserError(f"{where}: {ties} of {len(verified)} outputs differ from plain decoding; {self._advice()}")

    def _check_difference(self, workload: Workload, prompt: Prompt, plain: list[int], speculative: list[int]) -> None:
        """Raise UserError if speculation gives another output.

        If the outputs part at two tokens that score the same up to float32's rounding, print that instead."""
        at = agreeing(plain, speculative)
        ours, theirs = (tokens[at] if at < len(tokens) else None for tokens in (speculative, plain))
        gap, scores = "one output is shorter", np.inf
        if ours is not None and theirs is not None:
            logits = CachedTarget(self.model, [1]).read_plain([prompt.ids + plain[:at]])[0, 0]
            scores = float(logits[theirs] - logits[ours])
            if workload.temperature:  # the race's logarithm decides; the logits are rounded
                draws = stream(seed_of(self.seed, prompt), at, TARGET).standard_exponential(max(ours, theirs) + 1)
                scores -= workload.temperature * float(np.log(draws[theirs] / draws[ours]))
            gap = f"the target's scores differ by {scores:.3g}"
        problem = f"prompt {prompt.id}, output token {at}: speculation gives {ours}, plain decoding {theirs} ({gap})"
        if self.options.dtype != "float32" or not abs(scores) <= TIE:
            raise UserError(f"{problem}; {self._advice()}")
        note(f"{problem}: rounding decided between equals, so this prompt does not count as verified")

    def _refuse_other_counts(
        self, prompt: Prompt, candidate: Candidate, trajectory: Trajectory, counts: Counts
    ) -> None:
        """Raise UserError if a real decoding accepted otherwise than the run from every position.

        If two draft tokens score the same up to rounding, either may be drafted: print that instead."""
        for depth, seen in counts.seen.items():
            expected = rounds(counts.accepted, depth)
            if seen == expected:
                continue
            at = agreeing(expected, seen)
            problem = f"prompt {prompt.id}, {candidate.name}, verification {at + 1} of {depth} draft tokens: "
            if at == min(len(expected), len(seen)):
                made = f"{len(seen)} verifications, the drafts from every position give {len(expected)}"
                raise UserError(f"{problem}real decoding makes {made}: report this bug")
            slot, parting = at + sum(expected[:at]), min(expected[at], seen[at])  # the step at which the drafts part
            gap = narrowest(candidate.drafter, candidate.target_ids, trajectory, slot, parting + 1)
            problem += f"real decoding accepts {seen[at]}, the draft from that position {expected[at]} "
            problem += f"(narrowest choice {gap:.3g})"
            if gap > TIE:
                raise UserError(f"{problem}; {self._advice()}")
            note(f"{problem}: rounding decided between equals")  # from here on the two decodings part

    def _advice(self) -> str:
        if (dtype := self.options.dtype) != "float32":
            return f"evaluate.dtype={dtype} rounds differently for several tokens at once: use evaluate.dtype=float32"
        tie = f"scores within {TIE:g}, in one of ten prompts"
        return f"rounding ({tie}) does not explain it: report this bug, or use other prompts (evaluate.prompts)"


def _layers(candidates: list[Candidate]) -> list[int]:
    return sorted({layer for candidate in candidates for layer in candidate.drafter.shape.aux_layers})


def timing(plain: list[Timed], speculative: list[Timed]) -> tuple[int, float, float]:
    """Return how many tokens plain decoding wrote, its seconds, and those of as many tokens by speculation; zeros if
    that was not timed."""
    if not speculative:
        return 0, 0.0, 0.0
    tokens, others = (sum(count for count, _ in each) for each in (plain, speculative))
    seconds, took = (sum(spent for _, spent in each) for each in (plain, speculative))
    return tokens, seconds, took * tokens / others


def batches(prompts: list[Prompt], timed: int, size: int, verified: int) -> Iterator[list[int]]:
    """Yield indices of prompts to decode together: the first `timed` alone, others of similar length `size` at a time.
    The first `verified`, which are decoded in every way, are never mixed with the rest."""
    timed = min(timed, verified)
    yield from ([index] for index in range(timed))
    for part in (range(timed, verified), range(verified, len(prompts))):
        ordered = sorted(part, key=lambda i: len(prompts[i].ids))
        yield from (ordered[at : at + size] for at in range(0, len(ordered), size))


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Context manager: torch computes on `count` threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def quickest_threads(work: Callable[[], object]) -> int:
    """Return how many threads of torch finish `work` first: all, half of them, and so on down to one.

    A pass over few tokens is short: a sleeping thread takes longer to wake than to compute its share.
    """
    most = torch.get_num_threads()
    seconds = {}
    for count in (most >> halvings for halvings in range(most.bit_length())):
        with threads(count):
            began = time.perf_counter()
            work()
            seconds[count] = time.perf_counter() - began
    quickest = min(seconds, key=seconds.__getitem__)
    if quickest < most:
        note(f"evaluate: decoding single prompts on {quickest} of {most} threads, which is faster here")
    return quickest


def seed_of(seed: int, prompt: Prompt) -> int:
    """Return a prompt's own seed, which does not depend on what is decoded beside it."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{prompt.ids}".encode()).digest()[:6], "big")
