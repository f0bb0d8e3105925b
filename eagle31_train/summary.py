"""The table at the end: what a run's five stages made, how well it drafts, and how to serve it.

python -m eagle31_train.summary +experiment=smollm2
"""

from pathlib import Path
from typing import Any

from eagle31_train import artifacts, cli
from eagle31_train.measure import drafters, tables
from eagle31_train.measure.intervals import LEVEL
from eagle31_train.measure.tables import bracket
from eagle31_train.schema import Config, UserError
from eagle31_train.store import EXTRACT, read_manifest

HELDOUT = "heldout"  # the workload that is meant where a report names none


def summarise(config: Config) -> None:
    """Print the table; UserError if a stage has not been run, or not on what was trained last."""
    run_dir = Path(config.run_dir)
    manifests = {
        "data": (config.data_folder / artifacts.MANIFEST, "python -m data_prep"),
        "train": (run_dir / "train" / artifacts.MANIFEST, "accelerate launch train.py"),
        "evaluate": (run_dir / "evaluate" / artifacts.MANIFEST, "python -m eagle31_train.evaluate"),
    }
    found = {stage: artifacts.read_json(file, command) for stage, (file, command) in manifests.items()}
    if (store := read_manifest(config)) is None:
        raise UserError(f"there is no complete store in {config.store_location}: run `{EXTRACT}` first")
    found |= {"extract": store, "export": drafters.exported(run_dir)}
    if found["evaluate"]["inputs"].get("checkpoint") != drafters.identity(found["train"]):
        raise UserError(f"evaluate was last run on another training: run `{manifests['evaluate'][1]}` again")
    print("\n" + table(config, found) + "\n")


def table(config: Config, found: dict[str, dict[str, Any]]) -> str:
    """The summary as text, from the stages' manifests."""
    report, trained = found["evaluate"]["report"], found["train"]
    depths, at = report["acceptance_at_depth"], str(report["draft_tokens"])
    told = report.get("by_depth", {}).get(at, {"acceptance_length": [report["acceptance_length"], None, None]})
    length = bracket(told["acceptance_length"])
    workloads = found["evaluate"].get("result", {}).get("workloads")  # which older evaluations have not
    sampling = tables.sampling(workloads[0]) if workloads else "greedy"
    prompts = "held-out prompts" if report.get("workload", HELDOUT) == HELDOUT else f"prompts of {report['workload']}"
    stages = ("data", "extract", "train", "evaluate", "export")
    seconds = {stage: found[stage]["seconds"] for stage in stages}
    speed = report["tokens_per_second"]
    export = Path(config.run_dir) / "export"
    rows = [
        (
            "acceptance length",
            f"{length} at {report['draft_tokens']} draft tokens, {sampling}, bonus token included",
        ),
        *by_depth(report),
        (
            "  measured on",
            f"{report['prompts']} {prompts}, {report['generated_tokens']:,} tokens, {report['dtype']}"
            + (f"; [low, high]: {LEVEL:.0%} interval over prompts" if "[" in length else ""),
        ),
        ("accepted at depth", "   ".join(f"{k}: {share:.1%}" for k, share in enumerate(depths, 1))),
        *by_source(report),
        ("speed", f"{speed['speculative']:.1f} tokens/s with the drafter, {speed['plain']:.1f} without"),
        ("trained on", f"{trained['tokens']:,} tokens ({trained['pairs']:,} slot-steps) in {trained['steps']} steps"),
        ("seconds", "   ".join(f"{stage} {value:,.0f}" for stage, value in seconds.items())),
        ("checkpoint", str(export)),
        ("serve it", found["export"]["serve"]),
    ]
    width = max(len(name) for name, _ in rows)
    line = "-" * 100
    body = [f"{name:<{width}}  {value}" for name, value in rows]
    return "\n".join([f"{config.name}: an EAGLE drafter for {config.target.path}", line, *body, line])


def by_depth(report: dict[str, Any]) -> list[tuple[str, str]]:
    """Acceptance length with each number of draft tokens, where they were measured."""
    lengths = {depth: found["acceptance_length"][0] for depth, found in report.get("by_depth", {}).items()}
    told = [f"{depth}: {bracket([value, None, None])}" for depth, value in lengths.items()]
    return [("  by draft tokens", "   ".join(told))] if len(told) > 1 else []


def by_source(report: dict[str, Any]) -> list[tuple[str, str]]:
    """Acceptance length of each source that was measured, where there are several."""
    sources = report.get("by_source", {})  # which older evaluations have not
    if len(sources) < 2:
        return []
    lengths = {name: found["acceptance_length"] for name, found in sources.items()}
    told = [f"{name}: {'-' if length is None else f'{length:.3f}'}" for name, length in lengths.items()]
    return [("  by source", "   ".join(told))]


if __name__ == "__main__":
    cli.run(summarise, "The table at the end: what a run's five stages made, and how to serve it.")
