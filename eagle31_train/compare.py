"""Compare drafters on the same outputs of the same target: which is better, on what, at which depth.

    eagle31 compare runs/a runs/b
    eagle31 compare runs/a runs/b '+suite=[mt_bench]' 'evaluate.perturbations=[no_template,context_2]'
    eagle31 compare before:runs/a1,runs/a2 after:runs/b1,runs/b2 evaluate.num_prompts=100
    eagle31 compare runs/a me/draft evaluate.backend=vllm evaluate.vllm_python=.venv-vllm/bin/python
    eagle31 compare me/draft them/draft target.path=Qwen/Qwen3-8B evaluate.prompts=prompts.jsonl

A DRAFTER is a run, an exported checkpoint, or a published one: a folder or a hub id (DRAFT@outputs if its config.json
counts layers as SGLang does). The first is compared with each of the others. NAME:… names it; several trainings of one
recipe, separated by commas, are measured as one. Target, data and evaluate.* are those of the first run given, unless
there is +experiment=…. Without any run, give target.path=… and evaluate.prompts=…. A single drafter is only measured.

Writes compare.out: a page and its pictures, then result.json, which lists them. If you add a drafter or a workload
later, only that is measured. With evaluate.backend=vllm, vLLM then serves every drafter, too, and all is written again.
"""

import gc
import os
import re
import shlex
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from eagle31_train import cli, compose, provenance
from eagle31_train.__main__ import SLOW
from eagle31_train.checkpoint import hub, published
from eagle31_train.checkpoint.drafter_checkpoint import DrafterCheckpoint, same_name, split_name
from eagle31_train.checkpoint.run_folder import is_export_of, read_export
from eagle31_train.common import artifacts
from eagle31_train.common.console import explained, note
from eagle31_train.common.errors import UserError
from eagle31_train.common.locks import writing
from eagle31_train.config import Config
from eagle31_train.evaluation.in_process import evaluate
from eagle31_train.evaluation.serving import measure_serving
from eagle31_train.evaluation.serving.engine import check as check_serving
from eagle31_train.evaluation.workloads import asked
from eagle31_train.reporting import evaluation_page, recipe, tables
from eagle31_train.reporting.markdown import public
from eagle31_train.targets.chat import ChatTemplate
from eagle31_train.targets.hf import read_config

COMPARISONS = Path("runs/compare")
Named = dict[str, list[str]]  # a drafter's name → its trainings


def main(argv: list[str] | None = None) -> None:
    words = sys.argv[1:] if argv is None else argv
    folders = [after for word, after in pairwise(words) if word == "--config-dir"]
    given = [
        word for word in words if not word.startswith(("-", "+", "~")) and is_drafter(word) and word not in folders
    ]
    options = [word for word in words if word not in given]
    if given or not {"-h", "--help", "--cfg"} & set(options):  # these need no drafter
        with explained():
            options = with_a_run(given, options)
    cli.run(lambda config: compare(named(given), config), __doc__ or "", options, before=SLOW["compare"])


def with_a_run(given: list[str], options: list[str]) -> list[str]:
    """Return the options after those of the first run among the drafters; the options alone if they name a recipe.

    UserError if there is neither, nor a target, or if no drafter is given."""
    if not given:
        raise UserError("no drafter given: run, for example, `eagle31 compare runs/a runs/b`")
    if any(word.lstrip("+").startswith("experiment=") for word in options):
        return options
    firsts = [trainings[0] for _, trainings in map(parted, given)]
    if run := next(filter(compose.is_run, firsts), None):
        return [run, f"run_dir={run}", *options]
    if any(word.startswith("target.path=") for word in options):
        return options
    raise UserError(
        f"{', '.join(firsts)}: none of them is a run: add one, whose target and prompts are used, or set "
        "target.path=… and evaluate.prompts=FILE"
    )


