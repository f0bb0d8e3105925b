"""Workloads decoded: by the target alone, and by real speculation with every drafter.

Beside that, every drafter is run from every place of the target's own output (`unrolled.py`), which tells its
acceptance at all depths at once. Two gates keep this honest: speculation must change no token, and what real decoding
accepted, verification by verification, must be what the run from every place says.
"""

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from eagle31_train.measure.acceptance import Sheet, machine
from eagle31_train.measure.decoding import (
    Decoded,
    Limits,
    Sampling,
    decode_plain,
    decode_speculative,
    first_difference,
    logit_gap,
)
from eagle31_train.measure.drafters import Candidate
from eagle31_train.measure.prompts import Prompt
from eagle31_train.measure.results import Measured, Trajectory
from eagle31_train.measure.sampling import TARGET, stream
from eagle31_train.measure.suites import Workload, leaving_out
from eagle31_train.measure.unrolled import narrowest, unroll
from eagle31_train.schema import EvaluateConfig, UserError
from eagle31_train.targets.cached import CachedTarget
from eagle31_train.targets.hf import pick_dtype

Way = tuple[str, int]  # who drafts, and how many tokens; PLAIN for nobody
PLAIN: Way = ("", 0)
TIE = 1e-4  # scores that float32 may round either way
NAMED = 5  # prompts that were left out, of one kind


