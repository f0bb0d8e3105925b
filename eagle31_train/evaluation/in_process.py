"""Evaluate drafters of one target in this process, alone or side by side; `serving` measures them in vLLM.

Every drafter's measurement of every workload is kept in its own file, so that a stopped run goes on with what is left,
and an additional drafter is decoded alone."""

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
from eagle31_train.evaluation.measurer import Candidate, Measurer
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
    """Decode all workloads with all drafters, and compare the others with the first. Afterwards, free what was loaded.

    UserError for wrong input, or for an output that is not plain decoding's, except by ties.

    Args:
        checkpoints: the trainings of each drafter, by its name.
        data: stage 1's manifest. folder: keeps the measurements. verified: see `Candidate`.

    Returns:
        The result (see `results.py`); the workloads; and for each workload, by drafter, a measurement per training.
    """
    options = config.evaluate
    headline, most = options.num_speculative_tokens, options.max_speculative_tokens
    trainings = {name: [one.inputs for one in some] for name, some in checkpoints.items()}
    known = caveats(trainings, data["dataset_fingerprint"])
    every = [one for some in checkpoints.values() for one in some]
    chosen = choose_workloads(config, every, data, known, [headline, most])
    measurements = decode(config, checkpoints, chosen, data, folder, dict.fromkeys(checkpoints, verified))
    result = summarise(list(zip(chosen, measurements, strict=True)), range(1, most + 1), headline)
    for workload, reported in zip(chosen, result["workloads"], strict=True):
        if workload.sampling(options.draft_sampling).drawn_drafts:
            reported["drafts"] = "sampled"
    result["machine"] = machine(pick_device(config.target.device))
    result |= {"dtype": options.dtype, "weights": config.target.dtype, "max_new_tokens": options.max_new_tokens}
    return result, chosen, measurements


def decode(
    config: Config,
    checkpoints: Mapping[str, Sequence[DrafterCheckpoint]],
    chosen: Sequence[Workload],
    data: dict[str, Any],
    folder: Path,
    verified: Mapping[str, int | None],
) -> list[dict[str, list[Measurement]]]:
    """Return, for each workload and by drafter, a measurement per training.

    Arguments and errors are `evaluate`'s, except that `verified` is by drafter."""
    # Loaded only after the prompts: what is wrong with those is reported within seconds.
    model = load_model(config.target, config.evaluate.dtype)
    target = CachedTarget(model, [1])  # every drafter reads its own layers
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
    """Load a drafter as it is served: weights rounded to the target's dtype, and run in evaluate.dtype."""
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
    """Return the workloads asked for, with prompts that fit every drafter's positions and that none was measured on.

    caveats: notes for all workloads. drafted: numbers of draft tokens that are tried here."""
    positions = [stretched(one.shape.max_position_embeddings, one.shape.rope_scaling) for one in checkpoints]
    measured_on = {prompt for one in checkpoints for prompt in one.measured_on}
    chosen = workloads(config, data, longest_prompt(config, positions, drafted), list(caveats), measured_on)
    for workload in chosen:
        for remark in workload.remarks:
            note(f"{workload.name}: {remark}")
    return chosen


def longest_prompt(config: Config, positions: Iterable[int | None], drafted: Iterable[int] = ()) -> int:
    """Return how many tokens a prompt may have for vLLM to take it and to draft every time.

    Near the last position vLLM drafts less. UserError if a limit of vLLM's is no number."""
    options, target = config.evaluate, read_config(config.target)
    served = max_model_len(config) if options.backend == "vllm" else None
    # Past longrope's short contexts, a token's keys depend on what is read beside it, unless vLLM is given a length.
    limits = [*positions, served, hf.positions(target) if served else hf.served_positions(target)]
    if options.backend == "vllm":
        drafted = [*drafted, *options.serve_speculative_tokens]
    # Positions that vLLM needs beyond an answer, so as not to shorten the last drafts: those of a verification, and of
    # the next one, which it prepares meanwhile as if the whole draft were accepted (seen in 0.32, async scheduling).
    past_the_end = 2 * (max(drafted, default=0) + 1)
    return min(limit for limit in limits if limit) - options.max_new_tokens - past_the_end


def caveats(trainings: Mapping[str, Sequence[Inputs | None]], data: str) -> Iterator[str]:
    """Yield which drafters may have been trained on the prompts, and which trainings of one differ beyond the seed."""
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
    """Return all that a training depended on except the seed. Options newer than the training have their defaults."""
    defaults = {"drafter": asdict(DrafterConfig()), "train": asdict(TrainConfig())}
    known = {name: {**provenance.recorded(name, new), **inputs.get(name, {})} for name, new in defaults.items()}
    return {**inputs, **known, "seed": None}


def measure(
    folder: Path, chosen: Sequence[Workload], measurer: Measurer, candidates: list[Candidate], inputs: Inputs
) -> list[dict[str, Measurement]]:
    """Return every workload's measurements by drafter, and read those that `folder` has.

    UserError as in `Measurer.measure`, or if the target wrote different outputs beside different drafters. inputs: what
    a measurement depends on besides its workload and its drafter (`provenance.of_workload`)."""
    measurements: list[dict[str, Measurement]] = []
    here, warm = measurer.machine, not measurer.options.warmup
    for workload in chosen:
        # Notes on a workload may depend on which other drafters are measured; counts do not.
        decoded = provenance.recorded("evaluate", asdict(replace(workload, left_out={}, notes=[])))
        # The key has what the drafter is, not its name, which other drafters beside it may change.
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
    """Raise UserError if the target's output differs between drafters: they cannot be compared."""
    outputs = [one.outputs for one in measurements.values()]
    for prompt, *answers in zip(workload.prompts, *outputs, strict=True):
        if any(answer != answers[0] for answer in answers):
            machines = ", ".join(f"{name} on {one.machine}" for name, one in measurements.items())
            raise UserError(
                f"{workload.name}, prompt {prompt.id}: the target's output is not the same for all drafters (measured: "
                f"{machines}): remove {', '.join(map(str, files.values()))} and run the same command again"
            )