def compare(trainings: Named, config: Config) -> None:
    """Measure the drafters and write which is better; UserError for whatever the user can correct."""
    prompts = asked(config)
    out = folder_of(trainings, prompts, config)
    engine = check_serving(config) if config.evaluate.backend == "vllm" else None
    drafts = {name: exported(some[0]) for name, some in trainings.items()} if engine else {}
    data = read_data(config)
    checkpoints = {name: [read(one, config, data) for one in some] for name, some in trainings.items()}
    with writing(out, "compare.out=…"):  # before hours are spent
        # Comparisons without compare.out share their measurements.
        shared = Path(config.compare.out or COMPARISONS)
        result, decoded, _ = evaluate(config, checkpoints, data, shared / "workloads", config.compare.verified)
        first, *others = trainings
        words = [f"{name}:{','.join(map(public, some))}" for name, some in trainings.items()]
        result |= {
            "title": f"{', '.join(others)} against {first}" if others else first,
            "target": config.target.name,
            "trainings": trainings,
            "asked": prompts,
            "identities": {name: [one.identity for one in some] for name, some in checkpoints.items()},
            "command": f"eagle31 compare {shlex.join([*words, *recipe.overrides(config)])}",
            "verified": config.compare.verified,
        }
        note(tables.as_text(result))
        write(out, result)  # before vLLM, which may fail hours later
        if engine is None:
            return
        workload = decoded[0]
        gc.collect()  # frees the target, which has reference cycles: vLLM takes nearly all GPU memory
        torch.cuda.empty_cache()
        served = measure_serving(config, drafts, workload.prompts, data["end_ids"], engine, shared / "serving")
        firsts = [f"of {name}, the first of {len(some)} trainings" for name, some in trainings.items() if len(some) > 1]
        result["serving"] = {**served, "notes": [*firsts, *served["notes"]], "workload": workload.name}
        note("\n" + tables.as_text({"serving": result["serving"]}))
        write(out, result)


def write(out: Path, result: dict[str, Any]) -> None:
    """Write the page and its pictures, then RESULT, which tells readers whether the pictures are its own."""
    files = evaluation_page.write(out, result)
    artifacts.write_json(out / evaluation_page.RESULT, {**result, "files": files})
    note(f"compare: {out / evaluation_page.PAGE}")


def is_drafter(word: str) -> bool:
    """Return whether a word names a drafter: not an option, or a folder whose name looks like one (runs/lr=1)."""
    return "=" not in word or os.path.isdir(parted(word)[1][0])  # noqa: PTH112 (Path's raises for a long option)


def parted(word: str) -> tuple[str | None, list[str]]:
    """Split a DRAFTER argument into its name, or None, and its trainings."""
    before, _, rest = word.partition(":")
    name, trainings = (before, rest) if before and rest and "/" not in before else (None, word)
    return name, [training.rstrip("/") or training[:1] for training in trainings.split(",")]


def named(words: Sequence[str]) -> Named:
    """Return drafters by name: NAME:…, or a `short_name`. UserError if a table could not tell them apart."""
    arguments = [parted(word) for word in words]
    # Never a whole absolute path: names appear in pictures and on public cards.
    paths = [Path(trainings[0]).absolute().parts[1:] for _, trainings in arguments]
    drafters_by_name: Named = {}
    for (given, trainings), path in zip(arguments, paths, strict=True):
        name = given or short_name(path, paths) or trainings[0]
        if name == "plain":
            raise UserError(
                f"plain is reserved for decoding without a drafter: choose another name, as NAME:{trainings[0]}"
            )
        if name in drafters_by_name:
            raise UserError(f"two drafters are called {name}: tell them apart as NAME:{trainings[0]}")
        if "" in trainings or len(set(trainings)) < len(trainings):
            raise UserError(f"{name}:{','.join(trainings)} lists a training twice, or an empty one: list each once")
        drafters_by_name[name] = trainings
    for name, trainings in drafters_by_name.items():
        several = {f"{name}/{n}" for n in range(1, len(trainings) + 1)} if len(trainings) > 1 else set()
        if twice := several & drafters_by_name.keys():
            raise UserError(f"{min(twice)} is both a training of {name} and another drafter: tell them apart as NAME:…")
    return drafters_by_name