@dataclass
class Outcome:
    """What one drafter did on a workload, in the order of its prompts.

    outputs: of the target, token ids. tokens: of the prompts that were decoded both ways; plain, speculative: seconds
    that these took, with evaluate.draft_tokens, for as many tokens: where drafts are drawn, outputs differ in length.
    machine: what was measured on, and with which versions, where that is another than now.
    """

    outputs: list[list[int]]
    measured: list[Measured]
    tokens: int = 0
    plain: float = 0.0
    speculative: float = 0.0
    machine: str = ""


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

    def shared(self, workload: Workload) -> bool:
        """Whether one output of the target serves every drafter and every number of draft tokens."""
        return workload.temperature == 0 or self.options.draft_sampling == "greedy"

    def measure(
        self, workload: Workload, candidates: list[Candidate], verified: int | None = None
    ) -> dict[str, Outcome]:
        """Decode a workload.

        Args:
            candidates: the drafters, whose names differ.
            verified: the first so many prompts are decoded with every drafter, too; default: all of them, and all
                where drafts are drawn, since nothing else tells what is accepted then.

        Returns:
            The outcome of every drafter, by name.

        Raises:
            UserError: speculation changed an output, or the two ways of counting differ.
        """
        prompts, options = workload.prompts, self.options
        sampling = Sampling(workload.temperature, workload.top_p, options.draft_sampling)
        shared = self.shared(workload)
        depths = [options.draft_tokens] if shared else range(1, options.depths + 1)
        verified = verified if shared else None
        found: dict[int, tuple[list[int], dict[str, Measured]]] = {}  # by the prompt's place
        every = [PLAIN, *((c.name, depth) for c in candidates for depth in depths)]
        tokens, seconds = dict.fromkeys(every, 0), dict.fromkeys(every, 0.0)
        with tqdm(total=len(prompts), desc=f"evaluate {workload.name}", unit="prompt") as bar:
            for number, batch in enumerate(batches(prompts, options.batch_size, verified)):
                rows = [prompts[i] for i in batch]
                real = verified is None or max(batch) < verified
                ways = every if real else [PLAIN]
                # In turns, so that a busy machine slows both alike.
                turns = ways if number % 2 == 0 else ways[::-1]
                decoded = {way: self._decode(way, rows, sampling, candidates, shared) for way in turns}
                for row, at in enumerate(batch):
                    of_row = {way: answers[row] for way, answers in decoded.items()}
                    layers = _layers(candidates)
                    read = {c.name: self._read(rows[row], of_row, c, layers, sampling, shared) for c in candidates}
                    found[at] = of_row[PLAIN].tokens, read
                if real:
                    for way, answers in decoded.items():
                        tokens[way] += sum(len(one.tokens) for one in answers)
                        seconds[way] += sum(one.seconds for one in answers)
                bar.update(len(batch))
        in_order, count = [found[at] for at in range(len(prompts))], tokens[PLAIN]
        outputs = [output for output, _ in in_order]
        outcomes = {}
        for name in (candidate.name for candidate in candidates):
            way = name, options.draft_tokens
            speculative = seconds[way] * count / tokens[way] if count else 0.0
            measured = [read[name] for _, read in in_order]
            outcomes[name] = Outcome(outputs, measured, count, seconds[PLAIN], speculative)
        return outcomes

    def warm_up(self, workload: Workload, candidates: list[Candidate]) -> None:
        """Decode one prompt in every way: the first also pays for what libraries set up."""
        sampling = Sampling(workload.temperature, workload.top_p, self.options.draft_sampling)
        for way in [PLAIN, *((candidate.name, self.options.draft_tokens) for candidate in candidates)]:
            self._decode(way, workload.prompts[:1], sampling, candidates, shared=False)

    def _decode(
        self, way: Way, rows: list[Prompt], sampling: Sampling, candidates: list[Candidate], shared: bool
    ) -> list[Decoded]:
        ids, seeds = [prompt.ids for prompt in rows], [seed_of(self.seed, prompt) for prompt in rows]
        if way == PLAIN:
            beyond = self.options.depths - 1 if shared else 0
            target = CachedTarget(self.model, _layers(candidates))
            return decode_plain(target, ids, self.limits, sampling, seeds, beyond=beyond, states=shared)
        candidate = next(one for one in candidates if one.name == way[0])
        target = CachedTarget(self.model, candidate.aux_layers)
        drafter = candidate.drafter
        return decode_speculative(target, drafter, candidate.target_ids, ids, way[1], self.limits, sampling, seeds)

    def _read(
        self,
        prompt: Prompt,
        decoded: dict[Way, Decoded],
        candidate: Candidate,
        layers: list[int],
        sampling: Sampling,
        shared: bool,
    ) -> Measured:
        """What a drafter did with one prompt; `layers` are those whose states were kept."""
        plain = decoded[PLAIN]
        real = {depth: answer for (name, depth), answer in decoded.items() if name == candidate.name}
        seen = {depth: answer.accepted for depth, answer in real.items()}
        if not shared:
            return Measured(prompt.id, prompt.source, len(plain.tokens), [], None, seen)
        for answer in real.values():
            self._refuse_difference(prompt, plain, answer, sampling)
        assert plain.aux is not None
        aux = plain.aux[:, [layers.index(layer) for layer in candidate.aux_layers]]
        trajectory = Trajectory(prompt.ids, plain.tokens, plain.beyond, aux)
        depth, drift = self.options.depths, self.options.drift
        measured = Measured(
            prompt.id,
            prompt.source,
            len(plain.tokens),
            *unroll(candidate.drafter, candidate.target_ids, trajectory, depth, drift),
            seen,
        )
        refuse_other_counts(prompt, candidate, trajectory, measured, self.options)
        return measured

    def _refuse_difference(self, prompt: Prompt, plain: Decoded, speculative: Decoded, sampling: Sampling) -> None:
        """UserError where speculation changed the output."""
        at = first_difference(plain.tokens, speculative.tokens)
        if at is None:
            return
        ours, theirs = (tokens[at] if at < len(tokens) else None for tokens in (speculative.tokens, plain.tokens))
        gap, tie = "one output is shorter", False
        if ours is not None and theirs is not None:
            target = CachedTarget(self.model, [1])  # whose states nobody asks for
            scores = logit_gap(target, prompt.ids + plain.tokens[:at], theirs, ours)
            gap, tie = f"the target's logits differ by {scores:.3g}", abs(scores) < TIE
            if not sampling.greedy:  # what decides is the race's logarithm
                draws = stream(seed_of(self.seed, prompt), at, TARGET).standard_exponential(max(ours, theirs) + 1)
                scores = scores / sampling.temperature - float(np.log(draws[theirs] / draws[ours]))
                # Dividing by the temperature made what rounding did to the logits as much larger.
                gap, tie = f"the target's draws differ by {scores:.3g}", abs(scores) * sampling.temperature < TIE
        raise UserError(
            f"prompt {prompt.id}, output token {at}: speculation gives {ours}, plain decoding {theirs} ({gap}); "
            f"{rounding(prompt, self.options, tie)}"
        )


def sheet(workload: Workload, outcomes: dict[str, list[Outcome]]) -> Sheet:
    """What tables and pictures need of a workload; several trainings of one drafter stand under one name.

    Speeds are those of a drafter that was measured alone, with every prompt. Of several, which were measured at other
    times and with a few prompts each, they would be noise: serving tells which is faster.
    """
    measured = {name: [each for one in some for each in one.measured] for name, some in outcomes.items()}
    ones = {
        f"{name}, training {n + 1}" if len(some) > 1 else name: one
        for name, some in outcomes.items()
        for n, one in enumerate(some)
    }
    speeds: dict[str, tuple[int, float]] = {}
    if len(ones) == 1:
        ((name, one),) = ones.items()
        speeds = {"plain": (one.tokens, one.plain), name: (one.tokens, one.speculative)} if one.tokens else {}
    elsewhere = [f"{name} was measured on {one.machine}" for name, one in ones.items() if one.machine]
    return Sheet(
        workload.name,
        workload.suite,
        workload.perturbation,
        workload.temperature,
        workload.top_p,
        measured,
        speeds,
        [*notes(workload), *elsewhere],
    )


