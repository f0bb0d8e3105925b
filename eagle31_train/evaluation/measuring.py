"""Decode workloads: by the target alone, and by real speculation with every drafter.

Every drafter is also run from every position of the target's output (`unrolled.py`), which gives its acceptance at all
numbers of draft tokens at once. Two gates check this: speculation must change no token, and what real decoding
accepted, verification by verification, must equal the run from every position.
"""

import hashlib
import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import numpy as np
import torch

from eagle31_train.config import EvaluateConfig
from eagle31_train.console import Progress, note
from eagle31_train.errors import UserError
from eagle31_train.evaluation.decoding import (
    Decoded,
    Limits,
    Sampling,
    decode_plain,
    decode_speculative,
    first_difference,
    logit_gap,
)
from eagle31_train.evaluation.drafters import Candidate
from eagle31_train.evaluation.measurement import Counts, Measurement, machine
from eagle31_train.evaluation.prompts import Prompt
from eagle31_train.evaluation.sampling import TARGET, stream
from eagle31_train.evaluation.unrolled import Trajectory, narrowest, unroll
from eagle31_train.evaluation.workloads import Workload
from eagle31_train.targets.cached import CachedTarget

Way = tuple[str, int]  # drafter's name and number of draft tokens; PLAIN for no drafter
PLAIN: Way = ("", 0)
TIE = 1e-4  # scores that float32 may round either way


@dataclass(frozen=True)
class Measurer:
    """What all workloads share.

    model: the target, as `load_model` gives it. seed: of sampling; every prompt draws from one of its own.
    """

    model: Any
    limits: Limits
    options: EvaluateConfig
    seed: int

    @property
    def machine(self) -> str:
        """What is measured on, and with which versions."""
        return f"{machine(self.model.device)}, torch {torch.__version__}, transformers {version('transformers')}"

    def one_output(self, workload: Workload) -> bool:
        """Whether one output of the target serves every drafter and every number of draft tokens."""
        return workload.temperature == 0 or self.options.draft_sampling == "greedy"

    def measure(
        self, workload: Workload, candidates: list[Candidate], verified: int | None = None
    ) -> dict[str, Measurement]:
        """Decode a workload.

        Args:
            candidates: the drafters, whose names differ.
            verified: the first so many prompts are decoded with every drafter, too; default: all of them, and all
                where drafts are sampled, since nothing else tells what is accepted then.

        Returns:
            The measurement of every drafter, by name.

        Raises:
            UserError: speculation changed an output, or the two ways of counting differ.
        """
        prompts, options = workload.prompts, self.options
        depths = (
            [options.num_speculative_tokens]
            if self.one_output(workload)
            else range(1, options.max_speculative_tokens + 1)
        )
        verified = verified if self.one_output(workload) else None
        every = [PLAIN, *((c.name, depth) for c in candidates for depth in depths)]
        outputs: list[list[int]] = [[] for _ in prompts]
        counts: dict[str, list[Any]] = {candidate.name: [None] * len(prompts) for candidate in candidates}
        tokens, seconds = dict.fromkeys(every, 0), dict.fromkeys(every, 0.0)
        with Progress(total=len(prompts), desc=f"evaluate {workload.name}", unit="prompt") as bar:
            for number, batch in enumerate(batches(prompts, options, verified)):
                real = verified is None or max(batch) < verified
                timed = real and max(batch) < options.timed_prompts
                ways = every if real else [PLAIN]
                # In turns, so that a busy machine slows both alike.
                turns = ways if number % 2 == 0 else ways[::-1]
                decoded = {way: self._decode(way, workload, batch, candidates) for way in turns}
                for row, at in enumerate(batch):
                    of_prompt = {way: answers[row] for way, answers in decoded.items()}
                    outputs[at] = of_prompt[PLAIN].tokens
                    for candidate in candidates:
                        counts[candidate.name][at] = self._count(workload, at, of_prompt, candidate, candidates)
                for way, answers in decoded.items() if timed else ():
                    tokens[way] += sum(len(one.tokens) for one in answers)
                    seconds[way] += sum(one.seconds for one in answers)
                bar.update(len(batch))
        measurements = {}
        for name in counts:
            way, total = (name, options.num_speculative_tokens), tokens[PLAIN]
            speculative = seconds[way] * total / tokens[way] if total else 0.0
            measurements[name] = Measurement(outputs, counts[name], total, seconds[PLAIN], speculative)
        return measurements

    def warm_up(self, workload: Workload, candidates: list[Candidate]) -> None:
        """Decode one prompt in every way: the first also pays for what libraries set up."""
        for way in [PLAIN, *((candidate.name, self.options.num_speculative_tokens) for candidate in candidates)]:
            self._decode(way, workload, [0], candidates)

    def _decode(self, way: Way, workload: Workload, batch: list[int], candidates: list[Candidate]) -> list[Decoded]:
        """The answers to the prompts at these indices, with their auxiliary states where PLAIN serves every drafter."""
        rows = [workload.prompts[at] for at in batch]
        ids, seeds = [prompt.ids for prompt in rows], [seed_of(self.seed, prompt) for prompt in rows]
        sampling = Sampling(workload.temperature, workload.top_p, self.options.draft_sampling)
        if way == PLAIN:
            target, states = CachedTarget(self.model, _layers(candidates)), self.one_output(workload)
            beyond = self.options.max_speculative_tokens - 1 if states else 0
            return decode_plain(target, ids, self.limits, sampling, seeds, beyond=beyond, states=states)
        (candidate,) = [one for one in candidates if one.name == way[0]]
        target = CachedTarget(self.model, candidate.aux_layers)
        drafter = candidate.drafter
        return decode_speculative(target, drafter, candidate.target_ids, ids, way[1], self.limits, sampling, seeds)

    def _count(
        self,
        workload: Workload,
        at: int,
        decoded: Mapping[Way, Decoded],
        candidate: Candidate,
        candidates: list[Candidate],
    ) -> Counts:
        """What a drafter did with the prompt at an index."""
        prompt, plain = workload.prompts[at], decoded[PLAIN]
        real = {depth: answer for (name, depth), answer in decoded.items() if name == candidate.name}
        seen = {depth: answer.accepted for depth, answer in real.items()}
        if not self.one_output(workload):
            return Counts(prompt.id, prompt.source, len(plain.tokens), [], None, seen)
        for answer in real.values():
            self._refuse_difference(workload, prompt, plain, answer)
        assert plain.aux is not None
        layers = _layers(candidates)
        aux = plain.aux[:, [layers.index(layer) for layer in candidate.aux_layers]]
        trajectory = Trajectory(prompt.ids, plain.tokens, plain.beyond, aux)
        depths, drift = self.options.max_speculative_tokens, self.options.drift
        accepted = unroll(candidate.drafter, candidate.target_ids, trajectory, depths, drift)
        counts = Counts(prompt.id, prompt.source, len(plain.tokens), *accepted, seen)
        refuse_other_counts(prompt, candidate, trajectory, counts, self.options)
        return counts

    def _refuse_difference(self, workload: Workload, prompt: Prompt, plain: Decoded, speculative: Decoded) -> None:
        """UserError where speculation changed the output."""
        at = first_difference(plain.tokens, speculative.tokens)
        if at is None:
            return
        ours, theirs = (tokens[at] if at < len(tokens) else None for tokens in (speculative.tokens, plain.tokens))
        gap = "one output is shorter"
        if ours is not None and theirs is not None:
            target = CachedTarget(self.model, [1])  # whose states are not used
            scores = logit_gap(target, prompt.ids + plain.tokens[:at], theirs, ours)
            if workload.temperature:  # what decides is the race's logarithm; rounding is of the logits
                draws = stream(seed_of(self.seed, prompt), at, TARGET).standard_exponential(max(ours, theirs) + 1)
                scores -= workload.temperature * float(np.log(draws[theirs] / draws[ours]))
            gap = f"the target's scores differ by {scores:.3g}"
        raise UserError(
            f"prompt {prompt.id}, output token {at}: speculation gives {ours}, plain decoding {theirs} ({gap}); "
            f"{_advice(prompt, self.options)}"
        )


