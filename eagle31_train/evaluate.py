"""STAGE 4: how many drafted tokens the target accepts, by real speculative decoding.

    python -m eagle31_train.evaluate +experiment=smollm2
    python -m eagle31_train.evaluate +experiment=smollm2 '+suite=[mt_bench,gsm8k]' 'evaluate.perturbations=[context_2]'
    python -m eagle31_train.evaluate +experiment=smollm2 evaluate.backend=vllm evaluate.vllm_python=PYTHON_WITH_VLLM

Reads run_dir/data and run_dir/train; writes run_dir/evaluate (the manifest, a page and its pictures) and
run_dir/workloads (the counts of each). Every prompt is decoded with the drafter and without; the two outputs must be
equal, token for token.

With backend=vllm it serves run_dir/export by vLLM, in vLLM's own environment, and writes run_dir/serving instead
(run_dir/servers: what each server answered, and what it said).
"""

import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from eagle31_train import artifacts, card, cli
from eagle31_train.measure import acceptance, drafters, learnt, page, perturb, records, suites, tables
from eagle31_train.measure.decoding import Limits
from eagle31_train.measure.drafters import TRAIN
from eagle31_train.measure.measuring import Measurer, Outcome, check_options, notes, remarks, sheet
from eagle31_train.measure.serving import Engine, measure_serving
from eagle31_train.measure.serving import check as check_serving
from eagle31_train.measure.serving import report as serving_report
from eagle31_train.measure.serving.command import server_arguments, target_arguments
from eagle31_train.schema import Config, EvaluateConfig, UserError
from eagle31_train.store import read_manifest
from eagle31_train.targets.cached import CachedTarget
from eagle31_train.targets.hf import load_model

DATA = "python -m data_prep"
LAYOUT = 3  # raise it when the same inputs are counted or reported otherwise


def evaluate(config: Config) -> None:
    """Run the stage.

    Raises:
        UserError: missing or damaged input, output of other inputs, or an output that differs from
            plain decoding.
    """
    began = time.perf_counter()
    options = config.evaluate
    check_options(options)
    if options.backend == "vllm":
        serve(config)
        return
    data = artifacts.read_json(config.data_folder / artifacts.MANIFEST, DATA)
    checkpoint = drafters.of_run(Path(config.run_dir), config.data_folder)
    trained = checkpoint.manifest
    assert trained is not None
    inputs = stage_inputs(config, data, {"train": trained["fingerprint"], "checkpoint": checkpoint.identity})
    folder = Path(config.run_dir) / "evaluate"
    if artifacts.finished(folder, artifacts.fingerprint(inputs), inputs, config.overwrite):
        print(f"evaluate: up to date ({folder})")
        return
    refuse_other_data(config, data, trained)
    drafters.refuse_other_target(checkpoint, read_manifest(config), config.target)
    if damage := artifacts.first_damaged(config.data_folder, data.get("files", {})):
        raise UserError(f"{damage}: run `{DATA}` again")

    # Prompts before the target: what is wrong with them is told in seconds.
    room = drafters.room(config, [checkpoint.shape.max_position_embeddings], [options.draft_tokens, options.depths])
    doubts = learnt.doubts({config.name: [trained]}, data["dataset_fingerprint"])
    workloads = suites.workloads(config, data, room, list(doubts))
    for remark in remarks(workloads):
        print(f"evaluate: {remark}")

    target = CachedTarget(load_model(config.target, options.dtype), checkpoint.shape.aux_layers)
    candidate = drafters.load(checkpoint, config.name, target, config)
    limits = Limits(options.max_new_tokens, frozenset(data["end_ids"]))
    measurer = Measurer(target.model, limits, options, config.seed)
    counted = records.inputs(config, data["end_ids"])
    # Beside the stage's folder: what is measured stays so when a suite is added.
    kept = Path(config.run_dir) / "workloads"
    outcomes, _ = records.measured(kept, workloads, measurer, [candidate], counted)

    found = [outcome[config.name] for outcome in outcomes]
    sheets = [sheet(workload, {config.name: [one]}) for workload, one in zip(workloads, found, strict=True)]
    result = {
        **acceptance.tell(sheets, range(1, options.depths + 1), options.draft_tokens),
        "title": config.name,
        "command": card.command("eagle31_train.evaluate", config),
        "machine": acceptance.machine(target.device),
        "dtype": options.dtype,
        "max_new_tokens": options.max_new_tokens,
    }
    shown = page.write(folder, result)
    seconds = time.perf_counter() - began
    described = [
        {**acceptance.describe(prompt, output, measured, options.draft_tokens), "reach": measured.accepted}
        for prompt, output, measured in zip(workloads[0].prompts, found[0].outputs, found[0].measured, strict=True)
    ]
    manifest = {
        "fingerprint": artifacts.fingerprint(inputs),
        "inputs": inputs,
        "report": {**report(result, found[0], options), "not_measured": not_measured(result, data), "seconds": seconds},
        "result": result,
        "per_prompt": described,
        "left_out": {workload.name: workload.left_out for workload in workloads},
        "end_ids": data["end_ids"],
        "files": artifacts.list_files(folder, shown),
        "seconds": seconds,
    }
    artifacts.write_json(folder / artifacts.MANIFEST, manifest)
    print(tables.table(result))
    if missing := manifest["report"]["not_measured"]:
        print(f"not measured: {', '.join(missing)} (no prompt of these sources was decoded)")
    print(f"evaluate: {folder / page.PAGE}")


