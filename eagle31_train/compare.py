"""Drafters side by side, on the same words of the same target: which wins, on what, at which depth.

    python -m eagle31_train.compare runs/a runs/b
    python -m eagle31_train.compare runs/a runs/b '+suite=[mt_bench]' 'evaluate.perturbations=[no_template,context_2]'
    python -m eagle31_train.compare before:runs/a1,runs/a2 after:runs/b1,runs/b2 evaluate.num_prompts=100
    python -m eagle31_train.compare runs/a me/draft evaluate.backend=vllm evaluate.vllm_python=.venv-vllm/bin/python

Every DRAFTER is a run, an exported checkpoint, or a published one (a folder, or an id of the hub); the others are
compared with the first. NAME:… calls it so, and several trainings of one recipe, with commas between them, are measured
as one. Target, data and evaluate.* are those of the first that is a run, where no +experiment=… is given.

Writes compare.out: a page and its pictures, then result.json, which lists them. A drafter, or a workload, that is
added later is measured alone. With evaluate.backend=vllm every drafter is then served by vLLM, too, and all written
again.
"""

import gc
import re
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from eagle31_train import artifacts, card, cli, published
from eagle31_train.markdown import public
from eagle31_train.measure import acceptance, drafters, learnt, page, records, suites, tables
from eagle31_train.measure.decoding import Limits
from eagle31_train.measure.drafters import Checkpoint
from eagle31_train.measure.measuring import Measurer, Outcome, check_options, remarks, sheet
from eagle31_train.measure.serving import check as check_serving
from eagle31_train.measure.serving import measure_serving
from eagle31_train.measure.serving import report as serving_report
from eagle31_train.measure.suites import Workload
from eagle31_train.schema import Config, UserError
from eagle31_train.store import read_manifest
from eagle31_train.targets.cached import CachedTarget
from eagle31_train.targets.hf import load_model, read_config

DRAFTERS = "DRAFTER DRAFTER … "  # of the usage line
DATA = "python -m data_prep"
COMPARISONS = Path("runs/compare")
FEWER = "give two drafters or more: python -m eagle31_train.compare runs/a runs/b"
Named = dict[str, list[str]]  # what a drafter is called → its trainings
T = TypeVar("T")


def main(argv: list[str] | None = None) -> None:
    """Entry point: DRAFTER arguments first, options behind them."""
    words = sys.argv[1:] if argv is None else argv
    given = [word for word in words if not word.startswith(("-", "+", "~")) and is_drafter(word)]
    options = [word for word in words if word not in given]
    if len(given) < 2 and not any(word.startswith("-") for word in words):  # --help wants none
        print(f"error: {FEWER}", file=sys.stderr)
        raise SystemExit(2)
    saved = None
    if given and not any(word.lstrip("+").startswith("experiment=") for word in options):
        firsts = [trainings[0] for _, trainings in map(parted, given)]
        first = next((one for one in firsts if Path(one, "train", "config.yaml").is_file()), firsts[0])
        # What the training may replace is not what this may.
        options, saved = [in_place(first), "overwrite=false", *options], Path(first, "train", "config.yaml")
    cli.run(lambda config: compare(called(given), config), __doc__ or "", options, saved, DRAFTERS)


def in_place(run: str) -> str:
    """The option by which a run's configuration speaks of the folder where the run lies now."""
    quoted = re.sub(r"(['\\])", r"\\\1", run)
    return f"run_dir='{quoted}'"


def is_drafter(word: str) -> bool:
    """Whether a word names a drafter: it is no option, or a folder whose name looks like one (runs/lr=1)."""
    return "=" not in word or Path(parted(word)[1][0]).is_dir()


def parted(word: str) -> tuple[str | None, list[str]]:
    """A DRAFTER argument: what it is to be called, where it says so, and its trainings."""
    name, _, rest = word.partition(":")
    asked, trainings = (name, rest) if name and rest and "/" not in name else (None, word)
    return asked, [training.rstrip("/") for training in trainings.split(",")]


