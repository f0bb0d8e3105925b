"""Evaluate drafters of one target, alone or side by side. Every drafter's measurement of every workload is kept in a
file of its own: a run that was stopped goes on with what is left, and one more drafter is decoded alone."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from eagle31_train import provenance
from eagle31_train.checkpoint.drafter_checkpoint import DrafterCheckpoint
from eagle31_train.common import artifacts
from eagle31_train.common.console import note
from eagle31_train.common.errors import UserError
from eagle31_train.config import Config, DrafterConfig, TrainConfig
from eagle31_train.evaluation.decoding import Limits
from eagle31_train.evaluation.measurement import Measurement, machine, read_measurement, write_measurement
from eagle31_train.evaluation.measuring import Candidate, Measurer
from eagle31_train.evaluation.results import summarise
from eagle31_train.evaluation.serving.engine import max_model_len
from eagle31_train.evaluation.workloads import Workload, workloads
from eagle31_train.model.rope import stretched
from eagle31_train.targets import hf
from eagle31_train.targets.cached import CachedTarget
from eagle31_train.targets.hf import DTYPES, load_model, pick_device, read_config

Inputs = dict[str, Any]  # what a training was made from


def evaluate(
    config: Config,
    checkpoints: Mapping[str, Sequence[DrafterCheckpoint]],
    data: dict[str, Any],
    folder: Path,
    verified: int | None = None,
) -> tuple[dict[str, Any], list[Workload], list[dict[str, list[Measurement]]]]:
    """Decode all workloads with all drafters, of which the others are compared with the first. What was loaded for it
    is free again afterwards. UserError: input that is wrong, or an output that is not plain decoding's, ties apart.

    Args:
        checkpoints: of each drafter by name, its trainings.
        data: stage 1's manifest. folder: keeps the measurements. verified: see `Candidate`.

    Returns:
        The result (see `results.py`); what was decoded; and the measurements of each, by drafter, of every training.
    """
    options = config.evaluate
    headline, most = options.num_speculative_tokens, options.max_speculative_tokens
    trainings = {name: [one.inputs for one in some] for name, some in checkpoints.items()}
    known = caveats(trainings, data["dataset_fingerprint"])
    every = [one for some in checkpoints.values() for one in some]
    chosen = choose_workloads(config, every, data, known, [headline, most])
    measurements = decode(config, checkpoints, chosen, data, folder, dict.fromkeys(checkpoints, verified))
    result = summarise(list(zip(chosen, measurements, strict=True)), range(1, most + 1), headline)
    result["machine"] = machine(pick_device(config.target.device))
    result |= {"dtype": options.dtype, "max_new_tokens": options.max_new_tokens}
    return result, chosen, measurements


def decode(
    config: Config,
    checkpoints: Mapping[str, Sequence[DrafterCheckpoint]],
    chosen: Sequence[Workload],
    data: dict[str, Any],
    folder: Path,
    verified: Mapping[str, int | None],
) -> list[dict[str, list[Measurement]]]:
    """Of each workload, the measurements by drafter, of every training; arguments and errors as of `evaluate`, but for
    `verified`, which is of each drafter by name."""
    # Prompts before the target: what is wrong with them is reported within seconds.
    model = load_model(config.target, config.evaluate.dtype)
    target = CachedTarget(model, [1])  # every drafter reads layers of its own
    candidates, trainings = [], {}
    for name, some in checkpoints.items():
        trainings[name] = [name] if len(some) == 1 else [f"{name}/{number}" for number in range(1, len(some) + 1)]
        for training, checkpoint in zip(trainings[name], some, strict=True):
            candidates.append(load(checkpoint, training, target, config, verified[name]))
    limits = Limits(config.evaluate.max_new_tokens, frozenset(data["end_ids"]))
    measurer = Measurer(model, limits, config.evaluate, config.seed)
    inputs = provenance.of_workload(config, data["end_ids"], target.device.type, str(torch.__version__))
    measured = measure(folder, chosen, measurer, candidates, inputs)
    return [{name: [of[one] for one in some] for name, some in trainings.items()} for of in measured]


def load(
    checkpoint: DrafterCheckpoint, name: str, target: CachedTarget, config: Config, verified: int | None = None
) -> Candidate:
    """The drafter as it is served: weights rounded to the target's dtype, and run in evaluate.dtype."""
    drafter = checkpoint.load(target, DTYPES[config.target.dtype], DTYPES[config.evaluate.dtype])
    ids = torch.from_numpy(checkpoint.vocab.target_ids).to(target.embedding.weight.device)
    return Candidate(name, checkpoint.identity, drafter, ids, verified)


def choose_workloads(
    config: Config,
    checkpoints: Sequence[DrafterCheckpoint],
    data: dict[str, Any],
    caveats: Iterable[str] = (),
    drafted: Iterable[int] = (),
) -> list[Workload]:
    """The workloads that are asked for, of prompts that every drafter has positions for and none was measured on.
    caveats: notes for all of them. drafted: numbers of draft tokens that are tried here."""
    positions = [stretched(one.shape.max_position_embeddings, one.shape.rope_scaling) for one in checkpoints]
    measured_on = {prompt for one in checkpoints for prompt in one.measured_on}
    chosen = workloads(config, data, longest_prompt(config, positions, drafted), list(caveats), measured_on)
    for workload in chosen:
        for remark in workload.remarks:
            note(f"{workload.name}: {remark}")
    return chosen


