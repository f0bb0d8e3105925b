"""The table at the end: what a run's five stages made, how well it drafts, and how to serve it.

eagle31 summary +experiment=smollm2
"""

from pathlib import Path
from typing import Any

from eagle31_train import artifacts, cli
from eagle31_train.checkpoint import run_folder
from eagle31_train.config import Config
from eagle31_train.console import note
from eagle31_train.errors import UserError
from eagle31_train.evaluation.intervals import LEVEL, bracket
from eagle31_train.store import EXTRACT, read_manifest

STAGES = ("data", "extract", "train", "evaluate", "export")


def summarise(config: Config) -> None:
    """Print the table; UserError if a stage has not been run, or not on what was trained last."""
    run_dir, evaluate = Path(config.run_dir), "eagle31 evaluate"
    manifests = {
        "data": artifacts.read_json(config.data_folder / artifacts.MANIFEST, "eagle31 data"),
        "train": artifacts.read_json(run_dir / "train" / artifacts.MANIFEST, "eagle31 train"),
        "evaluate": artifacts.read_json(run_dir / "evaluate" / artifacts.MANIFEST, evaluate),
    }
    if (store := read_manifest(config)) is None:
        raise UserError(f"there is no complete store in {config.store_location}: run `{EXTRACT}` first")
    manifests |= {"extract": store, "export": run_folder.read_export(run_dir)}
    if manifests["evaluate"]["inputs"].get("checkpoint") != run_folder.identity(manifests["train"]):
        raise UserError(f"evaluate was last run on another training: run `{evaluate}` again")
    note("\n" + table(config, manifests) + "\n")


def table(config: Config, manifests: dict[str, dict[str, Any]]) -> str:
    """The summary as text, from the stages' manifests. Older evaluations lack some of it."""
    report, trained = manifests["evaluate"]["report"], manifests["train"]
    speed, depth, by_depth = report["tokens_per_second"], str(report["draft_tokens"]), report.get("by_depth", {})
    lengths = {k: of["acceptance_length"] for k, of in by_depth.items()}
    length = bracket(lengths.get(depth, [report["acceptance_length"], None, None]))
    by_source = {name: [of["acceptance_length"], None, None] for name, of in report.get("by_source", {}).items()}
    rows = {
        "acceptance length": f"{length} at {depth} draft tokens, bonus token included ({LEVEL:.0%} interval)",
        "  by draft tokens": "   ".join(f"{k}: {value[0]:.3f}" for k, value in lengths.items() if value[0]),
        "  by source": "   ".join(f"{name}: {bracket(value)}" for name, value in by_source.items()),
        "  measured on": f"{report['prompts']} prompts of {report.get('workload', 'heldout')}, "
        f"{report['generated_tokens']:,} tokens, {report['dtype']}",
        "speed": f"{speed['speculative']:.1f} tokens/s with the drafter, {speed['plain']:.1f} without, for one user",
        "trained on": f"{trained['tokens']:,} tokens ({trained['pairs']:,} slot-steps) in {trained['steps']} steps"
        + (f", of which step {trained['kept']['step']} is kept" if "kept" in trained else ""),
        "seconds": "   ".join(f"{stage} {manifests[stage]['seconds']:,.0f}" for stage in STAGES),
        "checkpoint": str(Path(config.run_dir) / "export"),
        "serve it": manifests["export"]["serve"],
    }
    body = [f"{name:<17}  {value}" for name, value in rows.items() if value]
    return "\n".join([f"{config.name}: an EAGLE drafter for {config.target.path}", "-" * 100, *body, "-" * 100])


if __name__ == "__main__":
    cli.run(summarise, "The table at the end: what a run's five stages made, and how to serve it.")