def short_name(path: tuple[str, ...], paths: Sequence[tuple[str, ...]]) -> str:
    """Return the fewest last parts of a path that no other has (of an export, from 2), or else its last part."""
    least = 2 if path[-1:] == ("export",) else 1
    alone = (n for n in range(least, len(path)) if sum(path[-n:] == other[-n:] for other in paths) == 1)
    return "/".join(path[-next(alone, 1) :])


def read_data(config: Config) -> dict[str, Any]:
    """Return stage 1's manifest or, if there is none but prompts are given, the entries that measuring them needs."""
    manifest = config.data_folder / artifacts.MANIFEST
    if manifest.is_file():
        return provenance.read_data(config, whole=True)
    if config.evaluate.prompts is None:
        raise UserError(f"{manifest} is missing: run `{provenance.DATA}` first, or set evaluate.prompts=FILE")
    return {"dataset_fingerprint": None, "splits": {}, "end_ids": ChatTemplate.load(config.target).end_ids}


def read(drafter: str, config: Config, data: dict[str, Any]) -> DrafterCheckpoint:
    """Return the checkpoint of a run, or of an exported or published drafter, with its weights read.

    UserError if it is of another target, or may have been trained on held-out prompts.
    """
    checkpoint = DrafterCheckpoint.open(drafter, target_layers=lambda: read_config(config.target).num_hidden_layers)
    checkpoint.tensors  # noqa: B018 (refuses damaged weights before the target is loaded)
    checkpoint.check_target(config.target)
    meant = None if checkpoint.train or checkpoint.exported else checkpoint.target_name
    if meant and not same_name(meant, config.target.name):
        note(f"{checkpoint.where} says that it drafts for {meant}, but target.path is {config.target.path}")
    inputs = checkpoint.inputs
    if config.evaluate.prompts is None and inputs is not None and inputs.get("data") != data["dataset_fingerprint"]:
        raise UserError(
            f"{checkpoint.where} was trained on other data than {config.data_folder}, perhaps on its held-out prompts: "
            "set evaluate.prompts=FILE to prompts that no drafter was trained on"
        )
    return checkpoint


def exported(drafter: str) -> Path:
    """Return the folder of a drafter that vLLM can serve; UserError if there is none, or it was made smaller."""
    place, counted = split_name(drafter)
    if counted == "outputs":
        raise UserError(f"{drafter}: vLLM would read its layer ids as inputs: remove evaluate.backend=vllm")
    folder = Path(place) if Path(place).is_dir() else hub.fetch(place, None)
    if not (folder / "train").is_dir():
        try:
            published.check_served(folder)
        except UserError as error:
            raise UserError(f"{drafter}: {error}") from None
        return folder
    trained = DrafterCheckpoint.open(drafter)
    if not is_export_of(read_export(folder), trained.shape, trained.vocab.target_ids.tolist()):
        raise UserError(
            f"{folder / 'export'} is smaller than the trained drafter (by its export_… options): pass that folder "
            "itself, or export again without these options"
        )
    return folder / "export"


def folder_of(trainings: Named, prompts: dict[str, str], config: Config) -> Path:
    """Return the folder to write to; UserError if the comparison there has drafters or `prompts` (see `asked`) that
    this one lacks."""
    name = "-".join(re.sub(r"[^\w.]+", "_", name) for name in trainings)
    out = COMPARISONS / name if config.compare.out is None else Path(config.compare.out)
    result = out / evaluation_page.RESULT
    if not config.overwrite and result.is_file():
        record = artifacts.read_json(result, "this command")
        earlier, remedy = record.get("trainings", {}), "set another compare.out=…, or replace it with overwrite=true"
        there, here = (
            {n: [Path(one).resolve() for one in some] for n, some in of.items()} for of in (earlier, trainings)
        )
        if not there.items() <= here.items():
            words = shlex.join(f"{name}:{','.join(some)}" for name, some in earlier.items())
            raise UserError(f"{out} compares {words}: {remedy}")
        if lacking := sorted(dict(record.get("asked", {}).items() - prompts.items())):
            which = ", ".join(lacking)
            raise UserError(f"{out} is also on prompts that this command does not ask ({which}): {remedy}")
    return out


if __name__ == "__main__":
    main()
