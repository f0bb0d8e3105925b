"""Outcomes on the disk, one file for each workload and drafter: what is measured is not measured again.

A measurement that was stopped goes on with what is left, and a comparison that gets one more drafter decodes for that
one alone.
"""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

from eagle31_train import artifacts
from eagle31_train.measure import drafters
from eagle31_train.measure.drafters import Candidate
from eagle31_train.measure.measuring import Measurer, Outcome
from eagle31_train.measure.results import Drift, Measured
from eagle31_train.measure.suites import Workload
from eagle31_train.schema import Config, UserError

LAYOUT = 1  # raise it when the same inputs are counted otherwise
COUNTED = ("draft_tokens", "depths", "max_new_tokens", "draft_sampling", "batch_size", "dtype", "drift")


def inputs(config: Config, end_ids: list[int]) -> dict[str, Any]:
    """What an outcome depends on beside its workload and its drafter."""
    options = {name: getattr(config.evaluate, name) for name in COUNTED}
    target = drafters.target_identity(config.target)
    return {"layout": LAYOUT, "target": target, "seed": config.seed, "end_ids": sorted(end_ids), **options}


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
        UserError: as `Measurer.measure`; or a file that is not as it was written.
    """
    outcomes: list[dict[str, Outcome]] = []
    files: list[Path] = []
    warm = not measurer.options.warmup
    for workload in workloads:
        # What is said of a workload may depend on who else is measured, and no count does.
        decoded = dataclasses.replace(workload, left_out={}, notes=[])
        whole = {"inputs": inputs, "workload": dataclasses.asdict(decoded), "verified": verified}
        keys = {c.name: artifacts.fingerprint({**whole, "drafter": c.identity}) for c in candidates}
        places = {name: folder / f"{_slug(workload.name)}-{_slug(name)}-{key[:6]}.json" for name, key in keys.items()}
        found = {name: outcome for name, file in places.items() if (outcome := _read(file, keys[name]))}
        if left := [candidate for candidate in candidates if candidate.name not in found]:
            if not warm:
                measurer.warm_up(workload, left)
                warm = True
            new = measurer.measure(workload, left, verified)
            for name, outcome in new.items():
                kept = json.loads(json.dumps(dataclasses.asdict(outcome)))  # as it is read again
                record = {"key": keys[name], "workload": workload.name, "sum": artifacts.fingerprint(kept)}
                artifacts.write_json(places[name], {**record, "outcome": kept})
            found |= new
        outcomes.append({candidate.name: found[candidate.name] for candidate in candidates})
        files += places.values()
    return outcomes, files


def _slug(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9.]+", "-", name)[-80:]  # the key tells apart what this does not


def _read(file: Path, key: str) -> Outcome | None:
    """An outcome that was kept whole; None where there is none for this key."""
    if not file.is_file():
        return None
    record = artifacts.read_json(file, "this command")
    if record.get("key") != key:
        return None
    outcome = record.get("outcome", {})
    if artifacts.fingerprint(outcome) != record.get("sum"):
        raise UserError(f"{file} is not as it was written: remove it, and the same command measures that anew")
    return Outcome(**{**outcome, "measured": [_measured(one) for one in outcome["measured"]]})


def _measured(one: dict[str, Any]) -> Measured:
    drift = Drift(**one["drift"]) if one["drift"] else None
    # JSON knows no numbers as keys.
    return Measured(**{**one, "drift": drift, "seen": {int(depth): counts for depth, counts in one["seen"].items()}})
