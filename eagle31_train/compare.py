"""Drafters side by side, on the same words of the same target: which wins, on what, at which depth.

    python -m eagle31_train.compare runs/a runs/b
    python -m eagle31_train.compare runs/a runs/b '+suite=[mt_bench]' 'evaluate.perturbations=[no_template,context_2]'
    python -m eagle31_train.compare before:runs/a1,runs/a2 after:runs/b1,runs/b2 evaluate.num_prompts=100
    python -m eagle31_train.compare runs/a me/draft evaluate.backend=vllm evaluate.vllm_python=.venv-vllm/bin/python

Every DRAFTER is a run, an exported checkpoint, or a published one (a folder, or an id of the hub); the others are
compared with the first. NAME:… calls it so, and several trainings of one recipe, with commas between them, are measured
as one. Target, data and evaluate.* are those of the first that is a run, where no +experiment=… is given.

Writes compare.out: result.json, a page and its pictures. A drafter, or a workload, that is added later is measured
alone. With evaluate.backend=vllm every drafter is served by vLLM, too.
"""

import re
import shlex
import sys
from functools import partial
from pathlib import Path
from typing import Any

from eagle31_train import artifacts, card, cli, published
from eagle31_train.markdown import public
from eagle31_train.measure import acceptance, drafters, learnt, page, records, suites, tables
from eagle31_train.measure.decoding import Limits
from eagle31_train.measure.drafters import Checkpoint
from eagle31_train.measure.measuring import Measurer, check_options, remarks, sheet
from eagle31_train.measure.serving import check as check_serving
from eagle31_train.measure.serving import measure_serving
from eagle31_train.measure.serving import report as serving_report
from eagle31_train.schema import Config, UserError
from eagle31_train.store import read_manifest
from eagle31_train.targets.cached import CachedTarget
from eagle31_train.targets.hf import load_model

RESULT = "result.json"
DATA = "python -m data_prep"
COMPARISONS = Path("runs/compare")
FEWER = "give two drafters or more: python -m eagle31_train.compare runs/a runs/b"
Named = dict[str, list[str]]  # what a drafter is called → its trainings


def main(argv: list[str] | None = None) -> None:
    """Entry point: DRAFTER arguments first, options behind them."""
    words = sys.argv[1:] if argv is None else argv
    given = [word for word in words if "=" not in word and not word.startswith(("-", "+", "~"))]
    options = [word for word in words if word not in given]
    if len(given) < 2 and not any(word.startswith("-") for word in words):  # --help wants none
        print(f"error: {FEWER}", file=sys.stderr)
        raise SystemExit(2)
    named, saved = called(given), None
    if given and not any(word.lstrip("+").startswith("experiment=") for word in options):
        firsts = [trainings[0] for trainings in named.values()]
        first = next((one for one in firsts if Path(one, "train", "config.yaml").is_file()), firsts[0])
        options, saved = [in_place(first), *options], Path(first, "train", "config.yaml")
    cli.run(partial(compare, named), __doc__ or "", options, saved)


def in_place(run: str) -> str:
    """The option by which a run's configuration speaks of the folder where the run lies now."""
    quoted = re.sub(r"(['\\])", r"\\\1", run)
    return f"run_dir='{quoted}'"


def called(words: list[str]) -> Named:
    """Drafters by name: as NAME:… says, else the last part of the path, or as many as tell it from the others."""
    parts = [re.fullmatch(r"(?:([^:/]+):)?(.+)", word) for word in words]
    asked = [(found[1], found[2].split(",")) for found in parts if found]
    # Never all of an absolute path: names stand in pictures and on public cards.
    paths = [Path(trainings[0]).absolute().parts[1:] for _, trainings in asked]
    named: Named = {}
    for (name, trainings), path in zip(asked, paths, strict=True):
        count = next((n for n in range(1, len(path)) if sum(path[-n:] == other[-n:] for other in paths) == 1), 1)
        label = name or "/".join(path[-count:]) or trainings[0]
        if label in named:
            named.setdefault("", []).append(label)  # told by `compare`, in one line
        named[label] = [training.rstrip("/") for training in trainings]
    return named


def title(names: list[str]) -> str:
    """What the numbers are: of the others, against the first."""
    first, *others = names
    return f"{', '.join(others)} against {first}"


