"""Print the table of a finished run: what its five stages made, how well it drafts, and how to serve it.

eagle31 summary +experiment=smollm2
"""

from pathlib import Path
from typing import Any

from eagle31_train import cli, provenance
from eagle31_train.checkpoint import run_folder
from eagle31_train.checkpoint.smaller import served
from eagle31_train.common import artifacts
from eagle31_train.common.console import note
from eagle31_train.common.errors import UserError
from eagle31_train.config import Config
from eagle31_train.evaluation.intervals import LEVEL, bracket
from eagle31_train.evaluation.results import ELSEWHERE
from eagle31_train.evaluation.workloads import TRAINED_ON
from eagle31_train.reporting import recipe
from eagle31_train.reporting.card import rounded_to
from eagle31_train.reporting.recipe import EVALUATE
from eagle31_train.reporting.tables import count, sampling
from eagle31_train.store import read_manifest


def summarise(config: Config) -> None:
    """Print the table; UserError if a stage has not run on the latest training, or the drafter is damaged."""
    run_dir = Path(config.run_dir)
    by_vllm = config.evaluate.backend == "vllm"
    evaluation = run_dir / ("serving" if by_vllm else "evaluate")
    manifests = {
        "data": provenance.read_data(config),
        "extract": read_manifest(config) or {},  # none if training ended early, or no longer needed its store
        "train": artifacts.read_json(run_dir / "train" / artifacts.MANIFEST, "eagle31 train"),
        "evaluate": artifacts.read_json(evaluation / artifacts.MANIFEST, EVALUATE),
        "export": run_folder.read_export(run_dir),
    }
    _, _, trained, evaluated, exported = manifests.values()
    drafter = served(config)
    drafter.check_target(config.target, by_name=True, store=read_manifest(config))
    key, made = ("export", exported["checkpoint"]) if by_vllm else ("checkpoint", drafter.identity)
    if not run_folder.is_export_of(exported, drafter.shape, drafter.vocab.target_ids.tolist()):
        remedy = "set the same ones here, or run `eagle31 export` again with overwrite=true"
        raise UserError(f"{run_dir / 'export'} was made with other export_ options: {remedy}")
    if evaluated["inputs"].get(key) != made:
        raise UserError(
            "evaluate was last run on another training, or with other export_ options: set the same ones here, or "
            f"run `{EVALUATE}` again with overwrite=true"
        )
    rounded = None if by_vllm else rounded_to(evaluated)
    if rounded not in (None, exported["inputs"]["dtype"]):
        raise UserError(
            f"evaluate was last run on weights rounded to {rounded}, but {run_dir / 'export'} has "
            f"{exported['inputs']['dtype']}: run `{EVALUATE} target.dtype={exported['inputs']['dtype']} "
            "overwrite=true`, or export again with the other target.dtype"
        )
    steps = f"{trained['steps']} " + (f"of {trained['planned']} planned steps" if "planned" in trained else "steps")
    if "kept" in trained:
        steps += f", of which step {trained['kept']['step']} is kept"
    seconds = {stage: manifest.get("seconds") for stage, manifest in manifests.items()}
    rows = {
        **(_served(config, evaluated) if by_vllm else _decoded(evaluated)),
        "trained on": f"{trained['tokens']:,} tokens ({trained['pairs']:,} predictions) in {steps}",
        "seconds": "   ".join(f"{stage} {spent:,.0f}" for stage, spent in seconds.items() if spent is not None)
        + "   (of the last launch; train: of all)",
        "checkpoint": str(run_dir / "export"),
        "serve it": (exported.get("serve") or recipe.serve_command(config, recipe.HERE)).replace(
            recipe.HERE, str(run_dir / "export")
        ),
    }
    body = [f"{name:<17}  {value}" for name, value in rows.items()]
    note("\n".join([f"{config.name}: an EAGLE drafter for {config.target.path}", "-" * 100, *body, "-" * 100]))


def _decoded(manifest: dict[str, Any]) -> dict[str, str]:
    """Return the rows for what stage 4 measured in process."""
    if (result := manifest.get("result")) is None:
        raise UserError(f"evaluate was last run by an earlier version: run `{EVALUATE} overwrite=true` again")
    workload, depth = result["workloads"][0], str(result["draft_tokens"])
    (numbers,), (plain, speculative) = workload["drafters"].values(), workload["tokens_per_second"].values()
    interval = numbers["by_depth"][depth]["acceptance_length"]
    certainty = f"{LEVEL:.0%} interval" if interval[1] is not None else "no interval: too few prompts, or all alike"
    lengths = {name: of["by_depth"][depth]["acceptance_length"][0] for name, of in numbers["by_source"].items()}
    of = ""
    if timed := workload.get("timed"):  # earlier results lack it; its length is None if every answer was one token
        timed_length = bracket([timed["by_depth"][depth], None, None], "{:.2f}")
        of = f" ({count(timed['prompts'], 'prompt')}, length {timed_length})"
    prompts = f"{count(workload['prompts'], 'prompt')} of {workload['name']}"
    return {
        "acceptance length": f"{bracket(interval)} at {depth} draft tokens, bonus token included ({certainty})",
        "  by source": "   ".join(f"{name}: {bracket([one, None, None])}" for name, one in lengths.items()),
        "  measured on": f"{prompts}, {sampling(workload)}, {numbers['generated_tokens']:,} tokens",
        **_cautions(workload),
        "speed": f"{speculative:.1f} tokens/s with the drafter, {plain:.1f} without, for one user{of}",
    }


def _cautions(measured: dict[str, Any]) -> dict[str, str]:
    notes = [note for note in measured["notes"] if note.endswith(TRAINED_ON) or ELSEWHERE in note]
    return {"  CAUTION": "; ".join(notes)} if notes else {}


def _served(config: Config, manifest: dict[str, Any]) -> dict[str, str]:
    """Return the rows for what stage 4 measured in vLLM at the least load. Of the draft lengths tried, take the longest
    up to the headline's."""
    serving, headline = manifest["serving"], config.evaluate.num_speculative_tokens
    users = min(row["concurrency"] for row in serving["rows"])
    least = [row for row in serving["rows"] if row["concurrency"] == users]
    # Earlier versions also wrote a row of 0 draft tokens for a drafter that rests.
    plain = next(row for row in least if row["drafter"] is None)
    rows = {row["draft_tokens"]: row for row in least if row["drafter"] and row["draft_tokens"]}
    tokens = max((n for n in rows if n <= headline), default=min(rows))
    drafted = rows[tokens]
    length = bracket([(drafted["acceptance"] or {}).get("acceptance_length"), None, None])
    too_high = " (too high, since tokens came in bunches)" * any("bunched" in row for row in (drafted, plain))
    whom = "one user" if users == 1 else f"each of {users} users"
    return {
        "acceptance length": f"{length} at {tokens} draft tokens, bonus token included, as vLLM counts it",
        "  measured on": f"{count(serving['prompts'], 'prompt')} of {serving['workload']}, {sampling(serving)}",
        **_cautions(serving),
        "speed": f"{drafted['per_user'][0]:.1f} tokens/s with the drafter, {plain['per_user'][0]:.1f} without, for "
        f"{whom} of vLLM {serving['vllm']}{too_high}",
    }


if __name__ == "__main__":
    cli.run(summarise, __doc__ or "")