def serve(config: Config) -> None:
    """Measure the exported checkpoint as vLLM serves it.

    Raises:
        UserError: what is exported is not whole, or not what was trained, or vLLM cannot be run.
    """
    began = time.perf_counter()
    run_dir = Path(config.run_dir)
    exported = drafters.exported(run_dir)
    engine = check_serving(config)
    data = artifacts.read_json(config.data_folder / artifacts.MANIFEST, DATA)
    # Of the checkpoint, and not of its card, which tells what is found here.
    inputs = stage_inputs(
        config, data, {"train": exported["inputs"]["train"], "export": exported["checkpoint"]}, engine
    )
    folder = run_dir / "serving"
    if artifacts.finished(folder, artifacts.fingerprint(inputs), inputs, config.overwrite):
        print(f"evaluate: up to date ({folder})")
        return
    trained = None
    if (train := run_dir / "train" / artifacts.MANIFEST).is_file():  # vLLM can do without
        refuse_other_data(config, data, trained := artifacts.read_json(train, TRAIN))
    doubts = list(learnt.doubts({config.name: [trained]}, data["dataset_fingerprint"]))
    room = drafters.room(config, [exported["inputs"]["shape"]["max_position_embeddings"]])
    workloads = suites.workloads(config, data, room, doubts)
    if len(workloads) > 1:
        raise UserError(
            "evaluate.backend=vllm measures one workload at a time: leave out evaluate.perturbations, and give one set "
            "of prompts as evaluate.prompts=FILE"
        )
    for remark in remarks(workloads):
        print(f"evaluate: {remark}")
    (asked,) = workloads
    serving = measure_serving(config, {config.name: run_dir / "export"}, asked.prompts, data["end_ids"], engine)
    serving |= {
        "workload": asked.name,
        "notes": [*notes(asked), *serving["notes"]],
        "command": card.command("eagle31_train.evaluate", config),
    }
    manifest = {
        "fingerprint": artifacts.fingerprint(inputs),
        "inputs": inputs,
        "serving": serving,
        "files": artifacts.list_files(folder, page.write(folder, {"title": config.name, "serving": serving})),
        "seconds": time.perf_counter() - began,
    }
    artifacts.write_json(folder / artifacts.MANIFEST, manifest)
    print(serving_report.table(serving))
    print(f"evaluate: {folder / page.PAGE}")


def refuse_other_data(config: Config, data: dict[str, Any], trained: dict[str, Any]) -> None:
    """Held-out prompts of other data may have been learnt."""
    if data["dataset_fingerprint"] != trained["inputs"].get("data"):
        raise UserError(
            f"{config.data_folder} is not the data that the drafter was trained on, so its held-out prompts may have "
            f"been trained on: run `{TRAIN}` on it, or give data_dir=… of training"
        )


def report(result: dict[str, Any], outcome: Outcome, options: EvaluateConfig) -> dict[str, Any]:
    """The manifest's report: the first workload, at evaluate.draft_tokens; `identical` speaks of all."""
    workload = result["workloads"][0]
    drawn = options.draft_sampling != "greedy" and any(each["temperature"] for each in result["workloads"])
    (numbers,) = workload["drafters"].values()
    found = acceptance.report(numbers, options.draft_tokens)
    return {
        **found,
        "max_new_tokens": options.max_new_tokens,
        "draft_tokens_proposed": options.draft_tokens * found["drafts"],
        "tokens_per_second": {
            "speculative": outcome.tokens / outcome.speculative,
            "plain": outcome.tokens / outcome.plain,
        },
        "identical": not drawn,  # or measuring would have refused
        "workload": workload["name"],
        "dtype": options.dtype,
        "machine": result["machine"],
    }


def not_measured(result: dict[str, Any], data: dict[str, Any]) -> list[str]:
    """Sources that the drafter learnt from, of which no held-out prompt was decoded."""
    workload = result["workloads"][0]
    (numbers,) = workload["drafters"].values()
    learnt = data["splits"]["train"].get("by_source", {}) if workload["suite"] == suites.HELDOUT else {}
    return sorted(learnt.keys() - numbers["by_source"].keys())


# ---------------------------------------------------------------- input


def stage_inputs(
    config: Config, data: dict[str, Any], drafter: dict[str, str], engine: Engine | None = None
) -> dict[str, Any]:
    """Everything that the counts depend on; `drafter`: what tells it from others; `engine`: by which it is served."""
    options = asdict(config.evaluate)
    for name in ("warmup", "prompts", "suites", "perturbations", "leave_out"):  # `suites.inputs` has all but the first
        del options[name]
    served = ("serve_depths", "concurrency", "vllm_python", "vllm_args")
    for name in served if config.evaluate.backend == "transformers" else ("depths", "batch_size", "drift"):
        del options[name]
    drawn = options["temperature"] or any(perturb.find(name).temperature for name in config.evaluate.perturbations)
    return {
        **({"seed": config.seed} if drawn else {}),
        "layout": LAYOUT,
        **drafter,
        "data": data["fingerprint"],
        "target": drafters.target_identity(config.target),
        "evaluate": options,
        "workloads": suites.inputs(config),
        **({"vllm": engine.version, "server": server_needs(config)} if engine else {}),
    }


def server_needs(config: Config) -> dict[str, Any]:
    """The server's arguments that other options than evaluate.vllm_args give: on how many devices, how quantized."""
    given = server_arguments(config, None, 0, 0)
    return {name: given[name] for name in target_arguments(config)}


if __name__ == "__main__":
    cli.run(evaluate, __doc__ or "")