def called(words: list[str]) -> Named:
    """Drafters by name: as NAME:… says, else the last part of the path, or as many as tell it from the others.

    Raises:
        UserError: two have the same name.
    """
    asked = [parted(word) for word in words]
    # Never all of an absolute path: names stand in pictures and on public cards.
    paths = [Path(trainings[0]).absolute().parts[1:] for _, trainings in asked]
    named: Named = {}
    for (name, trainings), path in zip(asked, paths, strict=True):
        count = next((n for n in range(1, len(path)) if sum(path[-n:] == other[-n:] for other in paths) == 1), 1)
        label = name or "/".join(path[-count:]) or trainings[0]
        if label in named:
            raise UserError(f"two drafters are called {label}: tell them apart as NAME:{trainings[0]}")
        named[label] = trainings
    return named


def title(names: list[str]) -> str:
    """What the numbers are: of the others, against the first."""
    first, *others = names
    return f"{', '.join(others)} against {first}"


def compare(named: Named, config: Config) -> None:
    """Measure the drafters and tell who wins.

    Raises:
        UserError: fewer than two drafters, or one that cannot be read or belongs to another target; missing data; an
            output that speculation changed; a folder that has another comparison; vLLM that cannot be run.
    """
    refuse_names(named)
    check_options(config.evaluate)
    if config.compare.verified < 0:
        raise UserError(f"compare.verified={config.compare.verified} is no number of prompts: give 0 or more")
    out = folder(named, config)
    engine = check_serving(config) if config.evaluate.backend == "vllm" else None
    drafts = {name: exported(some[0]) for name, some in named.items()} if engine else {}
    data = read_data(config)

    result, workload = measure(named, config, data)
    print(tables.table(result))
    write(out, result)  # before vLLM, which may fail after hours
    if engine:
        free()
        served = measure_serving(config, drafts, workload.prompts, data["end_ids"], engine, shared(config) / "serving")
        result["serving"] = {**served, "notes": [*served_of(named), *served["notes"]], "workload": workload.name}
        print("\n" + serving_report.table(result["serving"]))
        write(out, result)


def measure(named: Named, config: Config, data: dict[str, Any]) -> tuple[dict[str, Any], Workload]:
    """The result of decoding, and its first workload. Nothing that was loaded for it is held any longer."""
    asked = prepare(named, config, data)
    for remark in remarks(asked.workloads):
        print(f"compare: {remark}")
    outcomes, machine = decode(asked, config, data["end_ids"])
    return tell(named, asked, outcomes, machine, config), asked.workloads[0]


# ---------------------------------------------------------------- before anything is loaded


def refuse_names(named: Named) -> None:
    """UserError for drafters that are too few, or whose trainings or names cannot be told apart."""
    if len(named) < 2:
        raise UserError(FEWER)
    for name, some in named.items():
        if "" in some or len(set(some)) < len(some):
            raise UserError(f"{name} is {','.join(some)}, which names a training twice or not at all: give each once")
    if "plain" in named:
        raise UserError(f"plain is what decoding without a drafter is called: call {named['plain'][0]} otherwise")


def folder(named: Named, config: Config) -> Path:
    """Where the comparison is written; UserError where another one of the same name is."""
    if config.compare.out is not None:
        return Path(config.compare.out)
    out = COMPARISONS / "-".join(re.sub(r"[^\w.]+", "_", name) for name in named)
    if not config.overwrite:
        refuse_another(out, named)
    return out


def shared(config: Config) -> Path:
    """Where what is measured is kept: comparisons without a folder of their own find what was measured for others."""
    return Path(config.compare.out or COMPARISONS)


def read_data(config: Config) -> dict[str, Any]:
    """Stage 1's manifest; UserError where its files are not as they were written."""
    data = artifacts.read_json(config.data_folder / artifacts.MANIFEST, DATA)
    if damage := artifacts.first_damaged(config.data_folder, data.get("files", {})):
        raise UserError(f"{damage}: run `{DATA}` again")
    return data


@dataclass(frozen=True)
class Asked:
    """What is to be decoded.

    members: what the trainings of each drafter are called. checkpoints: by what the training is called.
    """

    members: Named
    checkpoints: dict[str, Checkpoint]
    workloads: list[Workload]


def by_drafter(members: Named, found: Mapping[str, T]) -> dict[str, list[T]]:
    """What is known of each training, as one list for each drafter."""
    return {name: [found[training] for training in trainings] for name, trainings in members.items()}