def _layers(candidates: list[Candidate]) -> list[int]:
    """Every auxiliary layer that some drafter reads."""
    return sorted({layer for candidate in candidates for layer in candidate.aux_layers})


def batches(prompts: list[Prompt], options: EvaluateConfig, verified: int | None) -> Iterator[list[int]]:
    """Indices of prompts to be decoded together: those that are timed alone, others of like length together, and those
    that are decoded in every way apart."""
    cut = len(prompts) if verified is None else min(verified, len(prompts))
    timed = min(options.timed_prompts, cut)
    yield from ([index] for index in range(timed))
    for part in (range(timed, cut), range(cut, len(prompts))):
        ordered = sorted(part, key=lambda i: len(prompts[i].ids))
        yield from (ordered[at : at + options.batch_size] for at in range(0, len(ordered), options.batch_size))


def seed_of(seed: int, prompt: Prompt) -> int:
    """A seed of its own for every prompt, whatever is decoded beside it."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{prompt.ids}".encode()).digest()[:6], "big")


def refuse_other_counts(
    prompt: Prompt, candidate: Candidate, trajectory: Trajectory, counts: Counts, options: EvaluateConfig
) -> None:
    """UserError where a real decoding accepted otherwise than the run from every position.

    Where two draft tokens score the same but for rounding, either may be drafted: that is printed and not refused.
    """
    for depth, seen in counts.seen.items():
        expected = counts.rounds(depth)
        at = first_difference(expected, seen)
        if at is None:
            continue
        problem = f"prompt {prompt.id}, {candidate.name}, verification {at + 1} of {depth} draft tokens: real decoding"
        if at == min(len(expected), len(seen)):
            raise UserError(f"{problem} makes {len(seen)}, the drafts from every position {len(expected)}")
        slot, parting = at + sum(expected[:at]), min(expected[at], seen[at])  # the step at which the two drafts part
        gap = narrowest(candidate.drafter, candidate.target_ids, trajectory, slot, parting + 1)
        problem += f" accepts {seen[at]}, the draft from that position {expected[at]} (narrowest choice {gap:.3g})"
        if gap > TIE:
            raise UserError(f"{problem}; {_advice(prompt, options)}")
        note(f"{problem}: rounding chose between equals")  # from here on the two decodings part


def _advice(prompt: Prompt, options: EvaluateConfig) -> str:
    """What a difference may come from, and what to do."""
    if options.dtype != "float32":
        return (
            f"evaluate.dtype={options.dtype} rounds differently for one token and for several: use "
            "evaluate.dtype=float32"
        )
    without = shlex.quote(f"evaluate.leave_out={json.dumps([*options.leave_out, prompt.id], ensure_ascii=False)}")
    return (
        f"under {TIE:g} rounding chose between equals, and {without} leaves this prompt out; over it, it is a mistake"
    )


def check_options(options: EvaluateConfig) -> None:
    """UserError for a headline that is not measured."""
    if options.max_speculative_tokens < options.num_speculative_tokens:
        raise UserError(
            f"evaluate.max_speculative_tokens={options.max_speculative_tokens} leaves out the headline, "
            f"evaluate.num_speculative_tokens={options.num_speculative_tokens}: raise the former or lower the latter"
        )