def compare(named: Named, config: Config) -> None:
    """Measure the drafters and tell who wins.

    Raises:
        UserError: fewer than two drafters, or one that cannot be read or belongs to another target; missing data; an
            output that speculation changed; a folder that has another comparison.
    """
    if twice := named.pop("", None):
        raise UserError(f"two drafters are called {twice[0]}: tell them apart as NAME:{named[twice[0]][0]}")
    if len(named) < 2:
        raise UserError(FEWER)
    for name, some in named.items():
        if "" in some or len(set(some)) < len(some):
            raise UserError(f"{name} is {','.join(some)}, which names a training twice or not at all: give each once")
    if "plain" in named:
        raise UserError(f"plain is what decoding without a drafter is called: call {named['plain'][0]} otherwise")
    options, verified = config.evaluate, config.compare.verified
    check_options(options)
    if verified < 0:
        raise UserError(f"compare.verified={verified} is no number of prompts: give 0 or more")
    # Of comparisons without a folder of their own, all find what was measured for the others.
    kept = Path(config.compare.out or COMPARISONS) / "workloads"
    out = Path(config.compare.out or COMPARISONS / "-".join(re.sub(r"[^\w.]+", "_", name) for name in named))
    if config.compare.out is None and not config.overwrite:
        refuse_another(out, named)
    drafts = {name: exported(some[0]) for name, some in named.items()} if options.backend == "vllm" else {}
    engine = check_serving(config) if options.backend == "vllm" else None
    data = artifacts.read_json(config.data_folder / artifacts.MANIFEST, DATA)
    if damage := artifacts.first_damaged(config.data_folder, data.get("files", {})):
        raise UserError(f"{damage}: run `{DATA}` again")
    model = load_model(config.target, options.dtype)
    target = CachedTarget(model, [1])  # whose states nobody asks for: every drafter has layers of its own
    checkpoints = {
        f"{name}/{n}": read(one, target.depth, config) for name, some in named.items() for n, one in enumerate(some)
    }
    for checkpoint in checkpoints.values():
        check_heldout(checkpoint, config, data)
    manifests = {name: [checkpoints[f"{name}/{n}"].manifest for n in range(len(some))] for name, some in named.items()}
    doubts = list(learnt.doubts(manifests, data["dataset_fingerprint"]))
    candidates = [drafters.load(one, name, target, config) for name, one in checkpoints.items()]
    positions = [one.shape.max_position_embeddings for one in checkpoints.values()]
    room = drafters.room(config, positions, [options.draft_tokens, options.depths])
    workloads = suites.workloads(config, data, room, doubts)
    for remark in remarks(workloads):
        print(f"compare: {remark}")

    measurer = Measurer(model, Limits(options.max_new_tokens, frozenset(data["end_ids"])), options, config.seed)
    inputs = records.inputs(config, data["end_ids"])
    outcomes, _ = records.measured(kept, workloads, measurer, candidates, inputs, verified)
    sheets = [
        sheet(workload, {name: [found[f"{name}/{n}"] for n in range(len(some))] for name, some in named.items()})
        for workload, found in zip(workloads, outcomes, strict=True)
    ]
    result: dict[str, Any] = {
        **acceptance.tell(sheets, range(1, options.depths + 1), options.draft_tokens),
        "title": title(list(named)),
        "trainings": named,
        "identities": {
            name: [checkpoints[f"{name}/{n}"].identity for n in range(len(some))] for name, some in named.items()
        },
        "command": command(named, config),
        "machine": acceptance.machine(target.device),
        "dtype": options.dtype,
        "max_new_tokens": options.max_new_tokens,
        "verified": verified,
    }
    if engine is not None:
        serving = measure_serving(config, drafts, workloads[0].prompts, data["end_ids"], engine)
        firsts = [f"of {name}, the first of {len(some)} trainings" for name, some in named.items() if len(some) > 1]
        result["serving"] = {
            **serving,
            "notes": [*firsts, *serving["notes"]],
            "workload": workloads[0].name,
        }
    artifacts.write_json(out / RESULT, result)
    print(tables.table(result))
    if "serving" in result:
        print("\n" + serving_report.table(result["serving"]))
    page.write(out, result)
    print(f"compare: {out / page.PAGE}")


def read(where: str, target_layers: int, config: Config) -> Checkpoint:
    """A drafter by its folder: of a run, which must have learnt from the same target, or as it is published; or by its
    id on the hub."""
    run = Path(where)
    if not (run / "train" / artifacts.MANIFEST).is_file():
        if run.is_dir() and (run / "train").is_dir():
            raise UserError(f"{run / 'train'} is not finished: run `{drafters.TRAIN}` again")
        return drafters.of_published(where, None, target_layers)
    trained_with = cli.load_config([in_place(where)], run / "train" / "config.yaml")
    checkpoint = drafters.of_run(run, trained_with.data_folder)
    drafters.refuse_other_target(checkpoint, read_manifest(trained_with), config.target)
    return checkpoint


def check_heldout(checkpoint: Checkpoint, config: Config, data: dict[str, Any]) -> None:
    """Held-out prompts must be held out from everybody whose data are known."""
    if config.evaluate.prompts is not None or checkpoint.manifest is None:
        return
    if checkpoint.manifest["inputs"].get("data") != data["dataset_fingerprint"]:
        raise UserError(
            f"{checkpoint.where} was trained on other data than {config.data_folder}, perhaps on its held-out prompts: "
            "give prompts that nobody learnt as evaluate.prompts=FILE"
        )


def refuse_another(out: Path, named: Named) -> None:
    """Drafters of other folders may have the same names, and so would this comparison."""
    if not (out / RESULT).is_file():
        return

    def places(trainings: Named) -> list[list[Path]]:
        return [[Path(one).resolve() for one in some] for some in trainings.values()]

    told = artifacts.read_json(out / RESULT, "this command").get("trainings", {})
    if places(told) != places(named):
        there = " ".join(f"{name}:{','.join(some)}" for name, some in told.items())
        raise UserError(f"{out} compares {there}: give another compare.out=…, or replace it with overwrite=true")


def exported(where: str) -> Path:
    """What vLLM serves of a drafter."""
    folder = Path(where) if Path(where).is_dir() else published.fetch(where, None)
    if not (folder / "train").is_dir():
        return folder
    drafters.exported(folder)
    return folder / "export"


def command(named: Named, config: Config) -> str:
    """The command line that compares these, with paths as others may see them."""
    words = [f"{name}:{','.join(map(public, some))}" for name, some in named.items()]
    return f"python -m eagle31_train.compare {shlex.join([*words, *card.overrides(config)])}"


if __name__ == "__main__":
    main()
