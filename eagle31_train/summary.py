"""The table at the end: what a run's five stages made, how well it drafts, and how to serve it.

python -m eagle31_train.summary +experiment=smollm2
"""

from pathlib import Path
from typing import Any

from eagle31_train import artifacts, cli
from eagle31_train.checkpoint import run_folder
from eagle31_train.checkpoint.writer import read_record
from eagle31_train.config import Config
from eagle31_train.errors import UserError
from eagle31_train.evaluation.intervals import LEVEL, bracket
from eagle31_train.reporting.tables import sampling
from eagle31_train.store import EXTRACT, read_manifest

STAGES = ("data", "extract", "train", "evaluate", "export")


def summarise(config: Config) -> None:
    """Print the table; UserError if a stage has not been run, or not on what was trained last."""
    run_dir, evaluate = Path(config.run_dir), "python -m eagle31_train.evaluate"
    manifests = {
        "data": artifacts.read_json(config.data_folder / artifacts.MANIFEST, "python -m data_prep"),
        "train": artifacts.read_json(run_dir / "train" / artifacts.MANIFEST, "accelerate launch train.py"),
        "evaluate": artifacts.read_json(run_dir / "evaluate" / artifacts.MANIFEST, evaluate),
    }
    if (store := read_manifest(config)) is None:
        raise UserError(f"there is no complete store in {config.store_location}: run `{EXTRACT}` first")
    manifests |= {"extract": store, "export": read_record(run_dir)}
    if manifests["evaluate"]["inputs"].get("checkpoint") != run_folder.identity(manifests["train"]):
        raise UserError(f"evaluate was last run on another training: run `{evaluate}` again")
    print("\n" + table(config, manifests) + "\n")


def table(config: Config, manifests: dict[str, dict[str, Any]]) -> str:
    """The summary as text, from the stages' manifests. Older evaluations lack some of it."""
    report, trained = manifests["evaluate"]["report"], manifests["train"]
    speed = report["tokens_per_second"]
    workloads = manifests["evaluate"].get("result", {}).get("workloads")
    depth, by_depth, by_source = str(report["draft_tokens"]), report.get("by_depth", {}), report.get("by_source", {})
    length = by_depth[depth]["acceptance_length"] if by_depth else [report["acceptance_length"], None, None]
    workload = report.get("workload", "heldout")
    prompts = "held-out prompts" if workload == "heldout" else f"prompts of {workload}"
    brackets = f"; [low, high]: {LEVEL:.0%} interval over prompts" if length[1] is not None else ""
    rows = {
        "acceptance length": f"{bracket(length)} at {depth} draft tokens, "
        f"{sampling(workloads[0]) if workloads else 'greedy'}, bonus token included",
        "  by draft tokens": _listed({k: of["acceptance_length"][0] for k, of in by_depth.items()}),
        "  measured on": f"{report['prompts']} {prompts}, {report['generated_tokens']:,} tokens, {report['dtype']}"
        + brackets,
        "accepted at depth": _listed(dict(enumerate(report["acceptance_at_depth"], 1)), "{:.1%}"),
        "  by source": _listed({name: of["acceptance_length"] for name, of in by_source.items()}),
        "speed": f"{speed['speculative']:.1f} tokens/s with the drafter, {speed['plain']:.1f} without",
        "trained on": f"{trained['tokens']:,} tokens ({trained['pairs']:,} slot-steps) in {trained['steps']} steps",
        "seconds": "   ".join(f"{stage} {manifests[stage]['seconds']:,.0f}" for stage in STAGES),
        "checkpoint": str(Path(config.run_dir) / "export"),
        "serve it": manifests["export"]["serve"],
    }
    body = [f"{name:<17}  {value}" for name, value in rows.items() if value]
    return "\n".join([f"{config.name}: an EAGLE drafter for {config.target.path}", "-" * 100, *body, "-" * 100])


def _listed(values: dict[Any, float | None], form: str = "{:.3f}") -> str:
    """Several numbers on a line; nothing where there are fewer than two."""
    shown = [f"{name}: {bracket([value, None, None], form)}" for name, value in values.items()]
    return "   ".join(shown) if len(shown) > 1 else ""


if __name__ == "__main__":
    cli.run(summarise, "The table at the end: what a run's five stages made, and how to serve it.")
