"""Outcomes on the disk, one file for each workload and drafter: what is measured is not measured again, under whatever
name.

A measurement that was stopped goes on with what is left, and a comparison that gets one more drafter decodes for that
one alone.
"""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import torch

from eagle31_train import artifacts
from eagle31_train.measure import drafters
from eagle31_train.measure.drafters import Candidate
from eagle31_train.measure.measuring import Measurer, Outcome
from eagle31_train.measure.results import Drift, Measured
from eagle31_train.measure.suites import Workload
from eagle31_train.schema import Config, UserError
from eagle31_train.targets.hf import pick_device

LAYOUT = 2  # raise it when the same inputs are counted otherwise
COUNTED = ("draft_tokens", "depths", "max_new_tokens", "draft_sampling", "batch_size", "dtype", "drift")


def inputs(config: Config, end_ids: list[int]) -> dict[str, Any]:
    """What an outcome depends on beside its workload and its drafter."""
    options = {name: getattr(config.evaluate, name) for name in COUNTED}
    target = drafters.target_identity(config.target)
    told = {"layout": LAYOUT, "target": target, "seed": config.seed, "end_ids": sorted(end_ids), **options}
    # Others round otherwise, and the target may write otherwise.
    return {**told, "device": pick_device(config.target.device).type, "torch": str(torch.__version__)}


def measured(
    folder: Path,
    workloads: list[Workload],
    measurer: Measurer,
    candidates: list[Candidate],
    inputs: dict[str, Any],
    verified: int | None = None,
) -> tuple[list[dict[str, Outcome]], list[Path]]:
    """Every workload's outcomes by drafter, and the files that keep them.

    Args:
        folder: where outcomes are kept.
        inputs: as the function of this name has them.
        verified: see `Measurer.measure`.

    Raises:
        UserError: as `Measurer.measure`; a file that is not as it was written; or drafters beside which the target
            wrote different outputs.
    """
    outcomes: list[dict[str, Outcome]] = []
    files: list[Path] = []
    here, warm = measurer.machine, not measurer.options.warmup
    for workload in workloads:
        # What is said of a workload may depend on who else is measured, and no count does.
        decoded = dataclasses.replace(workload, left_out={}, notes=[])
        whole = {"inputs": inputs, "workload": dataclasses.asdict(decoded), "verified": verified}
        keys = {c.name: artifacts.fingerprint({**whole, "drafter": c.identity}) for c in candidates}
        # By what the drafter is and not by what it is called, which another drafter beside it may change.
        places = {name: folder / f"{_slug(workload.name)}-{key[:12]}.json" for name, key in keys.items()}
        found = {name: outcome for name, file in places.items() if (outcome := _read(file, keys[name], here))}
        new: dict[str, Outcome] = {}
        if left := [candidate for candidate in candidates if candidate.name not in found]:
            if not warm:
                measurer.warm_up(workload, left)
                warm = True
            new = measurer.measure(workload, left, verified)
            for name, outcome in new.items():
                known = dataclasses.replace(outcome, machine=here)  # which may be another when it is read
                kept = json.loads(json.dumps(dataclasses.asdict(known)))  # as it is read again
                record = {"key": keys[name], "workload": workload.name, "sum": artifacts.fingerprint(kept)}
                artifacts.write_json(places[name], {**record, "outcome": kept})
        found = new | found
        if measurer.shared(workload):
            _refuse_other_outputs(workload, found, places, here)
        outcomes.append({candidate.name: found[candidate.name] for candidate in candidates})
        files += places.values()
    return outcomes, files


def _refuse_other_outputs(workload: Workload, found: dict[str, Outcome], places: dict[str, Path], here: str) -> None:
    """UserError where the target wrote otherwise beside one drafter than beside another: they cannot be compared.

    What is to go is what differs from one that was measured here, the first of `found` of these: just now, if any was.
    """
    first, *others = sorted(found, key=lambda name: found[name].machine != "")
    stale = [name for name in others if found[name].outputs != found[first].outputs]
    if not stale:
        return
    one, other = found[first], found[stale[0]]
    pairs = zip(workload.prompts, one.outputs, other.outputs, strict=True)
    prompt = next(prompt.id for prompt, ours, theirs in pairs if ours != theirs)
    raise UserError(
        f"{workload.name}, prompt {prompt}: the target's output is not the same for {', '.join(stale)} (measured on "
        f"{other.machine or here}) as for {first} (on {one.machine or here}), so these cannot be compared: remove "
        f"{', '.join(str(places[name]) for name in stale)} and run the same command again"
    )


def _slug(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9.]+", "-", name)[-80:]  # the key tells apart what this does not


def _read(file: Path, key: str, here: str) -> Outcome | None:
    """An outcome that was kept whole; None where there is none for this key."""
    if not file.is_file():
        return None
    record = artifacts.read_json(file, "this command")
    if record.get("key") != key:
        return None
    outcome = record.get("outcome", {})
    if artifacts.fingerprint(outcome) != record.get("sum"):
        raise UserError(f"{file} is not as it was written: remove it, and the same command measures that anew")
    machine = "" if outcome["machine"] == here else outcome["machine"]
    return Outcome(**{**outcome, "measured": [_measured(one) for one in outcome["measured"]], "machine": machine})


def _measured(one: dict[str, Any]) -> Measured:
    drift = Drift(**one["drift"]) if one["drift"] else None
    # JSON knows no numbers as keys.
    return Measured(**{**one, "drift": drift, "seen": {int(depth): counts for depth, counts in one["seen"].items()}})
