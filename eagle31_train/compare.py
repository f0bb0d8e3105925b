"""Drafters side by side, on the same words of the same target: which is better, on what, at which depth.

    eagle31 compare runs/a runs/b
    eagle31 compare runs/a runs/b '+suite=[mt_bench]' 'evaluate.perturbations=[no_template,context_2]'
    eagle31 compare before:runs/a1,runs/a2 after:runs/b1,runs/b2 evaluate.num_prompts=100
    eagle31 compare runs/a me/draft evaluate.backend=vllm evaluate.vllm_python=.venv-vllm/bin/python

Every DRAFTER is a run, an exported checkpoint, or a published one (a folder, or an id of the hub); the others are
compared with the first. NAME:… calls it so, and several trainings of one recipe, with commas between them, are measured
as one. Target, data and evaluate.* are those of the first that is a run, where no +experiment=… is given.

Writes compare.out: a page and its pictures, then result.json, which lists them. A drafter, or a workload, that is
added later is measured alone. With evaluate.backend=vllm every drafter is then served by vLLM, too, and all written
again.
"""

import gc
import shlex
import sys
from pathlib import Path
from typing import Any

import torch

from eagle31_train import artifacts, cli
from eagle31_train.config import Config
from eagle31_train.console import note
from eagle31_train.evaluation import comparison
from eagle31_train.evaluation.comparison import Named, named
from eagle31_train.evaluation.evaluating import evaluate, read_data
from eagle31_train.evaluation.measuring import check_options
from eagle31_train.evaluation.serving import check as check_serving
from eagle31_train.evaluation.serving import measure_serving
from eagle31_train.reporting import evaluation_page, recipe, tables
from eagle31_train.reporting.markdown import public

DRAFTERS = "DRAFTER DRAFTER … "  # of the usage line
FEWER = "give two drafters or more: eagle31 compare runs/a runs/b"


def main(argv: list[str] | None = None) -> None:
    """Entry point: DRAFTER arguments first, options behind them."""
    words = sys.argv[1:] if argv is None else argv
    given = [word for word in words if not word.startswith(("-", "+", "~")) and comparison.is_drafter(word)]
    options = [word for word in words if word not in given]
    if len(given) < 2 and not any(word.startswith("-") for word in words):  # --help wants none
        note(f"error: {FEWER}", error=True)
        raise SystemExit(2)
    saved = None
    if given and not any(word.lstrip("+").startswith("experiment=") for word in options):
        firsts = [trainings[0] for _, trainings in map(comparison.parted, given)]
        first = next((one for one in firsts if Path(one, "train", "config.yaml").is_file()), firsts[0])
        # That a training may replace its outputs does not let its comparisons do so.
        options, saved = [f"run_dir={first}", "overwrite=false", *options], Path(first, "train", "config.yaml")
    cli.run(lambda config: compare(named(given), config), __doc__ or "", options, saved, DRAFTERS)


def compare(trainings: Named, config: Config) -> None:
    """Measure the drafters, and write which is better.

    Raises:
        UserError: one that cannot be read or belongs to another target; missing data; an output that speculation
            changed; a folder that has another comparison; vLLM that cannot be run.
    """
    check_options(config.evaluate)
    out = comparison.folder_of(trainings, config, evaluation_page.RESULT)
    engine = check_serving(config) if config.evaluate.backend == "vllm" else None
    drafts = {name: comparison.exported(some[0]) for name, some in trainings.items()} if engine else {}
    data = read_data(config)
    checkpoints = {name: [comparison.read(one, config, data) for one in some] for name, some in trainings.items()}

    # Comparisons without a folder of their own share what is measured.
    shared = Path(config.compare.out or comparison.COMPARISONS)
    evaluation = evaluate(config, checkpoints, data, shared / "workloads", config.compare.verified)
    first, *others = trainings
    result = {
        **evaluation.result,
        "title": f"{', '.join(others)} against {first}",
        "target": config.target.name,
        "trainings": trainings,
        "identities": {name: [one.identity for one in some] for name, some in checkpoints.items()},
        "command": command(trainings, config),
        "verified": config.compare.verified,
    }
    note(tables.as_text(result))
    write(out, result)  # before vLLM, which may fail after hours
    if engine is None:
        return
    workload = evaluation.workloads[0]
    gc.collect()  # the target, which has cycles: vLLM asks for nearly all memory that a GPU has
    torch.cuda.empty_cache()
    served = measure_serving(config, drafts, workload.prompts, data["end_ids"], engine, shared / "serving")
    firsts = [f"of {name}, the first of {len(some)} trainings" for name, some in trainings.items() if len(some) > 1]
    result["serving"] = {**served, "notes": [*firsts, *served["notes"]], "workload": workload.name}
    note("\n" + tables.as_text({"serving": result["serving"]}))
    write(out, result)


def write(out: Path, result: dict[str, Any]) -> None:
    """The page and its pictures, and then RESULT, by which readers know whether the pictures are its own."""
    files = evaluation_page.write(out, result)
    artifacts.write_json(out / evaluation_page.RESULT, {**result, "files": artifacts.list_files(out, files)})
    note(f"compare: {out / evaluation_page.PAGE}")


def command(trainings: Named, config: Config) -> str:
    """The command line that compares these, with paths as others may see them."""
    words = [f"{name}:{','.join(map(public, some))}" for name, some in trainings.items()]
    return f"eagle31 compare {shlex.join([*words, *recipe.overrides(config)])}"


if __name__ == "__main__":
    main()
