"""Drafters side by side, on the same words of the same target: which wins, on what, at which depth.

    python -m eagle31_train.compare runs/a runs/b
    python -m eagle31_train.compare runs/a runs/b '+suite=[mt_bench]' 'evaluate.perturbations=[no_template,context_2]'
    python -m eagle31_train.compare before:runs/a1,runs/a2 after:runs/b1,runs/b2 evaluate.num_prompts=100
    python -m eagle31_train.compare runs/a me/published-draft evaluate.backend=vllm

Every DRAFTER is a run, an exported checkpoint, or a published one (a folder, or an id of the hub); the others are
compared with the first. NAME:… calls it so, and several trainings of one recipe, with commas between them, are measured
as one. Target, data and evaluate.* are those of the first run, where no +experiment=… is given.

Writes compare.out: result.json, a page and its pictures. A drafter, or a workload, that is added later is measured
alone. With evaluate.backend=vllm every drafter is served by vLLM, too.
"""

import re
import sys
from functools import partial
from pathlib import Path
from typing import Any

from eagle31_train import artifacts, card, cli
from eagle31_train.measure import acceptance, drafters, page, records, suites, tables
from eagle31_train.measure.decoding import Limits
from eagle31_train.measure.drafters import Checkpoint
from eagle31_train.measure.measuring import Measurer, check_options, remarks, sheet
from eagle31_train.measure.serving import measure_serving
from eagle31_train.schema import Config, UserError
from eagle31_train.targets.cached import CachedTarget
from eagle31_train.targets.hf import load_model

RESULT = "result.json"
DATA, EXPORT = "python -m data_prep", "python -m eagle31_train.export"
Named = dict[str, list[str]]  # what a drafter is called → its trainings


def main(argv: list[str] | None = None) -> None:
    """Entry point: DRAFTER arguments first, options behind them."""
    words = sys.argv[1:] if argv is None else argv
    given = [word for word in words if "=" not in word and not word.startswith(("-", "+", "~"))]
    options = [word for word in words if word not in given]
    named, saved = called(given), None
    if given and not any(word.lstrip("+").startswith("experiment=") for word in options):
        saved = next(iter(named.values()))[0]
    cli.run(partial(compare, named), __doc__ or "", options, Path(saved, "train", "config.yaml") if saved else None)


def called(words: list[str]) -> Named:
    """Drafters by name: as NAME:… says, else the last part of the path, or all of it where that is not enough."""
    parts = [re.fullmatch(r"(?:([^:/]+):)?(.+)", word) for word in words]
    asked = [(found[1], found[2].split(",")) for found in parts if found]
    last = [Path(trainings[0]).name for _, trainings in asked]
    named: Named = {}
    for (name, trainings), short in zip(asked, last, strict=True):
        label = name or (short if last.count(short) == 1 else trainings[0])
        if label in named:
            named.setdefault("", []).append(label)  # told by `compare`, in one line
        named[label] = [training.rstrip("/") for training in trainings]
    return named


def compare(named: Named, config: Config) -> None:
    """Measure the drafters and tell who wins.

    Raises:
        UserError: fewer than two drafters, or one that cannot be read or belongs to another target; missing data; an
            output that speculation changed.
    """
    if twice := named.pop("", None):
        raise UserError(f"two drafters are called {twice[0]}: tell them apart as NAME:{named[twice[0]][0]}")
    if len(named) < 2:
        raise UserError("give two drafters or more: python -m eagle31_train.compare runs/a runs/b")
    options = config.evaluate
    check_options(options)
    data = artifacts.read_json(config.data_folder / artifacts.MANIFEST, DATA)
    model = load_model(config.target, options.dtype)
    target = CachedTarget(model, [1])  # whose states nobody asks for: every drafter has layers of its own
    checkpoints = {f"{name}/{n}": read(one, target.depth) for name, some in named.items() for n, one in enumerate(some)}
    for checkpoint in checkpoints.values():
        refuse_other_data(checkpoint, config, data)
    candidates = [drafters.load(one, name, target, config) for name, one in checkpoints.items()]
    workloads = suites.workloads(config, data, drafters.room(target, candidates, options))
    for remark in remarks(workloads):
        print(f"compare: {remark}")

    out = Path(config.compare.out or Path("runs/compare") / "-".join(re.sub(r"[^\w.]+", "_", name) for name in named))
    measurer = Measurer(model, Limits(options.max_new_tokens, frozenset(data["end_ids"])), options, config.seed)
    inputs, verified = records.inputs(config, data["end_ids"]), config.compare.verified
    outcomes, _ = records.measured(out / "workloads", workloads, measurer, candidates, inputs, verified)
    sheets = [
        sheet(workload, {name: [found[f"{name}/{n}"] for n in range(len(some))] for name, some in named.items()})
        for workload, found in zip(workloads, outcomes, strict=True)
    ]
    result: dict[str, Any] = {
        **acceptance.tell(sheets, range(1, options.depths + 1), options.draft_tokens),
        "title": " against ".join(named),
        "trainings": named,
        "command": " ".join([command(named), *card.overrides(config)]),
        "machine": acceptance.machine(target.device),
        "dtype": options.dtype,
        "max_new_tokens": options.max_new_tokens,
        "verified": verified,
    }
    if options.backend == "vllm":
        drafts = {name: exported(some[0]) for name, some in named.items()}
        result["serving"] = measure_serving(config, drafts, workloads[0].prompts, data["end_ids"])
    artifacts.write_json(out / RESULT, result)
    print(tables.table(result))
    page.write(out, result)
    print(f"compare: {out / page.PAGE}")


def read(where: str, target_layers: int) -> Checkpoint:
    """A drafter by its folder: of a run, or as it is published; or by its id on the hub."""
    run = Path(where)
    if not (run / "train" / artifacts.MANIFEST).is_file():
        if run.is_dir() and (run / "train").is_dir():
            raise UserError(f"{run / 'train'} is not finished: run `{drafters.TRAIN}` again")
        return drafters.of_published(where, None, target_layers)
    trained_with = cli.load_config([], run / "train" / "config.yaml")
    return drafters.of_run(run, Path(trained_with.data_dir) if trained_with.data_dir else run / "data")


def refuse_other_data(checkpoint: Checkpoint, config: Config, data: dict[str, Any]) -> None:
    """Held-out prompts must be held out from everybody; of a published draft nobody can know."""
    if config.evaluate.prompts is not None:
        return
    if checkpoint.manifest is None:
        print(f"compare: nobody knows whether {checkpoint.where} was trained on the held-out prompts")
    elif checkpoint.manifest["inputs"].get("data") != data["dataset_fingerprint"]:
        raise UserError(
            f"{checkpoint.where} was trained on other data than {config.data_folder}, perhaps on its held-out prompts: "
            "give prompts that nobody learnt as evaluate.prompts=FILE"
        )


def exported(where: str) -> Path:
    """What vLLM serves of a drafter."""
    folder = Path(where)
    if (folder / "train").is_dir():
        folder /= "export"
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder} holds no exported checkpoint: run `{EXPORT}` for it first")
    return folder


def command(named: Named) -> str:
    """The command line without options."""
    return " ".join(["python -m eagle31_train.compare", *(f"{name}:{','.join(some)}" for name, some in named.items())])


if __name__ == "__main__":
    main()
