"""STAGE 4: measure how many draft tokens the target accepts, by real speculative decoding.

    eagle31 evaluate +experiment=smollm2
    eagle31 evaluate +experiment=smollm2 '+suite=[mt_bench,gsm8k]' 'evaluate.perturbations=[context_2]'
    eagle31 evaluate +experiment=smollm2 evaluate.backend=vllm evaluate.vllm_python=PYTHON_WITH_VLLM

Reads run_dir/data and run_dir/train; writes run_dir/evaluate (the manifest, a page and its pictures) and
run_dir/workloads (the counts of each). Every prompt is decoded with and without the drafter. The two outputs must be
equal, token for token, except where two tokens have equal scores and rounding decides; such ties are reported.

With backend=vllm, vLLM serves run_dir/export from its own environment, and the results go to run_dir/serving instead
(run_dir/servers: each server's answers and log).
"""

import time
from pathlib import Path
from typing import Any

from eagle31_train import cli, provenance
from eagle31_train.checkpoint.drafter_checkpoint import DrafterCheckpoint
from eagle31_train.checkpoint.run_folder import is_export_of, read_export
from eagle31_train.checkpoint.smaller import served
from eagle31_train.common import artifacts
from eagle31_train.common.console import note
from eagle31_train.common.errors import UserError
from eagle31_train.common.locks import writing
from eagle31_train.config import Config
from eagle31_train.evaluation import in_process, perturb, results, workloads
from eagle31_train.evaluation.serving import measure_serving
from eagle31_train.evaluation.serving.engine import Installation, server_arguments, target_arguments
from eagle31_train.evaluation.serving.engine import check as check_serving
from eagle31_train.provenance import Provenance
from eagle31_train.reporting import evaluation_page, recipe, tables
from eagle31_train.store import read_manifest


def evaluate(config: Config) -> None:
    """Run the stage; UserError if its input is wrong, or an output differs from plain decoding's other than by ties."""
    began = time.perf_counter()
    if config.evaluate.backend == "vllm":
        serve(config)
        return
    run_dir = Path(config.run_dir)
    data = provenance.read_data(config)
    checkpoint = served(config)
    trained = checkpoint.manifest
    assert trained is not None
    made_of = made_from(config, data, {"train": trained["fingerprint"], "checkpoint": checkpoint.identity})
    folder = run_dir / "evaluate"
    if provenance.up_to_date(folder, made_of, config.overwrite):
        note(f"evaluate: up to date ({folder})")
        return
    checkpoint.check_data(data, config.data_folder)
    checkpoint.check_target(config.target, store=read_manifest(config))
    provenance.read_data(config, whole=True)  # refuses damaged data

    with writing(folder):  # before hours are spent
        # Measurements stay outside the stage's folder, so that adding a suite does not decode the others again.
        checkpoints = {config.name: [checkpoint]}
        result, decoded, measurements = in_process.evaluate(config, checkpoints, data, run_dir / "workloads")
        ((first,),) = measurements[0].values()
        workload = decoded[0]
        trained_on = data["splits"]["train"].get("by_source", {}) if workload.suite == workloads.HELDOUT else {}
        missing = sorted(trained_on.keys() - {prompt.source for prompt in workload.prompts})
        result |= {
            "title": config.name,
            "target": config.target.name,
            "command": recipe.command(recipe.EVALUATE, config),
        }
        if missing:
            note(f"not measured: {', '.join(missing)} (no prompt of these sources was decoded)")
        facts = {
            "result": result,
            # Measuring refuses any difference except ties, and does not count prompts with ties as verified. Where
            # drafts are drawn, outputs are another draw.
            "identical": all(w["verified"] == w["prompts"] and "drafts" not in w for w in result["workloads"]),
            "not_measured": missing,  # sources
            "per_prompt": results.per_prompt(workload, first, config.evaluate.num_speculative_tokens),
            "left_out": {workload.name: workload.left_out for workload in decoded},
            "end_ids": data["end_ids"],
        }
        _write(folder, result, made_of, facts, began)


def serve(config: Config) -> None:
    """Measure the exported checkpoint as vLLM serves it; UserError if it is not an export of what was trained."""
    began = time.perf_counter()
    run_dir = Path(config.run_dir)
    exported, checkpoint = read_export(run_dir), DrafterCheckpoint.open(run_dir / "export")
    if (run_dir / "train" / artifacts.MANIFEST).is_file():
        made = served(config)
        if not is_export_of(exported, made.shape, made.vocab.target_ids.tolist()):
            remedy = "set the same ones here, or run `eagle31 export` again with overwrite=true"
            raise UserError(f"{run_dir / 'export'} was made with other export_ options: {remedy}")
    engine = check_serving(config)
    data = provenance.read_data(config)
    # Depends on the checkpoint, not on its card, which shows what is measured here.
    made_of = made_from(config, data, {"train": exported["inputs"]["train"], "export": exported["checkpoint"]}, engine)
    folder = run_dir / "serving"
    if provenance.up_to_date(folder, made_of, config.overwrite):
        note(f"evaluate: up to date ({folder})")
        return
    checkpoint.check_data(data, config.data_folder)
    # Not an error: a quantized copy of the target may have another name.
    other = checkpoint.other_target(config.target, read_manifest(config))
    if other:
        note(f"evaluate: {other}")
    caveats = in_process.caveats({config.name: [checkpoint.inputs]}, data["dataset_fingerprint"])
    workload, *others = in_process.choose_workloads(config, [checkpoint], data, caveats)
    if others:
        raise UserError("evaluate.backend=vllm serves one workload: use one set of prompts, and no perturbations")
    with writing(folder):
        serving = measure_serving(config, {config.name: run_dir / "export"}, workload.prompts, data["end_ids"], engine)
        serving |= {
            "workload": workload.name,
            "notes": [*([other] if other else []), *workload.remarks, *serving["notes"]],
            "command": recipe.command(recipe.EVALUATE, config),
        }
        result = {"title": config.name, "target": config.target.name, "serving": serving}
        _write(folder, result, made_of, {"serving": serving}, began)


def _write(folder: Path, result: dict[str, Any], made_of: Provenance, facts: dict[str, Any], began: float) -> None:
    """Write the page and its pictures, then the manifest of these facts.

    First remove what other options left, or pages of both would lie side by side.
    """
    if folder.is_dir():  # even without a manifest, which a killed evaluation did not write
        artifacts.discard(folder)
    files = evaluation_page.write(folder, result)
    record = made_of.record(**facts, files=files, seconds=time.perf_counter() - began)
    artifacts.write_json(folder / artifacts.MANIFEST, record)
    note(tables.as_text(result))
    note(f"evaluate: {folder / evaluation_page.PAGE}")


def made_from(
    config: Config, data: dict[str, Any], drafter: dict[str, str], engine: Installation | None = None
) -> Provenance:
    """Return all that the counts depend on. drafter: its identity. engine: the vLLM that serves it, if any."""
    temperatures = [perturb.find(name).temperature for name in config.evaluate.perturbations]
    server = None
    if engine:  # only the arguments that come from other options than evaluate.vllm_args
        given = server_arguments(config, None, 0, 0)
        server = {"vllm": engine.version, "server": {name: given[name] for name in target_arguments(config)}}
    sampled = bool(config.evaluate.temperature or any(temperatures))
    return provenance.of_evaluation(config, data, drafter, workloads.inputs(config), sampled, server)


if __name__ == "__main__":
    cli.run(evaluate, __doc__ or "")