def longest_prompt(config: Config, positions: Iterable[int | None], drafted: Iterable[int] = ()) -> int:
    """How many tokens a prompt may have, so that vLLM takes it and drafts every time: near the last position it drafts
    less. UserError where a limit of vLLM's is no number."""
    options, target = config.evaluate, read_config(config.target)
    served = max_model_len(config) if options.backend == "vllm" else None
    # Past a longrope's short contexts a token's keys depend on what is read beside it, unless vLLM is told a length.
    limits = [*positions, served, hf.positions(target) if served else hf.served_positions(target)]
    if options.backend == "vllm":
        drafted = [*drafted, *options.serve_speculative_tokens]
    # What vLLM needs beyond an answer, or it shortens the last drafts: positions of a verification, and of the next,
    # which it prepares meanwhile as if all of it were accepted (seen in 0.32, async scheduling).
    past_the_end = 2 * (max(drafted, default=0) + 1)
    return min(limit for limit in limits if limit) - options.max_new_tokens - past_the_end


def caveats(trainings: Mapping[str, Sequence[Inputs | None]], data: str) -> Iterator[str]:
    """Which drafters may have been trained on the prompts, and which trainings of one differ beyond their seed."""
    for name, inputs in trainings.items():
        if any(one is None or one.get("data") != data for one in inputs):
            yield f"{name} may have been trained on these prompts"
        elif any(one.get("train", {}).get("init_from") for one in inputs if one):
            yield f"the weights that {name} was initialised from may have been trained on these prompts"
        first, *others = [_recipe(one or {}) for one in inputs]
        for number, other in enumerate(others, 2):
            if change := artifacts.describe_change(first, other):
                yield f"trainings 1 (there) and {number} (here) of {name} differ in more than their seed: {change}"


def _recipe(inputs: Inputs) -> Inputs:
    """All that training depended on but the seed; options that are newer than a training have their defaults."""
    defaults = {"drafter": asdict(DrafterConfig()), "train": asdict(TrainConfig())}
    known = {name: {**provenance.recorded(name, new), **inputs.get(name, {})} for name, new in defaults.items()}
    return {**inputs, **known, "seed": None}


def measure(
    folder: Path, chosen: Sequence[Workload], measurer: Measurer, candidates: list[Candidate], inputs: Inputs
) -> list[dict[str, Measurement]]:
    """Every workload's measurements by drafter; what `folder` has of them is read. UserError: as `Measurer.measure`;
    also where the target wrote different outputs beside different drafters. inputs: what a measurement depends on
    beside its workload and its drafter (`provenance.of_workload`)."""
    measurements: list[dict[str, Measurement]] = []
    here, warm = measurer.machine, not measurer.options.warmup
    for workload in chosen:
        # What is said of a workload may depend on who else is measured, and no count does.
        decoded = provenance.recorded("evaluate", asdict(replace(workload, left_out={}, notes=[])))
        # By what the drafter is and not by its name, which another drafter beside it may change.
        whole = {"inputs": inputs, "workload": decoded}
        keys = {
            one.name: artifacts.fingerprint({**whole, "verified": one.verified, "drafter": one.identity})
            for one in candidates
        }
        slug = re.sub(r"[^A-Za-z0-9.]+", "-", workload.name)[-80:]
        files = {name: folder / f"{slug}-{key[:12]}.json" for name, key in keys.items()}
        known = {name: one for name, file in files.items() if (one := read_measurement(file)) is not None}
        if missing := [one for one in candidates if one.name not in known]:
            if not warm:
                measurer.warm_up(workload, missing)
                warm = True
            for name, one in measurer.measure(workload, missing).items():
                known[name] = replace(one, machine=here)
                write_measurement(files[name], known[name], key=keys[name], workload=workload.name)
        known = {one.name: known[one.name] for one in candidates}
        if measurer.one_output(workload):
            _refuse_other_outputs(workload, known, files)
        measurements.append({n: replace(m, machine="") if m.machine == here else m for n, m in known.items()})
    return measurements


def _refuse_other_outputs(workload: Workload, measurements: dict[str, Measurement], files: dict[str, Path]) -> None:
    """UserError where the target wrote otherwise beside one drafter than beside another: they cannot be compared."""
    outputs = [one.outputs for one in measurements.values()]
    for prompt, *answers in zip(workload.prompts, *outputs, strict=True):
        if any(answer != answers[0] for answer in answers):
            machines = ", ".join(f"{name} on {one.machine}" for name, one in measurements.items())
            raise UserError(
                f"{workload.name}, prompt {prompt.id}: the target's output is not the same for all drafters (measured: "
                f"{machines}): remove {', '.join(map(str, files.values()))} and run the same command again"
            )