def remarks(workloads: list[Workload]) -> Iterator[str]:
    """What to say of workloads before they are measured."""
    for workload in workloads:
        yield from (f"{workload.name}: {note}" for note in notes(workload))


def notes(workload: Workload) -> Iterator[str]:
    """What a reader of its numbers should know: also what does not belong to it, and why."""
    yield from workload.notes
    for why in dict.fromkeys(workload.left_out.values()):
        ids = [prompt for prompt, reason in workload.left_out.items() if reason == why]
        more = f" and {len(ids) - NAMED} more" if len(ids) > NAMED else ""
        yield f"left out {', '.join(ids[:NAMED])}{more}: {why}"


def _layers(candidates: list[Candidate]) -> list[int]:
    """Every auxiliary layer that some drafter reads."""
    return sorted({layer for candidate in candidates for layer in candidate.aux_layers})


def check_options(options: EvaluateConfig) -> None:
    """Refuse numbers with which nothing would be measured."""
    pick_dtype(options.dtype)
    least = {"num_prompts": 1, "draft_tokens": 1, "depths": 1, "max_new_tokens": 2, "batch_size": 1}
    for name, at_least in least.items():
        if getattr(options, name) < at_least:
            raise UserError(f"evaluate.{name}={getattr(options, name)} measures nothing: set at least {at_least}")
    if options.depths < options.draft_tokens:
        raise UserError(
            f"evaluate.depths={options.depths} leaves out evaluate.draft_tokens={options.draft_tokens}, the headline: "
            f"set depths to {options.draft_tokens} or more, or draft_tokens lower"
        )
    for name, choices in (("backend", ("transformers", "vllm")), ("draft_sampling", ("greedy", "probabilistic"))):
        if getattr(options, name) not in choices:
            raise UserError(f"evaluate.{name}={getattr(options, name)} is unknown: it is {' or '.join(choices)}")
    if not 0 <= options.temperature < math.inf or not 0 < options.top_p <= 1:
        raise UserError(
            f"evaluate.temperature={options.temperature} and evaluate.top_p={options.top_p} are no way to sample: "
            "temperature is 0 (greedy) or more, top_p above 0 and at most 1"
        )


def batches(prompts: list[Prompt], size: int, verified: int | None) -> Iterator[list[int]]:
    """Indices of prompts to be decoded together: of like length, and those that are decoded in every way apart."""
    cut = len(prompts) if verified is None else min(verified, len(prompts))
    for part in (range(cut), range(cut, len(prompts))):
        ordered = sorted(part, key=lambda i: len(prompts[i].ids))
        yield from (ordered[at : at + size] for at in range(0, len(ordered), size))


def seed_of(seed: int, prompt: Prompt) -> int:
    """A seed of its own for every prompt, whatever is decoded beside it."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{prompt.ids}".encode()).digest()[:6], "big")


def refuse_other_counts(
    prompt: Prompt, candidate: Candidate, trajectory: Trajectory, measured: Measured, options: EvaluateConfig
) -> None:
    """UserError where a real decoding accepted otherwise than the run from every place says.

    Where two draft tokens are as likely as each other, rounding picks one: the difference is told, and is none of ours.
    """
    for depth, seen in measured.seen.items():
        told = measured.rounds(depth)
        at = first_difference(told, seen)
        if at is None:
            continue
        problem = f"prompt {prompt.id}, {candidate.name}, verification {at + 1} of {depth} draft tokens: real decoding"
        if at == min(len(told), len(seen)):
            raise UserError(f"{problem} makes {len(seen)}, the drafts from every place {len(told)}: a mistake")
        slot, parting = at + sum(told[:at]), min(told[at], seen[at])  # the step at which the two drafts part
        gap = narrowest(candidate.drafter, candidate.target_ids, trajectory, slot, parting + 1)
        problem += f" accepts {seen[at]}, the draft from that place {told[at]} (its narrowest choice is {gap:.3g})"
        if gap > TIE:
            raise UserError(f"{problem}; {rounding(prompt, options, tie=False)}")
        tqdm.write(f"{problem}: rounding chose between equals")  # from here on the two walk apart


def rounding(prompt: Prompt, options: EvaluateConfig, tie: bool) -> str:
    """What a difference may come from, and what to do; tie: whether the two are equal but for rounding."""
    if options.dtype != "float32":
        return (
            f"evaluate.dtype={options.dtype} rounds differently for one token and for several: use "
            "evaluate.dtype=float32"
        )
    without = leaving_out([*options.leave_out, prompt.id])
    if tie:
        return f"rounding chose between equals: add {without} to the command, which leaves this prompt out"
    return f"rounding rarely makes {TIE:g}, so it is likely a mistake, which {without} would hide"