def prepare(named: Named, config: Config, data: dict[str, Any]) -> Asked:
    """Read the drafters, and choose prompts: such as all of them have room for.

    Raises:
        UserError: a drafter that cannot be read, or may have learnt the held-out prompts; or no prompts.
    """
    options, layers = config.evaluate, read_config(config.target).num_hidden_layers
    members: Named = {}
    checkpoints: dict[str, Checkpoint] = {}
    for name, some in named.items():
        members[name] = [f"{name}/{number}" for number in range(len(some))]
        checkpoints |= {training: read(one, layers, config) for training, one in zip(members[name], some, strict=True)}
    for checkpoint in checkpoints.values():
        check_heldout(checkpoint, config, data)
    manifests = by_drafter(members, {training: one.manifest for training, one in checkpoints.items()})
    doubts = list(learnt.doubts(manifests, data["dataset_fingerprint"]))
    positions = [one.shape.max_position_embeddings for one in checkpoints.values()]
    room = drafters.room(config, positions, [options.draft_tokens, options.depths])
    return Asked(members, checkpoints, suites.workloads(config, data, room, doubts))


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
    if not (out / page.RESULT).is_file():
        return

    def places(trainings: Named) -> list[list[Path]]:
        return [[Path(one).resolve() for one in some] for some in trainings.values()]

    told = artifacts.read_json(out / page.RESULT, "this command").get("trainings", {})
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


# ---------------------------------------------------------------- measuring


def decode(asked: Asked, config: Config, end_ids: list[int]) -> tuple[list[dict[str, Outcome]], str]:
    """Outcomes of every workload by what the trainings are called, and what they were measured on."""
    options = config.evaluate
    model = load_model(config.target, options.dtype)
    target = CachedTarget(model, [1])  # whose states nobody asks for: every drafter has layers of its own
    candidates = [drafters.load(one, training, target, config) for training, one in asked.checkpoints.items()]
    measurer = Measurer(model, Limits(options.max_new_tokens, frozenset(end_ids)), options, config.seed)
    kept = shared(config) / "workloads"
    inputs, verified = records.inputs(config, end_ids), config.compare.verified
    outcomes, _ = records.measured(kept, asked.workloads, measurer, candidates, inputs, verified)
    return outcomes, acceptance.machine(target.device)


def free() -> None:
    """Give back the memory of what nobody holds any longer: vLLM asks for nearly all that a GPU has."""
    gc.collect()  # models have cycles
    torch.cuda.empty_cache()


# ---------------------------------------------------------------- telling


def tell(
    named: Named, asked: Asked, outcomes: list[dict[str, Outcome]], machine: str, config: Config
) -> dict[str, Any]:
    """The result of what was decoded."""
    options = config.evaluate
    sheets = [
        sheet(workload, by_drafter(asked.members, found))
        for workload, found in zip(asked.workloads, outcomes, strict=True)
    ]
    identities = {training: checkpoint.identity for training, checkpoint in asked.checkpoints.items()}
    return {
        **acceptance.tell(sheets, range(1, options.depths + 1), options.draft_tokens),
        "title": title(list(named)),
        "trainings": named,
        "identities": by_drafter(asked.members, identities),
        "command": command(named, config),
        "machine": machine,
        "dtype": options.dtype,
        "max_new_tokens": options.max_new_tokens,
        "verified": config.compare.verified,
    }


def served_of(named: Named) -> list[str]:
    """What is served of drafters that have several trainings."""
    return [f"of {name}, the first of {len(some)} trainings" for name, some in named.items() if len(some) > 1]


def write(out: Path, result: dict[str, Any]) -> None:
    """The page and its pictures, and then page.RESULT, by which readers know whether the pictures are its own."""
    shown = page.write(out, result)
    artifacts.write_json(out / page.RESULT, {**result, "files": artifacts.list_files(out, shown)})
    print(f"compare: {out / page.PAGE}")


def command(named: Named, config: Config) -> str:
    """The command line that compares these, with paths as others may see them."""
    words = [f"{name}:{','.join(map(public, some))}" for name, some in named.items()]
    return f"python -m eagle31_train.compare {shlex.join([*words, *card.overrides(config)])}"


if __name__ == "__main__":
    main()
